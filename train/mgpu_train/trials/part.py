"""One node's part in a trial: its ranks, from their start to their end, and what they have left."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field

from mgpu_train.agent.machine import procs
from mgpu_train.agent.status.log import hide, last_words, peer_lost
from mgpu_train.config import Job, Model, Outcome, Rate
from mgpu_train.health.hardware import lacks_memory
from mgpu_train.system import prctl
from mgpu_train.trials.lr_range import curve

_LOOK_S = 0.05
_GRACE_S = 5.0  # for the other ranks to say what they saw, once one has failed
_KILL_S = 10.0
_SHOWN = 20  # lines of a rank that failed
SPEED = "_per_s"


class Part(Model):
    """How a trial went on one node."""

    outcome: Outcome = "ok"
    said: str = ""
    consequence: bool = Field(default=False, description="its ranks have but lost others")
    unit: str = ""
    units_per_s: float | None = None
    memory_gib: float | None = None
    mfu: float | None = None
    rates: tuple[Rate, ...] = ()


class Ranks:
    """Those of this node, in processes of their own. Make it on the main thread: they die with that."""

    def __init__(self, job: Job, port: int, folder: Path) -> None:
        """`job`: of the trial; node 0 listens at `port`; `folder`, empty, gets what they write."""
        self._job, self._folder, self._metrics = job, folder, folder / "metrics"
        self._starved = procs.out_of_memory_kills()
        told = folder / "job.json"
        told.write_text(job.model_dump_json(by_alias=True), encoding="utf-8")
        count, parent = job.processes_per_node, os.getpid()
        self._processes: list[subprocess.Popen[bytes]] = []
        for local in range(count):
            environment = {
                **os.environ,
                "MGPU_JOB": str(told),
                "MGPU_METRICS_DIR": str(self._metrics),
                "RANK": str(job.node_rank * count + local),
                "WORLD_SIZE": str(job.world_size),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(count),
                "NODE_RANK": str(job.node_rank),
                "MASTER_ADDR": job.master_addr,
                "MASTER_PORT": str(port),
            }
            with self._log(local).open("wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "mgpu_train.loop"],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                        preexec_fn=lambda: prctl.die_with_parent(signal.SIGKILL, parent),
                    )
                )

    def run(self, limit_s: float, broken: Callable[[], bool], tell: Callable[[], None]) -> Part:
        """Waits for their end; `broken`: a rank of another node has failed; `tell` says that one of these has."""
        end, told, order = time.monotonic() + limit_s, False, list[int]()
        late = False
        while len(order) < len(self._processes):
            order += [n for n, each in enumerate(self._processes) if n not in order and each.poll() is not None]
            failed = any(self._processes[n].returncode for n in order)
            if failed and not told:
                tell()
            if (failed or broken()) and not told:
                told, end = True, min(end, time.monotonic() + _GRACE_S)
            if time.monotonic() > end:
                late = not told
                break
            time.sleep(_LOOK_S)
        alive = [each for each in self._processes if each.poll() is None]
        self.kill()
        return self._judged([n for n in order if self._processes[n].returncode], late=late, cut=bool(alive))

    def kill(self) -> None:
        """Ends them and all that they have started."""
        for each in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
        for each in self._processes:
            each.wait(_KILL_S)

    def _judged(self, failed: list[int], *, late: bool, cut: bool) -> Part:
        measured = self._measured()
        if late:
            return Part(outcome="too slow", said="not through in time (trial_s)", **measured)
        if not failed:
            return (
                Part(outcome="failed", said="another node's ranks failed", consequence=True)
                if cut
                else Part(**measured)
            )
        words = {n: self._words(n) for n in failed}
        first = next((n for n in failed if not peer_lost(words[n])), failed[0])
        lines = self._lines(first)[-_SHOWN:]
        sys.stderr.write("".join(f"  {line}\n" for line in lines))
        sys.stderr.flush()
        said, killed = words[first], self._processes[first].returncode == -signal.SIGKILL
        starved = killed and procs.out_of_memory_kills() > self._starved
        outcome: Outcome = "failed"
        if starved or lacks_memory(said):
            outcome = "out of memory"
        elif "TrainError" in said and measured["units_per_s"] is None:
            outcome = "refused"
        memory = measured["memory_gib"]
        return Part(outcome=outcome, said=said, consequence=peer_lost(said), memory_gib=memory)

    def _words(self, local: int) -> str:
        code = self._processes[local].returncode
        words = hide(last_words(self._lines(local)), (os.environ.get(name, "") for name in self._job.secrets))
        return f"{procs.ended(code)}" + (f": {words}" if words else "") if code < 0 or not words else words

    def _log(self, local: int) -> Path:
        return self._folder / f"log-{local}"

    def _lines(self, local: int) -> list[str]:
        return [
            line for line in self._log(local).read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
        ]

    def _measured(self) -> dict[str, Any]:
        """What their metrics say of the steps that count: the last ones."""
        trials = self._job.trials
        steps, of_rates = (trials.steps, trials.purpose == "lr-range") if trials else (1, False)
        lines = [line for line in self._metric_lines() if line.get("kind") == "step"]
        counted = [line for line in lines if line["first"]][-steps:]
        unit = next((name for line in counted for name in line if name.endswith(SPEED)), "")
        speeds = [line[unit] for line in counted if unit in line]
        shares = [line["mfu"] for line in counted if "mfu" in line]
        return {
            "unit": unit.removesuffix(SPEED),
            "units_per_s": statistics.median(speeds) if speeds else None,
            "memory_gib": max((line["memory_gib"] for line in lines), default=None),
            "mfu": statistics.median(shares) if shares else None,
            "rates": curve([(line["lr"], line["loss"]) for line in counted]) if of_rates else (),
        }

    def _metric_lines(self) -> Iterator[dict[str, Any]]:
        """Of all ranks here; `first`: of the first of them."""
        for path in sorted(self._metrics.glob("rank-*.jsonl")):
            first = path.stem == f"rank-{self._job.node_rank * self._job.processes_per_node}"
            for line in path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):  # torn, as it was killed
                    yield {**json.loads(line), "first": first}
