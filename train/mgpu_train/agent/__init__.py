"""The node's agent: starts the launcher, watches it from outside, uploads checkpoints, renews the lease."""
