"""Before the launcher, on a node with GPUs: are they, and the links between them, fit to train on?

The driver and the kernel are asked, then a product of matrices and two sums are measured on all ranks, as the program
will use them (`mgpu_train.health.preflight`). A machine that stands out is at fault, named and replaced. What cannot
be asked or measured is said, and ends nothing: the program itself will tell. Nodes without GPUs are measured by their
launchers (`mgpu_train.health.processors`): to import torch for that alone would take seconds of a processor.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mgpu_train.agent.attempt import faults, gpu_health
from mgpu_train.agent.attempt.attempt import Attempt
from mgpu_train.agent.attempt.decide import AttemptFailed
from mgpu_train.agent.machine import facts, kernel_log
from mgpu_train.agent.phases.launcher_process import Launch, LauncherProcess, torchrun
from mgpu_train.agent.status.log import last_words, tail
from mgpu_train.agent.status.status import Fault
from mgpu_train.config import Job
from mgpu_train.health import figures, preflight, processors
from mgpu_train.launchers import OUR_TORCHRUN
from mgpu_train.names import FAILURE_FILE, PREFLIGHT

ASK_S = 4 * facts.SMI_S  # three calls of nvidia-smi, and the kernel
_FIND_S = 30.0  # for the interpreter to say whether it has torch
_HAS_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"


Judged = tuple[list[str], Callable[[str], "str | None"]]  # a call of nvidia-smi, and who reads what it prints


def _query(option: str, fields: tuple[str, ...]) -> list[str]:
    return ["nvidia-smi", f"--query-{option}={','.join(fields)}", "--format=csv,noheader,nounits"]


_STATE: Judged = (_query("gpu", gpu_health.STATE), gpu_health.by_state)
_ROWS: Judged = (_query("remapped-rows", gpu_health.ROWS), gpu_health.by_rows)
_LINKS: Judged = (["nvidia-smi", "nvlink", "--status"], gpu_health.by_links)


def by_launchers(job: Job) -> dict[str, str]:
    """The variable that has launchers measure the nodes: several, without GPUs, whose launchers import torch anyway."""
    if job.gpus or job.nodes == 1 or job.preflight_port is None or not job.preflight:
        return {}
    if OUR_TORCHRUN not in job.launcher.argv:
        return {}
    times = job.timeouts
    at = processors.Meeting(
        job.node_rank, job.nodes, job.master_addr, job.preflight_port, times.rendezvous_s, times.preflight_s
    )
    return {PREFLIGHT: json.dumps(at.told())}


def divided() -> str | None:
    """Which GPU is in MIG mode, so that a program sees fewer than there are; None: none is, or nobody says so."""
    with suppress(facts.NoAnswer):
        return gpu_health.by_mig(facts.output(_STATE[0], facts.SMI_S))
    return None


def ask(attempt: Attempt) -> None:
    """What the driver and the kernel know of this machine's GPUs. Takes no longer than `ASK_S`.

    Raises:
        AttemptFailed: one of them is broken.
    """
    found = gpu_health.by_kernel(kernel_log.since(0.0))
    for asked, judge in (_STATE, _ROWS, *([_LINKS] if attempt.job.gpus > 1 else [])):
        try:
            found = found or judge(facts.output(asked, facts.SMI_S))
        except facts.NoAnswer as error:
            attempt.say(f"preflight: {error}")
    if found:
        raise _suspect(attempt, found)


class Measuring:
    """The ranks of this node that measure. Made on the main thread, which has to pass on until it is `over`."""

    def __init__(self, attempt: Attempt, environment: Mapping[str, str], python: str) -> None:
        """Nothing is measured without a torch, or without a port for the ranks to meet."""
        job, layout = attempt.job, attempt.layout
        self._attempt, self._path = attempt, Path(layout.preflight(job.attempt))
        self._path.unlink(missing_ok=True)
        self._begin, self._part, self._since = attempt.log.size, "", time.monotonic()
        self._process: LauncherProcess | None = None
        if job.preflight_port is None or not _has_torch(python, environment):
            attempt.say("preflight: nothing is measured, without PyTorch or a port for it")
            return
        # how its ranks end is no failure of the program's
        given = {name: value for name, value in environment.items() if name != FAILURE_FILE}
        given |= {preflight.FILE: str(self._path), preflight.TIMEOUT_S: str(job.timeouts.preflight_s)}
        argv = torchrun(job, layout, python, ("-m", "mgpu_train.health.preflight"), job.preflight_port)
        try:
            self._process = LauncherProcess(Launch(argv, given, attempt.work), attempt.log.fd)
        except OSError as error:
            attempt.say(f"preflight: {error}")

    def over(self) -> bool:
        """One look: True when all is measured, or cannot be.

        Raises:
            AttemptFailed: this machine stands out, or a part has taken too long.
        """
        if self._process is None:
            return True
        code, said = self._process.poll(), self._said()
        if said.get("part", self._part) != self._part:
            self._part, self._since = said["part"], time.monotonic()
        if code is None:
            self._in_time()
            return False
        self.end()
        if code == 0 and isinstance(said.get("ranks"), list):
            self._judge(said["ranks"])
            return True
        lines = tail(self._attempt.log, self._begin)
        words = last_words(lines)
        found = faults.find(lines, last_words=words, code=code, nodes=self._attempt.job.nodes)
        if found is not None and found.sign.machine:
            raise _suspect(self._attempt, f"{found.sign.means}: {found.line}")
        self._attempt.say(f"preflight: it ended with exit code {code}, and says nothing of this machine: {words}")
        return True

    def end(self) -> None:
        """Ends what is left of it."""
        if self._process is not None:
            self._process.kill(self._attempt.times.kill_s)

    def _in_time(self) -> None:
        times = self._attempt.times
        limit_s = times.preflight_s if self._part else times.rendezvous_s + times.preflight_s
        if time.monotonic() <= self._since + limit_s:
            return
        self.end()
        what = {
            "": "the nodes did not meet",
            "matmul": "a product of matrices does not end",
            "inside": "a sum over its own GPUs does not end",
        }.get(self._part, "a sum over all ranks does not end")
        what = f"{what} within {limit_s:g} s (preflight_s)"
        if self._part in ("matmul", "inside"):
            raise _suspect(self._attempt, what)
        raise AttemptFailed(Fault.INFRASTRUCTURE, f"preflight: {self._attempt.job.node}: {what}")

    def _judge(self, ranks: list[dict[str, Any]]) -> None:
        job = self._attempt.job
        if found := figures.by_figures(ranks, job.node_rank, job.processes_per_node):
            raise _suspect(self._attempt, found)
        if found := figures.between(ranks):
            raise AttemptFailed(Fault.INFRASTRUCTURE, f"preflight: {job.node}: {found}")
        try:
            self._attempt.say(f"preflight: {figures.summary(ranks)}")
        except (KeyError, TypeError, ValueError):
            self._attempt.say("preflight: what was measured makes no sense")

    def _said(self) -> dict[str, Any]:
        try:
            said = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        return said if isinstance(said, dict) else {}


def _suspect(attempt: Attempt, why: str) -> AttemptFailed:
    return AttemptFailed(Fault.INFRASTRUCTURE, f"preflight: {attempt.job.node}: {why}", suspect=True)


def _has_torch(python: str, environment: Mapping[str, str]) -> bool:
    try:
        asked = [python, "-c", _HAS_TORCH]
        return subprocess.run(asked, env=dict(environment), check=False, timeout=_FIND_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
