"""What the trainer can train."""
