"""Checkpoints that can be trusted: whole on local disk, whole in the store, in a log that only grows."""
