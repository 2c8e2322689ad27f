"""How parameters are changed: optimizers, and the learning rate of each step."""
