"""Saves checkpoints as an agent does, in children that may be killed: a server that has imported everything, and forks.

One request a line on standard input, one answer a line:

    {"do": "save" | "go on", ...}   forks a child; the answer is {"pid": ...}
    {"wait": pid}                   {"code": ...} of that child: the exit code, or -signal

save: keys world, url, env, attempt, step; `points`: where to write down what was met; `die_at`: the point to die at.
go on: keys world, url, env; a new attempt goes on from the newest checkpoint that verifies, until it is killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from failure.checkpoint.points import Points, WatchedStore
from mgpu_train.agent import procs
from mgpu_train.checkpoint.commitlog import CommitLog
from mgpu_train.checkpoint.fetch import fetch
from mgpu_train.checkpoint.local import discard, finished, write_aside
from mgpu_train.checkpoint.manifest import checkpoint_id
from mgpu_train.checkpoint.newest import newest_verified
from mgpu_train.checkpoint.retention import prune
from mgpu_train.checkpoint.upload import commit_when_complete, upload_part
from mgpu_train.store import Store, open_store
from mgpu_train.timeouts import Timeouts

RUN, NODES = "run", 2
SIZES = {"empty": 0, "few.json": 300, "sub/some.pt": 70_000}  # bytes: all of them travel in a pack
OWN, BULK = 1_500_000, 9 << 20  # bytes: an object of its own; one that travels in pieces
TIMES = Timeouts(store_retry_s=20)


def content(node: int, step: int, name: str) -> bytes:
    """What a file holds: the same whenever it is asked for."""
    size = SIZES.get(name, OWN if name == "own.distcp" else BULK)
    return random.Random(f"{node} {step} {name}").randbytes(size)


def names(node: int, step: int) -> list[str]:
    """The files of a node's part: small ones; every second step has a larger one, every fourth a very large one."""
    if node > 0:
        return [f"node-{node}/sub/some.pt"]
    large = ["own.distcp"] * (step % 2 == 0) + ["bulk.distcp"] * (step % 4 == 0)
    return [f"node-0/{name}" for name in [*SIZES, *large]]


def differs(folder: Path, steps: Mapping[int, int]) -> list[str]:
    """What a folder holds that is not the part of these nodes, of these steps, and what it lacks of them."""
    wanted = {name: (node, step) for node, step in steps.items() for name in names(node, step)}
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    wrong = sorted(wanted.keys() ^ found.keys())
    for name in wanted.keys() & found.keys():
        if found[name].read_bytes() != content(*wanted[name], name.partition("/")[2]):
            wrong.append(name)
    return [f"{folder}: {name} is not what was written" for name in wrong]


def write(folder: Path, node: int, step: int) -> Path:
    """The node's checkpoint on its own disk; one that is finished is left as it is."""
    final = folder / f"node-{node}" / f"step-{step}"
    if step not in dict(finished(final.parent)):
        with write_aside(final) as aside:
            for name in names(node, step):
                path = aside / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content(node, step, name.partition("/")[2]))
    return final


def save(store: Store, world: Path, attempt: int, step: int, keep_last: int = 1) -> None:
    """Both nodes write and upload, node 0 commits and deletes what is old; then it is fetched."""
    name = checkpoint_id(attempt, step)
    for node in range(NODES):
        part = write(world, node, step)
        upload_part(
            store, RUN, name, folder=part, attempt=attempt, node=node, step=step, world_size=NODES, meta={"step": step}
        )
    writers = range(NODES)
    commit = commit_when_complete(store, RUN, name, writers=writers, nodes=NODES, writer=f"writer-{attempt}")
    assert commit is not None, "all parts are there"
    prune(store, RUN, keep_last)
    fetch(store, RUN, CommitLog(store, RUN).manifest(commit), world / "resume")


def save_once(given: Mapping[str, Any]) -> None:
    world, attempt, step = Path(given["world"]), given["attempt"], given["step"]
    store = open_store(given["url"], given["env"], timeouts=TIMES)
    CommitLog(store, RUN).begin_attempt(attempt, f"writer-{attempt}")
    points = Points(world, given.get("die_at"))
    if "points" in given or "die_at" in given:
        points.watch_disk()
        store = WatchedStore(store, points)
    save(store, world, attempt, step)  # type: ignore[arg-type]
    if "points" in given:
        points.write(Path(given["points"]))


def go_on(given: Mapping[str, Any]) -> None:
    """What a run does that is killed again and again: every start is a new attempt."""
    world = Path(given["world"])
    store = open_store(given["url"], given["env"], timeouts=TIMES)
    log = CommitLog(store, RUN)
    attempt = log.newest_attempt() + 1
    log.begin_attempt(attempt, f"writer-{attempt}")
    newest = newest_verified(store, RUN, report=lambda _problem: None)
    step = 0 if newest is None else newest.step
    for node in range(NODES):  # as the agent does before the launcher starts
        for _, old in finished(world / f"node-{node}"):
            discard(old)
    while True:
        step += 1
        save(store, world, attempt, step, keep_last=3)


_DOINGS: dict[str, Callable[[Mapping[str, Any]], None]] = {"save": save_once, "go on": go_on}


def _child(request: Mapping[str, Any], server: int) -> NoReturn:
    os.fsync = lambda _descriptor: None  # who is killed loses nothing that the system was given
    procs.die_with_parent(signal.SIGKILL, server)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    try:
        _DOINGS[request["do"]](request)
    except BaseException:  # noqa: BLE001 - told on standard error, then over
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def main() -> None:
    """Serves until standard input ends."""
    import botocore.session  # noqa: F401 - what a child would have to load
    import mgpu_train.store.s3  # noqa: F401

    server = os.getpid()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = {"code": os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])}
        elif pid := os.fork():
            answer = {"pid": pid}
        else:
            _child(request, server)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
