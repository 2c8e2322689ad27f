"""`command` as people write it, and what is wrong with it: the launcher starts Python itself, and no shell reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "fabric", "mpirun", "srun")
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_SHELLS = ("bash", "sh", "zsh", "dash")
_PLAIN = re.compile(r"[\w./=-]+")


def started_by_us(words: Sequence[str]) -> str | None:
    """The interpreter or launcher in front of a program, by name; None where the program comes first."""
    name = PurePosixPath(words[0]).name if words else ""
    if _PYTHON.fullmatch(name):
        return words[2] if tuple(words[1:2]) == ("-m",) and words[2:3] and words[2] in _MODULES else name
    return name if name in _LAUNCHERS else None


def is_shell(words: Sequence[str]) -> bool:
    """Whether a shell is what would be started."""
    return PurePosixPath(words[0]).name in _SHELLS if words else False


def program(words: Sequence[str]) -> tuple[str, ...] | None:
    """The words from the program on, without what starts it; None where it cannot be told."""
    given = started_by_us(words)
    if given is None:
        return tuple(words)
    if not _PYTHON.fullmatch(given):  # a launcher, whose options may have values
        at = next((n for n, each in enumerate(words) if n and each.endswith(".py")), None)
        return None if at is None else tuple(words[at:])
    rest = list(words[1:])
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):  # -u, -O, -X ...
        rest.pop(0)
    return tuple(rest) if rest and rest[0] != "-c" else None


def line(words: Sequence[str]) -> str:
    """The line of a run file that says these words."""
    quoted = (word if _PLAIN.fullmatch(word) else json.dumps(word, ensure_ascii=False) for word in words)
    return f"command: [{', '.join(quoted)}]"


def mistake(words: Sequence[str], launcher: str) -> str | None:
    """What is wrong with its first word, and the line to write instead. `launcher`: what mgpu starts it by."""
    if is_shell(words):
        return "no shell is started on the nodes: name a Python program, which may start others by `subprocess`"
    given = started_by_us(words)
    if given is None:
        return None
    right = program(words)
    instead = f": write `{line(right)}`" if right else ": name the Python file, and then its arguments"
    return f"`{given}` is not a file of yours; on each node mgpu starts {launcher} itself{instead}"
