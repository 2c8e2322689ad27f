"""What the machine's GPUs are, and whether they are fit to train on."""
