"""Tokens of files as one stream, in a training and a validation part.

A folder has `index.json` and the files that it names, which `mgpu_train.data.tokenize` makes; or `train.bin` and
`val.bin`, as nanoGPT has them: 2 bytes a token, or 4 where the vocabulary has more than 65,536. No file has a header.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mgpu_train.data import token_index
from mgpu_train.data.text import Text, TextFile
from mgpu_train.data.token_index import Index
from mgpu_train.errors import TrainError

_NANO = {"train": "train.bin", "validation": "val.bin"}
_PROBED = 1 << 20  # bytes at both ends of a file without a checksum that tell it from others


@dataclass(frozen=True)
class Tokens:
    """Token files, end to end. Nothing is copied: a sample is read out of the page cache when it is asked for."""

    stream: Text  # as bytes
    width: int  # bytes a token
    vocabulary: int
    fingerprint: str  # two nodes with the same one see the same samples
    text_bytes: int | None  # of the text that they were made of, where it is known

    def __len__(self) -> int:
        """Tokens in all."""
        return len(self.stream) // self.width

    @property
    def per_byte(self) -> float | None:
        """Tokens per byte of text, where it is known."""
        return len(self) / self.text_bytes if self.text_bytes else None

    def samples(self, seq_len: int) -> int:
        """How many sequences of `seq_len` tokens, each with the token that follows it, there are."""
        return max(0, len(self) - 1) // seq_len

    def tensor(self, samples: Sequence[int], seq_len: int) -> torch.Tensor:
        """The named samples with the token that follows each: int64, shape (samples, seq_len + 1).

        Raises TrainError: a file is gone or shorter, or has a token that is not in the vocabulary.
        """
        size = (seq_len + 1) * self.width
        rows = b"".join(self.stream.read(sample * seq_len * self.width, size) for sample in samples)
        found = np.frombuffer(rows, f"<u{self.width}").astype(np.int64)
        if (largest := int(found.max())) >= self.vocabulary:
            raise TrainError(
                f"{self.stream.root} holds token {largest}, and `model.vocabulary` says that there are "
                f"{self.vocabulary}: the files are of another tokenizer, or damaged. Say that tokenizer's vocabulary, "
                "or make or fetch the files anew"
            )
        return torch.from_numpy(found).view(len(samples), seq_len + 1)


def open_tokens(folder: str, seq_len: int, vocabulary: int) -> tuple[Tokens, Tokens]:
    """The training and the validation tokens of a folder.

    Raises TrainError: there are none, or too few; they are not as the index says, or of a larger vocabulary.
    """
    root = Path(folder).resolve()
    index = token_index.read(root)
    training, validation = _indexed(root, index, vocabulary) if index else _nano(root, vocabulary)
    if not training.samples(seq_len) or not validation.samples(seq_len):
        raise TrainError(
            f"{root} holds too few tokens: {len(training)} for training and {len(validation)} for validation. Both "
            f"need more than seq_len = {seq_len}: lower `train.seq_len`, or tokenize more text (`--held-out` says how "
            "much of it is for validation)"
        )
    return training, validation


def _indexed(root: Path, index: Index, vocabulary: int) -> tuple[Tokens, ...]:
    if index.vocabulary > vocabulary:
        raise TrainError(
            f"the tokens of {root} are of a vocabulary of {index.vocabulary}, and `model.vocabulary` is {vocabulary}: "
            f"set it to {index.vocabulary}"
        )

    def part(split: str) -> Tokens:
        shards = [each for each in index.shards if each.split == split and each.tokens]
        files = tuple(TextFile(each.file, each.tokens * index.token_bytes) for each in shards)
        for name, size in files:
            if (found := _size(root / name)) != size:
                raise TrainError(
                    f"{root / name} has {found} bytes, and by {token_index.NAME} it has {size}: fetch the folder anew, "
                    "or make it again with the same command"
                )
        fingerprint = zlib.crc32(repr([(each.tokens, each.crc64nvme) for each in shards]).encode())
        of_text = sum(each.text_bytes for each in shards)
        return Tokens(Text(root, files), index.token_bytes, vocabulary, f"{fingerprint:08x}", of_text or None)

    return part("train"), part("validation")


def _nano(root: Path, vocabulary: int) -> tuple[Tokens, ...]:
    width = 2 if vocabulary <= 1 << 16 else 4

    def part(name: str) -> Tokens:
        path = root / name
        size = _size(path)
        if size % width:
            raise TrainError(f"{path} has {size} bytes, which are no tokens of {width} bytes each: fetch it anew")
        stream = Text(root, (TextFile(name, size),))
        ends = stream.read(0, _PROBED) + stream.read(max(0, size - _PROBED), _PROBED)
        return Tokens(stream, width, vocabulary, f"{zlib.crc32(ends, zlib.crc32(str(size).encode())):08x}", None)

    return part(_NANO["train"]), part(_NANO["validation"])


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise TrainError(
            f"there is no {path} ({error.strerror}): `train.tokens` names a folder on the node with {token_index.NAME} "
            f"and its files, or with {' and '.join(_NANO.values())}"
        ) from error
