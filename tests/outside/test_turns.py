"""A stack whose fleet goes from one provider to another and back, with the real engine: nothing of it is ended."""

from __future__ import annotations

import subprocess

RUN_FILE = """
name: turns
provider: [yard, local]
max_price_usd_per_hour: 1
max_hours: 0.2
launcher: python
command: [train.py]
checkpoint: none
yard: {{endpoint: "{endpoint}", key: OUR_YARD_KEY}}
"""
# by a line of standard input: the provider to be asked, and up to which rank; `end` is the stack's end
DRIVER = """
import json, os, sys
from pathlib import Path
from mgpu_train.timeouts import Timeouts
from mgpu.errors import MgpuError
from mgpu.iac.engine.project import program, settle
from mgpu.iac.engine.stack import Stack

folder = Path.cwd()
settle(project := program(folder))
times, run_file = Timeouts.of_environment(os.environ), folder / "mgpu.yaml"
stack = Stack(project, "turns-1", run_file, log_dir=folder / "log", emit=lambda _: None, timeouts=times)
for line in sys.stdin:
    provider, *rank = line.split()
    try:
        if provider == "end":
            stack.destroy()
            print("ended", flush=True)
            continue
        stack.choose(provider)
        stack.init()
        stack.up(ranked_up_to=json.loads(*rank) if rank else ())
        print("has", stack.outputs().provider, *(node.id for node in stack.outputs().nodes), flush=True)
    except MgpuError as error:
        print("refused", type(error).__name__, flush=True)
"""


def test_a_guard_ends_no_machines_that_its_fleet_has_got_back(beside, cloud):
    (beside.folder / "train.py").write_text("pass\n")
    (beside.folder / "mgpu.yaml").write_text(RUN_FILE.format(endpoint=cloud.endpoint))
    (beside.folder / "driver.py").write_text(DRIVER)
    pipe = subprocess.PIPE
    command = [beside.programs / "python", "driver.py"]
    with subprocess.Popen(command, cwd=beside.folder, stdin=pipe, stdout=pipe, text=True) as driver:

        def told(line: str) -> list[str]:
            assert driver.stdin is not None
            assert driver.stdout is not None
            driver.stdin.write(f"{line}\n")
            driver.stdin.flush()
            return driver.stdout.readline().split()

        try:
            free, cloud.capacity = dict(cloud.capacity), dict.fromkeys(cloud.capacity, 0)
            assert told("yard") == ["refused", "NoOffer"]
            assert told("local [true,0,0.0]") == ["refused", "NoOffer"], "another one's offers are better"
            cloud.capacity = free
            has, provider, machine = told("yard")
            assert (has, provider, cloud.billed) == ("has", "yard", [machine]), "its own guard has ended it"
            cloud.quota = 0
            assert told("local")[:2] == ["has", "local"], "and the other one, whose machines replace it"
            assert cloud.billed == []
            assert told("end") == ["ended"]
        finally:
            driver.kill()
    assert cloud.billed == []
