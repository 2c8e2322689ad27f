"""Whole machines are killed outright, at the worst moments. Bill, store and the ranks' own book are the judges."""

from __future__ import annotations

import time

import pytest
from mgpu_train.agent.status.status import Fault

from mgpu.providers.local import bill, control


@pytest.mark.drawn("faults x nodes of a fleet")
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_dies_in_the_middle_of_a_save_costs_that_save_and_nothing_more(new_line, node):
    line = new_line(save_s=0.6, every=10, steps=40)
    line.start()
    line.wait(lambda: any(e.step == 10 for e in line.committed()))
    line.wait(lambda: line.done("saving", step=20, rank=node))
    before = line.fleet.ids
    line.fleet.lose_power(before[node])
    ended = line.end()
    assert ended.succeeded, ended
    after = line.fleet.ids
    assert after[1 - node] == before[1 - node], "the survivor stays"
    assert after[node] != before[node]
    assert {e["step"] for e in line.done("start", attempt=2)} == {10}, "step 20 was never whole"
    assert [e.step for e in line.committed()] == [10, 20, 30, 40]
    line.judge()


@pytest.mark.drawn("faults x nodes of a fleet")
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_dies_when_all_is_saved_leaves_nothing_to_do_again(new_line, node):
    line = new_line(steps=20, every=10, linger_s=20)
    line.start()
    line.wait(lambda: any(e.step == 20 for e in line.committed()))
    control.kill(line.fleet.instance(node))
    ended = line.end()
    assert ended.succeeded, ended
    assert [entry.attempt for entry in line.attempts()] == [1, 2]
    assert {e["step"] for e in line.done("start", attempt=2)} == {20}
    assert not line.done("step", attempt=2)
    line.judge()


@pytest.mark.parametrize("times", [2, 100])
def test_interrupted_again_in_every_restore_it_goes_on_or_gives_up_and_says_whose_fault_it_is(new_line, times):
    line = new_line(steps=40, every=10, attempts=10)
    line.start()
    line.wait(lambda: line.committed())
    control.kill(line.fleet.instance(1))
    killed = kill_in_restore(line, times)
    ended = line.end()
    if times == 2:
        assert ended.succeeded, ended
        assert [entry.attempt for entry in line.attempts()] == [1, 2, 3, 4]
    else:
        assert killed == 3
        assert not ended.succeeded
        assert "3 attempts in a row without progress" in ended.reason
        assert ended.fault is Fault.PROVIDER
    line.judge()
    line.fleet.end()
    assert not bill.read(line.fleet.provider.root).alive


def kill_in_restore(line, times: int) -> int:
    """Kills the machine of node 1 whenever a new one has its agent, so many times; returns how often it came to it."""
    known = {line.fleet.ids[1]}
    while line.going and len(known) <= times:
        name = line.fleet.ids[1]
        if name not in known and line.fleet.agent(name):
            control.kill(line.fleet.instance(1))
            known.add(name)
        time.sleep(0.02)
    return len(known) - 1


def test_a_machine_that_dies_before_anything_has_begun_on_it_is_replaced(new_line):
    line = new_line(steps=20, times={"connect_s": 3})
    line.output = line.fleet.rent()
    control.kill(line.fleet.instance(1))
    line.start()
    ended = line.end()
    assert ended.succeeded, ended
    assert len(bill.read(line.fleet.provider.root).nodes) == 3
    line.judge()
