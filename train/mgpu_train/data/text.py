"""Text files as one stream of bytes, split by file into a training and a validation part.

Without a folder of the user's, the text is the source of the interpreter's own standard library: real text that every
machine has. Nothing is copied: a sample is read from its file when it is asked for, out of the page cache.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from mgpu_train.errors import TrainError

# Left out: what is installed beside the library, and tests, which some distributions do not ship
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_VALIDATION_SHARE = 10  # one file in so many
_ENTROPY_BYTES = 64 << 20


class TextFile(NamedTuple):
    """A file of the text: its path relative to the folder, with `/`, and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class Text:
    """Files of one folder, end to end."""

    root: Path
    files: tuple[TextFile, ...]

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return (0, *accumulate(file.size for file in self.files))

    def __len__(self) -> int:
        """Bytes in all."""
        return self._starts[-1]

    def read(self, start: int, length: int) -> bytes:
        """Up to `length` bytes from byte `start`, over the ends of files; fewer only at the end of the text."""
        length = min(length, len(self) - start)
        parts: list[bytes] = []
        while length > 0:
            index = bisect_right(self._starts, start) - 1
            part = self._read_file(index, start - self._starts[index], length)
            parts.append(part)
            start, length = start + len(part), length - len(part)
        return b"".join(parts)

    def _read_file(self, index: int, offset: int, length: int) -> bytes:
        name, size = self.files[index]
        wanted = min(length, size - offset)
        try:
            with (self.root / name).open("rb") as file:
                file.seek(offset)
                part = file.read(wanted)
        except OSError as error:
            raise TrainError(f"cannot read {self.root / name}: {error.strerror}") from error
        if len(part) < wanted:
            raise TrainError(f"{self.root / name} has become shorter while it was in use")
        return part

    def samples(self, seq_len: int) -> int:
        """How many sequences of `seq_len` bytes, each with the byte that follows it, the text holds."""
        return max(0, len(self) - 1) // seq_len

    def tensor(self, samples: Sequence[int], seq_len: int) -> torch.Tensor:
        """The named samples with the byte that follows each: int64, shape (samples, seq_len + 1)."""
        rows = b"".join(self.read(sample * seq_len, seq_len + 1) for sample in samples)
        return torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(len(samples), seq_len + 1).long()

    @property
    def per_byte(self) -> float:
        """A byte is a token."""
        return 1.0

    @property
    def fingerprint(self) -> str:
        """Hash of all names and sizes: two machines with the same one see the same samples."""
        return f"{zlib.crc32(repr(self.files).encode()):08x}"

    def entropies(self) -> tuple[float, float]:
        """Unigram entropy and bigram entropy (of a byte, its predecessor known), nat/byte; of the first 64 MiB.

        What a model reaches that knows only how frequent bytes, or pairs of bytes, are: the marks to fall below.
        """
        data = np.frombuffer(self.read(0, _ENTROPY_BYTES), dtype=np.uint8).astype(np.int64)
        pairs = np.bincount(data[:-1] * 256 + data[1:], minlength=1 << 16).reshape(256, 256)
        unigram = _entropy(pairs.sum(axis=1))
        return unigram, _entropy(pairs.ravel()) - unigram


def _entropy(counts: np.ndarray) -> float:
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def open_split(folder: str | None, seq_len: int) -> tuple[Text, Text]:
    """The training and the validation text of `folder`, or of the standard library.

    A file is validation text when the CRC-32 of its name says so, one in ten; where that finds none (a folder of a few
    files), the file with the smallest one is. Raises TrainError when the text is too small for both.
    """
    root = Path(folder or sysconfig.get_path("stdlib")).resolve()
    files = sorted(_library(root) if folder is None else _all(root))
    held_out = {file for file in files if _hash(file) % _VALIDATION_SHARE == 0} or set(sorted(files, key=_hash)[:1])
    training = Text(root, tuple(file for file in files if file not in held_out))
    validation = Text(root, tuple(file for file in files if file in held_out))
    if not training.samples(seq_len) or not validation.samples(seq_len):
        raise TrainError(
            f"{root} holds too little text: {len(files)} files, {len(training)} bytes for training and "
            f"{len(validation)} for validation (split by file). Both need more than seq_len = {seq_len} bytes: "
            "set `train.text` to a folder of more or larger files, or lower `train.seq_len`."
        )
    return training, validation


def _hash(file: TextFile) -> int:
    return zlib.crc32(file.name.encode())


def _library(root: Path) -> Iterator[TextFile]:
    return (file for file in _files(root, _NOT_LIBRARY.__contains__) if file.name.endswith(".py"))


def _all(root: Path) -> Iterator[TextFile]:
    if not root.is_dir():
        raise TrainError(f"`train.text` names {root}, which is no folder on this node")
    return _files(root, lambda name: name.startswith("."))


def _unread(error: OSError) -> None:
    """A folder that is not ours is left out; a disk that fails would leave out text, and nobody knew."""
    if not isinstance(error, PermissionError):
        raise TrainError(f"cannot read {error.filename}: {error.strerror}") from error


def _files(root: Path, left_out: Callable[[str], bool]) -> Iterator[TextFile]:
    """All that have bytes; of what is left out by its name folders are not looked into."""
    for folder, folders, names in os.walk(root, onerror=_unread):
        folders[:] = [name for name in folders if not left_out(name)]
        for path in (Path(folder, name) for name in names if not left_out(name)):
            if path.is_file() and (size := path.stat().st_size):
                yield TextFile(path.relative_to(root).as_posix(), size)
