"""The trainer's checkpoints, by torch.distributed.checkpoint: one format for every strategy and world size.

A checkpoint is the folder `step-<n>`: DCP's shards, its `.metadata`, and `meta.json` for people. Each rank writes its
shards to the disk of its own node; `.metadata` and `meta.json` are on node 0. All of it is written to `.tmp-step-<n>`
beside it, flushed, and renamed by one rank of each node when every rank is through: a folder with that name is whole.

To import torch.distributed.checkpoint takes most of a second: it is done where something is saved or loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mgpu_train.checkpoint.distributed.staging import Snapshot, Staging, gathered, local
from mgpu_train.checkpoint.distributed.writer_process import Outside
from mgpu_train.checkpoint.local import discard, publish
from mgpu_train.checkpoint.state import Part
from mgpu_train.config import Writers
from mgpu_train.errors import TrainError
from mgpu_train.health.hardware import free_bytes
from mgpu_train.parallel import Place, is_sharded, machine

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

log = logging.getLogger("mgpu_train")

_WRITERS = "mgpu_train.checkpoint.distributed.writers"


@dataclass(frozen=True)
class Progress:
    """How far training is: optimizer steps done, and samples consumed by all ranks together."""

    step: int = 0
    samples: int = 0


class _RankFailed(TrainError):
    """What DCP says of the rank that failed first, which may be another one: it begins with its number."""


class PeersLost(TrainError):
    """The ranks do not hear one another any more in what saves need, and no later save can succeed."""


@dataclass(frozen=True)
class Capture:
    """One rank's state of one step, on its way to the disk. `meta` is what `meta.json` says of this step alone."""

    progress: Progress
    meta: dict[str, Any]
    snapshot: Snapshot


class Checkpointer:
    """Saves and loads named parts. `meta` goes into `meta.json`, for people and for `meta.differences`."""

    def __init__(
        self,
        parts: Mapping[str, Part],
        place: Place,
        writers: Writers,
        meta: dict[str, Any],
        *,
        outside_s: float | None = None,
    ) -> None:
        """With `outside_s` a process of its own writes this rank's shards, in at most so many seconds."""
        self.parts, self.place, self.meta = parts, place, meta
        self.absent: set[str] = set()  # parts of which nothing was in the checkpoint that was loaded
        self.writers: Writers = writers
        self._staging = Staging(place.device, shared=outside_s is not None)
        self._outside = Outside(self._staging, outside_s) if outside_s is not None and self._writes else None

    @property
    def _writes(self) -> bool:
        return self.writers == "all" or self.place.rank == 0

    @property
    def _gathers(self) -> bool:
        """True where one rank writes what several hold."""
        steady = (each for part in self.parts.values() for each in part.steady())
        return self.writers != "all" and any(is_sharded(each) for each in steady)

    def lay_out(self) -> None:
        """Takes the memory of a save, which the first one would stand still for: seconds where it is pinned, and a
        machine that goes has two minutes. Where all is gathered to one rank it is taken by the first save.

        All ranks call it together, once there is something of the optimizer's.
        """
        if self._outside is not None and not self._gathers:
            self.capture(Progress()).snapshot.lay_out()

    def require_memory(self, state: float) -> None:
        """The copy of a save has room beside what is there; `state`: bytes of the whole one.

        All ranks call it together. Raises TrainError, on all of them, where one's machine has too little memory.
        """
        needs = self.place.gather((machine(), copied_bytes(state, self.place, self.writers)))
        needed, free = sum(need for name, need in needs if name == machine()), free_bytes()
        with _together(self.place):
            if needed > free:
                raise TrainError(
                    f"a save takes {needed / 2**30:.1f} GiB of this machine's memory, of which {free / 2**30:.1f} GiB "
                    f"are free (`checkpoint.writers: {self.writers}`). Take machines with more memory, more of them "
                    "with `writers: all`, which share it, or a smaller model."
                )

    def capture(self, progress: Progress, meta: dict[str, Any] | None = None) -> Capture:
        """The state as it is now. All ranks call it together.

        Until `snapshot.filled` is set nobody may change a parameter or the optimizer's state.
        """
        import_dcp()
        steady = [local(each) for part in self.parts.values() for each in part.steady()]
        unchanged = {each.untyped_storage().data_ptr() for each in steady}
        if self.writers == "all":
            state = _share(self._state(), self.place)
        elif self._gathers:
            # what a step changes is copied now: the memory holds what is gathered, and is not laid out anew
            state, unchanged = gathered(self._state(), self._staging if self._writes else None), set[int]()
        else:
            state = self._state() if self._writes else {}
        return Capture(progress, meta or {}, Snapshot(state, unchanged, self._staging))

    def write(self, capture: Capture, folder: Path) -> None:
        """Make `folder/step-<n>`; returns when it stands on every node. All ranks call it together, in any thread.

        Raises TrainError when a rank could not do its part: then no node has the folder. Raises PeersLost when one is
        gone, or did not answer in time.
        """
        place, target = self.place.background, folder / f"step-{capture.progress.step}"
        aside = folder / f".tmp-{target.name}"
        publishes = place.local_rank == 0 if self.writers == "all" else place.rank == 0
        try:
            with _together(place):
                capture.snapshot.fill()
                if publishes:
                    _make_room(folder, aside)
            with _together(place):
                self._shards(capture, aside, place)
            with _together(place):
                if place.rank == 0:
                    _write(aside / "meta.json", self._describe(capture))
            _publish(place, aside if publishes else None, target)
        except (TrainError, RuntimeError) as error:
            if publishes:
                shutil.rmtree(aside, ignore_errors=True)
            # a peer that is gone, or late, ends a collective with a RuntimeError; gloo's group is of no use after it
            kind = TrainError if isinstance(error, TrainError) else PeersLost
            raise kind(f"cannot save {target}: {_first_line(error)}") from error

    def save(self, folder: Path, progress: Progress, meta: dict[str, Any] | None = None) -> None:
        """`capture` and `write`, while training stands still."""
        self.write(self.capture(progress, meta), folder)

    def load(self, folder: Path) -> Progress:
        """Continue from a verified checkpoint; the folder has what this rank reads of it. All ranks call it together.

        Raises TrainError when it cannot be read or is of another model.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        from mgpu_train.checkpoint.distributed.plain import PlainLoadPlanner, PlainReader

        reader = PlainReader(folder)
        try:
            saved = reader.read_metadata()
            known = {name.partition(".")[0] for name in saved.state_dict_metadata}
            parts = {name: part for name, part in self.parts.items() if name in known or name == "model"}
            state = {name: _known(saved, part.state_dict(), name) for name, part in parts.items()}
            state["progress"] = asdict(Progress())
            _require_same(saved, state)
            load(state, storage_reader=reader, planner=PlainLoadPlanner(), process_group=self.place.control)
        except TrainError as error:
            raise TrainError(f"cannot resume from {folder}: {error}") from error
        except (OSError, CheckpointException) as error:
            raise TrainError(f"cannot resume from {folder}: {_first_cause(error, self.place.rank)}") from error
        for name, part in parts.items():
            part.load_state_dict(state[name])
        self.absent = self.parts.keys() - parts.keys()
        for name in sorted(self.absent):
            log.warning("nothing of %s is in the checkpoint: it begins anew", name)
        return Progress(**state["progress"])

    def close(self) -> None:
        """End the process that writes, and give the memory back."""
        if self._outside is not None:
            self._outside.close()
        self._staging.close()

    def _state(self) -> dict[str, Any]:
        """All parts, as this rank holds them."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def _shards(self, capture: Capture, aside: Path, place: Place) -> None:
        """Each rank writes and flushes its part, and rank 0 what says where all of it lies."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_saver import save

        from mgpu_train.checkpoint.distributed.writers import OutsideWriter, ShardWriter, SnapshotPlanner

        state = {**capture.snapshot.state, "progress": asdict(capture.progress)}
        writer = OutsideWriter(aside, self._staging, self._outside) if self._outside else ShardWriter(aside)
        planner = SnapshotPlanner(capture.snapshot)
        try:
            if self.writers == "all":
                save(state, storage_writer=writer, planner=planner, process_group=place.control)
            elif place.rank == 0:
                save(state, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:
            raise _RankFailed(_first_cause(error, place.rank)) from error

    def _describe(self, capture: Capture) -> str:
        """`meta.json`."""
        return json.dumps({**asdict(capture.progress), **capture.meta, **self.meta}, indent=2) + "\n"


def import_dcp() -> None:
    """All of it that a save needs, and what that imports as it is called first."""
    for name in ("torch._dynamo", "torch.distributed.checkpoint.state_dict", _WRITERS):
        import_module(name)


def copied_bytes(state: float, place: Place, writers: Writers) -> float:
    """Of a state of so many bytes, what a save copies on this rank."""
    return state / place.world_size if writers == "all" else state * (place.rank == 0)


@contextmanager
def _together(place: Place) -> Iterator[None]:
    """What the block does succeeds on all ranks, or raises TrainError with the first one's reason on all of them."""
    reason = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the others have to hear of it
        reason = _cause(error, place.rank)
    reasons = [each for each in place.gather(reason) if each]
    if reasons:
        raise TrainError(reasons[0])


def _make_room(folder: Path, aside: Path) -> None:
    """An empty `aside`. What else is unfinished is of an attempt that was killed here, or of a save that failed."""
    for left in folder.glob(".tmp-step-*"):
        shutil.rmtree(left, ignore_errors=True)
    aside.mkdir(parents=True)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _publish(place: Place, aside: Path | None, target: Path) -> None:
    """The folder gets its name on every node, or on none. `aside`: of the rank that does it on its node."""
    try:
        with _together(place):
            if aside is not None:
                publish(aside, target)
    except TrainError:
        if aside is not None and not aside.exists():
            with suppress(OSError):  # it stays on this node alone, which makes no checkpoint
                discard(target)
        raise


def _share(state: dict[str, Any], place: Place) -> dict[str, Any]:
    """This rank's part of what all ranks hold alike, so that none copies and writes all; what is sharded stays.

    All ranks call it together: each tensor is written once, also where a rank does not hold it.
    """
    loads = [0] * place.stage_size
    mine = set()
    for path, (size, ranks) in sorted(_held(state, place).items(), key=lambda found: -found[1][0]):
        rank = min(ranks, key=loads.__getitem__)
        loads[rank] += size
        if rank == place.rank % place.stage_size:
            mine.add(path)
    return _pick(state, mine)


def _held(state: dict[str, Any], place: Place) -> dict[str, tuple[int, Sequence[int]]]:
    """The replicated tensors of this stage: bytes, and which of its ranks hold them. Ranks tell each other what they
    hold only where it is not the same within each stage."""
    alike, size = dict(_alike(state)), place.stage_size
    digests = place.gather(hashlib.sha256(repr(alike).encode()).digest())
    if all(digests[rank] == digests[rank // size * size] for rank in range(place.world_size)):
        return {path: (nbytes, range(size)) for path, nbytes in alike.items()}
    stage = place.gather(alike)[place.stage * size :][:size]
    sizes = {path: nbytes for each in stage for path, nbytes in each.items()}
    return {path: (nbytes, [rank for rank in range(size) if path in stage[rank]]) for path, nbytes in sizes.items()}


def _alike(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """The replicated tensors of nested dictionaries: where they are, and how many bytes they have."""
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _alike(inner, f"{path}/{name}")
        elif isinstance(inner, torch.Tensor) and not is_sharded(inner):
            yield f"{path}/{name}", inner.nbytes


def _pick(value: dict[str, Any], wanted: set[str], path: str = "") -> dict[str, Any]:
    picked = {}
    for name, inner in value.items():
        if isinstance(inner, dict):
            picked[name] = _pick(inner, wanted, f"{path}/{name}")
        elif is_sharded(inner) or not isinstance(inner, torch.Tensor) or f"{path}/{name}" in wanted:
            picked[name] = inner
    return picked


def _known(saved: Metadata, state: dict[str, Any], part: str) -> dict[str, Any]:
    """A part without the dictionaries of which a checkpoint has nothing: optimizers keep nothing of a parameter before
    its first gradient, and begin with it then."""
    there = {name.rpartition(".")[0] for name in saved.state_dict_metadata}
    there |= {name[:at] for name in there for at, each in enumerate(name) if each == "."}

    def known(value: dict[str, Any], path: str) -> dict[str, Any]:
        return {
            name: known(inner, f"{path}{name}.") if isinstance(inner, dict) else inner
            for name, inner in value.items()
            if not isinstance(inner, dict) or f"{path}{name}" in there
        }

    kept = known(state, f"{part}.")
    lacks = {f"{part}.{name.rpartition('.')[0]}" for name in dict(_tensors(state)).keys() - dict(_tensors(kept)).keys()}
    if lacks:
        log.warning("nothing of these is in the checkpoint, and they begin anew: %s", ", ".join(sorted(lacks)))
    return kept


def _require_same(saved: Metadata, state: dict[str, Any]) -> None:
    """Raises TrainError with the first tensor that a checkpoint holds in no, or in another, shape."""
    for name, tensor in _tensors(state):
        found = saved.state_dict_metadata.get(name)
        size = getattr(found, "size", None)  # of what is no tensor there is none
        there = None if size is None else tuple(size)
        if there != tuple(tensor.shape):
            part, _, short = name.partition(".")
            raise TrainError(
                f"it is of another {part}: `{short}` is {there or 'absent'} there and {tuple(tensor.shape)} here. "
                "Give the task and its options as they were, or begin a new run."
            )


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of nested dictionaries, by the names that a checkpoint gives them."""
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _tensors(inner, f"{path}{name}.")
        elif isinstance(inner, torch.Tensor):
            yield f"{path}{name}", inner


def _first_cause(error: BaseException, rank: int) -> str:
    """The first failure of any rank, one line: DCP wraps each in its own."""
    failures: dict[int, Any] = getattr(error, "failures", {})
    return _cause(error, rank) if not failures else _cause(min(failures.items())[1][0], min(failures))


def _cause(error: BaseException, rank: int) -> str:
    """One line."""
    if isinstance(error, _RankFailed):
        return str(error)
    kind = "" if isinstance(error, TrainError) else f"{type(error).__name__}: "
    return f"rank {rank}: {kind}{_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
