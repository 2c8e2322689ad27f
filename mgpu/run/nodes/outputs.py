"""The files that a run names as outputs come home: `mgpu-runs/<run>/outputs/` beside the run file, those of other nodes
than the first in `node-<rank>/` there. From the nodes while they stand, from the run's store at any time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.config import OutputFile, OutputList, TrialResults, Tried
from mgpu_train.names import TRIALS
from pydantic import ValidationError

from mgpu.errors import InputError, MgpuError, RemoteError
from mgpu.events import Note, Warned
from mgpu.remote.node import Node
from mgpu.remote.nodeset import NodeSet
from mgpu.run.job import operator_store
from mgpu.run.job.request import Request
from mgpu.run.record.record import Record
from mgpu.run.record.session import Session
from mgpu.words import amount, count

if TYPE_CHECKING:
    from mgpu_train.store import Store

FOLDER = "mgpu-runs"
_STORED = re.compile(r"(?:a(?P<attempt>[0-9]+)/)?(?P<rank>[0-9]+)/(?P<path>.+)")  # below outputs/ in the store
LARGE = 100 << 20  # bytes of one node that are told before they are fetched, because they take their time


def home(record: Record) -> Path:
    """Where a run's outputs go."""
    return Path(record.project_base) / FOLDER / record.run_id / "outputs"


def place(root: Path, node_rank: int, path: str) -> Path:
    """Where one of them goes. Nodes are not trusted: raises ValueError for a path that leads out of the folder."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r} is no path in the folder of the code")
    return (root / f"node-{node_rank}" if node_rank else root).joinpath(*parts)


@dataclass
class Came:
    """What came home of one node."""

    files: int = 0
    size: int = 0
    missing: int = 0
    why: str = ""
    unmatched: frozenset[str] = frozenset()


def collect(session: Session, request: Request, nodes: NodeSet, lost: Iterable[int] = ()) -> None:
    """Fetches what the attempt has left, from every node that answers; nothing of it judges the run.

    A lost node may still answer: it is asked over the connection that there is, and no new one is made for it.
    """
    if not request.spec.outputs:
        return
    came = _take_all(session, request, nodes, frozenset(lost))
    for event in told(session.record, came):
        session.emit(event)
    parts = [*came.values()]
    session.record.outputs = {
        "folder": str(home(session.record)),
        "files": sum(each.files for each in parts),
        "bytes": sum(each.size for each in parts),
        "missing": sum(each.missing or bool(each.why) for each in parts),
    }
    if request.spec.trials is not None:
        session.record.trials = _tried(session.record)
    session.save()


def _tried(record: Record) -> list[dict[str, Any]]:
    """What came home of trials, with what a million units cost; nothing where that is damaged."""
    try:
        found = TrialResults.model_validate_json((home(record) / TRIALS).read_bytes())
    except (OSError, ValidationError):
        return []
    usd = 1e6 * record.price_usd_per_hour / 3600

    def shown(row: Tried) -> dict[str, Any]:
        known = {"purpose": found.purpose, "usd_per_million": usd / row.units_per_s if row.units_per_s else None}
        return {**row.model_dump(mode="json"), **known}

    return [shown(row) for row in found.rows]


def _take_all(session: Session, request: Request, nodes: NodeSet, lost: frozenset[int]) -> dict[int, Came]:
    root, until = home(session.record), time.monotonic() + session.timeouts.outputs_s
    came: dict[int, Came] = {}
    with session.phase("fetching outputs"):

        def take(node: Node) -> None:
            came[node.target.rank] = _take(session, node, root, until, lost)

        nodes.each(take)
    return came


def _take(session: Session, node: Node, root: Path, until: float, lost: frozenset[int]) -> Came:
    rank = node.target.rank
    layout = RunLayout(session.record.run_id)
    try:
        if node.closed and rank not in lost:
            node.reconnect()
        told = OutputList.model_validate_json(node.read(str(layout.outputs_list)))
    except FileNotFoundError:
        return Came(why="its agent has kept none; the log says why")
    except (MgpuError, OSError, ValidationError) as error:
        return Came(why=error.what if isinstance(error, MgpuError) else "its list of them cannot be read")
    if told.attempt != session.record.attempt:
        return Came(why="its agent has kept none of this attempt")
    came = Came(unmatched=frozenset(told.unmatched))
    if (size := sum(file.size for file in told.files)) > LARGE:
        session.emit(Note(f"node {rank}: {count(len(told.files), 'file')}, {amount(size)}"))

    def go_on() -> None:
        if time.monotonic() > until:
            raise RemoteError(f"they took more than {session.timeouts.outputs_s:g} s (outputs_s)")

    for file in told.files:
        try:
            go_on()
            _fetch(node, str(layout.outputs / file.path), place(root, rank, file.path), file, go_on)
        except (MgpuError, OSError, ValueError) as error:  # the others come all the same
            words = error.what if isinstance(error, MgpuError) else str(error)
            came.missing, came.why = came.missing + 1, came.why or f"{file.path}: {words}"
        else:
            came.files, came.size = came.files + 1, came.size + file.size
    if told.problems and not came.why:
        more = f", and {len(told.problems) - 1} more" if told.problems[1:] else ""
        came.why = f"{told.problems[0]}{more}"
    return came


def _fetch(node: Node, remote: str, local: Path, file: OutputFile, go_on: Callable[[], None]) -> None:
    local.parent.mkdir(parents=True, exist_ok=True)
    node.fetch(remote, local, go_on)
    if local.stat().st_size != file.size:
        raise RemoteError(f"{local.stat().st_size} bytes came of {file.size}")


def told(record: Record, came: dict[int, Came]) -> list[Note | Warned]:
    """What came home and what did not, in words."""
    files, size = sum(each.files for each in came.values()), sum(each.size for each in came.values())
    where = f" ({amount(size)}) in {home(record)}" if files else ""
    said: list[Note | Warned] = [Note(f"outputs: {count(files, 'file')}{where}")]
    # a pattern that one node's files match is a good one: often only rank 0 writes
    for pattern in sorted(frozenset.intersection(*(each.unmatched for each in came.values()))) if came else []:
        said.append(Warned(f"outputs: no file matches `{pattern}`: paths are relative to the folder of the code"))
    for rank, each in sorted(came.items()):
        if each.why:
            what = f"{count(each.missing, 'output')} of node {rank} did not come home" if each.missing else ""
            stored = f"; `mgpu outputs {record.run_id}` fetches what is in {record.store}" if record.store else ""
            said.append(Warned(f"{what or f'outputs of node {rank}'}: {each.why}{stored}"))
    return said


def from_store(session: Session, request: Request) -> None:
    """Brings home what the agents have stored, where the machines are gone; what cannot be had is told."""
    if not request.spec.outputs:
        return
    if request.checkpoint is None:
        session.emit(Warned("the machines are gone, and the outputs with them: `checkpoint: none` has no store"))
        return
    root = home(session.record)
    try:
        files, size = pull(session.record, root)
    except InputError as error:
        session.emit(Warned(f"{error.what}: {error.why}; try again: `mgpu outputs {session.record.run_id}`"))
        return
    session.emit(Note(f"outputs: {count(files, 'file')} ({amount(size)}) of the store in {root}"))
    session.record.outputs = {"folder": str(root), "files": files, "bytes": size, "missing": 0}
    session.save()


def pull(record: Record, to: Path) -> tuple[int, int]:
    """Fetches the run's outputs from its store, each of the newest attempt that has left it; how many files and bytes.

    Raises:
        InputError: the run has no store, or it does not answer; this disk does not work.
    """
    from mgpu_train.store import StoreError

    if record.store is None:
        raise InputError(f"run {record.run_id} has no store", "`checkpoint: none`: its outputs came home, or are gone.")
    prefix, files, size = f"{record.run_id}/outputs/", 0, 0
    try:
        store = operator_store.for_record(record.store, record)
        for rank, path, key in _of_newest([found.key for found in store.list(prefix)], prefix):
            local = place(to, rank, path)
            local.parent.mkdir(parents=True, exist_ok=True)
            whole = store.stat(key)
            if whole is None:
                continue
            checksum = whole.crc64nvme or store.checksum(key, whole.size)
            store.get_file(key, local, size=whole.size, crc64nvme=checksum)
            files, size = files + 1, size + whole.size
    except (StoreError, ValueError) as error:
        raise InputError(f"the outputs of run {record.run_id} cannot be read", str(error)) from error
    except OSError as error:
        raise InputError(
            f"{to} cannot be written: {error.strerror}", str(error), "Name another folder: `--to`."
        ) from error
    return files, size


def drop_superseded(store: Store, run_id: str) -> int:
    """Removes those of older attempts that a newer one has left, too; how many. Raises StoreError."""
    prefix = f"{run_id}/outputs/"
    keys = [found.key for found in store.list(prefix)]
    superseded = {*keys} - {key for _, _, key in _of_newest(keys, prefix)}
    for key in sorted(superseded):
        store.delete(key)
    return len(superseded)


def _of_newest(keys: Iterable[str], prefix: str) -> list[tuple[int, str, str]]:
    """Node, path and key of each output, of the newest attempt that has left it. Those without an attempt, which agents
    of an older mgpu have left, count as older than all others. Raises ValueError for a key that is no output's."""
    found: dict[tuple[int, str], tuple[int, str]] = {}
    for key in keys:
        if (named := _STORED.fullmatch(key.removeprefix(prefix))) is None:
            raise ValueError(f"{key!r} is no output of a node")
        output, attempt = (int(named["rank"]), named["path"]), int(named["attempt"] or 0)
        found[output] = max(found.get(output, (-1, "")), (attempt, key))
    return [(*output, key) for output, (_, key) in found.items()]
