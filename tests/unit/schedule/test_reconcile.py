"""A pass does what is due and leaves the rest, whoever else passes, and wherever it is cut off."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from mgpu_train.agent.host.python_env import PROBLEM
from mgpu_train.config import Job, Share
from mgpu_train.store import Ambiguous
from mgpu_train.store.file import FileStore
from waiting import until

from mgpu.backend import location
from mgpu.cli import cli
from mgpu.context import Context
from mgpu.errors import AuthError, ConnectionFailed, InputError, MgpuError, StackError, TeardownIncomplete
from mgpu.events import Warned
from mgpu.iac.naming import fleet_name
from mgpu.providers.base import NodePhase
from mgpu.providers.local.provider import LocalProvider
from mgpu.remote.targets import Result
from mgpu.run.budget import account
from mgpu.run.fleet import reuse
from mgpu.run.fleet import stack as stacks
from mgpu.run.lifecycle import attach, down, submit, supervise
from mgpu.run.lifecycle import launch as runs
from mgpu.run.record import record
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Record, State
from mgpu.run.record.signals import Interrupts
from mgpu.schedule import kept, reconcile, supervisors
from mgpu.schedule.decide import Need, advanced
from mgpu.schedule.model import IfRunning, Outcome, Schedule
from mgpu.schedule.reconcile import Reconciler
from mgpu.schedule.supervisors import Looked, Supervisors
from mgpu.spec.load import load
from mgpu.spec.text.change import Change

RUN_FILE = """
name: it
provider: local
nodes: 1
max_hours: 1
max_price_usd_per_hour: 1
command: [train.py]
checkpoint: none
"""
HOUR = 3600.0
NOW = 1_800_000_000.0


class InProcess:
    """Looks after runs in this very process, as the commands do."""

    def __init__(self, context: Context) -> None:
        self.context, self.over, self.began = context, list[Looked](), list[str]()

    busy = property(lambda self: bool(self.over))

    def begin(self, need: Need, watch_s: float) -> None:
        self.began.append(need.run_id)
        known = record.load(need.run_id)
        try:
            if need.give_back:
                said = {"state": str(down.down(known, self.context).state)}
            else:
                outcome = attach.attach(known, replace(self.context, watch_s=watch_s))
                found = outcome.record if outcome else known
                said = {"state": str(found.state), "reason": found.reason}
            self.over.append(Looked(need, 0, said))
        except MgpuError as error:
            self.over.append(Looked(need, error.exit_code, {"error": error.to_json()}))

    def ended(self, wait_s: float) -> Looked | None:
        return self.over.pop(0) if self.over else None

    def leave(self) -> None:
        pass


class Idle(InProcess):
    """Looks after nothing."""

    def begin(self, need: Need, watch_s: float) -> None:
        pass


class Nights:
    """The world with a schedule of every hour, and a clock."""

    def __init__(self, world) -> None:
        self.world, self.now = world, NOW
        (world.folder / "train.py").write_text("print('as it was')\n")
        world.run_file.write_text(RUN_FILE)
        self.context = Context(world.events.append, world.timeouts)

    def add(self, name: str = "nightly", **changes: Any) -> Schedule:
        known = Schedule(name, f"u-{name}", "0 * * * *", "UTC", {}, self.now, "me@here", self.now)
        made = replace(known, **changes)
        spec, folder = load(self.world.run_file), kept.folder(made)
        made.run = runs.kept_for_later(self.world.run_file, spec, self.context, folder, f"{made.submission}/")
        kept.add(made)
        return made

    def reconciler(self, **more: Any) -> Reconciler:
        more = {"supervisors": InProcess(self.context)} | more
        return Reconciler(self.context, clock=lambda: self.now, **more)

    def works(self, hours: float = 0.0):
        self.now += hours * HOUR
        return self.reconciler().work()

    def through(self, hours: float = 0.0) -> list[str | None]:
        """Passes until nothing is left to do: what each run was seen to be."""
        states = list[str | None]()
        while (report := self.works(hours)).needs:
            states += [each.state for each in report.looked]
            hours = 0.0
        return states

    @property
    def outcomes(self) -> list[str]:
        return [str(due.outcome) for due in kept.load("nightly").history]


@pytest.fixture
def nights(world, monkeypatch: pytest.MonkeyPatch) -> Nights:
    monkeypatch.setattr(type(world.cloud), "offers", lambda _, needed: LocalProvider().offers(needed), raising=False)
    return Nights(world)


def test_what_is_due_is_begun_and_brought_to_its_end(nights):
    nights.add()
    assert nights.works().due == []
    assert nights.through(hours=1) == ["running", "succeeded"]
    assert nights.outcomes == ["succeeded"]
    (run,) = record.every()
    assert (run.schedule, run.due_at, run.state, run.teardown) == (
        "nightly",
        NOW + HOUR - NOW % HOUR,
        State.SUCCEEDED,
        "confirmed",
    )
    assert nights.world.cloud.billed == set()
    assert nights.works().due == [], "and is not done again"


def test_a_run_begins_with_the_code_and_the_run_file_as_they_were(nights):
    nights.add()
    (nights.world.folder / "train.py").write_text("print('changed')\n")
    nights.world.run_file.write_text(RUN_FILE.replace("name: it", "name: other"))
    for _ in range(2):
        nights.through(hours=1)
    for run in record.every():
        folder = Folder(run.run_id)
        assert (run.name, folder.run_file.read_text()) == ("it", RUN_FILE)
        assert (folder.work / "train.py").read_text() == "print('as it was')\n"
        assert (folder.program / "Pulumi.yaml").exists()
    assert len(record.every()) == 2


def test_a_run_begins_with_the_code_that_git_has_at_its_time_and_all_passes_take_the_same_commit(nights, tmp_path):
    repository = tmp_path / "repository"

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *who, *words], cwd=repository, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commits(text: str) -> str:
        (repository / "train.py").write_text(f"print('{text}')\n")
        git("add", ".")
        git("commit", "--quiet", "-m", text)
        return git("rev-parse", "HEAD")

    repository.mkdir()
    git("init", "--quiet", "--initial-branch=main", ".")
    commits("at first")
    nights.add(code_from=f"git+file://{repository}@main")
    second = commits("as it is at its time")
    slow = nights.reconciler()
    assert nights.through(hours=1) == ["running", "succeeded"]
    (run,) = record.every()
    (due,) = kept.load("nightly").history
    assert (due.code, run.code) == (second, f"git+file://{repository}@{second}")
    assert (Folder(run.run_id).work / "train.py").read_text() == "print('as it is at its time')\n"
    commits("later")
    late = slow._code(kept.load("nightly"), replace(due, code=""))
    assert late.ref == second, "whoever looked later goes by what is written"
    repository.rename(tmp_path / "gone")
    report = nights.works(hours=1)
    assert "could not be submitted" in report.failures[0].what
    assert nights.outcomes == ["succeeded", "starting"]
    (tmp_path / "gone").rename(repository)
    assert nights.through() == ["running", "succeeded"]


def test_the_bundled_trainer_needs_no_code(nights):
    nights.world.run_file.write_text(RUN_FILE.replace("command: [train.py]", "train: {task: lm, steps: 5}"))
    nights.add()
    assert nights.through(hours=1) == ["running", "succeeded"]


def test_a_run_that_trains_is_left_alone_once_it_needs_nothing_and_judged_when_it_has_ended(nights):
    nights.world.program = nights.world.train_on
    nights.add()
    report = nights.works(hours=1)
    assert [each.state for each in report.looked] == ["running"]
    assert nights.outcomes == ["running"]
    (run,) = record.every()
    assert not record.supervised(run.run_id)
    beats(nights.world)
    assert [each.state for each in nights.works().looked] == ["running"], "seen to, and left again"
    assert nights.world.cloud.billed, "nothing of it was touched"
    nights.world.succeed(nights.world.nodes[0], SimpleNamespace(attempt=1, checkpoint=None))
    assert [each.state for each in nights.works().looked] == ["succeeded"]
    assert (nights.outcomes, nights.world.cloud.billed) == (["succeeded"], set())


def beats(world) -> None:
    """From here on the agent of node 0 is seen to live."""
    node, beat = world.nodes[0], iter(range(1, 10**6))
    read = node.read

    def moved(path: str) -> bytes:
        said = json.loads(read(path))
        return json.dumps({**said, "beat": next(beat)}).encode() if "beat" in said else json.dumps(said).encode()

    node.read = moved


def test_a_lost_machine_is_replaced_by_the_next_pass(nights):
    nights.world.run_file.write_text(RUN_FILE.replace("checkpoint: none", "recovery: {attempts: 2}"))
    nights.world.program = nights.world.train_on
    nights.add()
    nights.works(hours=1)
    nights.world.cloud.phases |= dict.fromkeys(nights.world.cloud.billed, NodePhase.TERMINATED)
    nights.world.nodes[0].reachable = False
    nights.world.hooks["up"] = lambda: setattr(nights.world.nodes[0], "reachable", True)
    nights.world.program = nights.world.succeed
    assert nights.through() == ["running", "succeeded"]
    (run,) = record.every()
    assert (run.recoveries, len(run.interruptions), nights.world.cloud.billed) == (1, 1, set())


@pytest.mark.parametrize(
    ("error", "code"),
    [(OSError(28, "No space left on device"), 2), (StackError("no answer"), 4)],
    ids=["the disk", "the backend"],
)
def test_what_cannot_be_submitted_has_the_exit_code_of_its_cause(nights, monkeypatch, error: Exception, code: int):
    def fails(*_: Any, **__: Any) -> None:
        raise error

    nights.add()
    monkeypatch.setattr(submit, "submit_kept", fails)
    assert [each.exit_code for each in nights.works(hours=1).failures] == [code]


def test_what_cannot_be_done_is_told_and_done_by_the_next_pass(nights, monkeypatch):
    nights.add()
    nights.add("other")
    submits = submit.submit_kept

    def full(folder, *args, **more):
        if more["schedule"] == "nightly":
            raise OSError(28, "No space left on device")
        return submits(folder, *args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(submit, "submit_kept", full)
        report = nights.works(hours=1)
    assert "could not be submitted" in report.failures[0].what
    assert [each.state for each in report.looked] == ["running"], "the other's"
    assert nights.outcomes == ["starting"]
    assert "No space left" in kept.load("nightly").history[0].reason
    nights.through(hours=0.2)
    assert nights.outcomes == ["succeeded"]


def test_a_pass_that_is_cut_off_anywhere_is_gone_on_with(nights, monkeypatch):
    """After each thing that it writes: the schedule, the run's files, its record."""
    nights.add()
    nights.now += HOUR
    for module, name in ((kept, "change"), (submit, "_copy"), (submit, "save")):
        real = getattr(module, name)

        def dies(*args, real=real, **more):
            real(*args, **more)
            raise KeyboardInterrupt

        monkeypatch.setattr(module, name, dies)
        with pytest.raises(KeyboardInterrupt):
            nights.works()
        monkeypatch.setattr(module, name, real)
    assert nights.through() == ["running", "succeeded"]
    assert (len(record.every()), nights.outcomes) == (1, ["succeeded"])


def test_who_has_read_a_schedule_before_another_wrote_it_goes_by_what_was_written(nights, monkeypatch):
    """One reads just before the hour, and the other one decides just after it: one time is started, the newer one."""
    nights.add()
    nights.now = NOW - NOW % HOUR + 1.99 * HOUR
    slow = nights.reconciler()
    stale = slow._decisions()
    assert [due.outcome for _, due in stale.submit] == [Outcome.STARTING]
    nights.now += 0.1 * HOUR
    nights.works()
    real, seen = slow._decisions, iter([stale])
    monkeypatch.setattr(slow, "_decisions", lambda: next(seen, None) or real())
    slow.work()
    assert [str(due.outcome) for due in kept.load("nightly").history][:1] == ["missed"]
    assert len(record.every()) == 1


def test_who_is_late_with_a_submission_of_a_time_that_was_replaced_submits_nothing(nights):
    nights.add(if_running=IfRunning.REPLACE)
    nights.now = NOW - NOW % HOUR + 1.1 * HOUR
    slow = nights.reconciler()
    kept.change("nightly", lambda found, _: advanced(found, record.find, nights.now))
    found = kept.load("nightly")
    nights.now += HOUR
    kept.change("nightly", lambda found, _: advanced(found, record.find, nights.now))
    slow._submit(found, found.history[0])
    assert record.every() == []


def test_who_is_late_with_a_submission_finds_the_run_as_it_is(nights):
    nights.world.program = nights.world.train_on
    made = nights.add()
    nights.works(hours=1)
    (run,) = record.every()
    again = submit.submit_kept(kept.folder(made), f"{made.submission}/", made.run, run.run_id)
    assert (again.state, record.every()) == (State.RUNNING, [run])


def test_twenty_at_once_start_one_run(nights):
    """And each run has one supervisor."""
    nights.add()
    nights.now += HOUR
    gate, queued = threading.Barrier(20, timeout=60), list[str]()

    class Counts(InProcess):
        def begin(self, need: Need, watch_s: float) -> None:
            queued.append(need.run_id)

    def one(_: int) -> None:
        gate.wait()
        nights.reconciler(supervisors=Counts(nights.context)).work()

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(one, range(20)))
    assert len(record.every()) == len(set(queued)) == 1
    assert nights.outcomes == ["running"]


def test_machines_that_nothing_stands_for_are_ended_once_an_hour(nights):
    nights.world.cloud.rent("mine-it-1125-abcde", 2)  # as an earlier mgpu named it
    named = [fleet_name(project, "it-1125-kmnpq-r2") for project in ("mine", "a-project-with-a-name-of-its-own" * 2)]
    for each in named:
        nights.world.cloud.rent(each, 1)
    nights.world.cloud.rent("theirs", 1)
    assert sorted(nights.works().swept) == sorted(["mine-it-1125-abcde", *named])
    assert nights.world.cloud.billed == {"theirs-0"}, "of a stack whose state nobody here can see, perhaps"
    assert any("fleet theirs: nothing is known" in event.text for event in nights.world.of(Warned))
    nights.world.cloud.rent("mine-it-1125-fghjk", 1)
    assert nights.works().swept == [], "somebody has looked a moment ago"


def test_a_machine_that_comes_after_its_run_is_over_is_ended_though_its_end_is_still_to_be_told(nights):
    over = {"state": State.SUCCEEDED, "teardown": "confirmed", "own_stack": True, "fleet_name": "mine-it-1125-abcde"}
    nights.world.record("it-1125-abcde", **over, has_sinks=True)
    assert record.load("it-1125-abcde").untold
    nights.world.cloud.rent("mine-it-1125-abcde", 1)
    assert nights.works().swept == ["mine-it-1125-abcde"]


def test_who_watches_tells_an_end_again_until_it_is_told(nights, monkeypatch):
    """The backend may have been away; not all the time, and it is one run in the report."""
    over = nights.world.record("it-1125-abcde", state=State.SUCCEEDED, teardown="confirmed", has_sinks=True)
    told, asked, real = list[float](), list[float](), kept.every

    def tell(run: Record) -> None:
        told.append(nights.now)
        if len(told) == 2:
            record.write(replace(run, end_told=True))

    def every():
        nights.now += 20.0
        asked.append(nights.now)
        return real()

    monkeypatch.setattr(kept, "every", every)
    report = nights.reconciler(watch_s=1000.0, supervisors=Idle(nights.context), tell_end=tell).work()
    assert report.over == [over.run_id]
    assert [at - told[0] for at in told] == [0.0, reconcile.TELL_AGAIN_S]
    assert asked[-1] - told[-1] > reconcile.TELL_AGAIN_S


@pytest.mark.parametrize("used", [False, True])
def test_a_cloud_that_cannot_be_asked_is_a_failure_where_a_run_is_there(nights, used):
    """Its credentials may be there for a store of somebody else's alone."""
    nights.world.elsewhere["far"] = far = type(nights.world.cloud)()
    far.refuses["list_owned"] = [AuthError("far: the credentials have expired")]
    if used:
        run = nights.world.record("far-1125-abcde", provider="far", state=State.QUEUED)
        record.write(run)
    report = nights.reconciler(supervisors=Idle(nights.context)).work()
    assert [error.what for error in report.failures] == (["far: the credentials have expired"] if used else [])
    warned = [event.text for event in nights.world.of(Warned)]
    assert any("no run has any: far: the credentials" in text for text in warned) is not used


def test_what_a_run_that_is_over_has_left_is_given_back(nights):
    nights.world.cloud.rent("mine-old", 1)
    nights.world.record("old", state=State.FAILED, teardown="asked")
    assert [each.need.give_back for each in nights.works().looked] == [True]
    assert (nights.world.cloud.billed, record.load("old").teardown) == (set(), "confirmed")


def test_a_record_that_cannot_be_read_is_told_and_its_time_goes_on(nights):
    nights.world.program = nights.world.train_on
    nights.add()
    nights.works(hours=1)
    (run,) = record.every()
    Folder(run.run_id).record.write_text("{")
    report = nights.works(hours=0.1)
    assert "cannot be read" in report.failures[0].what
    assert nights.outcomes == ["running"]


def test_a_run_whose_record_cannot_be_read_is_not_passed_over_in_silence(nights):
    nights.world.record("it-1125-abcde")
    Folder("it-1125-abcde").record.write_text('{"state": "of a newer mgpu"}')
    report = nights.works()
    assert [(each.what, each.exit_code) for each in report.failures] == [
        ("the record of run it-1125-abcde cannot be read", 2)
    ]
    assert "move its folder away" in report.failures[0].next_step
    Folder("it-1125-abcde").root.rename(nights.world.folder / "away")
    assert nights.works().failures == [], "passes do not fail for ever"


def test_who_watches_outlives_a_backend_that_is_away_and_tries_a_run_again_later(nights, monkeypatch):
    """And does not ask for the same thing all the time."""
    nights.world.program = nights.world.train_on
    nights.add()
    nights.now += HOUR
    looks, failing = InProcess(nights.context), iter([False, False, False, True])
    reconciler = nights.reconciler(watch_s=130.0, supervisors=looks)
    real = kept.every

    def every():
        nights.now += 20.0
        if next(failing, False):
            raise StackError("the backend does not answer")
        return real()

    monkeypatch.setattr(kept, "every", every)
    monkeypatch.setattr(attach, "attach", lambda *_, **__: None)  # as if it could not be reached
    report = reconciler.work()
    assert [error.what for error in report.failures] == ["the backend does not answer"]
    assert len(looks.began) == 2, "at once, and a minute later"
    assert len(report.needs) == len(report.looked) == 1
    failing = iter([True])
    with pytest.raises(StackError):
        nights.reconciler().work()


def test_a_damaged_schedule_is_told_and_hides_no_other(nights):
    nights.add()
    (kept.folder(kept.load("nightly")).parents[1] / "schedules" / "bad.json").write_text("{")
    report = nights.works(hours=1)
    assert [each.what for each in report.failures] == ["schedule bad cannot be read"]
    assert nights.outcomes == ["running"]


@pytest.mark.parametrize("run", [{}, 3])
def test_a_schedule_without_a_run_hides_no_other(nights, run):
    nights.add()
    found = kept.load("nightly")
    other = replace(found, name="other", uid="u2", run=run)
    (kept.folder(found).parents[1] / "schedules" / "other.json").write_bytes(other.to_json())
    report = nights.works(hours=1)
    assert [each.what for each in report.failures] == ["schedule other cannot be read"]
    assert nights.outcomes == ["running"]


def test_a_schedule_whose_run_this_mgpu_does_not_understand_ends_no_pass(nights):
    """A newer one has added it."""
    nights.add()
    kept.change("nightly", lambda found, _: replace(found, run=found.run | {"state": "of a newer mgpu"}))
    (failed,) = nights.works(hours=1).failures
    assert "could not be submitted" in failed.what
    assert "of a newer mgpu" in failed.why


def test_a_schedule_of_a_zone_that_is_not_known_here_hides_no_other_and_can_be_removed(nights):
    nights.add()
    found = kept.load("nightly")
    other = replace(found, name="mars", uid="u2", timezone="Mars/Olympus")
    place = kept.folder(found).parents[1]
    (place / "schedules" / "mars.json").write_bytes(other.to_json())
    (place / other.submission).mkdir()
    (place / other.submission / "mgpu.yaml").write_text("")
    report = nights.works(hours=1)
    assert [(each.what, "Mars/Olympus" in each.why) for each in report.failures] == [
        ("schedule mars cannot be read here", True)
    ]
    assert "tzdata" in report.failures[0].next_step, "to remove it would take it from machines that know the zone"
    assert nights.outcomes == ["running"]
    assert "schedule mars cannot be read here" in mgpu("schedule", "ls").stderr
    save = nights.world.record("mars-1125-abcde", state=State.RUNNING, schedule="mars")
    works = str(mgpu("schedule", "rm", "mars").exception)
    assert "run mars-1125-abcde is not over" in works
    assert "`mgpu stop mars-1125-abcde`" in works
    record.write(replace(save, state=State.STOPPED, schedule="mars"))
    assert mgpu("schedule", "rm", "mars").return_value == 0
    assert [each.name for each in (place / "schedules").iterdir()] == ["nightly.json"]
    assert [each.name for each in (place / "submissions").iterdir()] == [Path(found.submission).name]


@pytest.mark.parametrize("ahead_h", [30.0, -30.0])
def test_a_machine_whose_clock_is_wrong_goes_by_the_backends(nights, monkeypatch, ahead_h):
    """It neither lets times pass that have not come, nor starts some that have not."""
    wrong = SimpleNamespace(time=lambda: time.time() + ahead_h * HOUR)
    with monkeypatch.context() as patched:
        patched.setattr(kept, "time", wrong)
        nights.now += ahead_h * HOUR + 60.0  # a minute past the hour
        nights.add()
        assert nights.works(hours=0.5).due == []
        said = [event.text for event in nights.world.events if isinstance(event, Warned)]
        assert f"clock is 30 h {'ahead of' if ahead_h > 0 else 'behind'} the backend's" in said[-1]
        assert nights.through(hours=0.75) == ["running", "succeeded"]
    assert nights.outcomes == ["succeeded"]


def test_two_who_change_a_schedule_at_once_lose_nothing(nights):
    nights.add()

    def more(found: Schedule, _: float) -> Schedule:
        return replace(found, start_within_s=found.start_within_s + 1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: kept.change("nightly", more), range(16)))
    assert kept.load("nightly").start_within_s == 4 * HOUR + 16


# --- processes of their own -------------------------------------------------------------------------------------------


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is called instead of `mgpu attach`: by run, a shell command."""
    known = dict[str, str]()
    monkeypatch.setattr(supervisors, "_command", lambda need, _: ["sh", "-c", known[need.run_id]])
    return known


def ended(found: Supervisors) -> dict[str, Looked]:
    told = {}
    while found.busy:
        if (looked := found.ended(60)) is not None:
            told[looked.need.run_id] = looked
    return told


def test_each_run_has_a_process_and_what_it_says_is_passed_on(commands, monkeypatch):
    monkeypatch.setattr(supervisors, "_AT_ONCE", 2)
    told = []
    found = Supervisors(told.append)
    commands |= {
        "a": 'echo hello >&2; echo \'{"state": "succeeded"}\'',
        "b": 'echo \'{"error": {"what": "no"}}\'; exit 2',
    }
    commands |= {"c": "kill -9 $$", "d": 'echo \'{"state": "failed"}\'; exit 6'}
    for run in "abcda":
        found.begin(Need(run, "queued"), 0.0)
    looked = ended(found)
    assert {run: (each.exit_code, each.state, each.error and each.error["what"]) for run, each in looked.items()} == {
        "a": (0, "succeeded", None),
        "b": (2, None, "no"),
        "c": (-9, None, "run c: its supervisor ended with exit code -9"),
        "d": (6, "failed", None),
    }
    assert [event.text for event in told] == ["a: hello"]


def test_one_that_cannot_be_started_ends_no_other(commands, monkeypatch):
    commands |= dict.fromkeys("abc", 'echo \'{"state": "running"}\'')
    start, numbers = subprocess.Popen, iter(range(3))

    def full(*args: Any, **more: Any) -> Any:
        if next(numbers) == 1:
            raise BlockingIOError("Resource temporarily unavailable")
        return start(*args, **more)

    monkeypatch.setattr(supervisors.subprocess, "Popen", full)
    found = Supervisors(lambda _: None)
    for run in "abc":
        found.begin(Need(run, "queued"), 0.0)
    looked = ended(found)
    assert {run: (each.state, each.exit_code) for run, each in looked.items()} == {
        "a": ("running", 0),
        "b": (None, 4),
        "c": ("running", 0),
    }
    assert (looked["b"].error or {})["why"] == "Resource temporarily unavailable"


@pytest.mark.parametrize("thread", [0, 1])
def test_one_that_no_thread_can_follow_is_ended_and_ends_no_other(commands, monkeypatch, thread: int):
    commands |= {"a": "exec sleep 100", "b": 'echo \'{"state": "running"}\''}
    start, numbers, processes = threading.Thread.start, iter(range(9)), list[subprocess.Popen[str]]()
    popen = subprocess.Popen

    def full(this: threading.Thread) -> None:
        if next(numbers) == thread:
            raise RuntimeError("can't start new thread")
        start(this)

    def began(*args: Any, **more: Any) -> Any:
        processes.append(popen(*args, **more))
        return processes[-1]

    monkeypatch.setattr(supervisors.subprocess, "Popen", began)
    monkeypatch.setattr(threading.Thread, "start", full)
    found = Supervisors(lambda _: None)
    for run in "ab":
        found.begin(Need(run, "queued"), 0.0)
    looked = ended(found)
    assert {run: (each.state, each.exit_code) for run, each in looked.items()} == {"a": (None, 4), "b": ("running", 0)}
    assert [process.poll() for process in processes] == [-9, 0]


def test_of_those_that_watch_none_waits_for_another(commands, monkeypatch, tmp_path):
    monkeypatch.setattr(supervisors, "_AT_ONCE", 1)
    found = Supervisors(lambda _: None)
    for run in "ab":
        other = "a" if run == "b" else "b"
        commands[run] = f"touch {tmp_path}/{run}; while [ ! -e {tmp_path}/{other} ]; do sleep 0.05; done; echo '{{}}'"
        found.begin(Need(run, "running"), 60.0)
    assert ended(found).keys() == {"a", "b"}


def test_who_leaves_has_all_of_them_leave(commands, tmp_path):
    commands["a"] = f"trap 'touch {tmp_path}/left; exit 0' TERM; touch {tmp_path}/begun; while :; do sleep 0.05; done"
    found = Supervisors(lambda _: None)
    found.begin(Need("a", "running"), 60.0)
    until((tmp_path / "begun").exists)
    found.leave()
    assert (tmp_path / "left").exists()


def test_one_that_takes_too_long_is_asked_to_leave_and_then_killed(commands, tmp_path):
    commands["obeys"] = f"trap 'exit 9' TERM; touch {tmp_path}/obeys; while :; do sleep 0.05; done"
    commands["hangs"] = f"trap '' TERM; touch {tmp_path}/hangs; exec sleep 100"
    now, told = [0.0], []
    found = Supervisors(told.append, lambda: now[0])
    for run in ("obeys", "hangs"):
        found.begin(Need(run, "running"), 60.0)
    until(lambda: len([*tmp_path.iterdir()]) == 2)
    now[0] = 7259.0
    assert found.ended(0.0) is None
    assert told == [], "it may take two hours, and watch a minute"
    now[0] = 7261.0
    assert (obeys := found.ended(30.0)).exit_code == 9
    assert found.ended(0.0) is None
    now[0] = 7290.0
    assert (hangs := found.ended(30.0)).exit_code == -signal.SIGKILL
    assert (obeys.need.run_id, hangs.need.run_id, found.busy) == ("obeys", "hangs", False)
    assert [event.text for event in told] == [
        f"{run}: it takes more than 2 h: left to the next pass" for run in ("obeys", "hangs")
    ]


def test_one_that_hangs_is_ended_also_while_a_pass_watches_for_ever(nights, commands, monkeypatch):
    """As a pass each minute does it; then the run is looked after again."""
    nights.world.record("run-1", state=State.RUNNING)
    commands["run-1"] = "exec sleep 1000"
    began, start, hours = list[float](), Supervisors._start, iter([0.5, 2.4, 0.2])

    def started(self: Supervisors, need: Need, watch_s: float) -> None:
        began.append(nights.now)
        start(self, need, watch_s)

    def between() -> None:
        if len(began) == 2:
            raise KeyboardInterrupt
        nights.now += next(hours, 0.01) * HOUR
        assert nights.now - began[0] < 24 * HOUR, "it is never ended"

    monkeypatch.setattr(Supervisors, "_start", started)
    monkeypatch.setattr(reconcile, "LOOK_EVERY_S", 0.01)
    found = Supervisors(nights.world.events.append, lambda: nights.now)
    with pytest.raises(KeyboardInterrupt):
        nights.reconciler(watch_s=10 * 365 * 24 * HOUR, supervisors=found, between=between).work()
    assert began[1] - began[0] > 3 * HOUR
    assert any("left to the next pass" in event.text for event in nights.world.of(Warned))


@pytest.mark.parametrize(
    ("sellers", "queue_h"),
    [
        ({"provider": "slurm", "options": {"queue_hours": "24"}}, 48),
        ({"candidates": {"slurm": {"queue_hours": "3"}, "kubernetes": {"queue_hours": "2"}}}, 10),
        ({"provider": "none-of-ours"}, 0),
        ({}, 0),
    ],
    ids=["one", "several", "not here", "no queue"],
)
def test_a_run_whose_machines_wait_in_a_queue_keeps_its_place_there(nights, commands, tmp_path, sellers, queue_h):
    """Whoever is ended while they wait asks anew."""
    nights.world.record("run-1", state=State.PROVISIONING, **sellers)
    commands["run-1"] = f"touch {tmp_path}/begun; exec sleep 1000"
    now = [0.0]
    found = Supervisors(nights.world.events.append, lambda: now[0])
    nights.reconciler(supervisors=found)._pass()
    until((tmp_path / "begun").exists)
    for hours, told in ((2 + queue_h - 0.01, 0), (2 + queue_h + 0.01, 1)):
        now[0] = hours * HOUR
        found.ended(0.0)
        assert len([each for each in nights.world.of(Warned) if "it takes more" in each.text]) == told
    found.leave()


def test_the_commands_that_look_after_a_run():
    assert supervisors._command(Need("a", ""), 90)[1:] == ["-m", "mgpu", "attach", "a", "--for", "90s", "--json"]
    assert supervisors._command(Need("a", "", give_back=True), 90)[1:] == ["-m", "mgpu", "down", "a", "--json"]


# --- commands ---------------------------------------------------------------------------------------------------------


def mgpu(*args: str) -> Any:
    return CliRunner().invoke(cli, args, standalone_mode=False)


@pytest.mark.parametrize("two", [("--dry-run", "--watch"), ("--dry-run", "--for", "5m"), ("--for", "5m", "--watch")])
def test_who_only_looks_or_goes_on_for_a_time_says_one_of_both(world, two):
    assert "not both" in str(mgpu("reconcile", *two).exception)


def test_a_schedule_from_the_command_line(nights, monkeypatch):
    monkeypatch.chdir(nights.world.folder)
    assert isinstance(mgpu("schedule", "add", "--cron", "0 2 * * *").exception, InputError), "nobody has agreed"
    assert kept.every().schedules == {}
    refused = mgpu("schedule", "add", "--cron", "0 2 * * *", "--code-from", "https://github.com/a/b", "--yes").exception
    assert "names no code" in str(refused)
    # also where the branch was forgotten: the token would be asked for as a host
    for ref in ("@main", ""):
        for secret in ("git+https://canary", "git+https://me:canary", "https://canary", "git+http://canary"):
            address = f"{secret}@nowhere.invalid/a/b{ref}"
            refused = mgpu("schedule", "add", "--cron", "0 2 * * *", "--code-from", address, "--yes").exception
            assert isinstance(refused, InputError)
            assert "~/.netrc" in str(refused)
            assert "canary" not in str(refused)
    refused = mgpu("schedule", "add", "--cron", "0 2 * * *", "--code-from", "git+https://[a@main", "--yes").exception
    assert isinstance(refused, InputError), "and not a bug"
    berlin = ("--cron", "30 2 * * *", "--timezone", "Europe/Berlin", "--machines", "new", "--if-missed", "latest")
    added = mgpu("schedule", "add", *berlin, "--yes", "--json")
    made = json.loads(added.stdout)
    assert (made["name"], made["if_running"], made["start_within_s"], len(made["next"])) == ("it", "skip", 14400, 5)
    assert (made["if_missed"], "the latest is started" in mgpu("schedule", "show", "it").stdout) == ("latest", True)
    assert "next  " in added.stderr
    assert "already" in str(mgpu("schedule", "add", "--cron", "0 2 * * *", "--yes").exception)
    late = mgpu("schedule", "add", "--cron", "0 2 * * *", "--jitter", "2h", "--start-within", "1h", "--yes").exception
    assert "would be missed by its own jitter" in str(late)
    close = mgpu("schedule", "add", "--cron", "0,10 2 * * *", "--jitter", "20m", "--yes").exception
    assert "at most 10 min" in str(close)
    assert "it" in mgpu("schedule", "ls").stdout
    assert json.loads(mgpu("schedule", "ls", "--json").stdout)["schedules"][0]["name"] == "it"
    assert json.loads(mgpu("schedule", "pause", "it", "--json").stdout)["paused"]
    assert not json.loads(mgpu("schedule", "resume", "it", "--json").stdout)["paused"]
    assert json.loads(mgpu("schedule", "run-now", "it", "--json").stdout)["history"][0]["outcome"] == "starting"
    again = mgpu("schedule", "run-now", "it").exception
    assert "was not over" in str(again)
    taken = str(mgpu("schedule", "rm", "it").exception)
    assert "is not over" in taken
    assert "`mgpu reconcile` submits it" in taken, "there is no run that could be stopped"
    assert "`mgpu reconcile` submits it" in str(again)
    shown = mgpu("reconcile", "--dry-run", "--json").stdout
    assert json.loads(shown)["runs"][0]["why"] == "queued"
    assert record.every() == [], "it was only looked"
    nights.now = time.time()
    assert nights.through() == ["running", "succeeded"]
    assert "succeeded" in mgpu("schedule", "show", "it").stdout
    (run,) = record.every()
    assert run.machines == "new"
    for teardown in ("asked", "kept"):
        record.write(replace(run, teardown=teardown))
        owed = str(mgpu("schedule", "rm", "it").exception)
        assert f"run {run.run_id} has something left to give back" in owed
        assert f"`mgpu down {run.run_id}`" in owed
    record.write(run)
    assert mgpu("schedule", "rm", "it").return_value == 0
    assert (kept.every().schedules, len(record.every())) == ({}, 1)
    assert "no schedules" in mgpu("schedule", "ls").stdout
    with pytest.raises(InputError, match="no schedule `it`"):
        kept.load("it")
    for what in ("pause", "resume", "run-now"):  # most often the name is wrong, and nobody has removed anything
        assert "Schedules: none yet" in str(mgpu("schedule", what, "it").exception)


def test_a_run_that_is_in_the_way_of_this_moment_is_named_and_what_ends_that(nights, monkeypatch):
    monkeypatch.chdir(nights.world.folder)
    mgpu("schedule", "add", "--cron", "0 2 * * *", "--if-running", "queue", "--yes")
    (busy,) = json.loads(mgpu("schedule", "run-now", "it", "--json").stdout)["history"]
    mgpu("schedule", "pause", "it")
    error = mgpu("schedule", "run-now", "it").exception
    assert isinstance(error, InputError)
    assert f"Run {busy['run_id']} was not over, and nothing waits while the schedule is paused" in error.why
    assert f"`mgpu stop {busy['run_id']}`" in error.next_step
    assert "`mgpu schedule resume it`" in error.next_step

    def a_night_later(found: Schedule, _: float) -> Schedule:
        """That run is over and forgotten, which no pass has seen; the next one is under way."""
        (gone,) = found.history
        next_one = replace(gone, at=gone.at + 1, run_id="it-2")
        return replace(found, paused=False, if_running="skip", history=[replace(gone, outcome="running"), next_one])

    kept.change("it", a_night_later)
    error = mgpu("schedule", "run-now", "it").exception
    assert (str(error).count("it-2"), busy["run_id"] in str(error)) == (2, False)
    assert "resume" not in error.next_step


def test_a_schedule_that_may_have_come_into_the_backend_is_told_as_that(nights, monkeypatch):
    """Else its runs begin every night, though somebody was told that it could not be added."""
    monkeypatch.chdir(nights.world.folder)
    real = kept._find

    def away(name: str) -> Any:
        if real(name) is not None:
            raise StackError("the backend could not be read", "no answer")
        return None

    with monkeypatch.context() as patched:
        patched.setattr(kept, "_find", away)
        failed = mgpu("schedule", "add", "--cron", "0 2 * * *", "--yes").exception
    assert isinstance(failed, StackError)
    assert "may be kept" in failed.what
    assert "mgpu schedule rm it" in failed.next_step
    assert mgpu("schedule", "rm", "it").return_value == 0


def test_a_schedule_whose_write_was_refused_is_not_told_as_a_name_that_is_taken(nights, monkeypatch):
    monkeypatch.chdir(nights.world.folder)
    real, refused = FileStore.put_if_absent, list[str]()

    def busy(store: FileStore, key: str, data: bytes) -> bool:
        if key == "schedules/it.json" and not refused:
            refused.append(key)
            raise Ambiguous("503 SlowDown")
        return real(store, key, data)

    monkeypatch.setattr(FileStore, "put_if_absent", busy)
    add = ("schedule", "add", "--cron", "0 2 * * *", "--yes")
    failed = mgpu(*add).exception
    assert (type(failed), failed.what, failed.next_step) == (StackError, "schedule it is not kept", "Try it again.")
    assert mgpu(*add).return_value == 0


def test_nobody_is_told_to_remove_a_schedule_of_somebody_else(nights, monkeypatch):
    """Of a name that is taken already, and of one that was taken while this one was made, and which nobody can read."""
    monkeypatch.chdir(nights.world.folder)
    add = ("schedule", "add", "--cron", "0 2 * * *", "--yes")
    mgpu(*add)
    own = mgpu(*add).exception
    assert "`mgpu schedule rm it`" in own.next_step
    kept.change("it", lambda found, _: replace(found, created_by="anna@desk"))
    taken = mgpu(*add).exception
    assert isinstance(taken, InputError)
    assert f"anna@desk has kept it, of {nights.world.run_file}" in taken.why
    assert ("--name" in taken.next_step, "schedule rm" in taken.next_step) == (True, False)

    monkeypatch.setattr(kept, "require_free", lambda *_: None)
    again = mgpu(*add).exception
    assert (again.why, again.next_step) == (taken.why, taken.next_step)
    monkeypatch.setattr(kept, "_find", Mock(side_effect=StackError("the backend could not be read", "no answer")))
    unsure = mgpu(*add).exception
    assert unsure.next_step.startswith("`mgpu schedule show it` says whether it is, and who has kept it")
    assert "if it is this one, `mgpu schedule rm it`" in unsure.next_step


def test_a_queued_run_waits_for_a_pass(nights, monkeypatch):
    monkeypatch.chdir(nights.world.folder)
    queued = json.loads(mgpu("submit", "--yes", "--json").stdout)
    assert (queued["state"], nights.world.cloud.billed) == ("queued", set())
    assert nights.through() == ["running", "succeeded"]


def test_a_sweep_is_queued_as_many_runs_and_begun_with_as_many_as_may_be_at_work(nights, monkeypatch):
    monkeypatch.chdir(nights.world.folder)
    with nights.world.run_file.open("a") as file:
        file.write("matrix: {env.SEED: [1, 2, 3]}\n")
    told = mgpu("submit", "--yes", "--json", "--max-parallel", "2")
    made = json.loads(told.stdout)
    assert [each["setting"] for each in made["runs"]] == [{"env.SEED": str(seed)} for seed in (1, 2, 3)]
    assert {each["sweep"] for each in made["runs"]} == {made["sweep"]}
    assert "3 runs, each:" in told.stderr
    first, second, third = (each["run_id"] for each in made["runs"])
    shown = json.loads(mgpu("reconcile", "--dry-run", "--json").stdout)
    assert [each["run_id"] for each in shown["runs"]] == [first, second]
    assert [(each["run_id"], each["waits_for"]) for each in shown["queued"]] == [
        (third, "its sweep, which has 2 runs at a time")
    ]
    assert 'SEED: "3"' in Folder(third).run_file.read_text(encoding="utf-8")


def test_a_sweep_that_fails_at_one_run_names_those_that_are_queued(nights, monkeypatch):
    monkeypatch.chdir(nights.world.folder)
    with nights.world.run_file.open("a") as file:
        file.write("matrix: {env.SEED: [1, 2, 3]}\n")
    saves, written = iter([submit.save, submit.save]), list[Record]()

    def save(record_: Record) -> None:
        next(saves, Mock(side_effect=StackError("the backend does not answer")))(record_)
        written.append(record_)

    monkeypatch.setattr(submit, "save", save)
    failed = mgpu("submit", "--yes", "--json").exception
    assert isinstance(failed, StackError)
    assert failed.to_json()["queued"] == [each.run_id for each in written] == record.ids()
    assert len(written) == 2


def test_a_record_that_cannot_be_read_hides_no_place_in_the_queue(nights, monkeypatch):
    """It is of a newer mgpu, say; passes go on beside it, too."""
    monkeypatch.chdir(nights.world.folder)
    first = json.loads(mgpu("submit", "--yes", "--json").stdout)["run_id"]
    after = json.loads(mgpu("submit", "--yes", "--json", "--after", first).stdout)["run_id"]
    Folder(first).record.write_text('{"state": "of a newer mgpu"}', encoding="utf-8")
    for shown in (mgpu("queue", "ls"), mgpu("queue", "ls", "--json")):
        assert (shown.return_value, shown.stderr.count(f"the record of run {first} cannot be read")) == (2, 1)
        assert after in shown.stdout
    assert mgpu("queue", "mv", after, "--first").return_value == 0


def test_the_queue_from_the_command_line(nights, monkeypatch):
    monkeypatch.chdir(nights.world.folder)
    first, second, third = (json.loads(mgpu("submit", "--yes", "--json").stdout)["run_id"] for _ in range(3))
    after = json.loads(mgpu("submit", "--yes", "--json", "--after", first, "--priority", "1").stdout)["run_id"]

    def order() -> list[str]:
        return [each["run_id"] for each in json.loads(mgpu("queue", "ls", "--json").stdout)["queued"]]

    assert order() == [after, first, second, third]
    assert f"run {first} to succeed" in mgpu("queue", "ls").stdout
    assert mgpu("queue", "mv", third, "--first").return_value == 0
    assert mgpu("queue", "mv", first, "--last").return_value == 0
    assert order() == [third, after, second, first]
    assert "one of" in str(mgpu("queue", "mv", first).exception).lower()
    assert mgpu("queue", "rm", second).return_value == 0
    assert (str(record.load(second).state), nights.world.cloud.billed) == ("stopped", set())
    assert f"run {second} is not in the queue" in str(mgpu("queue", "rm", second).exception)
    with record.supervising(third):
        assert "has begun" in str(mgpu("queue", "mv", third, "--last").exception)
    record.write(replace(record.load(first), state=State.FAILED, teardown="confirmed"))
    assert f"run {first}, which has failed: it may be resumed" in mgpu("reconcile", "--dry-run").stdout
    refused = mgpu("submit", "--yes", "--max-parallel", "2").exception
    assert "nothing to limit" in str(refused)


def test_a_queued_run_for_which_there_is_no_room_waits_and_everybody_can_see_for_what(nights, monkeypatch):
    monkeypatch.chdir(nights.world.folder)
    account.change(usd_per_hour=0.05)
    run = json.loads(mgpu("submit", "--yes", "--json").stdout)["run_id"]
    report = nights.works()
    assert [each.state for each in report.looked] == ["queued"]
    found = record.load(run)
    assert (found.state, nights.world.cloud.billed) == (State.QUEUED, set())
    why = "waits: dollars per hour: $0.00 are in use, and up to $0.10 would come, of $0.05: $0.05 too much"
    assert found.reason == why
    assert f"queued, {why}" in " ".join(mgpu("ls").stdout.split())
    assert json.loads(mgpu("status", run, "--json").stdout)["reason"] == why
    with monkeypatch.context() as patch:
        patch.setattr(Reconciler, "work", lambda _: report)
        assert why in " ".join(mgpu("reconcile").stdout.split())
    attached = mgpu("attach", run)
    assert (attached.return_value, f"stays queued: {why}" in " ".join(attached.stderr.split())) == (0, True)
    account.change(usd_per_hour=0.1)
    assert nights.through() == ["running", "succeeded"]


# --- kept fleets


@pytest.fixture
def kept_fleet(nights, monkeypatch) -> Record:
    """Of a run that is over; the cloud has nothing else."""
    monkeypatch.chdir(nights.world.folder)
    keeps = load(nights.world.run_file, changes=[Change.of("--set", "teardown=keep")])
    runs.launch(nights.world.run_file, keeps, nights.context)
    nights.world.calls.clear()
    nights.now = time.time()  # by which leases go
    (made,) = record.every()
    return made


def submitted(*args: str) -> str:
    return json.loads(mgpu("submit", "--yes", "--json", *args).stdout)["run_id"]


def test_a_queued_run_begins_on_a_kept_fleet_and_one_that_takes_no_other_waits_for_it(nights, kept_fleet):
    billed, first, second = nights.world.cloud.billed, submitted(), submitted("--machines", "kept")
    stack, name = kept_fleet.stack, kept_fleet.fleet["fleet"]
    waits = f"kept fleet {stack}, which run {first} uses"
    shown = json.loads(mgpu("reconcile", "--dry-run", "--json").stdout)
    assert [(each["run_id"], each["why"]) for each in shown["runs"]] == [
        (first, f"queued: starts on kept fleet {stack}")
    ]
    assert [(each["run_id"], each["waits_for"]) for each in shown["queued"]] == [(second, waits)]
    assert f"the next pass, on kept fleet {stack}" in " ".join(mgpu("queue", "ls").stdout.split())
    listed = json.loads(mgpu("queue", "ls", "--json").stdout)["queued"]
    assert [each["starts_on"] for each in listed] == [stack, None]
    assert [each.state for each in nights.works().looked] == ["running"]
    with pytest.raises(InputError, match=f"used by run {first}"):
        down.down(kept_fleet, nights.context)
    assert nights.through() == ["succeeded", "running", "succeeded"]
    assert ("up" in nights.world.calls, nights.world.cloud.billed) == (False, billed), "nothing was rented or ended"
    for run in map(record.load, (first, second)):
        assert (run.state, run.teardown, run.kept_by, run.recoveries) == (
            State.SUCCEEDED, "kept", kept_fleet.run_id, 0,
        )  # fmt: skip
        assert run.fleet["fleet"] == name
        assert run.lease_until == pytest.approx(time.time() + 3600, abs=60), "the fleet's own lease again"
        (spent,) = run.spending
        assert (spent.price_usd_per_hour, spent.until is not None) == (0.5, True), "its hours are the run's"
    down.down(record.load(second), nights.context)
    assert nights.world.cloud.billed == set()
    assert {each.teardown for each in record.every()} == {"confirmed"}
    assert f"remove {stack}" in nights.world.calls, "the stack goes with its last machine"


def test_where_the_kept_fleet_is_in_use_others_rent(nights, kept_fleet):
    first, second, third = submitted(), submitted(), submitted("--machines", "new")
    report = nights.works()
    assert [each.state for each in report.looked] == ["running"] * 3
    assert [record.load(run).kept_by for run in (first, second, third)] == [kept_fleet.run_id, "", ""]
    assert len(nights.world.cloud.billed) == 3


def test_a_run_on_a_kept_fleet_has_its_store_where_it_would_have_it_anywhere(nights, kept_fleet):
    record.write(replace(kept_fleet, fleet={**kept_fleet.fleet, "store": "s3://theirs/runs"}))
    nights.world.run_file.write_text(RUN_FILE.replace("checkpoint: none\n", ""))
    run = submitted()
    nights.through()
    assert record.load(run).kept_by
    assert record.load(run).store.startswith("file://")


@pytest.mark.parametrize("how", ["terminated", "destroyed", "changed", "unreachable", "used"])
@pytest.mark.parametrize("machines", ["any", "kept"])
def test_a_kept_fleet_that_vanished_between_decision_and_start_is_no_failure_of_the_run(
    nights, kept_fleet, monkeypatch, how, machines
):
    world, run, claim = nights.world, submitted("--machines", machines), reuse.claim
    stands = world.stacks[kept_fleet.stack]

    def vanishes() -> None:
        if how in ("terminated", "destroyed"):
            world.cloud.phases |= dict.fromkeys(world.cloud.billed, NodePhase.TERMINATED)
        if how == "destroyed":
            world.stacks[kept_fleet.stack] = None
        if how == "changed":
            world.stacks[kept_fleet.stack] = stands.model_copy(update={"nodes": stands.nodes * 2})
        if how == "unreachable":
            world.connect_error = ConnectionFailed("no route")
        if how == "used":
            answer = b'{"problem": "used", "why": "Run theirs trains there.", "run": "theirs"}'
            world.nodes[0].equipped = Result(PROBLEM, answer, b"")

    def decided(record):
        found = claim(record)
        if found is not None:
            vanishes()
        else:
            world.connect_error, world.nodes[0].equipped = None, type(world.nodes[0])(world, 0).equipped
        return found

    monkeypatch.setattr(reuse, "claim", decided)
    states = nights.through() if machines == "any" else [each.state for each in nights.works().looked]
    found = record.load(run)
    assert (found.avoid, found.recoveries, found.interruptions) == ([kept_fleet.fleet["fleet"]], 0, [])
    assert (found.kept_by, found.stack, found.own_stack) == ("", run, True)
    assert found.fleet_name == fleet_name("mine", run)
    assert json.loads((location.current().root / "fleets.json").read_text())["claims"] == {}
    if machines == "any":
        assert (states, found.state) == (["running", "succeeded"], State.SUCCEEDED)
        assert found.teardown == "confirmed"
    else:
        assert (states, found.state, found.fleet) == (["queued"], State.QUEUED, None)
        assert found.reason.startswith("waits: a kept fleet that fits")
    assert len(found.spending) == (machines == "any")


def test_a_run_leaves_a_kept_fleet_without_that_the_backend_is_asked_for_a_name(nights, kept_fleet, monkeypatch):
    """It may be what is away, and then the run would fail for it."""
    run, stack = submitted("--machines", "kept"), stacks.Stack.func

    def away(_stack):
        raise StackError("the backend s3://team could not be asked for a stack")

    monkeypatch.setattr(stack, "outputs", away)
    monkeypatch.setattr(stack, "fleet", property(away))
    assert [each.state for each in nights.works().looked] == ["queued"]
    found = record.load(run)
    assert (found.state, found.fleet_name, found.kept_by) == (State.QUEUED, fleet_name("mine", run), "")
    assert reuse.claimed_by(kept_fleet.fleet["fleet"]) == ""


def test_a_run_that_was_put_on_a_kept_fleet_and_left_there_is_gone_on_with(nights, kept_fleet, monkeypatch):
    """Its supervisor died before anything of it had begun."""
    run, there = submitted(), []
    with monkeypatch.context() as dies:
        dies.setattr(supervise, "_conducted", lambda *_: there.append(record.load(run)) or sys.exit())
        with pytest.raises(SystemExit):
            nights.works()
    assert [(each.state, each.kept_by) for each in there] == [(State.PROVISIONING, kept_fleet.run_id)]
    assert nights.through() == ["running", "succeeded"]
    assert (record.load(run).teardown, "up" in nights.world.calls) == ("kept", False)


def test_a_machine_of_a_kept_fleet_that_is_lost_later_is_replaced_as_any(nights, kept_fleet):
    nights.world.run_file.write_text(RUN_FILE.replace("checkpoint: none", "recovery: {attempts: 2}"))
    nights.world.program = nights.world.train_on
    run = submitted()
    nights.works()
    nights.world.cloud.phases |= dict.fromkeys(nights.world.cloud.billed, NodePhase.TERMINATED)
    nights.world.nodes[0].reachable = False
    nights.world.hooks["up"] = lambda: setattr(nights.world.nodes[0], "reachable", True)
    nights.world.program = nights.world.succeed
    assert nights.through() == ["running", "succeeded"]
    found = record.load(run)
    assert (found.kept_by, found.recoveries, found.teardown) == (kept_fleet.run_id, 1, "kept")
    assert len(nights.world.cloud.billed) == 1


def test_a_limit_that_leaves_no_room_leaves_the_kept_fleet_to_others(nights, kept_fleet):
    run = submitted()
    account.change(usd_per_hour=0.05)
    assert [each.state for each in nights.works().looked] == ["queued"]
    found = record.load(run)
    assert (found.kept_by, found.avoid, found.stack) == ("", [], run)
    assert reuse.claimed_by(kept_fleet.fleet["fleet"]) == ""


@pytest.fixture
def shared_fleet(nights, monkeypatch) -> Record:
    """With two places on its node, for runs that share it."""
    monkeypatch.chdir(nights.world.folder)
    changes = ("teardown=keep", "share=true", "processes_per_node=2")
    runs.launch(
        nights.world.run_file,
        load(nights.world.run_file, changes=[Change.of("--set", each) for each in changes]),
        nights.context,
    )
    nights.now = time.time()
    nights.world.calls.clear()
    nights.world.program = nights.world.train_on
    nights.world.run_file.write_text(RUN_FILE.replace("checkpoint: none", "recovery: {attempts: 2}"))
    (made,) = record.every()
    return made


SHARES = ("--set", "share=true")


def test_two_runs_share_a_fleet_and_its_cost_and_whoever_needs_all_of_it_waits(nights, shared_fleet):
    jobs, start = list[Job](), nights.world.train_on
    nights.world.program = lambda node, job: jobs.append(job) or start(node, job)
    first, second = submitted(*SHARES), submitted(*SHARES)
    third, whole = submitted(*SHARES, "--machines", "kept"), submitted("--machines", "kept")
    report = nights.works()
    assert [(each.need.run_id, each.state) for each in report.looked] == [(first, "running"), (second, "running")]
    both = ", ".join(sorted((first, second)))
    assert {each.record.run_id: each.waits_for for each in report.waiting} == dict.fromkeys(
        (third, whole), f"kept fleet {shared_fleet.stack}, which runs {both} use"
    )
    assert {job.run_id: job.share and job.share.slots for job in jobs} == {first: (0,), second: (1,)}
    assert all(job.share == Share(slots=job.share.slots, of=2, gpus=False) for job in jobs)
    for run in (first, second):
        (spent,) = record.load(run).spending
        assert spent.price_usd_per_hour == 0.25, "half of what the fleet costs"
    for run in (shared_fleet.run_id, first):  # of one that trains, its own supervisor may
        with pytest.raises(InputError, match="is used by run"):
            down.down(record.load(run), nights.context)
    nights.world.program = nights.world.succeed
    for run in (first, second):
        nights.world.run_id = run
        nights.world.succeed(nights.world.nodes[0], next(job for job in jobs if job.run_id == run))
    assert nights.through().count("succeeded") == 4
    assert [record.load(run).slots for run in (third, whole)] == [[0], []]
    assert ("up" in nights.world.calls, len(nights.world.cloud.billed)) == (False, 1)


def test_a_machine_that_two_runs_share_is_lost_to_both_and_each_goes_on_elsewhere(nights, shared_fleet):
    world, both = nights.world, (submitted(*SHARES), submitted(*SHARES))
    nights.works()
    world.cloud.phases |= dict.fromkeys(world.cloud.billed, NodePhase.TERMINATED)
    world.nodes[0].reachable = False
    world.hooks["up"] = lambda: setattr(world.nodes[0], "reachable", True)
    world.program = world.succeed
    assert nights.through().count("succeeded") == 2
    for run in map(record.load, both):
        assert (run.recoveries, len(run.interruptions), run.attempt, run.teardown) == (1, 1, 2, "confirmed"), run
        assert (run.kept_by, run.slots, run.stack, run.avoid) == ("", [], run.run_id, [shared_fleet.fleet["fleet"]])
        assert run.interruptions[0].repaired_at is not None
        assert [each.price_usd_per_hour for each in run.spending] == [0.25, 0.5]
    assert world.cloud.billed == set()


def test_the_hours_of_a_run_that_waits_in_the_queue_again_go_on_and_end_it(nights, shared_fleet):
    world, ends_at = nights.world, time.time() + HOUR / 2
    record.write(replace(shared_fleet, fleet={**shared_fleet.fleet, "hard_cap_at": ends_at}))
    world.stacks[shared_fleet.stack] = world.stacks[shared_fleet.stack].model_copy(update={"hard_cap_at": ends_at})
    run = submitted(*SHARES, "--machines", "kept")
    nights.works()
    assert record.load(run).hard_cap_at == ends_at
    world.cloud.phases |= dict.fromkeys(world.cloud.billed, NodePhase.TERMINATED)
    world.nodes[0].reachable = False
    assert [each.state for each in nights.works().looked] == ["queued"]
    waits = record.load(run)
    assert waits.hard_cap_at == waits.begun_at + HOUR, "the fleet's end is none of the run's any more"
    record.write(replace(waits, begun_at=waits.begun_at - HOUR / 2, hard_cap_at=waits.hard_cap_at - HOUR / 2))
    assert nights.works(hours=0.1).looked == []
    record.write(replace(waits, begun_at=waits.begun_at - HOUR, hard_cap_at=waits.hard_cap_at - HOUR))
    assert [each.state for each in nights.works(hours=0.1).looked] == ["stopped"]
    over = record.load(run)
    assert (over.exit_code, over.teardown, over.attempt) == (8, "confirmed", 1)
    assert "max_hours" in over.reason
    assert "up" not in world.calls


def test_a_run_that_shared_a_machine_goes_on_on_another_kept_fleet(nights, shared_fleet, monkeypatch):
    world, run, claim = nights.world, submitted(*SHARES), reuse.claim
    nights.works()
    other = replace(shared_fleet, run_id="other", stack="other", fleet_name="mine-other", ended_at=time.time())
    world.stacks["other"] = world.output(world.cloud.rent("mine-other"))
    record.save(replace(other, fleet=world.stacks["other"].model_dump(mode="json")))
    world.cloud.phases[shared_fleet.fleet["nodes"][0]["id"]] = NodePhase.TERMINATED
    world.nodes[0].reachable = False
    monkeypatch.setattr(reuse, "claim", lambda found: setattr(world.nodes[0], "reachable", True) or claim(found))
    world.program = world.succeed
    assert nights.through().count("succeeded") == 1
    found = record.load(run)
    assert (found.kept_by, found.slots, found.attempt, found.recoveries) == ("other", [0], 2, 1)
    assert found.interruptions[0].repaired_at is not None
    assert ("up" in world.calls, [each.price_usd_per_hour for each in found.spending]) == (False, [0.25, 0.25])


def test_a_run_that_shares_and_may_not_try_again_fails_with_its_machine(nights, shared_fleet):
    nights.world.run_file.write_text(RUN_FILE)
    run = submitted(*SHARES)
    nights.works()
    nights.world.cloud.phases |= dict.fromkeys(nights.world.cloud.billed, NodePhase.TERMINATED)
    nights.world.nodes[0].reachable = False
    assert nights.through() == ["failed"]
    assert record.load(run).teardown == "kept"


def test_twenty_at_once_put_one_run_on_a_kept_fleet(nights, kept_fleet):
    first, _ = submitted("--priority", "1"), submitted()
    gate = threading.Barrier(20, timeout=60)

    def one(_: int) -> None:
        gate.wait()
        nights.reconciler(supervisors=Idle(nights.context)).work()

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(one, range(20)))
    claims = json.loads((location.current().root / "fleets.json").read_text())["claims"]
    assert {name: [each["run"] for each in those] for name, those in claims.items()} == {
        kept_fleet.fleet["fleet"]: [first]
    }
    with pytest.raises(InputError, match=f"used by run {first}"):
        runs.run(nights.world.run_file, load(nights.world.run_file), kept_fleet.stack, nights.context)
    with pytest.raises(InputError, match=f"used by run {first}"):
        down.down(kept_fleet, nights.context)
    reuse.let_go(first)
    by_hand = runs.run(nights.world.run_file, load(nights.world.run_file), kept_fleet.stack, nights.context)
    claims = json.loads((location.current().root / "fleets.json").read_text())["claims"]
    assert [each["run"] for those in claims.values() for each in those] == [by_hand.record.run_id], (
        "a pass would have seen it"
    )


@pytest.mark.parametrize("args", [("--for", "soon"), ("--for", "5m", "--watch")])
def test_reconcile_says_what_it_cannot_read(nights, args):
    assert mgpu("reconcile", *args).exception is not None


def test_the_pass_tells_the_worst_of_what_could_not_be_done(nights, monkeypatch):
    looked = [
        Looked(Need("a", "running"), 2, {"error": {"what": "a secret is missing", "exit_code": 2}}),
        Looked(Need("b", "teardown"), 7, {"state": "failed"}),
    ]
    report = reconcile.Report(needs=[each.need for each in looked], looked=looked)
    monkeypatch.setattr(Reconciler, "work", lambda _: report)
    told = mgpu("reconcile")
    assert told.return_value == 7
    assert "a secret is missing" in told.stderr
    assert "mgpu down b" in told.stderr
    looked.pop()
    assert mgpu("reconcile", "--json").return_value == 2
    looked[:] = [Looked(Need("a", "running"), -9, {})]
    assert mgpu("reconcile").return_value == 1, "one that was killed"
    looked[:] = [Looked(Need("a", "running"), 130, {"error": {"what": "taken over", "exit_code": 130}})]
    report.failures.append(TeardownIncomplete("fleet f may still be billed"))
    assert mgpu("reconcile").return_value == 7, "it beats all others"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_who_passes_by_ends_no_run(number):
    interrupts = Interrupts(leave=True)
    with interrupts.installed(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
    assert interrupts.count == 0
