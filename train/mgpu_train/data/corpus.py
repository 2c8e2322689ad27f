"""Documents of a folder or file, read one after the other: text files, JSON lines (*.jsonl), Parquet (*.parquet),
TFRecord (*.tfrecord, *.tfrecord-00000-of-00008).

A `Part` is a piece of one file that can be read without what is before it: whole text files, ranges of bytes of JSON
lines and TFRecord, row groups of Parquet. No file is held in memory but a text file, which is one document.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from mgpu_train.data import tfrecord
from mgpu_train.errors import TrainError

_ROWS = 1000  # of Parquet, decoded at a time
_OF_TFDS = ("dataset_info.json", "features.json")  # what TensorFlow's data sets say of themselves, beside TFRecord


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Around what reads this file or folder. Raises TrainError: the system does not let it."""
    try:
        yield
    except OSError as error:
        raise TrainError(f"cannot read {error.filename or path}: {error.strerror or error}") from error


class Document(NamedTuple):
    """One text. `hashed` says which split it is in, whatever else there is and in which order."""

    text: str
    hashed: int


class Part(NamedTuple):
    """From `start` to `stop`: bytes of a text file, of JSON lines or TFRecord, row groups of Parquet."""

    file: str  # below the root, with `/`
    start: int
    stop: int


class Corpus:
    """What lies below a folder, or one file."""

    def __init__(self, root: Path, key: str) -> None:
        """`key`: of the text in JSON lines, Parquet and TFRecord. Raises TrainError: nothing is there."""
        self.root, self.key = root.resolve(), key
        with readable(self.root):
            self._top = self.root.parent if self.root.is_file() else self.root
            if not self.root.exists():
                raise TrainError(
                    f"there is no {self.root}: name a folder or file of texts, JSON lines, Parquet or TFRecord"
                )
            found = [self.root] if self.root.is_file() else sorted(self.root.rglob("*"))
            named = ((path.relative_to(self._top).as_posix(), path) for path in found if path.is_file())
            self.files = tuple(
                (name, path.stat().st_size)
                for name, path in named
                if not any(part.startswith(".") for part in name.split("/"))
            )
        if any(tfrecord.is_named(name) for name, _ in self.files):
            self.files = tuple(each for each in self.files if each[0].rpartition("/")[2] not in _OF_TFDS)
        if not any(size for _, size in self.files):
            raise TrainError(f"{self.root} holds no text: text files, JSON lines (*.jsonl), Parquet or TFRecord")

    def pieces(self, size: int) -> list[tuple[Part, ...]]:
        """All of it in its order, in pieces of about so many bytes: they follow from the files alone."""
        pieces: list[tuple[Part, ...]] = []
        piece: list[Part] = []
        held = 0
        for part, part_size in self._parts(size):
            piece.append(part)
            held += part_size
            if held >= size:
                pieces.append(tuple(piece))
                piece, held = [], 0
        return [*pieces, tuple(piece)] if piece else pieces

    def read(self, parts: Iterable[Part]) -> Iterator[Document]:
        """The documents that begin in these parts. Raises TrainError: one cannot be read."""
        for part in parts:
            path = self._top / part.file
            kind = {".jsonl": self._lines, ".parquet": self._rows}.get(path.suffix.lower(), self._whole)
            kind = self._examples if tfrecord.is_named(part.file) else kind
            with readable(path):
                yield from kind(path, part)

    def _parts(self, size: int) -> Iterator[tuple[Part, int]]:
        for name, length in self.files:
            if not length:
                continue
            if name.lower().endswith(".parquet"):
                groups = _parquet(self._top / name, self.key)
                for number in range(groups.num_row_groups):
                    yield Part(name, number, number + 1), groups.metadata.row_group(number).total_byte_size
            elif tfrecord.is_named(name):
                yield from ((part, part.stop - part.start) for part in _runs(name, self._top / name, size))
            else:
                step = size if name.lower().endswith(".jsonl") else length
                for start in range(0, length, step):
                    stop = min(start + step, length)
                    yield Part(name, start, stop), stop - start

    def _whole(self, path: Path, part: Part) -> Iterator[Document]:
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise TrainError(f"{path} is no text in UTF-8, at byte {error.start}: take it out of the folder") from error
        yield Document(text, zlib.crc32(part.file.encode()))

    def _lines(self, path: Path, part: Part) -> Iterator[Document]:
        with path.open("rb") as file:
            at = part.start
            if at:  # a line is of the part in which it begins
                file.seek(at - 1)
                at += len(file.readline()) - 1
            while at < part.stop and (line := file.readline()):
                if line.strip():
                    yield self._row(f"{path}, the line at byte {at}", line)
                at += len(line)

    def _row(self, place: str, line: bytes) -> Document:
        try:
            said: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TrainError(f"{place}: no JSON ({error}): mend it, or leave it out") from error
        if not isinstance(said, dict) or not isinstance(said.get(self.key), str):
            there = ", ".join(map(repr, said)) if isinstance(said, dict) else type(said).__name__
            raise TrainError(f"{place}: there is no text under {self.key!r}, only {there}: `--key` says where it is")
        return _of_row(said[self.key])

    def _rows(self, path: Path, part: Part) -> Iterator[Document]:
        groups = _parquet(path, self.key)
        rows = groups.iter_batches(_ROWS, row_groups=range(part.start, part.stop), columns=[self.key])
        for batch in rows:
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str):
                    where = f"{path}, row groups {part.start} to {part.stop}"
                    raise TrainError(f"{where}: {self.key!r} has {text!r}, which is no text: leave such rows out")
                yield _of_row(text)

    def _examples(self, path: Path, part: Part) -> Iterator[Document]:
        for record, data in tfrecord.records(path, part.start):
            if record.begin >= part.stop:
                return
            where = f"{path}, the record at byte {record.begin}"
            if tfrecord.masked_crc(data) != record.crc:
                raise TrainError(f"{where}: it is damaged (its checksum does not match): fetch the file anew")
            try:
                found = tfrecord.example(data)
                (text,) = found.get(self.key) or [None]
                if not isinstance(text, memoryview):
                    there = ", ".join(map(repr, found))
                    raise TrainError(f"{where}: there is no text under {self.key!r}, only {there}: `--key` says where")
                yield _of_row(bytes(text).decode())
            except ValueError as error:
                raise TrainError(f"{where}: no tf.train.Example of a text ({error}): leave the file out") from error


def _runs(name: str, path: Path, size: int) -> Iterator[Part]:
    """Of the records of a TFRecord file as many as have so many bytes together."""
    start = end = 0
    for record, _ in tfrecord.records(path):
        end = record.end
        if end - start >= size:
            yield Part(name, start, end)
            start = end
    if end > start:
        yield Part(name, start, end)


def _of_row(text: str) -> Document:
    """By its text, so that one that is there twice is not in both splits."""
    try:
        return Document(text, zlib.crc32(text.encode()))
    except UnicodeEncodeError:  # half of a pair, which JSON can say and no encoding has
        text = text.encode("utf-8", "replace").decode()
        return Document(text, zlib.crc32(text.encode()))


def _parquet(path: Path, key: str) -> Any:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise TrainError(
            f"{path} is read by pyarrow, which is not installed here: `pip install 'mgpu-train[tokens]'`"
        ) from error
    try:
        with readable(path):
            found = parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise TrainError(f"{path} is no Parquet file ({error}): take it out of the folder, or fetch it anew") from error
    if key not in found.schema_arrow.names:
        there = ", ".join(found.schema_arrow.names)
        raise TrainError(f"{path} has no column {key!r}, only {there}: `--key` says where the text is")
    return found
