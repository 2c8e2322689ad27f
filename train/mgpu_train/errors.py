"""The error that ends a training run with one clear line."""

from __future__ import annotations


class TrainError(Exception):
    """Training cannot begin or go on; the message says what is wrong, why, and what to do."""
