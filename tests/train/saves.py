"""What test_saving.py looks at: trainings of several forked ranks, since torch starts slowly.

`saves.py OUT STORY` writes checkpoints and metrics below OUT, and exit codes into `codes.json`.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mgpu_train import parallel
from mgpu_train.agent.machine import ports
from mgpu_train.agent.phases.resume import choice
from mgpu_train.checkpoint.distributed import dcp
from mgpu_train.checkpoint.distributed.plain import PlainReader
from mgpu_train.checkpoint.distributed.writers import ShardWriter
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.checkpoint.log.manifest import Manifest
from mgpu_train.checkpoint.transfer import pack
from mgpu_train.checkpoint.transfer.fetch import fetch
from mgpu_train.checkpoint.transfer.upload import commit_when_complete, upload_part
from mgpu_train.environment import Folders
from mgpu_train.errors import TrainError
from mgpu_train.loop import Trainer
from mgpu_train.signals import StopRequest
from mgpu_train.store import Store, open_store
from mgpu_train.timeouts import Timeouts
from scenarios import Patient, Signal, job
from torch.distributed.checkpoint.filesystem import FileSystemWriter

STEPS, EVERY, LIMIT_S = 8, 2, 30
_CLONE_NEWNS = 0x20000  # linux/sched.h; `os.unshare` comes with Python 3.12
Hook = Callable[[int], object]


def ranks(
    world_size: int, body: Callable[[parallel.Place], None], *, nodes: int = 1, save_s: float = LIMIT_S
) -> list[int]:
    """Forks so many ranks, which meet; returns their exit codes, negative where a signal ended one."""
    port = str(ports.free(1)[0])
    forked = [_fork(rank, world_size, nodes, port, body, save_s) for rank in range(world_size)]
    return [_code(child) for child in forked]


def _code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _fork(
    rank: int, world_size: int, nodes: int, port: str, body: Callable[[parallel.Place], None], save_s: float
) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        local = rank % (world_size // nodes)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(world_size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        body(parallel.join(LIMIT_S, save_s))
        code = 0
    except TrainError as error:
        sys.stderr.write(f"{error}\n")
    finally:
        os._exit(code)


class Hooked(Patient):
    """Does something after some steps, when the save before has ended and before the next one begins."""

    hooks: dict[int, Hook] | None = None

    def _judge(self, *given: float) -> None:
        super()._judge(*given)
        if self.hooks and self.progress.step in self.hooks:
            self.hooks[self.progress.step](self.progress.step)
            self.place.barrier()


def train(
    out: Path,
    home: Path,
    place: parallel.Place,
    *,
    checkpoints: Path | None = None,
    resume: Path | None = None,
    stop: StopRequest | None = None,
    hooks: dict[int, Hook] | None = None,
    **settings: Any,
) -> None:
    """One training; metrics go below `home`."""
    folders = Folders(checkpoints or home / "checkpoints", home / "metrics", resume, None)
    given = job(out, **{"steps": STEPS, "every_steps": EVERY, "strategy": "fsdp", **settings})
    made = Hooked(given, folders, place, stop or Signal(place))
    made.hooks = hooks
    made.run()


# --- disks that do not take it ----------------------------------------------------------------------------------------


def disks(out: Path) -> list[int]:
    """F32, F33: what a disk does to the second save, and what it does once there is room again."""
    _keep_mounts_here()

    def body(place: parallel.Place) -> None:
        train(out, out / "plain", place)
        first = out / "plain" / "checkpoints" / f"step-{EVERY}"
        pages = sum(-(-path.stat().st_size // 4096) for path in first.iterdir())
        inodes = 2 + 1 + len(list(first.iterdir()))  # the root, the folder of checkpoints, and the first checkpoint
        for name, options in {
            "room-none": f"size={pages * 4096}",
            "room-half": f"size={pages * 3 // 2 * 4096}",
            "room-all-but-a-page": f"size={(2 * pages - 1) * 4096}",
            "inodes-none": f"nr_inodes={inodes}",
            "inodes-2": f"nr_inodes={inodes + 2}",
            "inodes-4": f"nr_inodes={inodes + 4}",
            "read-only": "size=64m",
        }.items():
            _on_disk(out, name, options, place)

    return ranks(2, body)


def _keep_mounts_here() -> None:
    """What this process mounts from now on is seen by it and its children alone."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def _on_disk(out: Path, name: str, options: str, place: parallel.Place) -> None:
    disk = out / name / "disk"
    if place.rank == 0:
        disk.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, name, disk], check=True)
    place.barrier()

    def remount(options: str) -> None:
        if place.rank == 0:
            subprocess.run(["mount", "-o", f"remount,{options}", disk], check=True)

    def after_the_failure(_step: int) -> None:
        if place.rank == 0:
            shutil.copytree(disk / "ck", out / name / "after")
        remount("rw" if name == "read-only" else "size=64m,nr_inodes=1000")

    hooks: dict[int, Hook] = {5: after_the_failure}
    if name == "read-only":
        hooks[3] = lambda _step: remount("ro")
    train(out, out / name, place, checkpoints=disk / "ck", hooks=hooks)
    if place.rank == 0:
        shutil.copytree(disk / "ck", out / name / "end")


# --- ranks and nodes that do not do their part ------------------------------------------------------------------------


def killed(out: Path, rank: int, moment: str) -> list[int]:
    """A rank is killed in the background, in the second save: it has written, or is about to describe or rename it."""
    owner: Any = {"write_data": ShardWriter, "finish": FileSystemWriter}.get(moment, dcp)
    done = getattr(owner, moment)
    calls = 0

    def die(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 and moment != "write_data":
            os.kill(os.getpid(), signal.SIGKILL)
        result = done(*given, **named)
        if calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def body(place: parallel.Place) -> None:
        with patch.object(owner, moment, die if place.rank == rank else done):
            train(out, out / f"{rank}-{moment}", place)

    return ranks(2, body)


def unpublished(out: Path) -> list[int]:
    """Two nodes; the second one cannot give the second save its name, when the first one has."""
    publish = dcp.publish
    calls = 0

    def refuse(aside: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            while not (out / "node-0" / "checkpoints" / target.name).exists():
                pass
            raise OSError(30, "Read-only file system")
        publish(aside, target)

    def body(place: parallel.Place) -> None:
        with patch.object(dcp, "publish", refuse if place.rank == 1 else publish):
            train(out, out / f"node-{place.rank}", place)

    return ranks(2, body, nodes=2)


class Steady(Trainer):
    """Does not wait for its saves, and takes its time."""

    def _judge(self, *given: float) -> None:
        super()._judge(*given)
        time.sleep(0.2)


def late(out: Path) -> list[int]:
    """The disk of one rank takes far longer for the second save than it may."""
    write_data, save_s = ShardWriter.write_data, 4.0
    calls = 0

    def slow(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            time.sleep(3 * save_s)
        return write_data(*given, **named)

    def body(place: parallel.Place) -> None:
        given = job(out, steps=200, every_steps=EVERY, strategy="fsdp")
        given = given.model_copy(update={"timeouts": Timeouts(save_s=save_s)})
        try:
            with patch.object(ShardWriter, "write_data", slow if place.rank == 1 else write_data):
                Steady(given, Folders(out / "checkpoints", out / "metrics"), place, StopRequest()).run()
        except TrainError as error:
            (out / f"error-{place.rank}").write_text(str(error))
            raise

    return ranks(2, body, save_s=save_s)


# --- other world sizes ------------------------------------------------------------------------------------------------


def reshard(out: Path, strategy: str) -> list[int]:
    """4 ranks, then 2, then 8, as if 4 had never been interrupted."""
    resume = None
    codes = ranks(4, lambda place: train(out, out / "whole", place, strategy=strategy, steps=9))
    for number, world_size in enumerate((4, 2, 8)):
        home = out / f"{number}-of-{world_size}"

        def body(place: parallel.Place, home: Path = home, resume: Path | None = resume) -> None:
            stop = Signal(place, 3, 1)
            train(out, home, place, resume=resume, stop=stop, strategy=strategy, steps=9, every_steps=100)

        codes += ranks(world_size, body)
        resume = home / "checkpoints" / f"step-{3 * number + 3}"
    return codes


# --- nodes that have what their ranks read ----------------------------------------------------------------------------

SAVED = 4  # the step that is gone on from
LAYOUTS = {"same": (4, 2), "swapped": (4, 2), "whole": (2, 1), "fewer": (3, 3), "more": (8, 4)}  # ranks, nodes
PARTED = {"global_batch": 24, "model": {"layers": 2, "dim": 10, "heads": 1}}  # 8 ranks share 10 rows: 2, 2, 2, 2, 2


class Counting:
    """A store that knows what was read of it, in bytes by file."""

    def __init__(self, store: Store) -> None:
        self.store, self.read = store, dict[str, int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def get(self, key: str, limit: int) -> bytes:
        data = self.store.get(key, limit)
        self.read[key.rpartition("/")[2]] = len(data)
        return data

    def get_file(self, key: str, path: Path, *, size: int, **named: Any) -> None:
        self.read[key.rpartition("/")[2]] = size
        self.store.get_file(key, path, size=size, **named)


def parted(out: Path) -> list[int]:
    """4 ranks on 2 nodes; as many, fewer and more ranks go on, and each node has fetched what its ranks read."""

    def folder(node: int) -> Path:
        return out / f"node-{node}" / "checkpoints" / f"step-{SAVED}"

    def begin(place: parallel.Place) -> None:
        train(out, out / f"node-{place.rank // 2}", place, steps=SAVED + 2, **PARTED)

    codes = ranks(4, begin, nodes=2)
    store, manifest = _committed(out, [folder(0), folder(1)])
    for layout, (world_size, nodes) in LAYOUTS.items():
        each = world_size // nodes
        for node in range(nodes):
            local = {"same": [folder(node)], "swapped": [folder(1 - node)]}.get(layout, [])
            told = {"node_rank": node, "nodes": nodes, "processes_per_node": each}
            given = job(out, strategy="fsdp").model_copy(update=told)
            home, counted = out / layout / f"node-{node}", Counting(store)
            fetch(counted, "test", manifest, home / "resume", local=local, choose=choice(given, manifest))
            (home / "fetched.json").write_text(json.dumps(counted.read))

        def go_on(place: parallel.Place, layout: str = layout, each: int = each) -> None:
            _go_on(out, out / layout / f"node-{place.rank // each}", place, steps=SAVED + 2 * (layout == "same"))

        codes += ranks(world_size, go_on, nodes=nodes)
        if layout == "same":  # one node lacks something
            (out / layout / "node-1" / "resume" / "__3_0.distcp").unlink()
            ranks(world_size, go_on, nodes=nodes)
    return codes


def _committed(out: Path, folders: list[Path]) -> tuple[Store, Manifest]:
    """The parts of two nodes as one checkpoint; no file is packed."""
    pack.SMALL_BYTES = 0
    (out / "store").mkdir()
    store = open_store(f"file://{out / 'store'}")
    CommitLog(store, "test").begin_attempt(1, "w")
    name = f"a001-step-{SAVED}"
    for node, folder in enumerate(folders):
        upload_part(store, "test", name, folder=folder, attempt=1, node=node, step=SAVED, world_size=4, meta={})
    commit = commit_when_complete(store, "test", name, writers=[0, 1], nodes=2, writer="w")
    assert commit is not None
    return store, CommitLog(store, "test").manifest(commit)


def _go_on(out: Path, home: Path, place: parallel.Place, steps: int) -> None:
    read_data = PlainReader.read_data

    def told(self: PlainReader, plan: Any, planner: Any) -> Any:
        names = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        (home / f"read-{place.rank}.json").write_text(json.dumps(sorted(names)))
        return read_data(self, plan, planner)

    try:
        with patch.object(PlainReader, "read_data", told):
            train(out, home, place, resume=home / "resume", steps=steps, every_steps=100, **PARTED)
    except TrainError as error:
        (home / f"error-{place.rank}").write_text(str(error))
        raise


KILLED = ((1, "write_data"), (0, "write_data"), (0, "finish"), (0, "publish"))
STORIES: dict[str, Callable[[Path], object]] = {
    "disks": disks,
    "unpublished": unpublished,
    "late": late,
    "parted": parted,
    "reshard-ddp": lambda out: reshard(out, "ddp"),
    "reshard-fsdp": lambda out: reshard(out, "fsdp"),
    "killed": lambda out: {f"{rank}-{moment}": killed(out, rank, moment) for rank, moment in KILLED},
}


def main() -> None:
    """Tells one story."""
    out, story = Path(sys.argv[1]), sys.argv[2]
    os.environ["OMP_NUM_THREADS"] = "1"
    (out / "codes.json").write_text(json.dumps(STORIES[story](out)))


if __name__ == "__main__":
    main()
