"""Schedules, and what has to happen now: decided as a value, then done."""
