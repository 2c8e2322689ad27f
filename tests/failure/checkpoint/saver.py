"""Saves checkpoints as an agent does, in children that may be killed: a server that has imported everything, and forks.

One request a line on standard input, one answer a line:

    {"do": "save" | "go on", ...}   forks a child; the answer is {"pid": ...}
    {"wait": pid}                   {"code": ...} of that child: the exit code, or -signal

save: keys world, url, env, run, attempt, step; `points`: where to write what was met; `die_at`: the point to die at.
go on: keys world, url, env, run; a new attempt goes on from the newest checkpoint that verifies, until it is killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, cast

from failure.checkpoint.points import Points, WatchedStore
from mgpu_train.agent.uploads.saves import clear
from mgpu_train.checkpoint.local import finished, write_aside
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.checkpoint.log.lines import Commit
from mgpu_train.checkpoint.log.manifest import checkpoint_id
from mgpu_train.checkpoint.newest import newest_verified
from mgpu_train.checkpoint.retention import plan_prune, prune
from mgpu_train.checkpoint.transfer.fetch import fetch
from mgpu_train.checkpoint.transfer.upload import commit_when_complete, upload_part
from mgpu_train.config import Retention
from mgpu_train.store import Store, open_store
from mgpu_train.system import prctl
from mgpu_train.timeouts import Timeouts

NODES = 2
SIZES = {"empty": 0, "few.json": 300, "sub/some.pt": 70_000}  # bytes: all of them travel in a pack
OWN, BULK = 1_500_000, 9 << 20  # bytes: an object of its own; one that travels in pieces
TIMES = Timeouts(store_retry_s=20)


@cache
def content(node: int, step: int, name: str) -> bytes:
    """What a file holds: the same whenever it is asked for."""
    size = SIZES.get(name, OWN if name == "own.distcp" else BULK)
    return random.Random(f"{node} {step} {name}").randbytes(size)


def names(node: int, step: int) -> list[str]:
    """The files of a node's part: small ones; every second step has a larger one, every twelfth a very large one."""
    if node > 0:
        return [f"node-{node}/sub/some.pt"]
    large = ["own.distcp"] * (step % 2 == 0) + ["bulk.distcp"] * (step % 12 == 4)
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


@cache  # the server opens it, once, and its children have it: to make a client takes longer than a save
def opened(url: str, env: str) -> Store:
    """The store, of which nothing was asked yet."""
    return open_store(url, json.loads(env), timeouts=TIMES)


@dataclass(frozen=True)
class Saver:
    """One run's nodes, with their disks below `world`."""

    store: Store
    run: str
    world: Path

    @property
    def log(self) -> CommitLog:
        """As it is now."""
        return CommitLog(self.store, self.run)

    def save(self, attempt: int, step: int, keep_last: int = 1, log: CommitLog | None = None) -> Commit:
        """All nodes write and upload, node 0 commits and deletes what is old. `log`: one that was read before."""
        store, run, log = self.store, self.run, log or self.log
        for node in range(NODES):
            upload_part(
                store,
                run,
                checkpoint_id(attempt, step),
                folder=write(self.world, node, step),
                attempt=attempt,
                node=node,
                step=step,
                world_size=NODES,
                meta={"step": step},
            )
        commit = commit_when_complete(
            store,
            run,
            checkpoint_id(attempt, step),
            writers=range(NODES),
            nodes=NODES,
            writer=f"writer-{attempt}",
            log=log,
        )
        assert commit is not None, "all parts are there"
        prune(store, run, plan_prune(store, run, Retention(keep_last=keep_last), log=log), log=log)
        return commit

    def save_once(self, given: Mapping[str, Any]) -> None:
        """One save, which is then fetched as a resuming node does."""
        self.log.begin_attempt(given["attempt"], f"writer-{given['attempt']}")
        points, me = Points(self.world, given.get("die_at")), self
        if "points" in given or "die_at" in given:
            points.watch_disk()
            me = replace(self, store=cast("Store", WatchedStore(self.store, points, self.run)))
        commit = me.save(given["attempt"], given["step"])
        fetch(me.store, self.run, me.log.manifest(commit), self.world / "resume")
        if "points" in given:
            points.write(Path(given["points"]))

    def go_on(self, _given: Mapping[str, Any]) -> None:
        """What a run does that is killed again and again: every start is a new attempt."""
        log = self.log
        attempt = log.newest_attempt() + 1
        log.begin_attempt(attempt, f"writer-{attempt}")
        newest = newest_verified(self.store, self.run, report=lambda _problem: None)
        step = 0 if newest is None else newest.step
        for node in range(NODES):  # as the agent does before the launcher starts
            (folder := self.world / f"node-{node}").mkdir(exist_ok=True)
            clear(folder)
        while True:
            step += 1
            self.save(attempt, step, keep_last=3, log=log)
            (self.world / f"saved-{os.getpid()}").touch()


def _child(request: Mapping[str, Any], store: Store, server: int) -> NoReturn:
    os.fsync = lambda _descriptor: None  # who is killed loses nothing that the system was given
    prctl.die_with_parent(signal.SIGKILL, server)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    try:
        saver = Saver(store, request["run"], Path(request["world"]))
        {"save": saver.save_once, "go on": saver.go_on}[request["do"]](request)
    except BaseException:  # noqa: BLE001 - told on standard error, then over
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def main() -> None:
    """Serves until standard input ends."""
    server = os.getpid()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = {"code": os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])}
        else:
            store = opened(request["url"], json.dumps(request["env"]))
            for node in range(NODES) if "step" in request else ():  # its children need not make it up
                for name in names(node, request["step"]):
                    content(node, request["step"], name.partition("/")[2])
            pid = os.fork()
            if pid == 0:
                _child(request, store, server)
            answer = {"pid": pid}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
