"""Which paths a .dockerignore leaves out: Docker's own rules, which are not those of .gitignore.

A pattern is of a path from the context's root. The last one that matches decides, `!` takes back in, and what matches
a folder matches everything in it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

_CHARACTER = r"(?:\\.|[^\]\\-])"
_TOKEN = re.compile(
    rf"(?P<any>\*\*/?)|(?P<star>\*)|(?P<one>\?)|\\(?P<escaped>.)|(?P<plain>[^*?\\\[])"
    rf"|\[(?P<not>\^?)(?P<among>(?:{_CHARACTER}(?:-{_CHARACTER})?)+)\]",
    re.DOTALL,
)
_SPECIAL = re.compile(r"[*?\\\[]")

State = list[bool]  # of a folder: which groups of patterns match it, or one that it lies in


class _Group(NamedTuple):
    """Patterns that follow each other and do the same: leave out, or take back in."""

    returns: bool
    by_name: Callable[[str], object] | None  # of those that are of names alone, `**/name`: the most, and the fastest
    by_path: Callable[[str], object] | None


class Rules:
    """The patterns of one file. Raises ValueError for what Docker would not take for a pattern; it says which."""

    def __init__(self, patterns: Iterable[str]) -> None:
        signed = [(pattern[:1] == "!", pattern.removeprefix("!")) for pattern in patterns]
        if not all(pattern for _, pattern in signed):
            raise ValueError("`!`")
        self._groups = [_group(sign, [pattern for _, pattern in run]) for sign, run in groupby(signed, lambda p: p[0])]
        self._returning = [pattern for returns, pattern in signed if returns]
        self.root: State = [False] * len(self._groups)

    def look(self, path: str, name: str, above: State) -> tuple[bool, State]:
        """Whether a path, whose last part is `name`, in a folder of state `above` is left out, and its own state."""
        left_out, found = False, [*above]
        for index, (returns, by_name, by_path) in enumerate(self._groups):
            if not found[index] and returns is left_out:
                found[index] = bool((by_name and by_name(name)) or (by_path and by_path(path)))
            if found[index]:
                left_out = not returns
        return left_out, found

    def may_return(self, folder: str) -> bool:
        """Whether something in a folder that is left out may be taken back in."""
        inside = folder + "/"
        for pattern in self._returning:
            special = _SPECIAL.search(pattern)
            fixed = pattern[: special.start()] if special else pattern
            if fixed.startswith(inside) or (special and inside.startswith(fixed)):
                return True
        return False


def read(text: bytes) -> list[str]:
    """The patterns of a file, as Docker cleans them. Names in it need not be UTF-8."""
    lines = text.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape").split("\n")
    return [_cleaned(line.strip()) for line in lines if line.strip() and not line.startswith("#")]


def _cleaned(line: str) -> str:
    sign, pattern = ("!", line[1:].strip()) if line.startswith("!") else ("", line)
    if pattern:
        pattern = re.sub("^/+", "", posixpath.normpath(pattern)) or "/"  # which no path is
    return sign + pattern


def _group(returns: bool, patterns: list[str]) -> _Group:
    names = [pattern.removeprefix("**/") for pattern in patterns if _is_of_names(pattern)]
    paths = [pattern for pattern in patterns if not _is_of_names(pattern)]
    return _Group(returns, _matcher(names), _matcher(paths))


def _is_of_names(pattern: str) -> bool:
    name = pattern.removeprefix("**/")
    return name != pattern and bool(name) and not re.search(r"/|\*\*|\[", name)


def _matcher(patterns: list[str]) -> Callable[[str], object] | None:
    if not patterns:
        return None
    return re.compile("|".join(f"(?:{_regex(pattern)})" for pattern in patterns), re.DOTALL).fullmatch


def _regex(pattern: str) -> str:
    tokens = list(_tokens(pattern))
    rest = "".join(token["plain"] or "" for token in tokens[1:])
    if tokens[0]["any"] == "**" and rest and len(rest) == len(tokens) - 1:
        return ".*" + re.escape(rest)  # `**x` alone is whatever ends so; else `**` stops at a `/`
    last = len(tokens) - 1
    regex = "".join(_piece(token, ends=index == last) for index, token in enumerate(tokens))
    try:
        re.compile(regex)
    except re.error as error:  # a range that ends before it begins
        raise ValueError(f"`{pattern}`") from error
    return regex


def _tokens(pattern: str) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None:
            raise ValueError(f"`{pattern}`")
        yield token
        at = token.end()


def _piece(token: re.Match[str], *, ends: bool) -> str:
    if token["any"]:
        return ".*" if ends else "(?:.*/)?"
    if token["star"]:
        return "[^/]*"
    if token["one"]:
        return "[^/]"
    if token["among"]:
        among = re.sub(r"\\.|[^-]", lambda character: re.escape(character[0][-1]), token["among"])
        return f"[{token['not']}{among}]"
    return re.escape(token["escaped"] or token["plain"])
