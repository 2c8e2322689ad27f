"""What a rank reports of its training."""
