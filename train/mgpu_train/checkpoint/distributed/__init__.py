"""The trainer's own checkpoints, by torch.distributed.checkpoint, made while training goes on."""
