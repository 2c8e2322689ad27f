"""Documents as tokens: text files and JSON lines, read by a tokenizer once and kept end to end.

Every rank keeps all of them, 4 bytes a token.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mgpu_train.errors import TrainError

log = logging.getLogger("mgpu_train")

Encode = Callable[[list[str]], Sequence[Sequence[int]]]
_AT_ONCE = 1000  # documents that a tokenizer is given
_HELD_OUT = 10  # where there is no validation set, one document in so many


class Document(NamedTuple):
    """One text. `place`: file and number in it, the same on all nodes."""

    place: str
    prompt: str
    text: str
    label: str | int | None


@dataclass(frozen=True)
class Keys:
    """Names in JSON lines; without `prompt` and `label` text files are documents, too."""

    text: str
    prompt: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class Tokens:
    """Documents, end to end; each begins with so many tokens that are not learned (`prompts`)."""

    flat: np.ndarray  # int32
    starts: np.ndarray  # int64: where each begins, and where the last one ends
    prompts: np.ndarray  # int32
    labels: np.ndarray  # int64

    @cached_property
    def fingerprint(self) -> str:
        """Of all of it."""
        parts = (self.flat, self.starts, self.prompts, self.labels)
        value = 0
        for part in parts:
            value = zlib.crc32(part.tobytes(), value)
        return f"{value:08x}"

    def __len__(self) -> int:
        """How many documents there are."""
        return len(self.starts) - 1

    def read(self, number: int) -> np.ndarray:
        """A document's."""
        return self.flat[self.starts[number] : self.starts[number + 1]]


def read(where: str, keys: Keys) -> list[Document]:
    """Those of a file, or of a folder's files in the order of their names. Raises TrainError: they cannot be read."""
    root = Path(where).resolve()
    if not root.exists():
        raise TrainError(f"there is no {root} on this node: `train.options.data` names a folder or file of texts")
    files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
    top = root.parent if root.is_file() else root
    names = [(path.relative_to(top).as_posix(), path) for path in files]
    found = [
        document
        for name, path in names
        if not any(part.startswith(".") for part in name.split("/"))
        for document in _documents(name, path, keys)
    ]
    if not found:
        raise TrainError(f"{root} holds no texts: text files, or JSON lines in files that end in .jsonl")
    return found


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """For training and for validation: by each one's place, one in ten. Raises TrainError: there is but one."""
    if len(documents) < 2:
        raise TrainError(
            f"{documents[0].place} is the only document, and none is left for validation: name one by "
            "`train.options.validation`"
        )
    ranks = [zlib.crc32(document.place.encode()) for document in documents]
    held_out = {number for number, rank in enumerate(ranks) if rank % _HELD_OUT == 0}
    if len(held_out) in (0, len(documents)):
        held_out = {ranks.index(min(ranks))}
    parted = ([each for number, each in enumerate(documents) if (number in held_out) is out] for out in (False, True))
    return next(parted), next(parted)


def encode(
    documents: Iterable[Document],
    tokens: Encode,
    continued: Encode,
    *,
    end: int | None,
    most: int | None,
    learns: bool,
    classes: Sequence[str | int] = (),
) -> Tokens:
    """By a tokenizer: `tokens` of what a document begins with, `continued` of the text after a prompt.

    Each ends with token `end`, and has `most` tokens at most. What then has nothing to learn is left out and told of:
    with `learns` that is one whose tokens after the first are all of the prompt, and else one without tokens.
    """
    places = {label: number for number, label in enumerate(classes)}
    flat: list[np.ndarray] = []
    prompts: list[int] = []
    labels: list[int] = []
    seen, rest = 0, iter(documents)
    while some := list(islice(rest, _AT_ONCE)):
        first = tokens([document.prompt or document.text for document in some])
        then = continued([document.text if document.prompt else "" for document in some])
        for document, head, tail in zip(some, first, then, strict=True):
            ids = [*head, *tail]
            if end is not None and ids[-1:] != [end]:
                ids.append(end)
            prompt = len(head) if document.prompt else 0
            if len(ids[:most]) > (max(1, prompt) if learns else 0):
                flat.append(np.array(ids[:most], np.int32))
                prompts.append(prompt)
                labels.append(0 if document.label is None else places.get(document.label, -1))
        seen += len(some)
    if seen > len(flat):
        log.warning("%d of %d documents are left out: nothing of them is learned", seen - len(flat), seen)
    starts = np.cumsum([0, *map(len, flat)], dtype=np.int64)
    whole = np.concatenate(flat) if flat else np.zeros(0, np.int32)
    return Tokens(whole, starts, np.array(prompts, np.int32), np.array(labels, np.int64))


def _documents(name: str, path: Path, keys: Keys) -> Iterator[Document]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TrainError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TrainError(f"{path} is no text in UTF-8, at byte {error.start}: take it out of the folder") from error
    if path.suffix == ".jsonl":
        lines = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
        yield from (_of_line(f"{name}:{number}", line, keys) for number, line in lines)
    elif keys.prompt or keys.label:
        raise TrainError(f"{path} has no {keys.prompt or keys.label!r}: JSON lines stand in files that end in .jsonl")
    elif text:
        yield Document(name, "", text, None)


def _of_line(place: str, line: str, keys: Keys) -> Document:
    try:
        said: Any = json.loads(line)
    except ValueError as error:
        raise TrainError(f"{place} is no JSON: {error}") from error
    wanted = {keys.text: str} | ({keys.prompt: str} if keys.prompt else {})
    for key, kind in [*wanted.items(), *([(keys.label, str | int)] if keys.label else [])]:
        value = said.get(key) if isinstance(said, dict) else None
        if not isinstance(value, kind):
            there = ", ".join(map(str, said)) if isinstance(said, dict) else type(said).__name__
            what = "a word or a number" if key == keys.label else "a text"
            raise TrainError(f"{place} has {what} nowhere under {key!r}; there are {there}")
    label = said[keys.label] if keys.label else None
    return Document(place, said[keys.prompt] if keys.prompt else "", said[keys.text], label)
