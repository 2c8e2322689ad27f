"""A Dockerfile as builders read it: its instructions, where they stand, and the text with other words in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_LINE = re.compile(r"[^\n]*\n?")
_DIRECTIVE = re.compile(r"#\s*([a-zA-Z]\w*)\s*=\s*(\S+)\s*\Z")
_FLAG = re.compile(r"\s*--([\w-]+)(?:=((?:\"[^\"]*\"|'[^']*'|\S)*))?(?=\s|\Z)")
_WORD = re.compile(r"(?:\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"|[^\s'\"\\])+")
_HEREDOC = re.compile(r"\d*<<(-?)([^<]+)\Z")
_BOM = "\ufeff"


class Flag(NamedTuple):
    """`--name=value`; where the value stands in the instruction's text."""

    name: str
    value: str
    at: int


class Instruction(NamedTuple):
    """One instruction. `word`: in upper case, without `ONBUILD`, which makes it `later`: of builds on this one. `text`:
    what follows, continued lines as one. `line`: its first one, from 1. `places`: where in the file each character of
    `text` is."""

    word: str
    text: str
    line: int
    later: bool
    places: tuple[int, ...]

    @property
    def flags(self) -> list[Flag]:
        """Those before the arguments."""
        return [Flag(match[1], match[2] or "", match.start(2)) for match in self._flags()]

    @property
    def after_flags(self) -> int:
        """Where in `text` the flags end."""
        return max((match.end() for match in self._flags()), default=0)

    @property
    def arguments(self) -> list[str]:
        """What follows the flags: a list in JSON, or words."""
        rest = self.text[self.after_flags :].strip()
        try:
            listed = json.loads(rest) if rest.startswith("[") else None
        except ValueError:
            listed = None
        return [str(each) for each in listed] if isinstance(listed, list) else rest.split()

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """Where in the file a part of `text`, which is not empty, begins and ends."""
        return self.places[begin], self.places[end - 1] + 1

    def _flags(self) -> Iterator[re.Match[str]]:
        at = 0
        while match := _FLAG.match(self.text, at):
            yield match
            at = match.end()


def read(recipe: bytes) -> list[Instruction]:
    """The instructions of a Dockerfile: no comments, no here-documents."""
    text = _decoded(recipe)
    lines = [(match.start(), match[0].rstrip("\r\n")) for match in _LINE.finditer(text, text.startswith(_BOM))]
    escape = re.escape(_escape(text))
    continues = re.compile(rf"(?<!{escape}){escape}[ \t]*\Z")
    found, at = list[Instruction](), 0
    while at < len(lines):
        first, parts, more = at, list[tuple[int, str]](), True
        while more and at < len(lines):
            start, line = lines[at]
            at += 1
            if not line.strip() or line.lstrip().startswith("#"):
                first = first if parts else at
                continue
            match = continues.search(line)
            parts.append((start, line[: match.start()] if match else line))
            more = match is not None
        if made := _instruction(parts, first + 1):
            found.append(made)
            at = _after_heredocs(made, lines, at)
    return found


def replaced(recipe: bytes, changes: Iterable[tuple[int, int, str]]) -> bytes:
    """A Dockerfile with other words in it, as many lines as before. `changes`: from where to where, and what is there
    instead."""
    text = _decoded(recipe)
    newline = f"{_escape(text)}\n"
    for begin, end, word in sorted(changes, reverse=True):
        text = text[:begin] + newline * text.count("\n", begin, end) + word + text[end:]
    return text.encode("utf-8", "surrogateescape")


def _instruction(parts: list[tuple[int, str]], line: int) -> Instruction | None:
    text = "".join(part for _, part in parts)
    match = re.match(r"\s*(ONBUILD\s+)?(\S+)\s*", text, re.IGNORECASE)
    if match is None:
        return None
    places = [start + index for start, part in parts for index in range(len(part))]
    later = match[1] is not None
    return Instruction(match[2].upper(), text[match.end() :], line, later, tuple(places[match.end() :]))


def _after_heredocs(made: Instruction, lines: list[tuple[int, str]], at: int) -> int:
    """The line after an instruction's here-documents; one that does not end is none."""
    if made.word not in ("RUN", "COPY", "ADD"):
        return at
    for word in _WORD.findall(made.text):
        if match := _HEREDOC.match(word):
            name = re.sub("[\"'\\\\]", "", match[2])
            ends = (number for number in range(at, len(lines)) if _ends(lines[number][1], name, chomp=bool(match[1])))
            at = next((number + 1 for number in ends), at)
    return at


def _ends(line: str, name: str, *, chomp: bool) -> bool:
    return (line.lstrip("\t") if chomp else line) == name


def _escape(text: str) -> str:
    """What continues a line: a directive at the top of the file may say so."""
    for line in text.removeprefix(_BOM).split("\n"):
        match = _DIRECTIVE.match(line.strip())
        if match is None:
            break
        if match[1].lower() == "escape" and match[2] in ("\\", "`"):
            return match[2]
    return "\\"


def _decoded(recipe: bytes) -> str:
    return recipe.decode("utf-8", "surrogateescape")
