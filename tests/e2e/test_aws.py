"""Provider `aws` as a user meets it, on the fake AWS with machines: real SSH, the real engine, real clocks. Judged by
what AWS would bill, and by what EC2 says of each machine."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key
from fakes.aws.fake import FakeAws
from fakes.aws.operator import Operator, left_behind, operator, why_ended
from waiting import until

from mgpu.iac.engine import install

CANARY = "canary-7be21f"
KINDS = ("billed", "launch templates", "placement groups", "addresses", "schedules")
NOTHING: dict[str, list[str]] = {kind: [] for kind in KINDS}
BY_ITSELF, BY_A_CALL = "Client.InstanceInitiatedShutdown", "Client.UserInitiatedShutdown"
LEASE_S, CAP_S, STALL_S = 12, 75, 10
QUICK = json.dumps({"lease_s": LEASE_S, "lease_renew_s": 2, "stall_s": STALL_S, "heartbeat_s": 1})
I1_S = 60  # beyond the lease
POWER_OFF_S = 20  # beyond the hard cap: the script looks every 5 s


@pytest.fixture(scope="module")
def ready(namespaces: None, require: Any) -> None:
    require("engine", install.find_engine() is not None, "no Pulumi engine; `make setup` installs one")


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def user(ready: None, tmp_path: Path) -> Iterator[Operator]:
    with operator(tmp_path, TOKEN=CANARY) as user:
        yield user


def test_a_run_from_launch_to_nothing_left_with_host_keys_of_the_machines_own(user: Operator):
    user.write(command=["count.py", "60", "0.1"], secrets=["TOKEN"])
    user.aws.enforce()  # nodes may do what their role, and that of their run, allow
    launch = user.start("launch", "--yes", "--json")
    try:
        until(user.trains)
        for node in user.run()["fleet"]["nodes"]:
            first, now = one_use_key(user.aws, node["id"]), shown_key(user.aws, node["address"])
            assert now == node["host_key"] != first, "the one-use key is replaced, and the new one is pinned"
            assert "Host key verification failed" in login(user, node["address"], first)
            assert "Permission denied" in login(user, node["address"], now), "the contrast: it fails for its key alone"
        out, err = launch.communicate(timeout=600)
    finally:
        launch.kill()
    assert launch.returncode == 0, err
    run = json.loads(out)
    assert (run["state"], run["teardown"], run["checkpoint_step"]) == ("succeeded", "confirmed", 60)
    assert left_behind(user.aws) == NOTHING
    assert len(user.aws.bill()) == 2, "what was asked for, and no machine more"
    taken_on = [call.parameters["RoleArn"] for call in user.aws.calls() if call.action == "AssumeRole"]
    assert len(taken_on) >= 2, "each node opens the store with the role of its run"
    assert {arn.partition(":role")[2] for arn in taken_on} == {f"/mgpu/run/mgpu-{run['run_id']}"}
    assert user.aws.client("iam").list_roles(PathPrefix="/mgpu/run/")["Roles"] == []
    assert CANARY not in json.dumps([call.parameters for call in user.aws.calls()])
    assert [path for path in user.root.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()] == []


def user_data(aws: FakeAws, machine: str) -> str:
    """As everybody on the machine, and many in the account, can read it."""
    told = aws.client("ec2").describe_instance_attribute(InstanceId=machine, Attribute="userData")
    return base64.b64decode(told["UserData"]["Value"]).decode()


def one_use_key(aws: FakeAws, machine: str) -> str:
    """The public half of the key in the user data, which holds no other secret."""
    text = user_data(aws, machine)
    assert CANARY not in text
    assert text.count("PRIVATE KEY-----") == 2, "one key: its first and its last line"
    private = re.search(r"-----BEGIN OPENSSH PRIVATE KEY-----.*?-----END OPENSSH PRIVATE KEY-----\n?", text, re.DOTALL)
    assert private
    key = load_ssh_private_key(private[0].rstrip().encode() + b"\n", None).public_key()
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def shown_key(aws: FakeAws, address: str) -> str:
    scan = ["ssh-keyscan", "-t", "ed25519", address]
    lines = subprocess.run([*aws.prefix, *scan], capture_output=True, text=True, timeout=30).stdout.splitlines()
    return next(line for line in lines if not line.startswith("#")).partition(" ")[2]


def login(user: Operator, address: str, host_key: str) -> str:
    """What SSH says to a login without a key, with this host key pinned."""
    known = user.root / "known"
    known.write_text(f"{address} {host_key}\n")
    options = ["BatchMode=yes", f"UserKnownHostsFile={known}", "StrictHostKeyChecking=yes", "IdentitiesOnly=yes"]
    words = ["ssh", "-F", "none", *(word for option in options for word in ("-o", option)), f"ubuntu@{address}", "true"]
    return subprocess.run([*user.aws.prefix, *words], capture_output=True, text=True, timeout=30).stderr


# --- the operator is gone for ever (F49, F51); all stories at once ---------------------------------------------------


RUN_FILES: dict[str, dict[str, Any]] = {
    "never-ends": {"command": ["count.py", "100000", "0.1"], "max_hours": CAP_S / 3600},
    "hangs": {"command": ["hang.py"], "checkpoint": "none"},
    "frozen": {"command": ["count.py", "100000", "0.1"]},
}


class Stories:
    """Each story has a user with an AWS of their own; it is told in a thread, up to the operator's death."""

    def __init__(self, folder: Path, stack: ExitStack, pool: ThreadPoolExecutor) -> None:
        self._folder, self._stack, self._pool = folder, stack, pool
        self._told: dict[str, Future[Operator]] = {}

    def begin(self, name: str, **run_file: Any) -> None:
        self._told[name] = self._pool.submit(self._tell, name, run_file)

    def told(self, name: str) -> Operator:
        return self._told[name].result()

    def _tell(self, name: str, run_file: dict[str, Any]) -> Operator:
        user = self._stack.enter_context(operator(self._folder / name, MGPU_TIMEOUTS=QUICK))
        user.write(**run_file)
        launch = user.start("launch", "--yes")
        try:
            until(user.trains, 120)
        finally:
            launch.kill()
            launch.communicate()
        return user


@pytest.fixture(scope="module")
def stories(ready: None, wanted_stories: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stories]:
    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        stories = Stories(tmp_path_factory.mktemp("gone"), stack, pool)
        for name in wanted_stories:
            stories.begin(name, **RUN_FILES[name])
        yield stories


@pytest.mark.story("hangs")
def test_machines_whose_program_hangs_end_with_their_lease_and_whoever_comes_back_finds_nothing(stories: Stories):
    user = stories.told("hangs")
    until(lambda: not user.aws.alive(), STALL_S + LEASE_S + I1_S, "a machine lives for ever")
    assert why_ended(user.aws) == [BY_ITSELF] * 2
    down = user.mgpu("down", user.run()["run_id"])
    assert down.returncode == 0, down.stderr
    assert left_behind(user.aws) == NOTHING


@pytest.mark.story("frozen")
def test_at_the_hard_cap_ec2_ends_machines_whose_kernels_hang(stories: Stories):
    """F51: nothing in them runs any more, their own clocks neither."""
    user = stories.told("frozen")
    for machine in user.ids:
        user.aws.freeze(machine)
    user.aws.age(0.5 * 3600 - 120)
    assert sorted(user.aws.alive()) == sorted(user.ids), "not before the hard cap"
    user.aws.age(180)
    until(lambda: not user.aws.alive(), I1_S)
    assert why_ended(user.aws) == [BY_A_CALL] * 2
    assert (user.aws.failed_schedules(), left_behind(user.aws)["schedules"]) == ([], [])


@pytest.mark.story("never-ends")
def test_nothing_that_makes_progress_passes_the_hard_cap_by_the_machines_own_clock(stories: Stories):
    user = stories.told("never-ends")
    scheduler = user.aws.client("scheduler")
    for schedule in scheduler.list_schedules()["Schedules"]:
        scheduler.delete_schedule(Name=schedule["Name"])
    until(lambda: not user.aws.alive(), CAP_S + I1_S, "a machine lives for ever")
    assert why_ended(user.aws) == [BY_ITSELF] * 2
    for row in user.aws.bill():
        assert row.ended_at
        assert CAP_S - 2 <= row.ended_at - row.launched_at <= CAP_S + POWER_OFF_S, "it renewed its lease until then"
    steps = [entry["manifest"]["step"] for entry in user.commits() if entry["kind"] == "checkpoint"]
    assert steps == sorted(steps)
    assert steps[-1] >= 100, "what it had saved until then is safe"
