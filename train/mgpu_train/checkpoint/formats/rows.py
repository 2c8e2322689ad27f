"""Which files of a checkpoint the ranks of one node read, where a strategy shares tensors out by rows, as FSDP2 does.

What each rank holds follows from the number of rows and of ranks; nothing has to be loaded to know it.
"""

from __future__ import annotations

from dataclasses import dataclass

from mgpu_train.checkpoint.formats.shards import Chunk, Shards, Tensor


@dataclass(frozen=True)
class Ranks:
    """The ranks of one node, which follow one another: `count` from `first` on, of `world_size` in all."""

    first: int
    count: int
    world_size: int

    def rows(self, length: int) -> range:
        """Those that they hold together of a tensor with `length` rows: torch's `Shard(0)`, which shares out as
        `torch.chunk` does, so that the last ranks may have fewer, or none."""
        each = -(-length // self.world_size)
        return range(min(self.first * each, length), min((self.first + self.count) * each, length))


def files(shards: Shards, ranks: Ranks) -> set[str]:
    """The names of the files that these ranks read. Of what is not known to be shared out by rows they read all."""
    read = {piece.file for piece in shards.objects.values()}
    for tensor in shards.tensors.values():
        rows = ranks.rows(tensor.shape[0]) if _by_rows(tensor) else None
        read.update(chunk.piece.file for chunk in tensor.chunks if rows is None or _holds(chunk, rows))
    return read


def _by_rows(tensor: Tensor) -> bool:
    return tensor.sharded and all(chunk.shape[1:] == tensor.shape[1:] for chunk in tensor.chunks)


def _holds(chunk: Chunk, rows: range) -> bool:
    first = chunk.offset[0]
    return first < rows.stop and rows.start < first + chunk.shape[0]
