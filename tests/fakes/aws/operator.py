"""A user of the fake AWS with machines: a folder made by `mgpu init`, and commands typed in the fake's network.

Nothing of it is in this process's own environment, so that many may live at once, beside each other and on one fake.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fakes.aws.fake import FOREIGN, HOME_REGION, FakeAws
from fakes.command import FORKS

MGPU = str(Path(sys.executable).with_name("mgpu"))
BUCKET = "mgpu-of-this-test"
# the user's own way to the engine; `program` of `start` and of `mgpu`
PULUMI = ("/bin/sh", "-c", '. .mgpu/env && exec pulumi "$@" --non-interactive', "sh")
PROGRAMS = Path(__file__).parents[2] / "programs"
_KINDS = ("state", "config", "data")
_AMBIENT = ("PULUMI_", "AWS_", "MGPU_")
Done = subprocess.CompletedProcess[str]


def environment(aws: FakeAws) -> dict[str, str]:
    """This process's, but that AWS means the fake alone."""
    return {name: value for name, value in os.environ.items() if name not in FOREIGN} | aws.env


class Operator:
    """One user with a project of their own under `root`; `variables` are in the environment of all their commands."""

    def __init__(self, aws: FakeAws, root: Path, **variables: str) -> None:
        """Raises subprocess.CalledProcessError: `mgpu init` has failed."""
        self.aws, self.root, self.folder = aws, root, root / "mine"
        kept = {name: value for name, value in environment(aws).items() if not name.startswith(_AMBIENT)}
        folders = {f"XDG_{kind.upper()}_HOME": str(root / kind) for kind in _KINDS}
        soon = {"MGPU_TIMEOUTS": json.dumps({"sold_out_s": 2})}  # the fake's clock runs faster than the wall's
        self.env = {**kept, **aws.env, **folders, "TMPDIR": str(root / "tmp"), **soon, **variables}
        for folder in (self.folder, root / "tmp"):
            folder.mkdir(parents=True)
        self.mgpu("init").check_returncode()
        for program in ("count.py", "hang.py"):
            shutil.copy(PROGRAMS / program, self.folder)

    @property
    def state(self) -> Path:
        """The folder of all that mgpu remembers of this user."""
        return self.root / "state" / "mgpu"

    def write(self, **run_file: Any) -> None:
        """The run file: two quick spot nodes without torch, but for what is given; None leaves a key out."""
        keys = {
            "name": "w",
            "provider": "aws",
            "regions": [HOME_REGION],
            "nodes": 2,
            "gpus_per_node": 1,
            "gpu": ["T4"],
            "market": "spot",
            "max_price_usd_per_hour": 2,
            "max_hours": 0.5,
            "launcher": "python",
            "command": ["count.py", "20", "0.05"],
            "checkpoint": {"to": f"s3://{BUCKET}/runs", "every_steps": 10},
            "aws": {"endpoint_url": self.aws.endpoint, "python": sys.executable},  # the machines see this interpreter
            **run_file,
        }
        (self.folder / "mgpu.yaml").write_text(
            "".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items() if value is not None)
        )

    @property
    def processes(self) -> dict[int, str]:
        """Every living process that one of this user's commands has begun, and its command line."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.fsencode(f"TMPDIR={self.root}/") in (folder / "environ").read_bytes():
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found |= {int(folder.name): line} if line else {}
        return found

    @property
    def ids(self) -> list[str]:
        """The machines of the newest run, by rank."""
        return [node["id"] for node in (self.run().get("fleet") or {}).get("nodes", ())]

    def trains(self) -> bool:
        """Whether the newest run's program runs, on every node, and has been seen to."""
        run = self.run()
        return bool(run) and run.get("node_phases") == ["training"] * run["nodes"]

    def start(self, *words: str, program: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """Begins `mgpu`, or another program, with these arguments."""
        return subprocess.Popen(
            [*self.aws.prefix, *(program or FORKS.behind(MGPU)), *words],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def mgpu(self, *words: str, seconds: float = 180, program: tuple[str, ...] = ()) -> Done:
        """`mgpu`, or another program, with these arguments, to its end. Raises subprocess.TimeoutExpired."""
        process = self.start(*words, program=program)
        try:
            out, err = process.communicate(timeout=seconds)
        finally:
            process.kill()
        return Done(words, process.returncode, out, err)

    def run(self) -> dict[str, Any]:
        """The newest record; empty: there is none."""
        records = [json.loads(path.read_text()) for path in (self.state / "runs").glob("[!.]*/record.json")]
        return max(records, key=lambda record: record["created_at"], default={})

    def commits(self) -> list[dict[str, Any]]:
        """The entries of the newest run's commit log, in order."""
        s3, prefix = self.aws.client("s3"), f"runs/{self.run()['run_id']}/commits/"
        keys = [each["Key"] for each in s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())]
        return [json.loads(s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()) for key in sorted(keys)]


@contextmanager
def operator(folder: Path, *, engines: bool = False, **variables: str) -> Iterator[Operator]:
    """A user with an AWS of their own, which has a base and a bucket; both go with it. `engines`: see FakeAws."""
    with FakeAws.start(folder / "aws", machines=True, engines=engines) as aws:
        aws.base()
        aws.client("s3").create_bucket(Bucket=BUCKET)
        yield Operator(aws, folder / "user", **variables)


def why_ended(aws: FakeAws, region: str = HOME_REGION) -> list[str]:
    """EC2's codes for the ends of all machines, in no order; an empty one for a machine that has not ended."""
    pages = aws.client("ec2", region).get_paginator("describe_instances").paginate()
    shown = [each for page in pages for group in page["Reservations"] for each in group["Instances"]]
    return [machine.get("StateReason", {}).get("Code", "") for machine in shown]


def left_behind(aws: FakeAws, region: str = HOME_REGION) -> dict[str, list[str]]:
    """What fleets have left in a region, by kind; empty is as it should be. By the fake's own word."""
    ec2, kinds = aws.client("ec2", region), ("launch templates", "placement groups", "addresses", "schedules")
    templates = [each["LaunchTemplateName"] for each in ec2.describe_launch_templates()["LaunchTemplates"]]
    groups = [each["GroupName"] for each in ec2.describe_placement_groups()["PlacementGroups"]]
    addresses = [each["AllocationId"] for each in ec2.describe_addresses()["Addresses"]]
    schedules = [each["Name"] for each in aws.client("scheduler", region).list_schedules()["Schedules"]]
    found: Mapping[str, list[str]] = dict(zip(kinds, (templates, groups, addresses, schedules), strict=True))
    return {"billed": aws.alive(), **found}
