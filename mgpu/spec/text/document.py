"""YAML text -> plain data, with the line of every key and item. No object is ever built from a tag.

Stricter than YAML on purpose, and each refusal names its line: no aliases (bombs), no tags of one's own, no key twice,
one document, no control characters, no number that YAML 1.1 and 1.2 read differently (`010`, `1:30`), no empty values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from mgpu.errors import Problem, SpecError

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
MAX_PROBLEMS = 50
MAX_KEY = 128

Where = tuple[str | int, ...]

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, where PyYAML was built with it
_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq")}
STRING = "tag:yaml.org,2002:str"
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|yes|on|false|no|off", re.IGNORECASE)
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]{1,2})?")
# octal, hexadecimal, binary, base 60, `_` between digits, too large, infinite, not a number
_ODD_NUMBER = re.compile(r"[-+]?([0-9][0-9_]*([:.eE][-+0-9:._]*)?|0[xob][0-9a-fA-F_]+|\.(inf|nan))", re.IGNORECASE)
# C0 but tab and newline, DEL and C1, line and paragraph separators, marks that turn the direction of text, surrogates
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_NO_BREAK = "\u00a0"  # as it comes along from a web page


class Mark(NamedTuple):
    """Where a field stands (`line` counts from 1) and, for a scalar without quotes, how it is written there.
    `origin`: the option of a command that says it, with `line` 0."""

    line: int
    plain: str | None = None
    origin: str = ""


@dataclass
class Document:
    """What was read: plain data, the mark of every path in it, and what is wrong with the text itself."""

    path: str
    data: Any = None
    marks: dict[Where, Mark] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    bad: set[Where] = field(default_factory=set)  # paths whose value is only a stand-in, because a problem names them

    def problem(
        self, at: Where, message: str, nearest: str | None = None, *, line: int | None = None, origin: str = ""
    ) -> None:
        """Notes a mistake in the field `at`: where its nearest part that was given stands."""
        mark = Mark(0, None, origin) if origin else self.mark(at)
        self.problems.append(Problem(mark.origin or self.path, line or mark.line, dotted(at), message, nearest))

    def mark(self, at: Where) -> Mark:
        """Where a field stands, or the block that it is missing from."""
        while at and at not in self.marks:
            at = at[:-1]
        return self.marks.get(at, Mark(1))

    def forget(self, at: Where) -> None:
        """Another value stands there now: what was wrong with the old one is nothing any more."""
        here, text = len(at), dotted(at)
        self.problems = [
            each for each in self.problems if each.field != text and not each.field.startswith((f"{text}.", f"{text}["))
        ]
        self.marks = {each: mark for each, mark in self.marks.items() if each[:here] != at}
        self.bad = {each for each in self.bad if each[:here] != at}

    def error(self) -> SpecError:
        """All problems, in the order of their lines; of very many the first ones."""
        found = sorted(self.problems, key=lambda problem: problem.line)
        if len(found) > MAX_PROBLEMS:
            rest = f"and {len(found) - MAX_PROBLEMS} more problems from here on"
            found = [*found[:MAX_PROBLEMS], Problem(self.path, found[MAX_PROBLEMS].line, "file", rest)]
        return SpecError(self.path, tuple(found))


def dotted(at: Where) -> str:
    """A path as the user would say it, e.g. `data[0].from`; `file` for the file itself."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in at)
    return text.removeprefix(".") or "file"


def is_text(plain: str) -> bool:
    """Whether a value that is written so, without quotes, is text."""
    return not any(other.fullmatch(plain) for other in (_NULL, _BOOL, _INT, _FLOAT, _ODD_NUMBER))


def read(text: str, path: str) -> Document:
    """Reads a run file's text. `Document.problems` holds what can be worked around to find more.

    Raises:
        SpecError: the text is no YAML document at all, or too large or too deep to be a run file.
    """
    document = Document(path)
    _check_text(text, document)
    reader = _Reader(text, document)
    try:
        reader.read()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        why = getattr(error, "problem", None) or "this is not YAML"
        if "cannot start any token" in why and "\t" in text:
            why += " (a tab? YAML is indented with spaces)"
        elif _NO_BREAK in text:
            why += (
                f" (a no-break space in line {text[: text.index(_NO_BREAK)].count(chr(10)) + 1}? It is none of YAML's)"
            )
        document.problem(
            (), f"not readable as YAML: {why}", line=min(mark.line, text.count("\n")) + 1 if mark else None
        )
        raise document.error() from error
    return document


def _check_text(text: str, document: Document) -> None:
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        document.problem((), f"larger than {MAX_BYTES >> 20} MiB: this is no run file")
        raise document.error()
    unix = text.replace("\r\n", "\n")
    if found := _CONTROL.search(unix):
        line = unix.count("\n", 0, found.start()) + 1
        document.problem((), f"control character U+{ord(found[0]):04X}", line=line)
        raise document.error()


class _Reader:
    def __init__(self, text: str, document: Document) -> None:
        self.document = document
        self.marks = document.marks
        self.events: Iterator[Any] = iter(yaml.parse(text, Loader=_LOADER))

    def read(self) -> None:
        next(self.events)  # the stream's start
        event = next(self.events)
        if isinstance(event, yaml.StreamEndEvent):
            return self.document.problem((), "empty: remove it, and `mgpu init` writes one to start from")
        self.document.data = self.node(next(self.events), ())
        next(self.events)  # the document's end
        event = next(self.events)
        if not isinstance(event, yaml.StreamEndEvent):
            self.document.problem((), "a second document begins here; a run file is one", line=_line(event))
        return None

    def node(self, event: Any, at: Where) -> Any:
        self.marks.setdefault(at, Mark(_line(event)))
        if len(at) > MAX_DEPTH:
            self.refuse(at, f"nested more than {MAX_DEPTH} deep: this is no run file")
            raise self.document.error()
        if isinstance(event, yaml.AliasEvent):
            return self.refuse(at, f"`*{event.anchor}`: aliases are not supported; write the value out")
        if event.anchor is not None:
            self.document.problem(at, f"`&{event.anchor}`: anchors are not supported; write the value out")
        if event.tag is not None and event.tag not in _TAGS:
            tag = _short(event.tag.replace("tag:yaml.org,2002:", "!!"))
            self.refuse(at, f"tag `{tag}` is not supported: values are plain text, numbers, lists and blocks")
        if isinstance(event, yaml.MappingStartEvent):
            return self.mapping(at)
        if isinstance(event, yaml.SequenceStartEvent):
            return self.sequence(at)
        return self.scalar(event, at)

    def mapping(self, at: Where) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key in self.until(yaml.MappingEndEvent):
            line = _line(key)
            if mistake := _key_mistake(key):
                self.document.problem(at, mistake, line=line)
                self.skip(key)
            elif key.value in result:
                first = self.marks[(*at, key.value)].line
                self.document.problem((*at, key.value), f"given twice; the first is in line {first}", line=line)
            else:
                inner = (*at, key.value)
                self.marks[inner] = Mark(line)
                result[key.value] = self.node(next(self.events), inner)
                continue
            self.skip(next(self.events))
        return result

    def sequence(self, at: Where) -> list[Any]:
        return [self.node(event, (*at, index)) for index, event in enumerate(self.until(yaml.SequenceEndEvent))]

    def scalar(self, event: Any, at: Where) -> Any:
        text = event.value
        if found := _CONTROL.search(text):
            return self.refuse(at, f"control character U+{ord(found[0]):04X} in the value")
        if event.tag == STRING or not (event.implicit[0] or event.tag):
            return text  # in quotes
        self.marks[at] = Mark(self.marks[at].line, text)
        return self.plain(text, at)

    def plain(self, text: str, at: Where) -> Any:
        number = _INT.fullmatch(text) or _FLOAT.fullmatch(text) or _ODD_NUMBER.fullmatch(text)
        if number and (at[:1] in (("command",), ("env",)) or at[:2] == ("image", "args")):
            return text  # arguments and variables are text: 1.10 stays 1.10
        if _NULL.fullmatch(text):
            return self.refuse(at, "has no value: give one, or leave the key out")
        if _BOOL.fullmatch(text):
            return text.lower() in ("true", "yes", "on")
        if _INT.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            return float(text)
        if number:
            return self.refuse(at, f"`{_short(text)}`: write a plain decimal number, or text in quotes")
        return text

    def refuse(self, at: Where, message: str) -> str:
        self.document.bad.add(at)
        self.document.problem(at, message)
        return ""

    def until(self, end: type) -> Iterator[Any]:
        while not isinstance(event := next(self.events), end):
            yield event

    def skip(self, event: Any) -> None:
        depth = isinstance(event, yaml.CollectionStartEvent)
        while depth:
            event = next(self.events)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)


def _key_mistake(event: Any) -> str | None:
    if not isinstance(event, yaml.ScalarEvent):
        return "a key is a plain word here, no list, block or alias"
    if event.tag or event.anchor:
        return "a key has no tag and no anchor"
    if len(event.value) > MAX_KEY:
        return f"a key of {len(event.value)} characters"
    if _NO_BREAK in event.value:
        return "a no-break space (U+00A0) in a key: YAML is indented with plain ones"
    found = _CONTROL.search(event.value)
    return f"control character U+{ord(found[0]):04X} in a key" if found else None


def _line(event: Any) -> int:
    return event.start_mark.line + 1


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:39] + "…"
