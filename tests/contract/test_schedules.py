"""I10 where the backend is a bucket: what its machines look for at once is done once, and costs few requests."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fakes.gateway import Team
from mgpu_train.store import Ambiguous
from mgpu_train.store.file import FileStore
from mgpu_train.store.s3 import S3Store
from mgpu_train.timeouts import Timeouts

from mgpu.backend import location, outbox
from mgpu.backend.outbox import Outbox
from mgpu.cli import cli
from mgpu.context import Context
from mgpu.errors import InputError, StackError
from mgpu.events import ScheduleMissed, ignore
from mgpu.iac.outputs import NodeOutput, StackOutput
from mgpu.plan.model import Requirements
from mgpu.run.fleet import reuse
from mgpu.run.lifecycle.launch import kept_for_later
from mgpu.run.lifecycle.outcome import judged
from mgpu.run.record import record
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Record, State
from mgpu.schedule import kept, reconcile
from mgpu.schedule.decide import Need
from mgpu.schedule.model import Outcome, Schedule
from mgpu.schedule.reconcile import Reconciler
from mgpu.spec.load import load

RUN_FILE = """
name: it
provider: local
nodes: 1
max_hours: 1
max_price_usd_per_hour: 1
command: [train.py]
checkpoint: none
"""
HOUR, NOW = 3600.0, 1_800_000_000.0
CONTEXT = Context(ignore, Timeouts())


class Nobody:
    """Looks after no run, and remembers which ones it should have."""

    busy = False

    def __init__(self) -> None:
        self.asked = list[str]()

    def begin(self, need: Need, watch_s: float) -> None:
        self.asked.append(need.run_id)

    def ended(self, wait_s: float) -> None:
        return None

    def leave(self) -> None:
        pass


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run file, its code and a Pulumi program."""
    monkeypatch.setattr(reconcile, "_claimed", lambda: False)  # what stands for S3 here is no AWS
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "Pulumi.yaml").write_text("name: mine\nruntime: python\n")
    (folder / "mgpu.yaml").write_text(RUN_FILE)
    (folder / "train.py").write_text("print('as it was')\n")
    (folder / ".hidden").write_text("the user's\n")
    return folder


def add(project: Path, name: str = "nightly", **changes: object) -> Schedule:
    known = Schedule(name, f"u-{name}", "0 * * * *", "UTC", {}, NOW, "me@here", NOW)
    made = replace(known, **changes)
    run_file = project / "mgpu.yaml"
    made.run = kept_for_later(run_file, load(run_file), CONTEXT, kept.folder(made), f"{made.submission}/")
    kept.add(made)
    return made


def passes(at: float = NOW + HOUR) -> list[str]:
    """One pass; the runs that it would look after."""
    nobody = Nobody()
    assert Reconciler(CONTEXT, supervisors=nobody, clock=lambda: at).work().failures == []
    return nobody.asked


def test_what_one_machine_has_added_another_submits_with_its_files(team: Team, project: Path):
    with team.on("a"):
        add(project)
    with team.on("b"):
        (run,) = passes()
        assert (Folder(run).work / "train.py").read_text() == "print('as it was')\n"
        assert (Folder(run).work / ".hidden").exists()
    with team.on("c"):
        assert passes() == [run], "nobody has begun with it"
        record.shared.files.bring(run)
        assert (Folder(run).work / "train.py").read_text() == "print('as it was')\n"
        assert (Folder(run).run_file.read_text(), Folder(run).program.is_dir()) == (RUN_FILE, True)


def test_twenty_at_once_submit_one_run_of_each_schedule(team: Team, project: Path):
    """All of one machine here: threads share its state folder, and each reads and writes the bucket for itself."""
    with team.on("a"):
        for name in ("nightly", "weekly"):
            add(project, name)
    with team.on("b"):
        gate = threading.Barrier(20, timeout=60)

        def one(_: int) -> list[str]:
            gate.wait()
            return passes()

        with ThreadPoolExecutor(20) as pool:
            asked = {run for found in pool.map(one, range(20)) for run in found}
        assert len(asked) == len(record.ids()) == 2
        assert [due.outcome for name in ("nightly", "weekly") for due in kept.load(name).history] == [
            Outcome.RUNNING
        ] * 2


@pytest.mark.parametrize("lost", ["put_if_absent", "replace"])
@pytest.mark.parametrize("done", [True, False])
def test_an_answer_that_is_lost_starts_nothing_twice(
    team: Team, project: Path, monkeypatch: pytest.MonkeyPatch, lost: str, done: bool
):
    with team.on("a"):
        add(project)
        store, told = location.current().ours, list[str]()
        real = getattr(store, lost)

        def lossy(key: str, *args: object) -> bool:
            told.append(key)
            if told.count(key) > 1:
                return real(key, *args)
            if done:
                real(key, *args)
            raise Ambiguous("the answer was lost")

        monkeypatch.setattr(store, lost, lossy)
        first = passes()
        (run,) = passes()
        assert first in ([], [run]), "what was not written is written by the next pass"
        assert record.ids() == [run]
        assert [due.outcome for due in kept.load("nightly").history] == [Outcome.RUNNING]
        assert told


@pytest.mark.drawn("seeds of storms", "mgpu/schedule", "mgpu/backend", "mgpu/run/record")
@pytest.mark.parametrize("storm", range(8), indirect=True)
def test_whatever_happens_to_requests_each_time_has_one_run(storm, team_in_a_storm: Team, project: Path):
    team, machines = team_in_a_storm, "abc"
    with team.on("a"):
        add(project)
    for hour in range(1, 4):
        now = NOW + hour * HOUR
        storm.blows = True
        for machine in (*machines, *machines):
            with team.on(machine), suppress(StackError):  # what it cannot do is done by the next one
                Reconciler(CONTEXT, supervisors=Nobody(), clock=lambda now=now: now).work()
        storm.blows = False
        with team.on("d"):
            (run,) = passes(now)
            assert len(record.ids()) == hour
            assert [due.run_id for due in kept.load("nightly").history][-1] == run
            record.shared.files.bring(run)
            assert (Folder(run).work / "train.py").exists(), "whoever submitted it has kept its code"
            record.write(replace(record.load(run), state=State.SUCCEEDED, teardown="confirmed"))
    with team.on("e"):
        assert passes(NOW + 3.5 * HOUR) == []
        assert [due.outcome for due in kept.load("nightly").history] == [Outcome.SUCCEEDED] * 3


class Dead(BaseException):
    """A process that is killed: nothing in it hears of it, and it asks the bucket for nothing more."""


class Writes:
    """What a process writes into the bucket, in order; it dies after the one with this number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done, self._last = list[str](), 0
        for name in ("put_if_absent", "put", "replace", "delete", "put_file"):
            monkeypatch.setattr(S3Store, name, self._wrapped(name, getattr(S3Store, name)))
        for name in ("read", "stat", "list", "get_file"):
            monkeypatch.setattr(S3Store, name, self._wrapped("", getattr(S3Store, name)))

    def begin(self, last: int) -> None:
        self.done, self._last = [], last

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: S3Store, key: str, *more: Any, **options: Any) -> Any:
            if len(self.done) >= self._last:
                raise Dead
            found = real(store, key, *more, **options)
            self.done += [f"{name} {key}"] if name else []
            return found

        return call


def test_wherever_a_pass_dies_another_machine_gives_its_time_one_run(team: Team, project: Path, monkeypatch):
    """After each write: in between nothing changes that others see. In the end the first machine comes back, too."""
    writes, bucket, forever = Writes(monkeypatch), location.current().url, 1 << 30

    def one_pass(name: str, last: int) -> list[str]:
        monkeypatch.setenv(location.VARIABLE, bucket.replace("/team?", f"/{name}?"))
        with team.on(f"{name}-a"):
            writes.begin(forever)
            add(project)
            writes.begin(last)
            with suppress(Dead):
                passes()
        return writes.done

    whole = one_pass("whole", forever)
    assert len(whole) >= 5, whole
    for number in range(len(whole) + 1):
        assert one_pass(f"p{number}", number) == whole[:number]
        writes.begin(forever)
        for machine in ("b", "a"):
            with team.on(f"p{number}-{machine}"):
                assert passes() == record.ids(), f"died after {whole[:number]}"
                (due,) = kept.load("nightly").history
                assert (due.outcome, [due.run_id]) == (Outcome.RUNNING, record.ids())
                record.shared.files.bring(due.run_id)
                assert (Folder(due.run_id).work / ".hidden").exists(), "whoever submitted it has kept its code"


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is asked of the bucket from here on."""
    asked = list[str]()
    store = location.current().ours
    # `get` is a `read`
    for name in ("put_if_absent", "put", "replace", "read", "stat", "list", "delete", "put_file", "get_file"):
        real = getattr(store, name)

        def counted(*args: object, real=real, name=name, **more: object) -> object:
            asked.append(f"{name} {args[0]}")
            return real(*args, **more)

        monkeypatch.setattr(store, name, counted)
    return asked


def test_a_pass_over_many_runs_that_are_over_reads_none_of_them(team: Team, project: Path, requests: list[str]):
    known = Record(
        run_id="", name="it", project="p", project_base="/", run_file="/mgpu.yaml", stack="s", own_stack=True,
        fleet_name="f", provider="local", nodes=1, created_at=1.0,
    )  # fmt: skip
    with team.on("a"):
        add(project)
        for number in range(30):
            one = replace(known, run_id=f"it-{number}")
            record.save(one)
            record.save(replace(one, state=State.FAILED, teardown="confirmed"))
        record.save(replace(known, run_id="it-left", state=State.FAILED, teardown="asked"))
    with team.on("b"):
        requests.clear()
        assert passes(NOW) == ["it-left"]
        assert len(requests) <= 6, requests
        assert len([each for each in requests if "records/" in each]) == 1
    with team.on("a"):
        record.write(replace(known, run_id="it-left", state=State.FAILED, teardown="confirmed"))
    with team.on("c"):
        requests.clear()
        assert passes(NOW) == []
        assert len(requests) <= 4, requests  # and one more to ask when machines were looked for


def test_schedules_move_with_all_that_they_submit(team: Team, project: Path, monkeypatch: pytest.MonkeyPatch):
    bucket = location.current().url
    monkeypatch.delenv(location.VARIABLE)
    with team.on("a"):
        made = add(project)
        Outbox(made.submission, "webhook").keep("m1", 1.0, {})
        Outbox(made.submission, "webhook").deliver(lambda _: None)
        Outbox(made.submission, "webhook").keep("m2", 2.0, {})
        assert CliRunner().invoke(cli, ["backend", "move", bucket, "--yes"], standalone_mode=False).exception is None
    monkeypatch.setenv(location.VARIABLE, bucket)
    with team.on("b"):
        assert kept.load("nightly") == made
        assert outbox.waiting() == [made.submission]
        (run,) = passes()
        assert (Folder(run).work / ".hidden").exists()
        back = f"file://{team.folder}/shared"
        record.write(replace(record.load(run), state=State.FAILED, teardown="confirmed"))
        assert CliRunner().invoke(cli, ["backend", "move", back, "--yes"], standalone_mode=False).exception is None
    monkeypatch.setenv(location.VARIABLE, back)
    with team.on("c"):
        told = list[int]()
        Outbox(made.submission, "webhook").keep("m1", 1.0, {})
        Outbox(made.submission, "webhook").deliver(lambda _: told.append(1))
        assert told == [1], "the one that waited: what was told before stays told"
        (second,) = passes(NOW + 2 * HOUR)
        assert (Folder(second).work / "train.py").read_text() == "print('as it was')\n"


def test_a_kept_fleet_is_had_by_one_run_whichever_machine_looks(team: Team):
    needs = Requirements(provider="local", max_price_usd_per_hour=1, max_hours=1).model_dump(mode="json")
    known = Record(
        run_id="q1", name="it", project="p", project_base="/", run_file="/mgpu.yaml", stack="q1", own_stack=True,
        fleet_name="f", provider="local", nodes=1, needs=needs,
    )  # fmt: skip
    node = NodeOutput(rank=0, id="i", address="127.0.0.1", user="u", host_key="k")
    output = StackOutput(version=1, fleet="f", owner="o", provider="local", private_key_file="k", nodes=(node,))
    over = {"state": State.SUCCEEDED, "teardown": "kept", "lease_until": time.time() + HOUR}
    with team.on("a"):
        record.save(replace(known, run_id="keeper", fleet=output.model_dump(mode="json"), **over))
        record.save(known)
        record.save(replace(known, run_id="q2"))
    with team.on("b"):
        assert (found := reuse.claim(known)) is not None
        assert (found.name, found.maker.run_id) == ("f", "keeper")
    with team.on("c"):
        assert (reuse.claim(replace(known, run_id="q2")), reuse.claimed_by("f")) == (None, "q1")
    with team.on("d"):
        reuse.let_go("q1")
        assert reuse.take("f", "q2") == ""


def test_a_schedule_that_is_removed_leaves_nothing(team: Team, project: Path):
    with team.on("a"):
        kept.remove(add(project))
    with team.on("b"):
        assert kept.every() == kept.All({}, [], 0.0)
        assert [each.key for each in location.current().ours.list("submissions/")] == []
        with pytest.raises(InputError, match="no schedule"):
            kept.load("nightly")


# --- a folder as the backend: nights that are compared, and times that are missed


EXPECTS = """
expect: {loss: {median_of: 2, tolerance_percent: 2}}
sinks: {command: {run: [sh, tell.sh]}}
"""


@pytest.fixture
def nights(tmp_path: Path, xdg: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run file whose runs are expected to be something; its backend is a folder, too."""
    monkeypatch.setenv(location.VARIABLE, f"file://{tmp_path}/backend")
    monkeypatch.setattr(reconcile, "_claimed", lambda: False)
    monkeypatch.setattr(kept, "_CLOCKS_S", float("inf"))  # the clock of a test is far from the backend's
    (tmp_path / "backend").mkdir()
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "Pulumi.yaml").write_text("name: mine\nruntime: python\n")
    (folder / "mgpu.yaml").write_text(RUN_FILE + EXPECTS)
    (folder / "train.py").touch()
    return folder


def ends(run: str, loss: float, at: float) -> Record:
    """The run ends as one does whose machines are gone."""
    found = record.load(run)
    found.state, found.teardown, found.metrics, found.ended_at = State.TEARDOWN, "confirmed", {"loss": loss}, at
    error = judged(found)
    found.exit_code, found.reason = (error.exit_code, error.what) if error else (0, "")
    found.to(State.SUCCEEDED)
    record.save(found)
    return found


def test_each_night_is_compared_with_those_before_also_of_a_schedule_that_was_added_anew(nights: Path):
    add(nights)
    said = list[str]()
    for number, loss in enumerate((1.8, 1.8, 1.9, 1.82)):
        (run,) = passes(NOW + (number + 1) * HOUR)
        said.append(ends(run, loss, NOW + (number + 1) * HOUR + 60).checks[0].said)
    passes(NOW + 4 * HOUR + 120)
    assert said == [
        "1.8; not compared yet: 0 of 2 runs",
        "1.8; not compared yet: 1 of 2 runs",
        "1.9 > 1.836, the median of 2 runs + 2 %",
        "1.82 <= 1.836, the median of 2 runs + 2 %",
    ]
    history = kept.load("nightly").history
    assert [(due.outcome, due.exit_code, bool(due.unmet)) for due in history] == [
        (Outcome.SUCCEEDED, code, code == 6) for code in (0, 0, 6, 0)
    ]
    kept.remove(kept.load("nightly"))
    add(nights, uid="u-new", created_at=NOW + 9 * HOUR, decided_until=NOW + 9 * HOUR)
    (run,) = passes(NOW + 10 * HOUR)
    assert record.load(run).earlier == {"loss": [1.82, 1.8]}


def test_a_missed_time_is_told_once_however_many_pass(nights: Path, monkeypatch: pytest.MonkeyPatch):
    add(nights)
    (nights / "tell.sh").write_text('echo "$MGPU_EVENT $MGPU_TITLE" >> said; exit 1\n')
    told, gate = list[ScheduleMissed](), threading.Barrier(8, timeout=60)

    def tell(event: ScheduleMissed, done: Callable[[], None]) -> None:
        told.append(event)
        done()

    def one(_: int) -> None:
        gate.wait()
        known = {"supervisors": Nobody(), "clock": lambda: NOW + 6 * HOUR}
        Reconciler(CONTEXT, **known).work()
        Reconciler(CONTEXT, teller=lambda _: tell, **known).look()
        Reconciler(CONTEXT, teller=lambda _: tell, **known).work()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(8)))
    assert [(event.schedule, event.times) for event in told] == [("nightly", 5)], "the sixth was started"

    def mgpu_reconcile(hours: float) -> str:
        monkeypatch.setattr(time, "time", lambda: NOW + hours * HOUR)
        monkeypatch.setattr(reconcile, "Supervisors", lambda _: Nobody())
        return CliRunner().invoke(cli, ["reconcile"], standalone_mode=False).stderr

    kept.change("nightly", lambda found, _: replace(found, paused=False, start_within_s=60.0))
    assert "exit status 1" in mgpu_reconcile(7.5)
    (nights / "tell.sh").write_text('echo "$MGPU_EVENT $MGPU_TITLE" > said\n')
    assert "told" not in mgpu_reconcile(7.6)
    title = "schedule nightly missed its time of 2027-01-15 15:00 UTC"
    assert (nights / "said").read_text() == f"missed {title}\n"
    (nights / "said").unlink()
    assert "told" not in mgpu_reconcile(7.7)
    assert not (nights / "said").exists()


def reconciled() -> str:
    """What `mgpu reconcile` says."""
    return CliRunner().invoke(cli, ["reconcile"], standalone_mode=False).stderr


def test_what_a_pass_cannot_tell_waits_for_one_that_can_and_the_rest_is_told(nights: Path, monkeypatch):
    sinks = "sinks: {command: {run: [sh, tell.sh]}, apprise: {urls: [TEAM]}}\n"
    (nights / "mgpu.yaml").write_text(RUN_FILE + sinks)
    (nights / "tell.sh").write_text("cat >> said\n")
    add(nights, start_within_s=60.0)
    monkeypatch.setattr(time, "time", lambda: NOW + 1.7 * HOUR)
    for _ in range(2):
        assert "TEAM is not set here" in reconciled()
    assert json.loads((nights / "said").read_text())["event"] == "missed"
    monkeypatch.setenv("TEAM", "json://127.0.0.1:9/nobody")
    assert "sink apprise: OSError: not delivered" in reconciled()


def over(run: str, folder: Path) -> None:
    """A run that has ended, and whoever ended it died before it told anybody."""
    known = Record(
        run_id=run, name="it", project="p", project_base=str(folder), run_file=str(folder / "mgpu.yaml"), stack="s",
        own_stack=True, fleet_name="f", provider="local", nodes=1, state=State.FAILED, reason="no disk",
        ended_at=NOW, exit_code=6, teardown="confirmed", has_sinks=True,
    )  # fmt: skip
    Folder(run).make()
    Folder(run).run_file.write_text((folder / "mgpu.yaml").read_text())
    record.shared.files.keep(run)
    record.save(known)


def test_that_a_run_is_over_is_told_by_the_next_pass_where_nobody_has(nights: Path):
    (nights / "tell.sh").write_text('echo "$MGPU_EVENT $MGPU_TEXT" >> said\n')
    over("it-1125-abcde", nights)
    assert "run it-1125-abcde" in CliRunner().invoke(cli, ["reconcile", "--dry-run"], standalone_mode=False).stdout
    assert not (nights / "said").exists()
    for _ in range(2):
        reconciled()
    assert (nights / "said").read_text().startswith("ended no disk\n")
    assert (nights / "said").read_text().count("ended") == 1
    assert (record.load("it-1125-abcde").end_told, record.unsettled()) == (True, [])


@pytest.mark.parametrize("what", ["missed", "over"])
def test_wherever_a_pass_dies_somebody_is_told_once(nights: Path, monkeypatch: pytest.MonkeyPatch, what: str):
    """After each thing that it writes. Once more, with the same id, where it dies between delivery and mark."""
    (nights / "tell.sh").write_text("cat >> said; echo >> said\n")
    now, writes, left = [NOW + 1.7 * HOUR], list[str](), [0]
    monkeypatch.setattr(time, "time", lambda: now[0])

    def dying(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: FileStore, key: str, *more: Any) -> Any:
            if left[0] <= 0:
                raise Dead
            found = real(store, key, *more)
            if name:
                left[0] -= 1
                writes.append(f"{name} {key}")
                with suppress(FileNotFoundError):  # the backend's clock is that of the test
                    os.utime(store._root / key, (now[0], now[0]))
            return found

        return call

    for name in ("put_if_absent", "put", "replace", "delete"):
        monkeypatch.setattr(FileStore, name, dying(name, getattr(FileStore, name)))
    for name in ("read", "stat", "list"):
        monkeypatch.setattr(FileStore, name, dying("", getattr(FileStore, name)))
    doubled = 0
    for number in range(100):
        monkeypatch.setenv(location.VARIABLE, f"file://{nights.parent}/{number}")
        (nights.parent / str(number)).mkdir()
        (nights / "said").write_text("")
        now[0], left[0] = NOW + 1.7 * HOUR, 1000
        if what == "over":
            over("it-1125-abcde", nights)
        else:
            add(nights, start_within_s=60.0)
        left[0] = number
        writes.clear()
        with suppress(Dead):
            reconciled()
        died, left[0] = left[0] <= 0, 1000
        marked = any(" runs/" in each or "/told/" in each for each in writes)
        for _ in range(2):
            now[0] += 200.0  # longer than a claim is good for
            reconciled()
        said = [json.loads(line)["id"] for line in (nights / "said").read_text().splitlines()]
        assert len({*said}) == 1, f"died after {writes}"
        assert len(said) == 1 or (died and not marked), f"died after {writes}"
        doubled += len(said) > 1
        if not died:
            break
    assert number >= 4
    assert doubled <= 2


def test_what_one_machine_leaves_untold_another_tells(team: Team, project: Path, monkeypatch: pytest.MonkeyPatch):
    """A pod that is gone after its pass: nothing of it is left but what is in the bucket."""
    (project / "mgpu.yaml").write_text(f"{RUN_FILE}sinks: {{command: {{run: [sh, tell.sh], secrets: [PIN]}}}}\n")
    (project / "tell.sh").write_text('echo "$MGPU_EVENT $MGPU_TITLE" >> said\n')
    monkeypatch.setattr(kept, "_CLOCKS_S", float("inf"))
    monkeypatch.setattr(time, "time", lambda: NOW + 1.7 * HOUR)
    with team.on("a"):
        add(project, start_within_s=60.0)
        over("it-1125-abcde", project)
    with team.on("b"):
        said = reconciled()
        assert said.count("PIN is not set here") >= 2
    monkeypatch.setenv("PIN", "1")
    for machine in "cde":
        with team.on(machine):
            reconciled()
    assert sorted((project / "said").read_text().splitlines()) == [
        "ended run it-1125-abcde failed",
        "missed schedule nightly missed its time of 2027-01-15 09:00 UTC",
    ]
    with team.on("f"):
        assert record.unsettled() == []
        assert [found.key for found in location.current().ours.list("unsettled/")] == []


BOX = ("runs/it-1125-abcde", "webhook")


def test_twenty_at_once_tell_each_message_of_a_bucket_once(team: Team):
    told, gate = list[str](), threading.Barrier(20, timeout=60)

    def one(_: int) -> None:
        gate.wait()
        Outbox(*BOX).deliver(lambda message: told.append(message["id"]))

    with team.on("a"):
        for number in (1, 2, 3):
            Outbox(*BOX).keep(f"m{number}", number, {"id": f"m{number}"})
        with ThreadPoolExecutor(20) as pool:
            list(pool.map(one, range(20)))
        Outbox(*BOX).deliver(lambda message: told.append(message["id"]))
        assert told == ["m1", "m2", "m3"]
        assert outbox.waiting() == []


@pytest.mark.drawn("seeds of storms", "mgpu/schedule", "mgpu/backend", "mgpu/run/record")
@pytest.mark.parametrize("storm", range(8), indirect=True)
def test_whatever_happens_to_requests_each_message_is_told_in_its_order(
    storm, team_in_a_storm: Team, monkeypatch: pytest.MonkeyPatch
):
    """Once, unless the backend went away between a delivery and its mark."""
    told, failed = list[str](), 0
    with team_in_a_storm.on("a"):
        for number in (1, 2, 3):
            Outbox(*BOX).keep(f"m{number}", number, {"id": f"m{number}"})
    storm.blows = True
    for machine in "abcabcabc":
        with team_in_a_storm.on(machine):
            try:
                Outbox(*BOX).deliver(lambda message: told.append(message["id"]))
            except StackError:
                failed += 1
    storm.blows = False
    monkeypatch.setattr(outbox, "CLAIM_S", -1.0)  # of those that died with it
    with team_in_a_storm.on("d"):
        Outbox(*BOX).deliver(lambda message: told.append(message["id"]))
        assert [*dict.fromkeys(told)] == ["m1", "m2", "m3"]
        assert len(told) <= 3 + failed
        assert outbox.waiting() == []
