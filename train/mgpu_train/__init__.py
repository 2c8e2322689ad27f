"""mgpu-train: the node side of mgpu (agent, trainer, checkpoints); useful alone, depends on nothing of `mgpu`."""

__version__ = "0.1.0"
