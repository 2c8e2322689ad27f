"""Nodes with real agents: a home folder each, and the operator's commands as it would call them over SSH."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forks import Forks
from mgpu_train.agent.machine import procs
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.store import Store, open_store
from waiting import until

TIMES = {"poll_s": 0.05, "peers_s": 10, "drain_s": 30, "stop_grace_s": 20, "lease_renew_s": 0.2, "command_s": 30}
SAVING = """
import json, os, pathlib, time
def save(step, data=b"weights"):
    folder = pathlib.Path(os.environ["MGPU_CHECKPOINT_DIR"])
    aside = folder / f".tmp-{step}"
    aside.mkdir()
    (aside / f"node-{os.environ['MGPU_NODE_RANK']}.bin").write_bytes(data * 100)
    aside.rename(folder / f"step-{step}")
def metric(kind, **values):
    with open(os.environ["MGPU_METRICS_DIR"] + "/rank-0.jsonl", "a") as file:
        print(json.dumps({"kind": kind, "t": time.time(), **values}), file=file)
"""

_AGENTS = Forks("mgpu_train.__main__", "mgpu_train.agent.start", "mgpu_train.agent.serve", "fakes.s3_models")


class Node:
    """One node: a home folder, and the operator's commands as it would call them over SSH."""

    def __init__(
        self,
        home: Path,
        store: Path,
        rank: int = 0,
        nodes: int = 1,
        *,
        url: str | None = None,
        keys: Mapping[str, str] | None = None,
    ) -> None:
        """Checkpoints go into the folder `store`, or to `url` with these AWS_* variables: the test's own way to it."""
        self.home, self.store, self.rank, self.nodes = home, store, rank, nodes
        self.url, self.keys = url or f"file://{store}", keys
        self.run = home / "runs" / "r"
        (self.run / "work").mkdir(parents=True)
        (self.run / "work" / "saving.py").write_text(SAVING)
        for folder in (".mgpu", "tmp"):
            (home / folder).mkdir()
        ours = {"HOME": str(home), "TMPDIR": str(home / "tmp"), "AWS_SECRET_ACCESS_KEY": "of the node"}
        self.env = {**os.environ, **ours}

    def program(self, text: str) -> None:
        (self.run / "work" / "prog.py").write_text(text)

    def job(self, **changes: Any) -> None:
        times = {**TIMES, **changes.pop("timeouts", {})}
        base = {
            "run_id": "r",
            "attempt": 1,
            "writer": "writer-1",
            "node_rank": self.rank,
            "nodes": self.nodes,
            "processes_per_node": 1,
            "master_addr": "127.0.0.1",
            "master_port": 29999,
            "launcher": "python",
            "command": ["prog.py"],
            "workdir": "runs/r/work",
            "checkpoint": {"to": self.url, "every_steps": 1, "writers": "all"},
            "lease_file": ".mgpu/lease",
            "notice_file": ".mgpu/notice.json",
            "timeouts": times,
        }
        job = {**base, **changes}
        (self.run / "job.json").write_text(json.dumps(job))
        if job["checkpoint"] and not self.rank:  # as the operator does
            self.commit_log.begin_attempt(job["attempt"], job["writer"])

    @property
    def commit_log(self) -> CommitLog:
        return CommitLog(self.opened, "r")

    @property
    def opened(self) -> Store:
        """The store as the test sees it."""
        return open_store(self.url, self.keys)

    @property
    def commits(self) -> list[int]:
        """Committed steps, newest first."""
        return [entry.step for entry in self.commit_log.checkpoints()]

    def popen(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "mgpu_train", "agent", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.home, env=self.env, stdin=pipe, stdout=pipe, stderr=pipe)

    def call(self, *arguments: str, stdin: dict[str, Any] | bytes = b"", code: int = 0) -> dict[str, Any]:
        """Runs one agent command; returns its answer, or its one line of error."""
        given = stdin if isinstance(stdin, bytes) else json.dumps(stdin).encode()
        words = ["agent", *arguments]
        done = _AGENTS.run("mgpu_train.__main__", words, self.env, cwd=self.home, timeout=60, stdin=given)
        assert done.returncode == code, (done.stdout, done.stderr)
        return json.loads(done.stdout) if code == 0 else {"error": done.stderr}

    def start(self, secrets: dict[str, Any] | None = None, code: int = 0) -> dict[str, Any]:
        return self.call("start", "--job", "runs/r/job.json", stdin=secrets or {}, code=code)

    def stop(self, *options: str) -> dict[str, Any]:
        return self.call("stop", "--run", "r", *options)

    def status(self) -> dict[str, Any]:
        return self.call("status", "--run", "r")

    def notice(self, left_s: float, action: str = "terminate") -> None:
        """Warns as a host does: whole or not at all."""
        moment = datetime.fromtimestamp(time.time() + left_s, UTC).isoformat()
        aside = self.home / ".mgpu" / "notice.new"
        aside.write_text(json.dumps({"action": action, "time": moment}))
        aside.replace(self.home / ".mgpu" / "notice.json")

    @property
    def said(self) -> dict[str, Any]:
        return json.loads((self.run / "status.json").read_text())

    @property
    def log(self) -> str:
        return (self.run / "log").read_text(errors="replace")

    @property
    def processes(self) -> list[procs.Process]:
        return procs.carrying(f"MGPU_CHECKPOINT_DIR={self.run / 'checkpoints'}")

    def until(self, condition: Callable[[], Any], deadline_s: float = 180) -> Any:
        """Where torchrun starts a rank it is 20 s of CPU, and other tests have most of it."""
        return until(condition, deadline_s, lambda: self.log)

    def ended(self) -> dict[str, Any]:
        """The final status; the agent and everything it started has ended."""
        status = self.until(lambda: self.said if self.said["phase"] in ("done", "failed") else None)
        agent = json.loads((self.run / "agent.json").read_text())["process"]
        self.until(lambda: not procs.Process(**agent).alive)
        assert self.processes == []
        return status

    def kill(self) -> None:
        """Ends whatever still runs on it."""
        if (self.run / "agent.json").exists():
            procs.Process(**json.loads((self.run / "agent.json").read_text())["process"]).send(signal.SIGKILL)
        procs.kill_all(lambda: self.processes, 10)
