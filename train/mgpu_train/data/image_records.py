"""Images in TFRecord files: found once, read one by one, each checked as it is read."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mgpu_train.data import tfrecord
from mgpu_train.errors import TrainError

log = logging.getLogger("mgpu_train")

INDEX = ".mgpu-records.npz"
_VERSION = 1
_KEYS = (("image/encoded", "image/class/label"), ("image", "label"))  # of TensorFlow's models, and of its data sets
_MODELS = re.compile(r"(train|validation|test)-\d{5}-of-\d{5}")  # files as the former's programs name them
_SPLIT = re.compile(r"(?:^|[-_.])(train|validation|valid|val|eval|dev|test)\d*(?=[-_.]|$)")
_HELD_OUT = 10  # where there is no validation set, one image in so many

Decode = Callable[[BinaryIO, str], np.ndarray]  # a file of an image, and its name in errors


@dataclass(frozen=True)
class Index:
    """All records of some files, in their order; arrays of one shape, but the names."""

    names: np.ndarray  # of files
    shard: np.ndarray  # int64: which of these
    number: np.ndarray  # int64: in it
    start: np.ndarray  # int64: bytes
    length: np.ndarray  # int64: bytes
    crc: np.ndarray  # uint32, masked
    label: np.ndarray  # int64


@dataclass(frozen=True)
class Records:
    """Some of the images of an index. `read` opens a file each time: it may be asked by several threads."""

    root: Path
    index: Index
    numbers: np.ndarray  # of records in the index
    classes: int
    decode: Decode

    @property
    def fingerprint(self) -> str:
        """Of the checksums of all records, and of all labels."""
        parts = self.index.crc[self.numbers], self.index.label[self.numbers]
        return f"{zlib.crc32(parts[1].tobytes(), zlib.crc32(parts[0].tobytes())):08x}"

    def __len__(self) -> int:
        """How many there are."""
        return len(self.numbers)

    def read(self, number: int) -> np.ndarray:
        """Raises TrainError: it cannot be, or has other bytes than its checksum says."""
        index, at = self.index, self.numbers[number]
        path, start, length = self.root / str(index.names[index.shard[at]]), int(index.start[at]), int(index.length[at])
        record = tfrecord.Record(int(index.number[at]), start, length, int(index.crc[at]))
        where = _where(path, record)
        try:
            with path.open("rb") as file:
                file.seek(start)
                data = file.read(length)
        except OSError as error:
            raise TrainError(f"cannot read {path}: {error.strerror}") from error
        if len(data) < length or tfrecord.masked_crc(data) != record.crc:
            raise TrainError(f"{where} is damaged (its checksum does not match): fetch the file anew")
        image, _ = _example(where, memoryview(data))
        return self.decode(BytesIO(image), where)

    def label(self, number: int) -> int:
        """As the record says."""
        return int(self.index.label[self.numbers[number]])


def named(root: Path) -> list[str]:
    """The names of TFRecord files in a folder, sorted."""
    found = (path.name for path in root.iterdir() if path.is_file())
    return sorted(name for name in found if tfrecord.is_named(name) or _MODELS.fullmatch(name))


def open_records(root: Path, names: list[str], decode: Decode) -> tuple[Records, Records]:
    """Training and validation images. Files are of the split whose name they have; what is called a test is validated
    on where nothing else is. Raises TrainError: they hold none, or one that cannot be read."""
    splits = {name: (_SPLIT.findall(name) or ["train"])[-1] for name in names}
    held_out = {name for name, split in splits.items() if split not in ("train", "test")}
    tests = {name for name, split in splits.items() if split == "test"}
    index = _index(root, [name for name in names if name not in tests or not held_out])
    if (lowest := int(index.label.min(initial=0))) < 0:
        at = int(index.label.argmin())
        raise TrainError(
            f"{root / str(index.names[index.shard[at]])}, record {index.number[at]}, has label {lowest}: labels begin "
            "at 0. Where a test has none, take its file out of the folder"
        )
    of_validation = np.isin(index.names, sorted(held_out or tests))[index.shard]
    if not of_validation.any():
        places = zip(index.names[index.shard], index.number, strict=True)
        of_validation = np.array([zlib.crc32(f"{name}:{number}".encode()) % _HELD_OUT == 0 for name, number in places])
    if not len(index.label):
        raise TrainError(f"{root} holds TFRecord files without a record: {', '.join(names)}")
    if of_validation.all():
        raise TrainError(f"{root} holds TFRecord files for validation alone: {', '.join(names)}")
    classes = int(index.label.max(initial=-1)) + 1
    training, validation = (
        Records(root, index, np.flatnonzero(part), classes, decode) for part in (~of_validation, of_validation)
    )
    return training, validation


def _index(root: Path, names: list[str]) -> Index:
    """It is made once and kept beside the files, by one of the node's ranks while others wait; where the folder cannot
    be written to, each makes its own."""
    stats = [(root / name).stat() for name in names]
    state = np.array([[_VERSION, 0], *([stat.st_size, stat.st_mtime_ns] for stat in stats)])
    with _alone(root) as writable:
        kept = _kept(root / INDEX, names, state)
        if kept is not None:
            return kept
        log.info("%s: the records of %d files are looked for", root, len(names))
        made = _made(root, names)
        if writable:
            aside = root / f"{INDEX}.{os.getpid()}"
            try:
                with aside.open("wb") as file:
                    np.savez(file, state=state, **{each.name: getattr(made, each.name) for each in fields(made)})
                aside.replace(root / INDEX)
            except OSError:  # a full disk: the next start looks for them again
                with suppress(OSError):
                    aside.unlink()
    return made


@contextmanager
def _alone(root: Path) -> Iterator[bool]:
    """No other process of this node is in here with the folder; False: it cannot be written to."""
    try:
        file = (root / f"{INDEX}.lock").open("w", encoding="utf-8")
    except OSError:
        yield False
        return
    with file:
        with suppress(OSError):  # a file system without locks: what is written has its name when it is whole
            fcntl.flock(file, fcntl.LOCK_EX)
        yield True


def _kept(path: Path, names: list[str], state: np.ndarray) -> Index | None:
    """What was made of these files; None: nothing, or they have changed since."""
    try:
        with np.load(path, allow_pickle=False) as found:
            if not np.array_equal(found["state"], state) or found["names"].tolist() != names:
                return None
            index = Index(*(found[each.name] for each in fields(Index)))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    return index if len({len(each) for each in astuple(index)[1:]}) == 1 else None


def _made(root: Path, names: list[str]) -> Index:
    rows: list[tuple[int, ...]] = []
    for shard, name in enumerate(names):
        path = root / name
        try:
            for record, data in tfrecord.records(path):
                _, label = _example(_where(path, record), data)
                rows.append((shard, *record, label))
        except OSError as error:
            raise TrainError(f"cannot read {path}: {error.strerror}") from error
    table = np.array(rows, np.int64).reshape(-1, 6)
    shard, number, start, length, crc, label = (np.ascontiguousarray(column) for column in table.T)
    return Index(np.array(names), shard, number, start, length, crc.astype(np.uint32), label)


def _example(where: str, record: memoryview) -> tuple[memoryview, int]:
    """A record's image, a file, and its class. Raises TrainError: it has none."""
    try:
        found = tfrecord.example(record, {key for keys in _KEYS for key in keys})
        for image, label in _KEYS:
            match found.get(image), found.get(label):
                case [memoryview() as data], [int(number)]:
                    return data, number
        there = ", ".join(sorted(tfrecord.example(record)))
    except ValueError as error:
        raise TrainError(f"{where} is no tf.train.Example ({error}): fetch the file anew") from error
    known = " or ".join(f"`{image}` with `{label}`" for image, label in _KEYS)
    raise TrainError(f"{where} has no image of one class: {known} are read, and there is {there or 'nothing'}")


def _where(path: Path, record: tfrecord.Record) -> str:
    return f"{path}, record {record.number} at byte {record.begin},"
