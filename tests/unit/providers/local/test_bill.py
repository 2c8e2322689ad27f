"""The bill of provider `local`: what it says of processes that are alive, dead, and of another boot."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mgpu.providers.local import bill, procs


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    child = subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"]})
    yield child
    child.kill()
    child.wait()


def start(process: procs.Process | None, instance: str = "0123456789-0", at: float = 1000.0, **changes) -> bill.Start:
    process = process or procs.Process(2**22 + 1, 1, procs.boot_id())
    fields = {
        "at": at,
        "instance": instance,
        "fleet": "demo",
        "generation": 1,
        "owner": "o-1",
        "pid": process.pid,
        "start_ticks": process.start_ticks,
        "boot_id": process.boot_id,
        "price_usd_per_hour": 0.5,
        "market": "spot",
    }
    return bill.Start(**{**fields, **changes})


def test_no_file_is_an_empty_bill(tmp_path: Path):
    assert bill.read(tmp_path) == bill.Bill(())
    assert bill.read(tmp_path).usd_per_hour == 0


def test_a_living_keeper_is_billed_until_now(tmp_path: Path, sleeper: subprocess.Popen):
    bill.write_start(tmp_path, start(procs.of(sleeper.pid), at=time.time() - 3600))
    (node,) = bill.read(tmp_path).alive
    assert node.start.instance == "0123456789-0"
    assert bill.read(tmp_path).usd_per_hour == 0.5
    assert bill.read(tmp_path).of("demo").cost_usd == pytest.approx(0.5, rel=1e-3)
    other = bill.read(tmp_path).of("other")
    assert (other.cost_usd, other.alive) == (0, ()), "a demo does not take another run's machine for its own"


def test_a_stop_line_is_not_believed_while_the_keeper_lives(tmp_path: Path, sleeper: subprocess.Popen):
    bill.write_start(tmp_path, start(procs.of(sleeper.pid)))
    bill.write_stop(tmp_path, "0123456789-0", "destroyed")
    assert len(bill.read(tmp_path).alive) == 1


def test_a_process_that_carries_the_mark_is_billed_though_the_keeper_is_dead(tmp_path: Path):
    bill.write_start(tmp_path, start(None, instance="fedcba9876-3"))
    bill.write_stop(tmp_path, "fedcba9876-3", "destroyed")
    assert bill.read(tmp_path).alive == ()
    child = subprocess.Popen(["sleep", "60"], env={procs.MARK: "fedcba9876-3", "PATH": os.environ["PATH"]})
    try:
        assert [node.start.instance for node in bill.read(tmp_path).alive] == ["fedcba9876-3"]
    finally:
        child.kill()
        child.wait()
    assert bill.read(tmp_path).alive == ()


@pytest.mark.parametrize("changes", [{"start_ticks": 1}, {"boot_id": "another boot"}])
def test_a_pid_that_was_reused_is_not_the_keeper(tmp_path: Path, sleeper: subprocess.Popen, changes: dict):
    bill.write_start(tmp_path, start(procs.of(sleeper.pid), **changes))
    assert bill.read(tmp_path).alive == ()


def test_a_zombie_has_ended(tmp_path: Path):
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    bill.write_start(tmp_path, start(procs.of(child.pid)))
    assert bill.read(tmp_path).alive == ()
    child.wait()


def test_a_stopped_node_costs_from_start_to_stop_and_the_first_stop_counts(tmp_path: Path):
    bill.write_start(tmp_path, start(None, at=1000.0))
    bill.write_stop(tmp_path, "0123456789-0", "destroyed", at=1000.0 + 1800)
    bill.write_stop(tmp_path, "0123456789-0", "seen once more", at=1000.0 + 7200)
    assert bill.read(tmp_path).of("demo").cost_usd == pytest.approx(0.25)


def test_without_a_stop_line_the_last_sign_of_life_counts(tmp_path: Path):
    bill.write_start(tmp_path, start(None, at=1000.0))
    assert bill.read(tmp_path).of("demo").cost_usd == 0
    beat = bill.heartbeat(tmp_path, "0123456789-0")
    beat.parent.mkdir(parents=True)
    beat.touch()
    os.utime(beat, (1000.0 + 3600, 1000.0 + 3600))
    assert bill.read(tmp_path).of("demo").cost_usd == pytest.approx(0.5)


def test_a_torn_line_hides_no_other(tmp_path: Path):
    bill.write_start(tmp_path, start(None))
    with (tmp_path / bill.FILE).open("a") as file:
        file.write('{"kind":"start","at":1,"inst\n')
    bill.write_start(tmp_path, start(None, instance="0123456789-1"))
    assert [node.start.instance for node in bill.read(tmp_path).nodes] == ["0123456789-0", "0123456789-1"]


def test_a_line_that_a_full_disk_cuts_off_is_an_error_and_spoils_no_other(tmp_path: Path):
    """A node process whose start line is not there has to end: nobody would ever be charged for what it runs."""
    bill.write_start(tmp_path, start(None))
    whole = (tmp_path / bill.FILE).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (whole + 20, hard))
    try:
        with pytest.raises(OSError, match="the line was cut off"):
            bill.write_start(tmp_path, start(None, "1111111111-0"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / bill.FILE).stat().st_size == whole + 20
    bill.write_start(tmp_path, start(None, "2222222222-0"))
    assert [node.start.instance for node in bill.read(tmp_path).nodes] == ["0123456789-0", "2222222222-0"]


def test_the_lines_are_as_documented(tmp_path: Path):
    bill.write_start(tmp_path, start(None))
    bill.write_stop(tmp_path, "0123456789-0", "destroyed")
    first, second = (json.loads(line) for line in (tmp_path / bill.FILE).read_text().splitlines())
    assert (first["kind"], second["kind"]) == ("start", "stop")
    page = (Path(__file__).parents[4] / "docs" / "formats.md").read_text().partition("## Bill")[2]
    for key in (*first, *second):
        assert f"`{key}`" in page, f"docs/formats.md does not mention {key}"
