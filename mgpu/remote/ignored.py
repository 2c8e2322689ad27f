"""What of a folder is not to be sent, as its owner has written it down: `.gitignore` files, and `.mgpuignore`.

Later ones have the last word, as in git: the `.gitignore` files of the repository from its root down, and its
`.git/info/exclude`; the folder's own `.mgpuignore`, which may take back by `!` what a `.gitignore` leaves out. The
names that nobody sends stay here whatever these say: `!*/` means the owner's folders, not `.git`; but `.mgpuignore`
takes one of them back by its name. That git follows a file all the same, because it was added by force, is not looked
at.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

from pathspec import GitIgnoreSpec

from mgpu.errors import InputError

IGNORE_FILE = ".mgpuignore"
GIT_FILE = ".gitignore"
# `[[:digit:]_]`: git knows these, pathspec takes them for the signs that they are written with
_BRACKET, _CLASS = re.compile(r"(?<!\\)\[[!^]?\]?(?:\[:[a-z]+:\]|[^]])*\]"), re.compile(r"\[:([a-z]+):\]")
_SIGNS = "".join(map(chr, (*range(1, ord("/")), *range(ord("/") + 1, 128), *range(0xDC80, 0xDD00))))  # as `_bytes`
_FOLDERS = re.compile(r"/\*\*/(?= *$)")
# `a\/b` is `a/b`, and nothing without the names around it; `***/a` is `**/a`
_SLASH, _STARS = re.compile(r"(?<=[^/\\])(?<!^!)((?:\\\\)*)\\/(?=[^/ ])"), re.compile(r"(?<![^/!])\*{3,}(?=/)")
_CLASSES = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "blank": " \t",
    "cntrl": "\0-\x1f\x7f",
    "digit": "0-9",
    "graph": '"-~!',
    "lower": "a-z",
    "print": " -~",
    "punct": ":-@!-.[-`{-~",  # a `!` in front would be the bracket's, and no name has a `/`
    "space": " \t-\r",
    "upper": "A-Z",
    "xdigit": "0-9a-fA-F",
}


class Ignored:
    """Asked while the folder is walked from its top: a folder that is left out is not entered, as in git."""

    def __init__(self, folder: Path, exclude: Sequence[str], *, files: bool = True) -> None:
        """`files`: also what the files above say.

        Raises:
            InputError: `.mgpuignore` cannot be read, or holds something else; a `.gitignore` cannot be read.
        """
        self._folder, self._files = folder.resolve(), files
        self._never = _Rules(map(_bytes, exclude))
        self._git: list[tuple[str, str, _Rules]] = []  # what a path begins with, what to put before it, rules
        self._own = _own(folder / IGNORE_FILE) if files else None
        if files:
            self._above()

    def enter(self, below: str) -> None:
        """A folder of it is looked at, by its path with a slash at the end; "": the top."""
        if self._files and (rules := _git_rules(self._folder / below / GIT_FILE)):
            self._git.append((below, "", rules))

    def left_out(self, path: str) -> bool | None:
        """Whether a path is not sent; a folder's ends with a slash. None: no, and no file had to say so."""
        own, said = self._own, None
        for below, above, rules in self._git:
            if path.startswith(below) and (word := rules.say(above + path[len(below) :])) is not None:
                said = word
        if own is not None and (word := own.say(path)) is not None:
            said = word
        if self._never.say(path) and not (own is not None and own.take_back(path)):
            return bool(said)
        return said or None

    def _above(self) -> None:
        """The rules of the repository that the folder is a part of, unless they leave out all of the folder."""
        root = next((each for each in (self._folder, *self._folder.parents) if (each / ".git").exists()), None)
        if root is None:
            return
        found = [(root, _git_rules(root / ".git" / "info" / "exclude"))]
        for each in reversed(self._folder.parents):
            if each.is_relative_to(root):
                found.append((each, _git_rules(each / GIT_FILE)))
        for at, rules in found:
            ways = [*accumulate(f"{part}/" for part in self._folder.relative_to(at).parts)]
            if rules is None:
                continue
            if any(map(rules.say, ways)):
                self._git.clear()
                return
            self._git.append(("", ways[-1] if ways else "", rules))


class _Rules:
    """The patterns of one file, as `_bytes` makes them; the last one that is for a path counts."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Raises ValueError: not a pattern."""
        lines = [*map(_plain, lines)]
        # `a/**/` is for folders in `a`, which pathspec takes for all in it
        self._files = GitIgnoreSpec.from_lines(_FOLDERS.sub("/*/", line) for line in lines)
        # who asks for `a/` hears of what is in a folder `a`: of the folder itself, as if that were a file
        self._folders = GitIgnoreSpec.from_lines(_of_anything(line) for line in lines)

    def say(self, path: str) -> bool | None:
        """Whether a path is left out; a folder's ends with a slash. None: no pattern is for it."""
        return self._spec(path).check_file(_bytes(path.rstrip("/"))).include

    def take_back(self, path: str) -> bool:
        """Whether a path is taken back, by a pattern that would not do so with any name, such as `.git`."""
        spec = self._spec(path)
        found = spec.check_file(_bytes(path.rstrip("/")))
        return found.include is False and spec.patterns[found.index or 0].match_file(".git") is None

    def _spec(self, path: str) -> GitIgnoreSpec:
        return self._folders if path.endswith("/") else self._files


def _bytes(text: str) -> str:
    """A sign for each byte, for which a `?` stands in git, and whose ranges its brackets hold."""
    return text.encode("utf-8", "surrogateescape").decode("ascii", "surrogateescape")


def _ranges(bracket: re.Match[str]) -> str:
    """A bracket with its classes spelled out. Of one with a `!`, which pathspec takes for a slash, too, all that it is
    for."""
    signs = _CLASS.sub(lambda found: _CLASSES.get(found[1], found[0]), bracket[0][1:-1])
    if signs[:1] not in ("!", "^") or "/" in signs:
        return f"[{signs}]"
    try:
        others = re.compile("[^" + signs[1:].replace("\\", "\\\\") + "]")
    except re.error:
        return bracket[0]  # not a pattern
    return "[" + "".join(sorted(filter(others.match, _SIGNS), key=lambda sign: (sign != "]", sign == "-"))) + "]"


def _of_anything(line: str) -> str:
    """A pattern for folders alone, as one for all."""
    found = re.fullmatch(r"(.+)/ *", line, re.DOTALL)  # a bracket may hold a line's end
    return found[1] if found and _is_pattern(found[1]) else line


def _git_rules(path: Path) -> _Rules | None:
    lines = _lines(path, IsADirectoryError)  # git passes over a folder of that name
    return _Rules(each for each in lines if _is_pattern(each)) if lines else None


def _is_pattern(line: str) -> bool:
    """git passes over what it does not understand."""
    try:
        GitIgnoreSpec.from_lines([_plain(line)])
    except (ValueError, re.error):  # pathspec knows the first, `[z-a]` is the second
        return False
    return True


def _own(path: Path) -> _Rules:
    lines = _lines(path)
    for number, line in enumerate(lines, 1):
        if not _is_pattern(line):
            text = line.encode("ascii", "surrogateescape").decode("utf-8", "backslashreplace")
            raise InputError(f"{path}, line {number}: not a pattern", f"`{text}`", "Patterns are as in .gitignore.")
    return _Rules(lines)


def _lines(path: Path, *none: type[OSError]) -> list[str]:
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, *none):
        return []
    except OSError as error:
        raise InputError(f"{path} cannot be read", str(error)) from error
    if text.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise InputError(f"{path} cannot be read", "It is UTF-16, of which git knows no pattern.", "Save it as UTF-8.")
    lines = text.removeprefix(BOM_UTF8).decode("ascii", "surrogateescape")  # as `_bytes`
    # `splitlines` ends lines at signs where git does not
    return [line.removesuffix("\r") for line in lines.split("\n")]


def _plain(line: str) -> str:
    """A pattern without what pathspec reads otherwise than git."""
    return _BRACKET.sub(_ranges, _STARS.sub("**", _SLASH.sub(r"\1/", line)))
