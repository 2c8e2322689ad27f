"""Which notices are believed, what a save is expected to take, and what follows; with a clock that the test sets."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest
from mgpu_train.agent.attempt.decide import Act, Watched, look
from mgpu_train.agent.attempt.save_budget import FACTOR, MARGIN_S, NOTHING, UNKNOWN_S, Need, going, need
from mgpu_train.agent.machine.lease import Lease
from mgpu_train.agent.machine.notices import BelievedNotice, NoticeFile, Notices
from mgpu_train.agent.status.status import Fault
from mgpu_train.agent.status.tail import Progress
from mgpu_train.timeouts import Timeouts

NOW = 1_767_225_600.0  # 2026-01-01T00:00:00Z
IN_2_MINUTES = b'{"action": "terminate", "time": "2026-01-01T00:02:00Z"}'


class Scripted:
    """A source that gives one answer after the other, and the last one again and again; it may be an exception."""

    def __init__(self, *answers: bytes | None | OSError, hints: tuple[bytes | None, ...] = (None,)) -> None:
        self.answers, self.hints = list(answers), list(hints)

    def hint(self) -> bytes | None:
        return self.hints.pop(0) if len(self.hints) > 1 else self.hints[0]

    def read(self) -> bytes | None:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer


def polled(
    *answers: bytes | None | OSError, clock: Callable[[], float] = lambda: NOW
) -> tuple[list[BelievedNotice], list[str]]:
    """What is believed, and what is said, of these answers; the last one is given three times."""
    said: list[str] = []
    notices = Notices(Scripted(*answers), said.append, clock)
    found = [notices.poll() for _ in range(len(answers) + 2)]
    return [warned for warned in found if warned], said


def at(time: str, action: str = "terminate") -> bytes:
    return json.dumps({"action": action, "time": time}).encode()


def test_a_notice_is_believed_once_a_clock_that_went_ahead_is_set_right():
    """F34"""
    now = iter([NOW + 1200, NOW + 1200, NOW + 5])
    found, said = polled(IN_2_MINUTES, clock=lambda: next(now))
    assert found == [BelievedNotice("terminate", NOW + 120, 115)]
    assert said == ["an interruption notice is not believed: its time is past: 1080 s ago"]


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
@pytest.mark.parametrize("time", ["2026-01-01T00:00:30Z", "2026-01-01T01:00:30+01:00", "2026-01-01t00:00:30.000z"])
def test_a_notice_is_believed_once(action, time):
    assert polled(None, at(time, action)) == ([BelievedNotice(action, NOW + 30, 30)], [])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"7",
        b"[" * 100_000,
        b'{"action": "terminate"}',
        b'{"time": "2026-01-01T00:02:00Z"}',
        b'{"action": "terminate", "time": 1767225720}',
        b'{"action": "terminate", "time": null}',
        b'{"action": "terminate", "time": "soon"}',
        b'{"action": "terminate", "time": "2026-01-01T00:02:00"}',  # of which zone?
        b'{"action": "terminate", "time": "2026-13-01T00:02:00Z"}',
        b'{"action": ["terminate"], "time": "2026-01-01T00:02:00Z"}',
        at("2026-01-01T00:02:00Z", "rebalance-recommendation"),
        at("2026-01-01T00:02:00Z", ""),
        at("2025-12-31T23:59:59Z"),
        at("2026-01-01T00:00:00Z"),
        at("0001-01-01T00:00:00+14:00"),
    ],
)
def test_what_cannot_be_believed_is_said_once_and_changes_nothing(data):
    """F21"""
    found, said = polled(data, None, data, b"", data)
    assert found == []
    assert len([line for line in said if line.startswith("an interruption notice is not believed: ")]) == len(said)
    assert len(said) == len(set(said)) <= 2  # two kinds of doubt at most: this one, and the empty file


def test_a_source_that_fails_is_said_once_and_asked_on():
    """F22"""
    found, said = polled(PermissionError(13, "no"), OSError(5, "broken"), IN_2_MINUTES, PermissionError(13, "no"))
    assert [warned.left_s for warned in found] == [120]
    assert said == ["an interruption notice is not believed: it cannot be read: [Errno 13] no"]


def test_a_notice_that_flaps_stands():
    """F21"""
    assert [warned.at for warned in polled(IN_2_MINUTES, None, b"{", IN_2_MINUTES, None, IN_2_MINUTES)[0]] == [
        NOW + 120
    ]


def test_only_an_earlier_time_replaces_a_notice():
    found, said = polled(IN_2_MINUTES, at("2026-01-01T00:05:00Z"), at("2026-01-01T00:00:10Z", "stop"), IN_2_MINUTES)
    assert found == [BelievedNotice("terminate", NOW + 120, 120), BelievedNotice("stop", NOW + 10, 10)]
    assert said == []


def test_a_notice_whose_time_comes_is_not_doubted_then():
    times = iter([NOW, NOW + 200, NOW + 300, NOW + 400, NOW + 500])
    later = at("2026-01-01T00:02:30Z")  # past by now, and later than what stands
    assert polled(IN_2_MINUTES, later, clock=lambda: next(times)) == ([BelievedNotice("terminate", NOW + 120, 120)], [])


def test_without_a_source_there_is_no_notice():
    notices = Notices(None, pytest.fail)
    assert (notices.poll(), notices.hinted()) == (None, None)


HINT = b'{"noticeTime": "2025-12-31T23:59:00Z"}'


def hinted(*hints: bytes | None) -> tuple[list[float | None], list[str]]:
    said: list[str] = []
    notices = Notices(Scripted(None, hints=hints), said.append)
    return [notices.hinted() for _ in range(len(hints) + 2)], said


def test_a_hint_is_told_once_however_it_flaps():
    """F21"""
    assert hinted(None, HINT, None, HINT, b"{", HINT) == ([None, NOW - 60, *[None] * 6], [])


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"{}", b'{"noticeTime": 7}', b'{"noticeTime": "soon"}', b"[" * 100_000, b"\xff"]
)
def test_a_hint_that_is_malformed_is_said_once_and_changes_nothing(data):
    """F21"""
    found, said = hinted(data, None, data)
    assert found == [None] * 5
    assert len(said) == 1
    assert said[0].startswith("an interruption notice is not believed: a hint is malformed: ")


def test_a_file_is_read_and_nothing_else_is(tmp_path):
    path = tmp_path / "notice.json"
    source = NoticeFile(path)
    assert source.read() is None
    path.write_bytes(IN_2_MINUTES)
    assert source.read() == IN_2_MINUTES
    path.unlink()
    assert source.read() is None
    path.write_bytes(b"x" * 1_000_000)
    assert len(source.read() or b"") < 10_000
    path.unlink()
    os.mkfifo(path)  # to open it would wait for ever
    with pytest.raises(OSError, match="regular"):
        source.read()
    path.unlink()
    path.symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="symbolic"):
        source.read()


# --- what a save takes ------------------------------------------------------------------------------------------------


def test_the_need_is_the_worst_of_late_with_a_margin():
    wanted = need([2.0, 6.0, 1.0], 0.5, 10.0)
    assert wanted == Need(MARGIN_S + FACTOR * 6.5, FACTOR * 10)
    assert need([], 0.5, None) == Need(MARGIN_S + UNKNOWN_S, UNKNOWN_S)
    assert need([], 8.0, 4.0) == Need(MARGIN_S + FACTOR * 8, FACTOR * 4)  # a step alone takes longer
    assert need([1.0], 0.0, 0.0).upload_s == 0  # another node uploads


def test_before_anything_is_known_ten_seconds_are_enough():
    wanted = need([], 0.0, None)
    assert wanted.save_s + wanted.upload_s < 9


@pytest.mark.parametrize(
    ("left_s", "fits"), [(120, True), (30, True), (15, True), (14.9, False), (2, False), (0, False)]
)
def test_a_save_fits_or_it_does_not(left_s, fits):
    """F20"""
    gone = going(Fault.PROVIDER, "gone", now=1000, left_s=left_s, wanted=Need(10, 5), grace_s=60)
    assert gone.fits is fits
    assert (gone.at, gone.save_by) == (1000 + left_s, 995 + left_s)
    assert gone.reason == f"gone in {left_s:.0f} s" + ("" if fits else ", too soon for a save of 15 s")


def test_a_save_that_the_launcher_would_cut_off_does_not_fit():
    assert not going(Fault.PROVIDER, "gone", now=0, left_s=500, wanted=Need(61, 5), grace_s=60).fits


def test_with_nothing_to_save_everything_fits():
    assert going(Fault.PROVIDER, "gone", now=0, left_s=0, wanted=NOTHING, grace_s=60).fits


def test_what_saves_and_steps_take_is_learned_from_the_metrics():
    progress = Progress()
    progress.take({"kind": "start", "t": 100.0})
    for step, t in ((1, 101.0), (2, 104.0), (4, 108.0)):  # a line every other step is not a slow step
        progress.take({"kind": "step", "step": step, "t": t, "loss": 1.0})
    assert progress.step_s == 3.0
    for step, save_s in enumerate((9.0, 1.0, 2.0, 1.0, 3.0, float("nan"), -1.0, 1.0)):
        progress.take({"kind": "checkpoint", "step": step, "t": 109.0, "stall_s": 0.01, "save_s": save_s})
    assert progress.saves.lasted == [1.0, 3.0, 0.01, 0.01, 1.0]  # of late; no word of how long: it was waited for
    progress.take({"kind": "step", "step": 5, "t": "?", "loss": 1.0})
    progress.take({"kind": "step", "step": 6, "t": 200.0, "loss": 1.0})
    assert progress.step_s == 3.0


# --- what is done -----------------------------------------------------------------------------------------------------

TIMES = Timeouts(stop_grace_s=30)
FITS = going(Fault.PROVIDER, "gone", now=100, left_s=20, wanted=Need(10, 5), grace_s=30)
LATE = going(Fault.PROVIDER, "gone", now=100, left_s=12, wanted=Need(10, 5), grace_s=30)


def seen(now: float, **changes) -> Watched:
    return Watched(**{"now": now, **changes})


def test_a_save_that_fits_is_asked_for_until_the_upload_needs_the_rest():
    act, cause = look(seen(100, going=FITS), TIMES)
    assert act is Act.TERMINATE
    assert cause is not None
    assert (cause.fault, cause.outside) == (Fault.PROVIDER, True)
    assert look(seen(114.9, going=FITS, ending=cause), TIMES)[0] is Act.TERMINATE
    assert look(seen(115, going=FITS, ending=cause), TIMES)[0] is Act.KILL


def test_a_save_that_does_not_fit_is_not_begun():
    act, cause = look(seen(100, going=LATE), TIMES)
    assert act is Act.KILL
    assert cause is not None
    assert cause.fault is Fault.PROVIDER


def test_a_stop_under_way_stays_a_stop_and_gets_no_longer_than_the_machine():
    _, stop = look(seen(99, asked=99), TIMES)
    act, cause = look(seen(100, asked=99, going=FITS, ending=stop), TIMES)
    assert (act, cause) == (Act.TERMINATE, stop)
    assert look(seen(115, asked=99, going=FITS, ending=stop), TIMES) == (Act.KILL, stop)


def test_a_long_save_has_its_time_where_the_machine_has_it():
    times, long = Timeouts(stop_grace_s=30), Need(90, 5)
    fits = going(Fault.PROVIDER, "gone", now=100, left_s=110, wanted=long, grace_s=times.grace_s(1e9))
    assert fits.fits
    _, cause = look(seen(100, going=fits, save_s=90), times)
    assert look(seen(189, going=fits, ending=cause), times)[0] is Act.TERMINATE
    assert look(seen(190, going=fits, ending=cause), times)[0] is Act.KILL
    _, stop = look(seen(150, asked=150, save_s=90), times)
    sooner = look(seen(205, asked=150, going=fits, ending=stop), times)
    assert sooner == (Act.KILL, stop), "never past the machine's end, less the upload"


def test_an_earlier_notice_cuts_the_grace():
    _, cause = look(seen(100, going=FITS), TIMES)
    sooner = going(Fault.PROVIDER, "gone", now=101, left_s=4, wanted=Need(10, 5), grace_s=30)
    assert look(seen(101, going=sooner, ending=cause), TIMES) == (Act.KILL, cause)


# --- the lease --------------------------------------------------------------------------------------------------------


def test_what_a_lease_has_left_is_what_stands_in_its_file(tmp_path):
    now = [1000.0]
    path = tmp_path / "lease"
    lease = Lease(path, lease_s=900, renew_s=20, uptime=lambda: now[0])
    assert lease.left_s() is None
    path.write_text("1100\n")  # the operator's
    assert lease.left_s() == 100
    lease.renew()
    now[0] = 1500.0
    assert lease.left_s() == 400
    path.write_text("what?")
    assert lease.left_s() == 400  # what it wrote itself
    assert Lease(None, lease_s=900, renew_s=20).left_s() is None
