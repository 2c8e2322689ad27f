"""Thirty nights of one schedule. Its clock is the story's; five nights have real machines, the others are records of
runs that are over. At the end its history is right, line for line, and nothing is billed (I1, I2, I3, I10)."""

from __future__ import annotations

import getpass
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from click.testing import CliRunner
from mgpu_train.timeouts import Timeouts

from mgpu.cli import cli
from mgpu.context import Context
from mgpu.events import ignore
from mgpu.paths import data_dir, state_dir
from mgpu.providers.local import bill, control
from mgpu.providers.local.nodes import Instance
from mgpu.run.lifecycle import attach
from mgpu.run.record import record
from mgpu.run.record.checks import judged
from mgpu.run.record.record import Record, Spent, State
from mgpu.schedule.decide import Need
from mgpu.schedule.reconcile import Reconciler, Report
from mgpu.schedule.supervisors import Looked

RUN_FILE = """
name: e2e
provider: local
nodes: 1
market: spot
max_price_usd_per_hour: 0.20
max_hours: 8
max_usd: 0.20
launcher: python
command: [night.py, "40", "0.02"]
recovery: {attempts: 3, wait_minutes: 1}
expect: {cost_usd: {max: 0.15}}
"""
NIGHT = """
import os, runpy, sys
if os.path.exists(os.environ["NO_DATA"]):
    sys.exit("the data of this night has no rows")
runpy.run_path("train.py")  # which does not come to its last step before COUNT_UNTIL is there
"""
BERLIN = ZoneInfo("Europe/Berlin")
NEEDED_S = 42 * 60.0  # by a night that is not real
AFTER_S = 60.0  # before the pass that saw it a real one has ended
SHOWN = Path(__file__).with_name("thirty_nights.txt")


class Story:
    """The story's clock, and who looks after its runs in this process: those of real nights on real machines."""

    def __init__(self, project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.real, self.watch_s = at("03-09 18:00"), set[float](), 0.0
        self.dear = {at("04-06 02:00")}
        self._over, self.folder = list[Looked](), project.folder
        self._project, self._context = project, Context(ignore, Timeouts(), leave=True)
        self._morning, self._no_data = self.folder / "morning", self.folder / "no-data"
        env = {"COUNT_UNTIL": str(self._morning), "NO_DATA": str(self._no_data)}
        (self.folder / "mgpu.yaml").write_text(f"{RUN_FILE}env: {json.dumps(env)}\n")
        (self.folder / "night.py").write_text(NIGHT)
        monkeypatch.chdir(self.folder)
        monkeypatch.setattr("mgpu.cli.schedule.time", SimpleNamespace(time=lambda: self.now))
        monkeypatch.setattr("mgpu.cli.schedule.secrets", SimpleNamespace(token_hex=lambda _: "story"))
        monkeypatch.setenv("TZ", "UTC")
        time.tzset()

    def mgpu(self, *words: str) -> str:
        """What `mgpu schedule` says, at this moment of the story."""
        done = CliRunner().invoke(cli, ["schedule", *words], standalone_mode=False)
        assert done.exception is None, done.exception
        return done.stdout

    def looks(self, when: str) -> Report:
        """Somebody looks then: one pass."""
        self.now = at(when)
        report = Reconciler(self._context, supervisors=self, clock=lambda: self.now).work()
        assert report.failures == []
        return report

    def night(self, day: str) -> None:
        """One without a machine, as most are."""
        self.looks(f"{day} 02:05")
        self.looks(f"{day} 08:45")

    def real_night(self, day: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """One with a machine. `meanwhile`: while nobody looks."""
        self.begins(f"{day} 02:05", at(f"{day} 02:00"))
        meanwhile()
        self.ends(f"{day} 02:50")

    def begins(self, when: str, due: float) -> None:
        """A real run begins, and trains while nobody looks."""
        self._morning.unlink(missing_ok=True)
        self.real.add(due)
        assert [looked.state for looked in self.looks(when).looked] == ["running"]

    def ends(self, when: str, *, morning: bool = True) -> None:
        """Somebody looks until it is over. `morning`: its program comes to its end by itself."""
        if morning:
            self._morning.touch()
        self.watch_s = 120.0
        (looked,) = self.looks(when).looked
        assert State(looked.state or "").final
        self.watch_s = 0.0

    def loses_its_machine(self) -> None:
        """After a checkpoint, which the nodes commit themselves."""
        run = record.every()[-1].run_id
        self._project.wait(lambda: [*(data_dir() / "checkpoints" / run / "commits").glob("*.json")])
        (node,) = bill.read(state_dir() / "local").alive
        control.kill(Instance(state_dir() / "local", node.start.instance))

    def has_no_data(self, day: str) -> None:
        """A real night whose program fails."""
        self._no_data.touch()
        self.real.add(at(f"{day} 02:00"))
        self.ends(f"{day} 02:05")
        self._no_data.unlink()

    # --- as `mgpu.schedule.supervisors`

    busy = property(lambda self: bool(self._over))

    def begin(self, need: Need, watch_s: float) -> None:
        known = record.load(need.run_id)
        seen = self._attached(known) if known.due_at in self.real else self._as_if(known)
        if seen.state.final:
            self._date(seen)
        self._over.append(Looked(need, 0, {"state": str(seen.state)}))

    def ended(self, wait_s: float) -> Looked | None:
        return self._over.pop(0) if self._over else None

    def leave(self) -> None:
        pass

    def _attached(self, known: Record) -> Record:
        if known.spending:  # as long as the story says that it has had them
            known.spending[-1].since = time.time() - (self.now - known.due_at)
            record.write(known)
        outcome = attach.attach(known, replace(self._context, watch_s=self.watch_s))
        assert outcome is not None
        return outcome.record

    def _as_if(self, known: Record) -> Record:
        """A machine was rented, and a pass later the run is over."""
        price = 0.3 if known.due_at in self.dear else 0.03
        if known.state is State.QUEUED:
            seen = replace(known, state=State.RUNNING, spending=[Spent(1, price, known.due_at)])
        else:
            seen = replace(known, state=State.SUCCEEDED, exit_code=0, step=40, teardown="confirmed")
        record.write(seen)
        return seen

    def _date(self, seen: Record) -> None:
        """In the story's time: when it was over, and for how long it had its machines."""
        real = seen.due_at in self.real
        seen.ended_at = self.now - AFTER_S if real else seen.due_at + NEEDED_S
        seen.spending = [replace(seen.spending[0], since=seen.due_at, until=seen.ended_at)]
        seen.checks = judged(seen, seen.ended_at) if seen.state is State.SUCCEEDED else []
        if seen.unmet:
            unmet = "; ".join(f"{each.metric} {each.said}" for each in seen.unmet)
            seen.reason = f"run {seen.run_id} succeeded, but not as expected: {unmet}"
        record.write(seen)


def at(when: str) -> float:
    return datetime.strptime(f"2027-{when}", "%Y-%m-%d %H:%M").replace(tzinfo=BERLIN).timestamp()


@pytest.fixture
def story(project: Any, monkeypatch: pytest.MonkeyPatch):
    yield Story(project, monkeypatch)
    monkeypatch.undo()
    time.tzset()


def test_thirty_nights_are_told_as_they_were_and_nothing_is_billed(story):
    story.mgpu("add", "--cron", "0 2 * * *", "--timezone", "Europe/Berlin", "--yes")
    for day in ("03-10", "03-11"):
        story.night(day)
    story.real_night("03-12")
    for day in ("03-13", "03-14", "03-15"):
        story.night(day)
    story.real_night("03-16", story.loses_its_machine)
    story.night("03-17")
    story.looks("03-18 07:00")  # nobody had until then
    story.night("03-19")
    story.now = at("03-19 22:30")
    story.mgpu("run-now", "e2e")
    story.begins("03-19 22:35", story.now)
    story.looks("03-20 02:05")
    story.ends("03-20 02:35")
    for day in ("03-21", "03-22"):
        story.night(day)
    story.begins("03-23 02:05", at("03-23 02:00"))
    story.ends("03-23 08:41", morning=False)  # its budget is spent
    for day in ("03-24", "03-25"):
        story.night(day)
    story.has_no_data("03-26")
    story.night("03-27")
    story.looks("03-28 03:05")  # at two the clocks go forward
    story.looks("03-28 08:45")
    story.night("03-29")
    story.looks("04-01 01:00")  # nobody has looked for two days
    story.night("04-01")
    story.mgpu("pause", "e2e")
    story.looks("04-02 12:00")
    story.now = at("04-03 00:30")
    story.mgpu("resume", "e2e")
    for day in ("04-03", "04-04", "04-05", "04-06", "04-07", "04-08"):
        story.night(day)

    shown = story.mgpu("show", "e2e", "--all")
    for real, told in ((f"{getpass.getuser()}@{os.uname().nodename}", "you@here"), (str(story.folder), "/mine")):
        shown = shown.replace(real, told)
    lines = [re.sub("─+", "─", line.rstrip()) for line in shown.splitlines()]  # as wide as the test's own folder
    if os.environ.get("MGPU_SCREENS") == "write":
        SHOWN.write_text("\n".join(lines) + "\n")
    assert lines == SHOWN.read_text().splitlines()
    history = json.loads(story.mgpu("show", "e2e", "--json"))["history"]
    assert [due["recoveries"] for due in history] == [int(number == 6) for number in range(31)]
    ledger = bill.read(state_dir() / "local")
    assert (len(ledger.nodes), ledger.alive) == (6, ()), "five nights, and one machine in another's place"
    assert all(each.settled for each in record.every())
    assert story.looks("04-08 12:00") == Report()
