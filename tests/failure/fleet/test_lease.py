"""A node that cannot renew its lease saves what it can and goes when the lease says so: F50."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.machine import procs
from waiting import until

from mgpu.providers.local import bill

LEASE_S = 600  # nothing ends by it but where the test says so, also on a busy machine
LEFT_S = 11  # with so little left the agent takes it for a notice: what it gives a first save, and 5 s


@pytest.mark.drawn("faults x nodes of a fleet")
@pytest.mark.parametrize("node", [0, 1])
def test_a_lease_that_cannot_be_renewed_ends_in_a_save_and_a_machine_that_goes_by_itself(new_line, node):
    line = new_line(steps=2000, every=1000, attempts=1, times={"lease_s": LEASE_S})
    line.start()
    line.wait(lambda: line.done("step", step=20), 120)
    home = line.fleet.provider.root / "nodes" / line.fleet.ids[node] / "home"
    lease, log = home / ".mgpu/lease", home / RunLayout(line.run_id).log
    (agent,) = agents(line, node)
    until(lambda: blocked(lease.with_name(f"lease.{agent}")))
    ends_in(lease, LEFT_S)
    until(lambda: b"ends this machine" in log.read_bytes(), why=log.read_text)
    ends_in(lease, LEASE_S)  # no clock ends the machine between its last save and the commit
    ended = line.end()
    assert not ended.succeeded
    assert "lease" in ended.reason
    (saved,) = {e["step"] for e in line.done("saved")}
    assert [e.step for e in line.committed()] == [saved], "a last save, and it is safe"
    last = max(e["step"] for e in line.done("step"))
    assert last == saved, "no step is lost"
    assert alive(line, node), "nobody but its lease has ended it"
    ended_at = time.time()
    ends_in(lease, 0)
    until(lambda: not alive(line, node))
    assert gone_at(line, node) >= ended_at
    line.judge()


def agents(line, node: int) -> list[int]:
    """The processes that renew a node's lease."""
    found = [process.pid for process in line.fleet.machine(line.fleet.ids[node])]
    return [pid for pid in found if " agent start " in procs.command_line(pid)]


def blocked(aside: Path) -> bool:
    """Whether the file that a new lease is written to is a folder from now on."""
    try:
        aside.mkdir()
    except FileExistsError:  # the agent writes it just now
        return False
    return True


def ends_in(lease: Path, seconds: float) -> None:
    fresh = lease.with_name("lease.test")
    fresh.write_text(f"{int(procs.uptime_s() + seconds)}\n")
    fresh.replace(lease)


def alive(line, node: int) -> bool:
    return any(n.start.instance == line.fleet.ids[node] for n in bill.read(line.fleet.provider.root).alive)


def gone_at(line, node: int) -> float:
    nodes = bill.read(line.fleet.provider.root).nodes
    return next(n.end_at for n in nodes if n.start.instance == line.fleet.ids[node])
