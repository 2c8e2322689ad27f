"""`--set KEY=VALUE` and `--env NAME=VALUE`: what the command line says otherwise than the run file."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from mgpu.errors import SpecError
from mgpu.spec.text.document import Document, Mark, Where, read

_KEY = re.compile(r"[^\s=.\[\]\"']+(\.[^\s=.\[\]\"']+)*")
_OPTIONS = {"--set": "KEY", "--env": "NAME"}


@dataclass(frozen=True)
class Change:
    """One of the options: the field `at`, and its `value` as it is written in a run file. Of a `matrix` in the file
    itself `option` is empty, and `line` is the value's."""

    option: str
    given: str
    at: Where
    value: str
    line: int = 0

    @classmethod
    def of(cls, option: str, given: str) -> Change:
        """The option as it was `given` on the command line. Raises ValueError: it says nothing."""
        key, equals, value = given.partition("=")
        if not (key and equals):
            hint = f"; for a secret, `secrets: [{key}]` in the run file" if key and option == "--env" else ""
            raise ValueError(f"write `{option} {_OPTIONS[option]}=VALUE`{hint}")
        if option == "--env":  # text, whatever it looks like
            return cls(option, given, ("env", key), json.dumps(value, ensure_ascii=False))
        if not _KEY.fullmatch(key):
            hint = "a list is given whole, `command=[train.py, --epochs, 3]`"
            raise ValueError(f"`{key}` is no key of a run file as in `train.steps=100`; {hint}")
        if "\n" in value:
            raise ValueError(f"the value of `{key}` is more than one line")
        return cls(option, given, tuple(key.split(".")), value)

    def make(self, document: Document) -> None:
        """Changes what was read of a run file; mistakes become its problems."""
        keys = "\n".join("  " * depth + json.dumps(key, ensure_ascii=False) + ":" for depth, key in enumerate(self.at))
        try:
            changed = read(f"{keys} {self.value}\n", self.option)
        except SpecError as error:
            changed = Document(self.option, problems=list(error.problems))
        if isinstance(document.data, dict) and isinstance(changed.data, dict):
            self._put(document, changed)
        for problem in changed.problems:
            document.problem(self.at, problem.message, line=self.line, origin=self.option)

    def _put(self, document: Document, changed: Document) -> None:
        """The value takes its place; the rest of the file stays."""
        here = len(self.at)
        marks = {at: Mark(self.line, mark.plain, self.option) for at, mark in changed.marks.items()}
        block, new = document.data, changed.data
        for depth, key in enumerate(self.at[:-1], 1):
            if not isinstance(block.get(key), dict):  # absent, or `checkpoint: none`
                block[key] = {}
                document.forget(self.at[:depth])
                document.marks[self.at[:depth]] = marks[self.at[:depth]]
            block, new = block[key], new[key]
        document.forget(self.at)
        block[self.at[-1]] = new[self.at[-1]]
        document.marks |= {at: mark for at, mark in marks.items() if at[:here] == self.at}
        document.bad |= changed.bad
