"""`make demo-aws`: the main job on AWS, without an account: a fake of its services, with Linux machines behind them.

What a user would type is run as it is (`mgpu bootstrap aws`, `mgpu launch`), in a network that is the fake's own: the
Pulumi engine, SSH, the machines' boot script, their clocks and their metadata service are real. The first zone has no
capacity, and in the middle of the training one machine is taken with the notice that EC2 gives. At the end AWS's own
record of what is billed is read: it has to be empty.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tests"))  # for `fakes`

from fakes.aws import world  # noqa: E402
from fakes.aws.fake import FakeAws  # noqa: E402
from fakes.aws.operator import environment, left_behind  # noqa: E402

import demo  # noqa: E402

if TYPE_CHECKING:
    from mgpu.console import Console
    from mgpu.run.record.record import Record

# the runs of this demo are seen with XDG_STATE_HOME set to this folder; the user's own runs and stacks are elsewhere
STATE = ROOT / ".mgpu" / "demo-aws"
RUN_FILE = ROOT / ".mgpu" / "demo-aws.yaml"
REGION = "us-east-1"
NOTICE_S = 30.0  # EC2 gives two minutes: nobody wants to watch them
STEPS, EVERY = 80, 20
TAKE_AFTER = 40  # the committed step after which a machine is taken,
TAKE_LATE = 10  # and as many steps later: in the middle between two checkpoints


def write_run_file(aws: FakeAws, bucket: str) -> None:
    """The run file of the demo: two spot machines, the bundled trainer, checkpoints in the bucket of `base`."""
    import yaml

    run = {
        "name": "demo-aws",
        "provider": "aws",
        "regions": [REGION],
        "nodes": 2,
        "gpus_per_node": 1,
        "gpu": ["T4"],
        "market": "spot",
        "max_price_usd_per_hour": 2,
        "max_hours": 0.5,
        "train": {"task": "lm", "strategy": "fsdp", "steps": STEPS, "global_batch": 32, "precision": "fp32", "seed": 1},
        "checkpoint": {"to": f"s3://{bucket}/runs", "every_steps": EVERY, "keep_last": 3},
        "recovery": {"attempts": 5, "wait_minutes": 2},
        # the machine image of the fake is this machine: its Python has torch
        "aws": {"endpoint_url": aws.endpoint, "python": sys.executable},
    }
    RUN_FILE.parent.mkdir(exist_ok=True)
    RUN_FILE.write_text(yaml.safe_dump(run, sort_keys=False), encoding="utf-8")


class Shell:
    """Types commands into the fake's network, and shows them."""

    def __init__(self, aws: FakeAws, console: Console) -> None:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        self._env = {**environment(aws), "PATH": path}
        self._prefix, self._console = aws.prefix, console

    def begin(self, *words: str) -> subprocess.Popen[bytes]:
        """Starts a command; its output is this program's."""
        self._console.say(f"$ {' '.join(words)}")
        return subprocess.Popen([*self._prefix, *words], cwd=ROOT, env=self._env)

    def run(self, *words: str) -> None:
        """Runs a command; ends the demo with its exit code if it fails."""
        status = self.begin(*words).wait()
        if status:
            raise SystemExit(status)


class Accident:
    """Has EC2 take the last node of the run, with a notice, in the middle between two checkpoints."""

    def __init__(self, aws: FakeAws, console: Console) -> None:
        self._aws, self._console = aws, console
        self.at: float | None = None  # of the notice, UNIX seconds

    def look(self, record: Record) -> None:
        """Does it once it is time."""
        committed = record.checkpoint_step
        if self.at is None and committed >= TAKE_AFTER and record.step >= committed + TAKE_LATE:
            node = (record.fleet or {})["nodes"][-1]
            self._console.say(f"now EC2 takes node {node['rank']} ({node['id']}), with a notice of {NOTICE_S:.0f} s")
            self.at = time.time()
            self._aws.interrupt(node["id"], NOTICE_S)


def no_capacity_where_it_is_cheapest(aws: FakeAws, console: Console) -> None:
    """The zone that the plan would ask first has nothing."""
    from mgpu.cli.common.agreement import make_plan
    from mgpu.spec.load import load

    zones = aws.client("ec2", REGION).describe_availability_zones()["AvailabilityZones"]
    names = {zone["ZoneId"]: zone["ZoneName"] for zone in zones}
    first = make_plan(load(RUN_FILE)).best.zone or ""
    aws.capacity(0, zone=names.get(first, first))
    console.say(f"the fake has no machines in {names.get(first, first)} ({first}), which is the cheapest zone")


def main() -> int:
    """Runs the demo; the exit code is the run's, or 7 when something is still billed."""
    from mgpu.console import Console

    console = Console()
    if reason := world.missing() or no_sshd():
        console.say(f"this demo cannot run here: {reason}", "red")
        return 3
    began = time.monotonic()
    shutil.rmtree(STATE, ignore_errors=True)  # of an AWS that is no more
    for kind in ("STATE", "CONFIG", "DATA"):
        os.environ[f"XDG_{kind}_HOME"] = str(STATE / kind.lower())
    with tempfile.TemporaryDirectory(prefix="mgpu-demo-aws-") as folder, FakeAws.start(Path(folder), True) as aws:
        aws.pace(emptied_s=0)  # the zone has another machine at once: nobody wants to watch the wait for one
        return run(aws, console, began)


def no_sshd() -> str | None:
    """Why no machine could be logged in to, or None."""
    if shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin"):
        return None
    return "not installed: OpenSSH's server (Debian, Ubuntu: apt install openssh-server)"


def run(aws: FakeAws, console: Console, began: float) -> int:
    """The demo on a fake that stands."""
    from mgpu.cli.common import closing
    from mgpu.providers.aws import names
    from mgpu.run.record.record import load

    shell, accident = Shell(aws, console), Accident(aws, console)
    console.say(f"a fake AWS for the demo: {aws.endpoint}, in a network of its own")
    account = aws.client("sts").get_caller_identity()["Account"]
    write_run_file(aws, names.bucket(account, REGION))
    where = ("--region", REGION, "--endpoint-url", aws.endpoint, "--allow-ssh", f"{world.GATEWAY}/32")
    shell.run("mgpu", "bootstrap", "aws", *where, "--yes")
    no_capacity_where_it_is_cheapest(aws, console)
    launched_at = time.time()
    launch = shell.begin("mgpu", "launch", str(RUN_FILE.relative_to(ROOT)), "--yes")
    while launch.poll() is None:
        time.sleep(0.2)
        if (record := newest(launched_at)) is not None:
            accident.look(record)
    record = load("last")
    if record.checkpoint_id:
        shell.run("mgpu", "checkpoints", "verify", record.run_id)
    left = left_behind(aws)
    rows = [
        *demo.training(record),
        *demo.way_back(record, accident.at, "the notice", {}),
        ("wall time", f"{time.monotonic() - began:.1f} s"),
        ("  by phase, s", closing.phases(record)),
        ("machines asked for", asked(aws)),
        ("AWS's bill", bill(aws)),
        ("  left there", ", ".join(f"{len(names)} {kind}" for kind, names in left.items())),
    ]
    console.table(("mgpu demo-aws", ""), rows)
    alive = aws.alive()
    console.text(f"still billed: {len(alive)}{': ' if alive else ''}{', '.join(alive)}")
    state = f"XDG_STATE_HOME={(STATE / 'state').relative_to(ROOT)}"
    console.next(f". .mgpu/env; {state} mgpu logs {record.run_id}    what the nodes said; the AWS of this demo is gone")
    return launch.returncode or (7 if alive or any(left.values()) else 0)


def newest(since: float) -> Record | None:
    """The record of the run that was begun after `since`, once there is one."""
    from mgpu.errors import MgpuError
    from mgpu.run.record.record import load

    try:
        record = load("last")
    except MgpuError:
        return None
    return record if record.created_at >= since else None


def asked(aws: FakeAws) -> str:
    """Each time that EC2 was asked for machines, and whether it gave them; by its own record."""
    ec2, said = aws.client("ec2", REGION), []
    zones = {subnet["SubnetId"]: subnet["AvailabilityZone"] for subnet in ec2.describe_subnets()["Subnets"]}
    made = json.dumps([group["Instances"] for group in ec2.describe_instances()["Reservations"]], default=str)
    for call in aws.calls("CreateFleet"):
        (pool,) = call.parameters["LaunchTemplateConfigs"][0]["Overrides"]
        count = call.parameters["TargetCapacitySpecification"]["TotalTargetCapacity"]
        given = "granted" if call.parameters["ClientToken"] in made else "no capacity"  # its machines' tag
        said.append(f"{count} x {pool['InstanceType']} in {zones[pool['SubnetId']]}: {given}")
    return ", ".join(said)


def bill(aws: FakeAws) -> str:
    """What AWS's own record says of the machines."""
    rows = [row for row in aws.bill() if row.id.startswith("i-")]
    now = time.time()
    cost = sum(((row.ended_at or now) - row.launched_at) / 3600 * row.usd_per_hour for row in rows)
    zones = ", ".join(sorted({row.zone for row in rows}))
    return f"{len(rows)} machines in {zones}, ${cost:.5f}"


if __name__ == "__main__":
    sys.exit(main())
