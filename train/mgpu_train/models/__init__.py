"""Models that tasks train."""
