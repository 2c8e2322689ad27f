"""Launchers of others, started so that what mgpu needs to know of their ranks is left behind."""
