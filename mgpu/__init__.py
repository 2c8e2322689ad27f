"""mgpu: rents multi-GPU machines, trains on them, keeps the checkpoints, gives every machine back."""

__version__ = "0.1.0"
