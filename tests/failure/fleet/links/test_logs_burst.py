"""100 MB of noise through a connection that is cut again and again, and from one supervisor to the next: F39."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 100
HERE = Path(__file__).parent
RUN_FILE = """
name: {name}
provider: local
nodes: 1
market: spot
max_price_usd_per_hour: 1
max_hours: 0.2
launcher: python
command: {command}
checkpoint: none
"""


class Supervisors:
    """Processes that supervise one line, one after another."""

    def __init__(self, line) -> None:
        self.file = line.fleet.folder / "line.json"
        what = {
            "run_id": line.run_id,
            "run_file": (line.fleet.folder / "mgpu.yaml").read_text(),
            "base": str(line.request.base),
            "times": line.deadlines.model_dump(),
            "fleet": line.output.model_dump(mode="json"),
        }
        self.file.write_text(json.dumps(what))

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, HERE / "watcher.py", self.file], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def burst(new_line, new_link):
    line, link = new_line(text=RUN_FILE, command=["burst.py", str(MIB), "7", "BOOK/go"]), new_link()
    shutil.copy(HERE / "burst.py", line.request.base)
    line.fleet.links[0] = link
    return line, link


def test_a_burst_arrives_byte_for_byte_in_bounded_memory_whoever_reads_on(burst):
    line, link = burst
    link.cut_after = 6 << 20  # whatever the machine's speed: as often as every 3 s at 2 MiB/s
    line.start()
    line.wait(lambda: line.copied(0) > 1 << 20)
    line.leave()
    supervisors = Supervisors(line)
    first = supervisors.start()
    line.wait(lambda: line.copied(0) > MIB << 18)
    first.kill()
    first.wait()
    (line.book / "go").touch()
    out, _ = supervisors.start().communicate(timeout=600)
    end = json.loads(out)
    assert end["succeeded"], end
    assert link.seen > MIB // 8, "it was cut"
    assert line.copied(0) > MIB << 20
    assert line.logs_agree(0)
    assert end["most_mib"] - end["before_mib"] < 48, "a bounded piece at a time"
