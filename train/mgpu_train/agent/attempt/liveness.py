"""How long an attempt may be quiet. Plain values: no I/O, no clock of its own; all times are monotonic seconds.

An attempt is judged as a whole. Most programs speak on rank 0 alone, so one silent node among working ones is normal:
every node vouches for the attempt until a moment of its own, and the attempt hangs when the last of them has passed.
What the processors do proves nothing, because a collective that hangs keeps them busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from mgpu_train.config import Job
from mgpu_train.timeouts import Timeouts

ROUNDS = 3  # of words between the agents, before one that was not heard in time is taken for a silent one
# Between two looks of an agent that runs: they are half a second apart, and one may take long. To ask ranks where they
# are takes 5 s; what nobody takes for a standstill costs no more than half of the time in which a sign is due.
STILL_S, STILL_LEAST_S = 60.0, 15.0


class Stage(StrEnum):
    """Where the program is. Each stage has its own deadline, and is a key of the run file's `timeouts`."""

    BUILDING = "building"
    FIRST_STEP = "first_step"
    TRAINING = "training"
    VALIDATION = "validation"
    SAVING = "saving"
    FINISHING = "finishing"


class Known(NamedTuple):
    """What is known of the other nodes. `heard`: every one of them has been heard of in this attempt; `silent`: one
    that was heard is heard no more, it or its machine."""

    until: float = float("-inf")  # they vouch for the attempt until then
    heard: bool = True
    silent: bool = False


ALONE = Known()  # there are no others


@dataclass(frozen=True)
class Silence:
    """What an attempt's silence means now. `until`: the nodes vouch for it so long. `hung`: that is over. `overdue`: it
    is, as far as is known, but some nodes were never heard. `silent`: one has fallen silent, which explains it."""

    until: float
    hung: bool
    overdue: bool
    silent: bool = False


def deadline_s(stage: Stage, times: Timeouts) -> float:
    """Seconds without any sign of progress before a program in this stage counts as hung."""
    if stage is Stage.SAVING:
        return times.save_s + times.stop_grace_s  # the trainer's own deadline of a save comes first
    seconds = {
        Stage.BUILDING: times.building_s,
        Stage.FIRST_STEP: times.first_step_s,
        Stage.TRAINING: times.stall_s,
        Stage.VALIDATION: times.validation_s,
        Stage.FINISHING: times.finishing_s,
    }
    return seconds[stage]


class Liveness:
    """One node's own view: when its program gave the last sign, and in which stage it is."""

    def __init__(self, job: Job, now: float) -> None:
        """`now`: the launcher was just started."""
        self._job, self._times = job, job.timeouts
        self._sign = now
        self._judged = self._watching = now  # when it was judged last, and since when without a break
        self.stage = Stage.FIRST_STEP

    @property
    def until(self) -> float:
        """This node vouches for the attempt until then."""
        return self._sign + deadline_s(self.stage, self._times)

    def doubtful(self, now: float) -> bool:
        """Half of the time is over in which this node has to give a sign."""
        return now > self.until - deadline_s(self.stage, self._times) / 2

    def sign(self, now: float, said: str | None = None, *, stepped: bool = False) -> None:
        """The program has shown that it goes on. `said` is the stage that it named, if any; `stepped`: a step was made.

        The bundled trainer is in its first step until one is made. Of another program any sign ends that: it may never
        name a step.
        """
        self._sign = now
        if said in list(Stage):
            self.stage = Stage(said)
        elif self.stage is Stage.FIRST_STEP and (stepped or self._job.command is not None):
            self.stage = Stage.TRAINING

    def judge(self, now: float, peers: Known = ALONE) -> Silence:
        """What the silence of all nodes means. Silence ends nothing while a node was never heard: it may be at work.

        An agent that stood still itself, on a machine that was frozen or swapped, hears its peers first. Alone, it
        takes its program to have stood still as long.
        """
        most_s = min(STILL_S, max(STILL_LEAST_S, deadline_s(self.stage, self._times) / 2))
        if self._job.nodes == 1 and (still_s := now - self._judged) > most_s:
            self._sign = min(now, self._sign + still_s)
        until, margin_s = max(self.until, peers.until), 0.0
        if self._job.nodes > 1:
            margin_s = ROUNDS * self._times.heartbeat_s
            if now - self._judged > margin_s:
                self._watching = now
        self._judged = now
        over = now > max(until, self._watching) + margin_s
        return Silence(until, hung=over and peers.heard, overdue=over and not peers.heard, silent=peers.silent)

    @property
    def reason(self) -> str:
        """Why the attempt counts as hung, in words, with the key of the run file that says how long it may be quiet."""
        where = f" on any of {self._job.nodes} nodes" if self._job.nodes > 1 else ""
        seconds, stage = deadline_s(self.stage, self._times), self.stage.replace("_", " ")
        return f"no sign of progress{where} for {seconds:g} s ({stage}: timeouts.{self.stage}_minutes)"
