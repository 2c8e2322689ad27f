"""Tries what the job says, one trial after the other, each in fresh processes: `python -m mgpu_train.trials`, once a
node, in the place of a launcher of `mgpu_train.loop`.

Node 0 decides. A rank that lacks memory, hangs or crashes ends its own trial and no more. What became of each stands
in `trials.json` of the folder that it is started in, from trial to trial, and in the metrics of the run.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mgpu_train.agent.machine import ports
from mgpu_train.config import Job, TrainConfig, Trial, TrialResults, Trials, Tried
from mgpu_train.metrics.lines import MetricLines
from mgpu_train.names import TRIALS
from mgpu_train.trials.board import Board
from mgpu_train.trials.lr_range import suggested
from mgpu_train.trials.part import SPEED, Part, Ranks

log = logging.getLogger("mgpu_train")

WARM_UP = 3  # steps that are not measured: memory is got, kernels are chosen and compiled
_SLACK_S = 60.0  # beside a trial itself, for a node to answer
_PART_S = 10.0  # for all to have read the last word


class Conductor:
    """One node's."""

    def __init__(self, job: Job, trials: Trials, metrics: MetricLines) -> None:
        self._job, self._trials, self._metrics = job, trials, metrics
        self._board = Board(job)
        self._leads = job.node_rank == 0
        self._rows: list[Tried] = []
        self._seconds = 0.0  # of the newest
        self._wait_s = job.timeouts.trial_s + _SLACK_S

    def run(self) -> str:
        """Tries all; returns why it was in vain, "": it was not. On other nodes than the first: always ""."""
        self._metrics.write("start", attempt=self._job.attempt, steps=len(self._trials.tries))
        why = ""
        for number, trial in enumerate(self._trials.tries):
            if not trial.refused:
                part = self._part(number, trial)
                if self._leads:
                    self._take(trial, part)
                    why = self._over(trial)
                    self._board.put(f"{number}/over", why)
                why = self._board.get(f"{number}/over", self._wait_s)
            elif self._leads:
                self._take(trial, Part(outcome="refused", said=trial.refused))
            if why:
                break
        self._part_from_others()
        if self._leads and not why and not any(row.outcome == "ok" for row in self._rows):
            why = "none of the trials could be trained: " + (self._rows[0].said if self._rows else "")
        self._metrics.write("end", step=len(self._rows), reason="done")
        return why if self._leads else ""

    def _part(self, number: int, trial: Trial) -> Part:
        """This node's, and on the first of all nodes that have one."""
        began, nodes = time.monotonic(), trial.nodes or self._job.nodes
        if self._leads:
            self._board.put(f"{number}/port", str(ports.free(1)[0]))
        if self._job.node_rank >= nodes:
            return Part()
        port, broken = int(self._board.get(f"{number}/port", self._wait_s)), f"{number}/broken"
        with tempfile.TemporaryDirectory(prefix="mgpu-trial-") as folder:
            ranks = Ranks(self._of(trial), port, Path(folder))
            try:
                part = ranks.run(
                    self._job.timeouts.trial_s, lambda: self._board.has(broken), lambda: self._board.put(broken)
                )
            finally:
                ranks.kill()
        self._seconds = round(time.monotonic() - began, 2)
        self._board.put(f"{number}/{self._job.node_rank}", part.model_dump_json())
        if not self._leads:
            return part
        return _of_all(
            [Part.model_validate_json(self._board.get(f"{number}/{rank}", self._wait_s)) for rank in range(nodes)]
        )

    def _of(self, trial: Trial) -> Job:
        """What the ranks of a trial are told."""
        of_rates = self._trials.purpose == "lr-range"
        steps = self._trials.steps + (WARM_UP if self._trials.purpose == "tune" else 0)
        short: dict[str, Any] = {
            "steps": steps,
            "log_every": 1,
            "validate_every": steps,
            "validate_batches": 1,
            "early_stopping": None,
        }
        if of_rates:  # it diverges in the end, as it has to
            short["max_skipped"] = steps
        assert self._job.train is not None  # noqa: S101 - or there is nothing to try
        given = self._job.train.model_dump(exclude_unset=True)
        nodes = trial.nodes or self._job.nodes
        changes = {
            "train": TrainConfig.model_validate({**given, **trial.train, **short}),
            "nodes": nodes,
            "addresses": self._job.addresses[:nodes],
            "processes_per_node": trial.processes_per_node or self._job.processes_per_node,
            "checkpoint": None,
            "resume": None,
        }
        return self._job.model_copy(update=changes)

    def _take(self, trial: Trial, part: Part) -> None:
        """Writes down how a trial went."""
        size = (trial.nodes or self._job.nodes) * (trial.processes_per_node or self._job.processes_per_node)
        row = Tried(
            name=trial.name,
            train=trial.train,
            world_size=size,
            seconds=0.0 if trial.refused else self._seconds,
            lr=suggested(part.rates) if part.outcome == "ok" else None,
            **part.model_dump(exclude={"consequence"}),
        )
        self._rows.append(row)
        path = Path(TRIALS)
        aside = path.with_name(f".{path.name}")
        aside.write_text(
            TrialResults(purpose=self._trials.purpose, rows=tuple(self._rows)).model_dump_json(indent=1),
            encoding="utf-8",
        )
        aside.replace(path)
        speed = {} if row.units_per_s is None else {f"{row.unit}{SPEED}": row.units_per_s}
        self._metrics.write("step", step=len(self._rows), steps=len(self._trials.tries), **speed)
        told = f"{row.units_per_s:,.0f} {row.unit}/s" if row.units_per_s and row.outcome == "ok" else row.outcome
        told += "" if row.lr is None else f", the loss falls fastest at lr {row.lr:g}"
        words = f": {row.said}" if row.said else ""
        log.info("%d/%d %s: %s%s", len(self._rows), len(self._trials.tries), row.name, told, words)

    def _over(self, trial: Trial) -> str:
        """Why nothing more is tried; "": something is."""
        row = self._rows[-1]
        spared = row.outcome == "ok" or (trial.may_lack_memory and row.outcome == "out of memory")
        if self._trials.purpose != "smoke" or spared:
            return ""
        return f"it breaks with {row.name}: {row.said or row.outcome}"

    def _part_from_others(self) -> None:
        """Node 0 has the words of all: it goes last."""
        self._board.put(f"gone/{self._job.node_rank}")
        with suppress(TimeoutError):  # all is known: nothing is lost with the last word of a node
            for rank in range(self._job.nodes if self._leads else 0):
                self._board.get(f"gone/{rank}", _PART_S)


def _of_all(parts: list[Part]) -> Part:
    """A trial, as all its nodes know it: the first has its speed, and any has what went wrong."""
    memory = max((part.memory_gib for part in parts if part.memory_gib is not None), default=None)
    wrong = [part for part in parts if part.outcome != "ok"]
    cause = next((part for part in wrong if not part.consequence), wrong[0] if wrong else parts[0])
    return cause.model_copy(update={"memory_gib": memory})


def main() -> int:
    """Tries; returns the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="[trials]: %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what is left is undone on the way out
    job = Job.model_validate_json(Path(os.environ["MGPU_JOB"]).read_bytes())
    assert job.trials is not None  # noqa: S101 - the agent starts it for nothing else
    metrics = MetricLines(Path(os.environ["MGPU_METRICS_DIR"]), job.node_rank * job.processes_per_node)
    try:
        why = Conductor(job, job.trials, metrics).run()
    except Exception as error:  # what a user needs is one line, and it comes last
        log.exception("this is a bug, or a lost node:")
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
    if why:
        log.error("TrainError: %s", why)
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
