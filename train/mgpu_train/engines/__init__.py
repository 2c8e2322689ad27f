"""How a step's gradients are made and applied."""
