"""Whole machines are killed outright, at the worst moments. Bill, store and the ranks' own book are the judges."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_dies_in_the_middle_of_a_save_costs_that_save_and_nothing_more(new_line, node):
    line = new_line(save_s=0.6, every=10, steps=40)
    line.start()
    line.wait(lambda: any(e.manifest.step == 10 for e in line.committed()))
    line.wait(lambda: line.done("saving", step=20, rank=node))
    before = line.fleet.ids
    line.fleet.lose_power(before[node])
    ended = line.end()
    assert ended.succeeded, ended
    after = line.fleet.ids
    assert after[1 - node] == before[1 - node], "the survivor stays"
    assert after[node] != before[node]
    assert {e["step"] for e in line.done("start", attempt=2)} == {10}, "step 20 was never whole"
    assert [e.manifest.step for e in line.committed()] == [10, 20, 30, 40]
    line.judge()
