"""A machine whose link is down: it runs somewhere, and nobody can tell. F25: no split brain."""

from __future__ import annotations

import time

import pytest
from mgpu_train.agent.host.layout import RunLayout

from mgpu import acquire
from mgpu.providers.local import bill

SILENCE_S, STOPS_S = 3, 5


@pytest.mark.drawn("faults x nodes of a fleet")
@pytest.mark.parametrize("node", [0, 1])
def test_a_frozen_node_counts_as_lost_in_time_and_is_ended_before_it_is_replaced(new_line, node):
    line = new_line(steps=60, times={"silence_s": SILENCE_S})
    line.start()
    line.wait(lambda: line.committed())
    line.wait(lambda: line.done("step", step=15))
    before, frozen_at = line.fleet.ids, time.time()
    line.fleet.freeze(before[node])
    line.wait(lambda: len(line.attempts()) == 2)
    assert not line.fleet.machine(before[node]), "nothing of it runs beside the new attempt"
    ended = line.end()
    assert ended.succeeded, ended
    assert line.fleet.ids[1 - node] == before[1 - node]
    survivor = [e["at"] for e in line.done("step", rank=1 - node, attempt=1)]
    assert max(survivor) - frozen_at < SILENCE_S + STOPS_S
    (second,) = (entry for entry in line.attempts() if entry.attempt == 2)
    assert second.at - frozen_at > SILENCE_S - 1, "a node that is only silent gets its time"
    line.judge()


def test_a_machine_that_wakes_up_beside_its_replacement_commits_nothing(new_line):
    # it is node 0, which commits; its provider says that it stops, and it does not: the fence has to hold alone
    line = new_line(steps=60, save_s=0.5, writers="rank0", times={"silence_s": SILENCE_S})
    line.fleet.abandon = True
    line.start()
    line.wait(lambda: line.done("saving", step=20, rank=0))
    old = line.fleet.handle
    line.fleet.freeze(old.ids[0])
    line.wait(lambda: line.done("start", attempt=2))
    line.fleet.wake(old.ids[0])
    woken_at = time.time()
    log = line.fleet.provider.root / "nodes" / old.ids[0] / "home" / str(RunLayout(line.run_id).log)
    line.wait(lambda: "checkpoint step-20: uploaded" in log.read_text(), 20)
    ended = line.end()
    assert ended.succeeded, ended
    assert "attempt 1 is over" in log.read_text(), "it tried"
    begun = next(entry.seq for entry in line.attempts() if entry.attempt == 2)
    assert not [e for e in line.committed() if e.attempt == 1 and e.seq > begun]
    assert line.committed()[-1].at > woken_at, "both were there"
    acquire.destroy(line.fleet.provider, old, timeouts=line.deadlines, nodes=(old.ids[0],))
    assert len(bill.read(line.fleet.provider.root).alive) == 2
