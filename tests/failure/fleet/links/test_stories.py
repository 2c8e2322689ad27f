"""Stories: a seed draws what goes wrong in one run, and the judges read what came of it.

`make test` draws among the seeds of every day; MGPU_FAULT_SEEDS names others: "4,5,6", or "20-40". A seed draws the
same story again; a story that fails is told by the test's output, and all that the judges have read is in
`history.json` beside the run.
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

import pytest
from pydantic_core import to_jsonable_python

from mgpu.errors import InputError
from mgpu.providers.local import bill, control

STEPS, EVERY = 80, 10
EVERY_DAY = () if "MGPU_FAULT_SEEDS" in os.environ else pytest.mark.drawn("seeds of stories")
KINDS = ("kill", "power", "notice", "frozen", "ssh", "cuts", "half-open", "capacity")


def seeds() -> list[int]:
    found = list[int]()
    for part in os.environ.get("MGPU_FAULT_SEEDS", "1-8").split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


@dataclass(frozen=True)
class Fault:
    """What happens to a node's machine, or to its provider, when the run comes to a step; `s` is for how long."""

    step: int
    kind: str
    node: int
    s: float


def story(seed: int) -> list[Fault]:
    dice = random.Random(seed)
    drawn = [
        Fault(dice.randrange(EVERY + 2, STEPS - 5), dice.choice(KINDS), dice.randrange(2), dice.choice((0.5, 2, 6)))
        for _ in range(dice.randint(1, 3))
    ]
    return sorted(drawn, key=lambda fault: fault.step)


class Fate:
    """Lets the faults of a story happen to a line."""

    def __init__(self, line, links) -> None:
        self.line, self.fleet, self.links = line, line.fleet, links
        self.later: list[threading.Timer] = []

    def strike(self, fault: Fault) -> None:
        """A machine that is gone already is struck by nothing."""
        with suppress(InputError, StopIteration):
            getattr(self, "_" + fault.kind.replace("-", "_"))(fault, self.fleet.ids[fault.node])

    def _kill(self, fault: Fault, _name: str) -> None:
        control.kill(self.fleet.instance(fault.node))

    def _power(self, _fault: Fault, name: str) -> None:
        self.fleet.lose_power(name)

    def _notice(self, fault: Fault, _name: str) -> None:
        control.notice(self.fleet.instance(fault.node), fault.s)

    def _frozen(self, _fault: Fault, name: str) -> None:
        self.fleet.freeze(name)

    def _ssh(self, fault: Fault, name: str) -> None:
        server = self.fleet.server(name)
        server.send(19)
        self._after(fault.s, lambda: server.send(18))

    def _cuts(self, fault: Fault, _name: str) -> None:
        link = self.links[fault.node]
        link.cut_every(0.3)
        self._after(fault.s, lambda: link.cut_every(0))

    def _half_open(self, fault: Fault, _name: str) -> None:
        self.links[fault.node].stall()
        self._after(fault.s, self.links[fault.node].flow)

    def _capacity(self, fault: Fault, _name: str) -> None:
        control.no_capacity(self.fleet.provider.root, fault.s)
        control.kill(self.fleet.instance(fault.node))

    def _after(self, seconds: float, call: Callable[[], object]) -> None:
        self.later.append(threading.Timer(seconds, call))
        self.later[-1].start()

    def end(self) -> None:
        for timer in self.later:
            timer.join()


def write_history(line, faults: list[Fault]) -> None:
    history = {
        "faults": [asdict(fault) for fault in faults],
        "bill": [asdict(node) for node in bill.read(line.fleet.provider.root).nodes],
        "commits": to_jsonable_python(line.commits()),
        "book": line.entries(),
        "record": asdict(line.record),
    }
    (line.fleet.folder / "history.json").write_text(json.dumps(history, default=str, indent=1))


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=EVERY_DAY) for seed in seeds()])
def test_whatever_goes_wrong_the_run_ends_well_and_nothing_is_left(new_line, new_link, seed):
    faults = story(seed)
    print(faults)  # noqa: T201 - pytest shows it when the story goes wrong
    line, links = new_line(steps=STEPS, every=EVERY, attempts=10, times={"silence_s": 4}), [new_link(), new_link()]
    line.fleet.links.update(enumerate(links))
    fate = Fate(line, links)
    line.start()
    for fault in faults:
        line.wait(lambda fault=fault: line.done("step", step=fault.step) or not line.going, 90)
        fate.strike(fault)
    ended = line.end(120)
    fate.end()
    write_history(line, faults)
    assert ended.succeeded, ended
    assert line.committed()[-1].step == STEPS
    line.judge()
    line.fleet.end()
    assert not bill.read(line.fleet.provider.root).alive, "I1"


def test_a_seed_tells_the_same_story_again_and_all_that_can_go_wrong_is_drawn():
    assert story(5) == story(5)
    assert {fault.kind for seed in range(60) for fault in story(seed)} == set(KINDS)
