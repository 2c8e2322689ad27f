"""Checkpoints on their way to the store, and those on this node's disk."""
