"""What is remembered of a run, who may write it, and what every step of it shares."""
