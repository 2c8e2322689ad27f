"""What of a folder is not to be sent, as its owner has written it down: `.gitignore` files, and `.mgpuignore`.

Later ones have the last word, as in git: the names that nobody sends; the `.gitignore` files of the repository from its
root down, and its `.git/info/exclude`; the folder's own `.mgpuignore`, which may take back by `!` what a `.gitignore`
leaves out. That git follows a file all the same, because it was added by force, is not looked at.
"""

from __future__ import annotations

from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Sequence
from pathlib import Path

from pathspec import GitIgnoreSpec

from mgpu.errors import InputError

IGNORE_FILE = ".mgpuignore"
GIT_FILE = ".gitignore"


class Ignored:
    """Asked while the folder is walked from its top: a folder that is left out is not entered, as in git."""

    def __init__(self, folder: Path, exclude: Sequence[str], *, files: bool = True) -> None:
        """`files`: also what the files above say.

        Raises:
            InputError: `.mgpuignore` cannot be read, or holds something else; a `.gitignore` cannot be read.
        """
        self._folder, self._files = folder.resolve(), files
        self._never = GitIgnoreSpec.from_lines(exclude)
        self._git: list[tuple[str, str, GitIgnoreSpec]] = []  # what a path begins with, what to put before it, rules
        self._own = _own(folder / IGNORE_FILE) if files else None
        if files:
            self._above()

    def enter(self, below: str) -> None:
        """A folder of it is looked at, by its path with a slash at the end; "": the top."""
        if self._files and (rules := _git_rules(self._folder / below / GIT_FILE)):
            self._git.append((below, "", rules))

    def left_out(self, path: str) -> bool | None:
        """Whether a path is not sent; a folder's ends with a slash. None: no, and no file had to say so."""
        said = self._never.check_file(path).include
        by_owner = False
        for below, above, rules in self._git:
            if path.startswith(below) and (word := rules.check_file(above + path[len(below) :]).include) is not None:
                said, by_owner = word, True
        if self._own is not None and (word := self._own.check_file(path).include) is not None:
            said, by_owner = word, True
        return by_owner if said else None

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
            above = "".join(f"{part}/" for part in self._folder.relative_to(at).parts)
            if rules is None:
                continue
            if above and rules.match_file(above):
                self._git.clear()
                return
            self._git.append(("", above, rules))


def _git_rules(path: Path) -> GitIgnoreSpec | None:
    lines = _lines(path)
    return GitIgnoreSpec.from_lines(each for each in lines if _is_pattern(each)) if lines else None


def _is_pattern(line: str) -> bool:
    """git passes over what it does not understand."""
    try:
        GitIgnoreSpec.from_lines([line])
    except ValueError:
        return False
    return True


def _own(path: Path) -> GitIgnoreSpec:
    try:
        return GitIgnoreSpec.from_lines(_lines(path))
    except ValueError as error:
        raise InputError(f"{path}: not a pattern", str(error), "Patterns are as in .gitignore.") from error


def _lines(path: Path) -> Iterable[str]:
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise InputError(f"{path} cannot be read", str(error)) from error
    if text.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise InputError(f"{path} cannot be read", "It is UTF-16, of which git knows no pattern.", "Save it as UTF-8.")
    return text.decode("utf-8-sig", "surrogateescape").splitlines()  # as names of files are decoded: git compares bytes
