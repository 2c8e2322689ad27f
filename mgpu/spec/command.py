"""`command` as people write it, and what is wrong with it: the launcher starts Python, or a shell, itself."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "fabric", "mpirun", "srun")
_PREFIXES = (
    "uv",
    "poetry",
    "conda",
    "env",
    "nohup",
    "time",
    "sudo",
)  # before the program, as on a machine of one's own
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_SHELLS = ("bash", "sh", "zsh", "dash")
_PLAIN = re.compile(r"[\w./=-]+")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_A_SHELL = "`launcher: bash` starts one, and takes this text"
_NAME_IT = "name the Python file, and then its arguments"


def started_by_us(words: Sequence[str]) -> str | None:
    """The interpreter or launcher in front of a program, by name; None where the program comes first."""
    name = PurePosixPath(words[0]).name if words else ""
    if _PYTHON.fullmatch(name):
        return words[2] if tuple(words[1:2]) == ("-m",) and words[2:3] and words[2] in _MODULES else name
    return name if name in (*_LAUNCHERS, *_PREFIXES) else None


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


def wrong(words: Sequence[str], launcher: str, *, shell: bool) -> str | None:
    """What is wrong with a command that `launcher` gives to Python, or to a `shell`; the line to write instead."""
    return _for_a_shell_wrong(words, launcher) if shell else _for_python_wrong(words, launcher)


def _for_a_shell_wrong(words: Sequence[str], launcher: str) -> str | None:
    if words[0] == "-c":
        if len(words) == 2 and not words[1].strip():
            return "is empty: name a script, or write one line of a shell"
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


def _for_python_wrong(words: Sequence[str], launcher: str) -> str | None:
    if is_shell(words):
        return f"{launcher} starts no shell: write `launcher: bash` and `{_for_shell(words)}`"
    if words[0] == "-m" and len(words) == 1:
        return "`-m` is followed by the name of a module: `command: [-m, package.train]`"
    named = words[0] == "-m" and words[1] in _MODULES
    given = words[1] if named else started_by_us(words)
    if given is None:
        return None
    right = program(("python", *words) if named else words)
    instead = f": write `{line(right)}`" if right else f": {_NAME_IT}"
    return f"`{given}` is not a file of yours; on each node mgpu starts {launcher} itself{instead}"


def as_list(text: str) -> str:
    """What is wrong with a command that is one string, and the list that means the same, where there is one."""
    needed = "a list is needed, because no shell reads it"
    words, shells = _words(text.strip().replace("\\\n", " "))
    variables = list(itertools.takewhile(_ASSIGNMENT.match, words))
    words = words[len(variables) :]
    right = program(words)
    if is_shell(words):
        return f"{needed}; {_A_SHELL}"
    if shells is not None:
        return f"{needed}, and only a shell understands {shells}: {_A_SHELL}"
    if not words or right is None:
        return f"{needed}: {_NAME_IT}"
    given = started_by_us(words)
    ours = f", and mgpu starts {'Python' if given in _PREFIXES else given} itself" if given else ""
    where = f"; `{variables[0]}` belongs in `env:`" if variables else ""
    return f"{needed}{ours}: write `{line(right)}`{where}"


def _words(text: str) -> tuple[list[str], str | None]:
    """The words as a shell divides them, and the first that only a shell understands."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError:  # a quote that is not closed
        return text.split(), None
    shells = (f"`{word}`" for word in words if not set(word) - set("();<>|&") or re.search(r"\$[\w{(]|`", word))
    return words, next(shells, "several lines" if "\n" in text else None)
