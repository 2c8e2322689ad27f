"""A container image is made: its context, its inputs, its builder."""
