"""Every key of a run in the object store. No key is the beginning of another one's folder: not every store has both."""

from __future__ import annotations

import re

_INDEX = re.compile(r"/index/([0-9]{8})-([0-9a-f]{16})\.json$")
_COMMIT = re.compile(r"/commits/([0-9]{8})\.json$")


def commits(run_id: str) -> str:
    """The prefix of the commit log."""
    return f"{run_id}/commits/"


def commit(run_id: str, seq: int) -> str:
    """One entry of the commit log."""
    return f"{commits(run_id)}{seq:08d}.json"


def seq_of(key: str) -> int | None:
    """The number of an entry, or None for what is none."""
    found = _COMMIT.search(key)
    return int(found[1]) if found else None


def indexes(run_id: str) -> str:
    """The prefix of the commit log's index."""
    return f"{run_id}/index/"


def index(run_id: str, upto: int, digest: str) -> str:
    """The index of the entries 0 to `upto`; `digest`: the first 16 hex digits of its SHA-256."""
    return f"{indexes(run_id)}{upto:08d}-{digest}.json"


def index_of(key: str) -> tuple[int, str] | None:
    """The last number and the digest that an index has in its name, or None for what is none."""
    found = _INDEX.search(key)
    return (int(found[1]), found[2]) if found else None


def checkpoints(run_id: str) -> str:
    """The prefix of all checkpoints."""
    return f"{run_id}/checkpoints/"


def checkpoint(run_id: str, checkpoint_id: str) -> str:
    """The prefix of one checkpoint."""
    return f"{checkpoints(run_id)}{checkpoint_id}/"


def checkpoint_of(run_id: str, key: str) -> str:
    """The id of the checkpoint that a key belongs to."""
    return key.removeprefix(checkpoints(run_id)).partition("/")[0]


def part(run_id: str, checkpoint_id: str, node: int) -> str:
    """The prefix of one node's files."""
    return f"{checkpoint(run_id, checkpoint_id)}node-{node}/"


def file(run_id: str, checkpoint_id: str, node: int, path: str) -> str:
    """One file of one node."""
    return part(run_id, checkpoint_id, node) + path


def packs(run_id: str, checkpoint_id: str, node: int) -> str:
    """The prefix of one node's packs."""
    return f"{checkpoint(run_id, checkpoint_id)}node-{node}.pack-"


def pack(run_id: str, checkpoint_id: str, node: int, number: int) -> str:
    """One pack of one node."""
    return f"{packs(run_id, checkpoint_id, node)}{number}"


def sidecar(run_id: str, checkpoint_id: str, node: int) -> str:
    """One node's sidecar."""
    return f"{checkpoint(run_id, checkpoint_id)}node-{node}.json"
