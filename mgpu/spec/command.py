"""`command` as people write it, and what is wrong with it: the launcher starts Python, or a shell, itself."""

from __future__ import annotations

import json
import re
import shlex
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


def shell_mistake(words: Sequence[str], launcher: str) -> str | None:
    """What is wrong with a command for the shell that `launcher` starts, and the line to write instead."""
    if words[0] == "-c":
        return None if len(words) == 2 else "after `-c` one line is needed, as one item"
    if is_shell(words):
        return f"{launcher} starts the shell itself: write `{_for_shell(words)}`"
    if started_by_us(words):
        return f"`{words[0]}` is not a script of yours: write `{_text(shlex.join(words))}`, which the shell reads"
    return None


def _for_shell(words: Sequence[str]) -> str:
    """The line of a run file with a launcher that is a shell, for words that begin with one."""
    rest = list(words[1:])
    if "-c" in rest:
        return _text(" ".join(rest[rest.index("-c") + 1 :][:1]))
    while rest and rest[0].startswith("-"):
        rest.pop(0)
    return line(rest) if rest else _text("...")


def _text(shell_line: str) -> str:
    return f"command: {json.dumps(shell_line, ensure_ascii=False)}"


def mistake(words: Sequence[str], launcher: str) -> str | None:
    """What is wrong with its first word, and the line to write instead. `launcher`: what mgpu starts it by."""
    if is_shell(words):
        return f"{launcher} starts no shell: write `launcher: bash` and `{_for_shell(words)}`"
    given = started_by_us(words)
    if given is None:
        return None
    right = program(words)
    instead = f": write `{line(right)}`" if right else ": name the Python file, and then its arguments"
    return f"`{given}` is not a file of yours; on each node mgpu starts {launcher} itself{instead}"
