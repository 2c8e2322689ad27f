"""The provider takes a machine, with a warning of many seconds, of few, or of none: F20."""

from __future__ import annotations

import time

import pytest

from mgpu.providers.local import bill, control

EVERY, PAUSE_S = 20, 0.05


def off_beat(line) -> set[int]:
    """Steps that were saved for no other reason than the notice."""
    return {entry["step"] for entry in line.done("saving", attempt=1) if entry["step"] % EVERY}


def recovered(line, node: int, before: tuple[str, ...]) -> None:
    """The run is through, on the machine that stayed and one that replaced the other."""
    ended = line.end()
    assert ended.succeeded, ended
    assert line.fleet.ids[1 - node] == before[1 - node], "the survivor keeps its machine"
    assert line.fleet.ids[node] != before[node]
    assert len(bill.read(line.fleet.provider.root).nodes) == 3, "one machine was replaced, once"
    assert [entry.attempt for entry in line.attempts()] == [1, 2]
    (interruption,) = line.record.interruptions
    assert interruption.fault == "provider"
    assert interruption.nodes == [node]
    line.judge()


def begun(new_line, pause_s=PAUSE_S, *, goes_on=False, **program):
    """Between two saves; without `goes_on` it stands there, however late what comes next is."""
    line = new_line(every=EVERY, pause_s=pause_s, steps=60, times={"stop_grace_s": 10}, **program)
    if not goes_on:
        (line.book / "hold").write_text(str(EVERY + 8))
    line.start()
    line.wait(lambda: line.committed())
    line.wait(lambda: line.done("step", step=EVERY + 8))
    return line, line.fleet.ids


@pytest.mark.drawn("faults x nodes of a fleet")
@pytest.mark.parametrize(("notice_s", "save_s", "node"), [(30, 0, 0), (10, 1.2, 1), (2, 0, 1)])
def test_a_save_that_fits_into_the_notice_loses_no_step(new_line, notice_s, save_s, node):
    line, before = begun(new_line, save_s=save_s)
    goes_at = control.notice(line.fleet.instance(node), notice_s)
    recovered(line, node, before)
    (saved,) = off_beat(line)
    assert [e.step for e in line.committed()][:2] == [EVERY, saved]
    assert line.committed()[1].at < goes_at, "it was safe before the machine went"
    assert line.steps_lost(2) == 0
    assert line.record.interruptions[0].steps_lost == 0


@pytest.mark.drawn("faults x nodes of a fleet")
@pytest.mark.parametrize(("notice_s", "save_s", "node"), [(3, 1.5, 0), (0, 0, 1)])
def test_a_save_that_does_not_fit_is_not_begun(new_line, notice_s, save_s, node):
    line, before = begun(new_line, save_s=save_s)
    told_at = time.time()
    control.notice(line.fleet.instance(node), notice_s)
    recovered(line, node, before)
    assert not off_beat(line)
    assert max(entry["at"] for entry in line.done("step", attempt=1)) < told_at + 2, "the repair did not wait"
    assert 0 < line.steps_lost(2) <= 2 * EVERY


def test_without_any_notice_what_was_not_committed_is_lost_and_told(new_line):
    line, before = begun(new_line, pause_s=2 * PAUSE_S, goes_on=True)
    line.wait(lambda: line.done("step", step=2 * EVERY - 3))
    control.kill(line.fleet.instance(0))
    recovered(line, 0, before)
    assert 0 < line.steps_lost(2) <= 2 * EVERY
