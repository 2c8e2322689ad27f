"""The errors that end a training run, or a command of the agent, with one clear line."""

from __future__ import annotations


class TrainError(Exception):
    """Training cannot begin or go on; the message says what is wrong, why, and what to do."""


class MachineError(TrainError):
    """This machine lacks what was rented, or is broken; another one may do. The agent knows it by its name."""


class Refused(Exception):
    """A command of the agent cannot be carried out; the message is one line that says why."""
