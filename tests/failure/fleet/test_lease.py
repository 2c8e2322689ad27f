"""A node that cannot renew its lease saves what it can and goes when the lease says so: F50."""

from __future__ import annotations

import time

import pytest

from mgpu.providers.local import bill

LEASE_S = 30  # nodes have to be at work by then, also on a busy machine


@pytest.mark.drawn("faults x nodes of a fleet")
@pytest.mark.parametrize("node", [0, 1])
def test_a_lease_that_cannot_be_renewed_ends_in_a_save_and_a_machine_that_goes_by_itself(new_line, node):
    line = new_line(steps=2000, every=1000, attempts=1, times={"lease_s": LEASE_S})
    line.start()
    line.wait(lambda: line.done("step", step=20))
    home = line.fleet.provider.root / "nodes" / line.fleet.ids[node] / "home"
    blocked_at = time.time()
    lease = home / ".mgpu/lease"
    lease.unlink()
    lease.mkdir()
    ended = line.end()
    assert not ended.succeeded
    assert "lease" in ended.reason
    (saved,) = {e["step"] for e in line.done("saved")}
    assert [e.step for e in line.committed()] == [saved], "a last save, and it is safe"
    last = max(e["step"] for e in line.done("step"))
    assert last == saved, "no step is lost"
    assert time.time() - blocked_at < LEASE_S + 5
    line.wait(lambda: not alive(line, node), LEASE_S + 15)
    assert gone_at(line, node) - blocked_at < LEASE_S + 4
    line.judge()


def alive(line, node: int) -> bool:
    return any(n.start.instance == line.fleet.ids[node] for n in bill.read(line.fleet.provider.root).alive)


def gone_at(line, node: int) -> float:
    nodes = bill.read(line.fleet.provider.root).nodes
    return next(n.end_at for n in nodes if n.start.instance == line.fleet.ids[node])
