"""What is asked of the operating system, by all parts alike; standard library only."""
