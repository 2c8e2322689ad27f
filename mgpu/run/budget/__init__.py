"""What runs have spent, and what an account may spend."""
