"""Files of checkpoints read and written without torch."""
