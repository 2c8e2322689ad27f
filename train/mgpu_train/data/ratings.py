"""Ratings that users gave to items: three columns of a CSV, Parquet or NumPy file, in memory (16 bytes a rating)."""

from __future__ import annotations

import csv
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mgpu_train.data.base import Batch
from mgpu_train.errors import TrainError

_HELD_OUT = 10  # one pair of user and item in so many


@dataclass(frozen=True)
class Ratings:
    """Of one split. Users and items have the numbers that they have in the whole file."""

    users: np.ndarray  # int32 (count,)
    items: np.ndarray  # int32 (count,)
    ratings: np.ndarray  # float64 (count,)
    counts: tuple[int, int]  # of users and items in the file

    @property
    def fingerprint(self) -> str:
        """Of all that is in it."""
        value = zlib.crc32(repr(self.counts).encode())
        for column in (self.users, self.items, self.ratings):
            value = zlib.crc32(column.tobytes(), value)
        return f"{value:08x}"

    def __len__(self) -> int:
        """How many there are."""
        return len(self.ratings)

    def batch(self, samples: Sequence[int], seeds: Sequence[int]) -> Batch:
        """`user` and `item` int64, `rating` float32, of shape (B,) each. Nothing is drawn."""
        chosen = np.asarray(samples)
        return {
            "user": torch.from_numpy(self.users[chosen].astype(np.int64)),
            "item": torch.from_numpy(self.items[chosen].astype(np.int64)),
            "rating": torch.from_numpy(self.ratings[chosen].astype(np.float32)),
        }

    def where(self, chosen: np.ndarray) -> Ratings:
        """Some of them."""
        return Ratings(self.users[chosen], self.items[chosen], self.ratings[chosen], self.counts)


def open_ratings(file: str, columns: tuple[str, str, str], separator: str) -> tuple[Ratings, Ratings]:
    """The ratings that are learned from, and those that are validated on: one pair of user and item in ten.

    `columns`: of users, items and ratings, by name, or by number from 0 where the file has no names.

    Raises TrainError: it cannot be read, lacks one, or a rating is no finite number.
    """
    path = Path(file)
    read = {".csv": _csv, ".tsv": _csv, ".txt": _csv, ".data": _csv, ".parquet": _parquet, ".npy": _npy}
    kind = read.get(path.suffix.lower())
    if kind is None:
        raise TrainError(
            f"`train.options.data`: {path} is none of the files that are known, {', '.join(read)}: convert it to one"
        )
    try:
        (users, user_count), (items, item_count), ratings = kind(path, columns, separator)
    except OSError as error:
        raise TrainError(f"`train.options.data`: cannot read {path} on this node: {error.strerror or error}") from error
    bad = np.flatnonzero(~np.isfinite(ratings))
    if len(bad):
        raise TrainError(f"{path}: of its {len(ratings)} ratings, {len(bad)} are no finite number: leave them out")
    whole = Ratings(users, items, ratings, (user_count, item_count))
    held_out = _hash(users, items) % _HELD_OUT == 0
    return whole.where(~held_out), whole.where(held_out)


def _hash(users: np.ndarray, items: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer of both: whoever rated a thing twice is in one split with both."""
    value = users.astype(np.uint64) << np.uint64(32) | items.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ value >> np.uint64(shift)) * np.uint64(factor)
    return value ^ value >> np.uint64(31)


Numbered = tuple[np.ndarray, int]
Columns = tuple[Numbered, Numbered, np.ndarray]


def _csv(path: Path, columns: tuple[str, str, str], separator: str) -> Columns:
    """With a header, unless the columns are numbers."""
    known: tuple[dict[str, int], dict[str, int]] = ({}, {})
    numbers, ratings = (array("i"), array("i")), array("d")
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter=separator)
        try:
            named = not all(each.isdecimal() for each in columns)
            places = _places(path, columns, next(rows, [])) if named else [int(each) for each in columns]
            for row in rows:
                if row:
                    for number, names, place in zip(numbers, known, places[:2], strict=True):
                        number.append(names.setdefault(row[place], len(names)))
                    ratings.append(float(row[places[2]]))
        except (IndexError, ValueError, csv.Error) as error:
            raise TrainError(
                f"{path}, line {rows.line_num}: cannot be read ({error}). It is parted by {separator!r}, which "
                "`train.options.separator` says, and its rating has to be a number"
            ) from error
    users, items = ((np.frombuffer(each, np.int32) if each else np.zeros(0, np.int32)) for each in numbers)
    return (users, len(known[0])), (items, len(known[1])), np.array(ratings, np.float64)


def _parquet(path: Path, columns: tuple[str, str, str], _separator: str) -> Columns:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise TrainError(
            f"{path} is read by pyarrow, which is not installed here: `pip install mgpu-train[recommender]`, or "
            "convert the file to CSV"
        ) from error
    try:
        names = parquet.read_schema(path).names
        wanted = [names[place] for place in _places(path, columns, names)]
        table = parquet.read_table(path, columns=wanted)
    except ArrowInvalid as error:
        raise TrainError(f"{path} is no Parquet file: {error}") from error
    return _of_arrays(path, *(table[name].to_numpy() for name in wanted))


def _npy(path: Path, columns: tuple[str, str, str], _separator: str) -> Columns:
    """Records, or rows of numbers."""
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise TrainError(f"{path} is no file of NumPy with numbers or text: {error}") from error
    names = list(values.dtype.names or ())
    if not names and values.ndim != 2:
        raise TrainError(f"{path} has the shape {values.shape}: records, or a row a rating, are wanted")
    places = _places(path, columns, names or [str(number) for number in range(values.shape[1])])
    return _of_arrays(path, *(values[names[place]] if names else values[:, place] for place in places))


def _of_arrays(path: Path, users: Any, items: Any, ratings: Any) -> Columns:
    numbered: list[Numbered] = []
    for column in (users, items):
        values, numbers = np.unique(np.asarray(column), return_inverse=True)
        numbered.append((numbers.astype(np.int32), len(values)))
    try:
        return *numbered, np.asarray(ratings).astype(np.float64)  # type: ignore[return-value]
    except (TypeError, ValueError) as error:
        raise TrainError(f"{path}: its ratings are no numbers ({error})") from error


def _places(path: Path, columns: Sequence[str], names: Sequence[str]) -> list[int]:
    """Where they stand. Raises TrainError: one is missing."""
    missing = [each for each in columns if each not in names]
    if missing:
        raise TrainError(
            f"{path} has no column `{missing[0]}`, only {', '.join(names) or 'none'}: `train.options.user`, `item` and "
            "`rating` say which it has, by number where it has no names"
        )
    return [list(names).index(each) for each in columns]
