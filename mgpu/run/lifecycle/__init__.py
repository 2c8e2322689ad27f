"""A run's life in order: launch, attempts, recovery, outcome; and its end by other commands."""
