"""Records that machines share by a bucket, which is a folder here: what a request at the wrong moment does to them."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from fakes.clock import Clock
from fakes.gateway import Team
from mgpu_train.store import Ambiguous, Store, Unavailable, open_store
from mgpu_train.store.file import FileStore
from mgpu_train.timeouts import Timeouts
from waiting import until

from mgpu.acquire import pauses
from mgpu.backend import location
from mgpu.backend.lease import Lease
from mgpu.backend.location import Backend
from mgpu.cli import cli
from mgpu.errors import InputError, StackError, TakenOver
from mgpu.events import ignore
from mgpu.run.record import record as records
from mgpu.run.record import shared
from mgpu.run.record.folder import Folder, runs
from mgpu.run.record.record import Record, State, supervising
from mgpu.run.record.session import Session
from mgpu.run.record.supervisor_lock import hold, unheld

RUN = "first-1"


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Team:
    """Machines whose bucket is a folder."""

    def opened(_backend: Backend, address: str) -> Store:
        return open_store(f"file://{tmp_path}/bucket/{address.removeprefix('s3://')}")

    monkeypatch.setattr(os, "fsync", lambda _file: None)  # no power is cut here
    monkeypatch.setattr(Backend, "_store", opened)
    monkeypatch.setenv(location.VARIABLE, "s3://team")
    return Team(tmp_path, monkeypatch.setenv)


def run(run_id: str = RUN, **changes: Any) -> Record:
    known = Record(run_id, "first", "p", "/", "/mgpu.yaml", run_id, True, "f", "local", 1, created_at=1.0)
    return replace(known, **changes)


@contextmanager
def supervised() -> Iterator[Record]:
    """The record of the run, which this machine supervises while the block runs."""
    records.save(run(state=State.PROVISIONING))
    with supervising(RUN) as token:
        mine = records.load(RUN)
        mine.supervisor = token
        records.save(mine)
        yield mine


def damage(path: Path) -> None:
    path.write_text('{"state": "of a newer mgpu"}')


def test_a_record_that_is_damaged_in_the_bucket_is_told_with_what_takes_it_away(team: Team, tmp_path: Path):
    """Its folder here is a copy, which comes back when it is moved."""
    there = tmp_path / "bucket/team/mgpu/records" / f"{RUN}.json"
    with team.on("a"):
        records.save(run(state=State.RUNNING))
    damage(there)
    for machine in ("a", "b"):
        with team.on(machine):
            failures = list[InputError]()
            assert records.unsettled(failures.append) == []
            with pytest.raises(InputError) as caught:
                records.find(RUN)
            assert {each.what for each in (*failures, caught.value)} == {f"the record of run {RUN} cannot be read"}
            assert f"move s3://team/mgpu/records/{RUN}.json away" in caught.value.next_step
    there.rename(tmp_path / "away")
    for machine in ("a", "b"):
        with team.on(machine):
            assert records.unsettled(pytest.fail) == []
            assert (records.find(RUN), records.every(fresh=True)) == (None, [])
            assert not Folder(RUN).root.exists()


def test_a_copy_that_alone_is_damaged_is_brought_again_unless_somebody_writes_to_it(team: Team):
    with team.on("a"):
        records.save(run(state=State.RUNNING))
        damage(Folder(RUN).record)
        with supervising(RUN), pytest.raises(InputError):
            records.load(RUN)
        damage(Folder(RUN).record)
        assert (Folder(RUN).root / ".version").exists(), "by which its supervisor writes"
        with pytest.raises(InputError):
            records.find(RUN)
        assert records.find(RUN) == records.load(RUN)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), PermissionError("not yours")], ids=lambda e: type(e).__name__
)
def test_a_damaged_record_hides_no_other_where_nothing_can_be_written(team: Team, monkeypatch, error):
    """A full disk is what damages one."""

    def full(*_: Any) -> None:
        raise error

    with team.on("a"):
        for run_id in (RUN, "second-2"):
            records.save(run(run_id, state=State.RUNNING))
        assert len(records.every()) == 2
        damage(Folder(RUN).record)
        monkeypatch.setattr(shared.files, "replace", full)
        assert [each.run_id for each in records.every()] == ["second-2"]


def test_to_read_a_damaged_record_in_a_folder_changes_nothing_there(team: Team, monkeypatch):
    monkeypatch.delenv(location.VARIABLE)
    with team.on("a"):
        records.save(run(state=State.RUNNING))
        damage(Folder(RUN).record)
        before = sorted(Folder(RUN).root.iterdir())
        assert records.every() == []
        assert sorted(Folder(RUN).root.iterdir()) == before


def once(monkeypatch: pytest.MonkeyPatch, call: str, error: Exception, *, done: bool = False) -> None:
    """The next such call for a record fails; `done`: after it was done."""
    real, failed = getattr(FileStore, call), list[str]()

    def fails(store: FileStore, key: str, *more: Any) -> Any:
        if failed or not key.startswith("records/"):
            return real(store, key, *more)
        failed.append(key)
        if done:
            real(store, key, *more)
        raise error

    monkeypatch.setattr(FileStore, call, fails)


@pytest.mark.parametrize("done", [False, True])
def test_a_write_whose_answer_is_lost_is_made_whether_it_came_or_not(team: Team, monkeypatch, done: bool):
    with team.on("a"), supervised() as mine:
        once(monkeypatch, "replace", Ambiguous("503 SlowDown"), done=done)
        mine.step = 5
        records.save(mine)
        mine.step = 6
        records.save(mine)
    with team.on("b"):
        assert records.load(RUN).step == 6


def test_who_sees_from_elsewhere_that_a_run_is_over_sees_the_end_of_its_logs(team: Team, monkeypatch):
    with team.on("a"), supervised() as mine:
        (Folder(RUN).root / "logs" / "node-0.0000.x.log").write_text("its last words\n")
        Session(mine, ignore, Timeouts()).to(State.FAILED)
        with team.on("b"):
            monkeypatch.setitem(shared.files._followed, RUN, time.monotonic())  # it has looked a moment ago
            done = CliRunner().invoke(cli, ["logs", "-f", RUN], standalone_mode=False)
        with team.on("a"):
            pass
    assert done.stdout == "[0] its last words\n"


@pytest.fixture
def renewed(monkeypatch) -> threading.Event:
    """Set by the next renewal of a lock; they are looked at all the time."""
    done = threading.Event()
    monkeypatch.setattr(shared, "_LOOK_S", 0.01)
    monkeypatch.setattr(Lease, "renew", lambda _lease: done.set())
    return done


@pytest.mark.parametrize("ends", [False, True])
def test_a_lock_is_kept_however_long_what_has_grown_takes_on_its_way(team: Team, monkeypatch, renewed, ends: bool):
    """A log of hours, over a slow line."""
    kept = list[bool]()

    def slow(_run: str) -> None:
        renewed.clear()
        kept.append(renewed.wait(60))

    with team.on("a"):
        with supervised():
            shared._renewals[RUN]._every_s = 0
            monkeypatch.setattr(shared.files, "send", slow)
            if not ends:
                shared.files.send_soon(RUN)
                until(lambda: kept)
        assert kept == [True] * (1 if ends else 2)


def test_a_repair_does_not_wait_until_what_has_grown_is_on_its_way(team: Team, monkeypatch):
    """Machines that are left cost money meanwhile."""
    put, begun, go_on, done = FileStore.put_if_absent, threading.Event(), threading.Event(), threading.Event()

    def slow(store: FileStore, key: str, *more: Any) -> Any:
        if "/grown/" in key:
            begun.set()
            assert go_on.wait(60)
        return put(store, key, *more)

    def repair() -> None:
        shared.files.send(RUN, small=True)
        done.set()

    with team.on("a"), supervised():
        (Folder(RUN).root / "logs" / "node-0.0000.x.log").write_text("hours of it\n")
        monkeypatch.setattr(FileStore, "put_if_absent", slow)
        shared.files.send_soon(RUN)
        assert begun.wait(60)
        threading.Thread(target=repair, daemon=True).start()
        try:
            assert done.wait(20)
        finally:
            go_on.set()


def test_a_full_disk_of_this_machine_loses_no_run(team: Team, monkeypatch, renewed):
    """What cannot be noted as sent is sent again later."""
    tried = list[str]()

    def full(run: str) -> None:
        tried.append(run)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with team.on("a"), supervised():
        shared._renewals[RUN]._every_s = 0
        monkeypatch.setattr(shared.files, "send", full)
        for _ in range(2):
            tried.clear()
            shared.files.send_soon(RUN)
            until(lambda: tried)
        renewed.clear()
        assert renewed.wait(60)


def save_unseen(mine: Record, monkeypatch) -> None:
    """Step 5 is written, and nobody can look whether it came."""
    once(monkeypatch, "read", Unavailable("no answer"))
    mine.step = 5
    with pytest.raises(StackError):
        records.save(mine)


@pytest.mark.parametrize("done", [False, True])
def test_a_first_write_whose_answer_is_lost_is_made_too(team: Team, monkeypatch, done: bool):
    with team.on("a"):
        once(monkeypatch, "put_if_absent", Ambiguous("503 SlowDown"), done=done)
        records.save(run(step=3))
    with team.on("b"):
        assert records.load(RUN).step == 3


def test_a_supervisor_knows_what_it_has_written_though_it_could_not_look(team: Team, monkeypatch):
    with team.on("a"), supervised() as mine:
        save_unseen(mine, monkeypatch)
        mine.step = 6
        records.save(mine)
    with team.on("b"):
        assert records.load(RUN).step == 6


def test_where_it_could_not_look_and_another_has_written_since_it_has_lost_the_run(team: Team, monkeypatch):
    with team.on("a"), supervised() as mine:
        save_unseen(mine, monkeypatch)
        with team.on("b"):
            there = records.load(RUN)
            there.supervisor, there.step = "another", 7
            records.save(there)
        with team.on("a"):
            mine.step = 6
            with pytest.raises(TakenOver):
                records.save(mine)
    with team.on("c"):
        assert records.load(RUN).step == 7


def test_writes_that_never_come_are_told_as_the_backends(team: Team, monkeypatch):
    def never(*_: Any) -> bool:
        raise Ambiguous("503 SlowDown")

    with team.on("a"), supervised() as mine:
        with monkeypatch.context() as patched:
            patched.setattr(FileStore, "replace", never)
            with pytest.raises(StackError) as told:
                records.save(mine)
            assert told.value.why == "503 SlowDown"
        mine.step = 6
        records.save(mine)


def meanwhile(
    monkeypatch: pytest.MonkeyPatch, call: str, of: str, does: Callable[[], Any], *, before: bool = False
) -> None:
    """`does` happens once, between the next such call for this key and what is made of its answer; or `before` it."""
    real, done = getattr(FileStore, call), list[str]()

    def then(store: FileStore, key: str, *more: Any) -> Any:
        if key != of or done:
            return real(store, key, *more)
        done.append(key)
        if before:
            does()
        found = real(store, key, *more)
        found = list(found) if call == "list" else found
        if not before:
            does()
        return found

    monkeypatch.setattr(FileStore, call, then)


def test_who_wakes_up_while_it_sends_a_log_cuts_off_nothing_of_whoever_has_the_run_now(team: Team, monkeypatch):
    """A laptop that was closed in the middle of it."""

    def log() -> Path:
        Folder(RUN).make()
        return Folder(RUN).root / "logs" / "node-0.0000.x.log"

    def taken_over() -> None:
        with team.on("b"):
            log().write_text("one two ")
            shared.files.send(RUN)
        with team.on("a"):
            pass

    for call in ("put", "put_if_absent"):
        meanwhile(monkeypatch, call, f"runs/{RUN}/grown/logs/node-0.0000.x.log/{0:015}", taken_over, before=True)
    with team.on("a"):
        log().write_text("one ")
        shared.files.send(RUN)
    with team.on("b"), log().open("a") as file:
        file.write("three")
        file.flush()
        shared.files.send(RUN)
    for machine in "ac":
        with team.on(machine):
            shared.files.bring_grown(RUN)
            assert log().read_text() == "one two three"


@pytest.mark.parametrize("done", [False, True])
def test_what_has_grown_is_sent_once_though_an_answer_is_lost(team: Team, monkeypatch, done: bool):
    real, failed = FileStore.put_if_absent, list[str]()

    def lost(store: FileStore, key: str, data: bytes) -> bool:
        if failed:
            return real(store, key, data)
        failed.append(key)
        if done:
            real(store, key, data)
        raise Unavailable("no answer")

    with team.on("a"):
        Folder(RUN).make()
        (Folder(RUN).root / "logs" / "node-0.0000.x.log").write_text("its words")
        monkeypatch.setattr(FileStore, "put_if_absent", lost)
        shared.files.send(RUN)
    with team.on("b"):
        shared.files.bring_grown(RUN)
        assert (Folder(RUN).root / "logs" / "node-0.0000.x.log").read_text() == "its words"


@pytest.mark.parametrize(("refused_s", "arrives"), [(20.0, True), (3600.0, False)])
def test_a_store_that_refuses_at_once_is_waited_for_until_it_takes_what_has_grown(
    team: Team, monkeypatch, refused_s: float, arrives: bool
):
    """Of the end of a run's log nothing else is sent later."""
    real, clock, asked = FileStore.put_if_absent, Clock(), list[float]()

    def busy(store: FileStore, key: str, data: bytes) -> bool:
        asked.append(clock.now)
        if clock.now < refused_s:
            raise Ambiguous("503 SlowDown")
        return real(store, key, data)

    with team.on("a"), monkeypatch.context() as patched:
        Folder(RUN).make()
        (Folder(RUN).root / "logs" / "node-0.0000.x.log").write_text("its last words")
        patched.setattr(FileStore, "put_if_absent", busy)
        patched.setattr(shared.files, "time", clock)
        patched.setattr(pauses, "time", clock)
        with nullcontext() if arrives else pytest.raises(StackError, match="could not be written"):
            shared.files.send(RUN)
    assert asked[-1] <= Timeouts().store_retry_s
    assert len(asked) < 10, "the pauses grow"
    with team.on("b"):
        shared.files.bring_grown(RUN)
        assert (Folder(RUN).root / "logs" / "node-0.0000.x.log").exists() == arrives


def test_a_store_that_answers_nothing_is_not_waited_for_beyond_its_own_patience(team: Team, monkeypatch):
    """A laptop that is offline when its run ends; all that a client repeats it has repeated by then."""
    clock = Clock()
    with team.on("a"), monkeypatch.context() as patched:
        Folder(RUN).make()
        (Folder(RUN).root / "logs" / "node-0.0000.x.log").write_text("its last words")
        for call in ("put_if_absent", "stat"):
            patched.setattr(FileStore, call, Mock(side_effect=Unavailable("no answer")))
        patched.setattr(shared.files, "time", clock)
        with pytest.raises(StackError, match="could not be written"):
            shared.files.send(RUN)
    assert clock.sleeps == []


@pytest.mark.parametrize("looks", [shared.unsettled, lambda: records.find(RUN)])
def test_a_look_puts_no_old_record_over_that_of_who_supervises_here_since(team: Team, monkeypatch, looks):
    with team.on("a"):
        records.save(run(state=State.PROVISIONING))
    with team.on("b"), ExitStack() as later:

        def begins() -> None:
            token = later.enter_context(supervising(RUN))
            records.save(replace(records.load(RUN), supervisor=token))

        meanwhile(monkeypatch, "read", f"records/{RUN}.json", begins)
        looks()
        mine = records.load(RUN)
        assert mine.supervisor
        mine.step = 6
        records.save(mine)
    with team.on("c"):
        assert records.load(RUN).step == 6


def test_a_look_removes_no_run_that_was_submitted_since(team: Team, monkeypatch):
    with team.on("a"):
        records.save(run("other-1"))
        with team.on("a"):
            meanwhile(monkeypatch, "list", "records/", lambda: records.save(run()))
            shared.pull()
        assert Folder(RUN).record.exists()


INDEX = f"unsettled/{RUN}"


def queued_again() -> None:
    """As `mgpu submit --resume` of another machine does, which sees that the run is over."""
    shared._listed.clear()  # which is another process
    assert records.load(RUN).settled
    records.save(run(state=State.QUEUED))


def settles() -> None:
    there = records.load(RUN)
    there.state, there.teardown = State.FAILED, "confirmed"
    records.save(there)


def found(team: Team) -> list[str]:
    with team.on("c"):
        return [each.run_id for each in records.unsettled()]


def test_a_run_that_is_queued_again_while_another_machine_settles_it_is_found(team: Team, monkeypatch):
    def elsewhere() -> None:
        with team.on("b"):
            queued_again()

    with team.on("a"):
        records.save(run(state=State.TEARDOWN))
        assert found(team) == [RUN]
        with team.on("a"):
            meanwhile(monkeypatch, "delete", INDEX, elsewhere, before=True)
            settles()
    assert found(team) == [RUN]


def test_a_run_that_another_machine_takes_out_of_the_index_before_its_record_is_there_is_found(team, monkeypatch):
    with team.on("a"):
        records.save(run(state=State.TEARDOWN))
        settles()
        assert found(team) == []
    with team.on("b"):
        store = location.current().shared
        assert store is not None
        meanwhile(monkeypatch, "replace", f"records/{RUN}.json", lambda: store.delete(INDEX), before=True)
        queued_again()
    assert found(team) == [RUN]


def test_a_process_that_had_a_run_in_the_index_sees_that_another_has_taken_it_out(team: Team):
    with team.on("b"):
        records.save(run(state=State.TEARDOWN))
        listed = dict(shared._listed)
    with team.on("a"):
        settles()
    with team.on("b"):
        shared._listed.update(listed)
        assert records.load(RUN).settled
        records.save(run(state=State.QUEUED))
    assert found(team) == [RUN]


def test_while_a_copy_is_replaced_nobody_begins(xdg: Path):
    Folder(RUN).make()
    lock = Folder(RUN).lock
    with unheld(lock) as free:
        assert free
        with hold(lock) as token:
            assert not token
    with hold(lock) as token, unheld(lock) as free:
        assert token
        assert not free


def begun_again() -> None:
    """The run is over, and a `launch --resume` of this machine has begun it again."""
    there = records.load(RUN)
    there.state, there.teardown = State.STOPPED, "confirmed"
    records.write(there)
    shared.withdraw_stop(RUN)
    records.write(replace(there, state=State.RUNNING, teardown="none"))


@pytest.mark.parametrize("asks", [shared.ask_to_stop, lambda run_id: Folder(run_id).stop.touch()])
def test_a_stop_of_an_earlier_use_of_the_run_ends_no_later_one(team: Team, asks: Callable[[str], None]):
    """Also one that an earlier mgpu has brought, whose file is empty."""
    with team.on("a"):
        records.save(run(state=State.RUNNING))
        asks(RUN)
    with team.on("b"):
        begun_again()
    with team.on("a"), supervising(RUN) as token:
        assert token
        assert not Folder(RUN).stop.exists()


def test_a_stop_that_did_not_come_into_the_backend_is_sent_by_the_next_supervisor(team: Team, monkeypatch):
    def away(*_: Any) -> None:
        raise Unavailable("no answer")

    with team.on("a"):
        records.save(run(state=State.RUNNING))
        with monkeypatch.context() as patched:
            patched.setattr(FileStore, "put", away)
            with pytest.raises(StackError):
                shared.ask_to_stop(RUN)
        with supervising(RUN):
            assert Folder(RUN).stop.exists()
    with team.on("b"), supervising(RUN):
        assert Folder(RUN).stop.exists()
        begun_again()
    with team.on("a"), supervising(RUN):
        assert not Folder(RUN).stop.exists()


def asked_in_vain(monkeypatch) -> None:
    """The request does not come into the bucket."""
    with monkeypatch.context() as patched:
        patched.setattr(FileStore, "put", Mock(side_effect=Unavailable("no answer")))
        with pytest.raises(StackError) as told:
            shared.ask_to_stop(RUN)
    assert "no other machine knows yet that it is to end" in told.value.what
    assert "no answer" in told.value.why
    assert "next command on this machine" in told.value.next_step


@pytest.mark.parametrize("look", [lambda: shared.pull(fresh=True), shared.unsettled])
def test_a_stop_that_did_not_come_is_sent_by_the_next_look_for_a_supervisor_elsewhere(team: Team, monkeypatch, look):
    with team.on("b"):
        records.save(run(state=State.RUNNING))
    with team.on("a"):
        asked_in_vain(monkeypatch)
    with team.on("b"), supervising(RUN):
        assert not Folder(RUN).stop.exists()
        with team.on("a"):
            with monkeypatch.context() as patched:
                patched.setattr(FileStore, "put", Mock(side_effect=Unavailable("no answer")))
                look()  # and fails not for it
            look()
        with team.on("b"):
            shared._renewals[RUN].look_for_stop()
            assert Folder(RUN).stop.exists()


@pytest.mark.parametrize("submitted_s_later", [-99, 99])
def test_a_stop_that_an_earlier_mgpu_has_left_is_for_runs_that_were_submitted_before(team: Team, submitted_s_later):
    """It has written down nothing of the use of the run that was to end."""
    with team.on("b"):
        records.save(run(state=State.RUNNING, submitted_at=time.time() + submitted_s_later))
    with team.on("a"):
        shared.pull()
        Folder(RUN).stop.write_bytes(b"asked for on this machine\n")
        shared.pull(fresh=True)
        sent = location.current().shared.stat(f"stops/{RUN}") is not None
        assert (sent, Folder(RUN).stop.exists()) == ((submitted_s_later < 0,) * 2)


@pytest.mark.parametrize("over", [{"state": State.FAILED, "ended_at": 9.0}, {"submitted_at": time.time() + 99}])
def test_a_stop_that_comes_too_late_is_not_sent(team: Team, monkeypatch, over: dict[str, Any]):
    with team.on("a"):
        records.save(run(state=State.RUNNING))
        asked_in_vain(monkeypatch)
    with team.on("b"):
        records.write(replace(records.load(RUN), **over))
    with team.on("a"):
        shared.pull()
        with supervising(RUN):
            assert location.current().shared.stat(f"stops/{RUN}") is None
            assert Folder(RUN).stop.exists() is ("ended_at" in over)


def never_came(monkeypatch, *, resumed: bool = False) -> None:
    """A submission whose record does not come into the bucket, and that does not know."""
    monkeypatch.setattr(
        FileStore, "replace" if resumed else "put_if_absent", Mock(side_effect=Unavailable("no answer"))
    )
    with pytest.raises(StackError), records.opening():
        records.save(run(state=State.QUEUED))


@pytest.mark.parametrize("by", ["its age", "the lock of submissions", "its supervisor", "its state"])
def test_a_submission_that_never_came_is_dropped_once_it_is_surely_over(team: Team, monkeypatch, by: str):
    with ExitStack() as busy:
        with monkeypatch.context() as patched, team.on("a"):
            never_came(patched)
        with team.on("a"):
            if by == "its state":
                path = Folder(RUN).record
                path.write_text(path.read_text().replace('"queued"', '"running"'))
            assert [each.run_id for each in records.every(fresh=True)] == [RUN]
            if by != "its age":
                monkeypatch.setattr(shared, "_UNSENT_S", -1.0)
            if by == "the lock of submissions":
                busy.enter_context(records.opening())
            if by == "its supervisor":
                busy.enter_context(hold(Folder(RUN).lock))
            assert [each.run_id for each in records.every(fresh=True)] == [RUN]
            busy.close()
            monkeypatch.setattr(shared, "_UNSENT_S", -1.0)
            assert (records.every(fresh=True) == []) is (by != "its state")


@pytest.mark.parametrize("when", ["before it is looked at", "before it is locked"])
def test_two_commands_may_drop_the_same_submission(team: Team, monkeypatch, when: str):
    monkeypatch.setattr(shared, "_UNSENT_S", -1.0)
    with team.on("a"):
        with monkeypatch.context() as patched:
            never_came(patched)
        name = "_version" if when == "before it is looked at" else "unheld"
        real = getattr(shared, name)

        def other(given: Any) -> Any:
            if given != runs() / ".opening":
                shutil.rmtree(Folder(RUN).root)
                monkeypatch.setattr(shared, name, real)
            return real(given)

        monkeypatch.setattr(shared, name, other)
        assert records.every(fresh=True) == []


def test_a_run_that_another_command_removes_while_records_are_read_is_none(xdg: Path, monkeypatch):
    records.save(run())
    real = records._read

    def removed(path: Path) -> Record:
        shutil.rmtree(path.parent)
        return real(path)

    monkeypatch.setattr(records, "_read", removed)
    assert records.ids() == []


def test_of_a_resumed_run_whose_submission_never_came_the_backend_has_what_was_before(team: Team, monkeypatch):
    with team.on("a"):
        records.save(run(state=State.FAILED, teardown="confirmed"))
        with monkeypatch.context() as patched:
            never_came(patched, resumed=True)
        assert records.load(RUN).state is State.QUEUED
        shared.forget(RUN)
        assert records.find(RUN).state is State.FAILED
