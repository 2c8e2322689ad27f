"""A machine of the provider from its create to its own end: real Linux, real sshd, and it alone ends itself."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.aws import FOREIGN, FakeAws

from mgpu.plan.model import Offer, Requirements
from mgpu.providers.aws.provider import AwsProvider
from mgpu.providers.base import FleetRequest, NodePhase, NodeState, create_token
from mgpu.providers.start import HostKey

REGION = "us-east-1"
LEASE_S = 12
PATIENCE_S = 60.0


@pytest.fixture
def aws(namespaces: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAws]:
    for name in FOREIGN:
        monkeypatch.delenv(name, raising=False)
    with FakeAws.start(tmp_path / "aws", machines=True) as aws:
        aws.quick()  # the machines alone are judged
        here = {**aws.env, "AWS_ENDPOINT_URL": aws.client("ec2").meta.endpoint_url}
        for name, value in here.items():
            monkeypatch.setenv(name, value)
        aws.base(REGION)
        yield aws


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_machine_that_nobody_comes_for_ends_itself_with_its_lease(aws: FakeAws, tmp_path: Path):
    provider, login = AwsProvider(), HostKey.make()
    offer = Offer(
        provider="aws",
        instance_type="g5.xlarge",
        market="spot",
        price_usd_per_hour=1,
        region=REGION,
        zone=f"{REGION}a",
        fetched_at=1,
    )
    request = FleetRequest(
        fleet="demo",
        generation=1,
        owner="me",
        requirements=Requirements(provider="aws", nodes=1, max_price_usd_per_hour=10, max_hours=1),
        ssh_public_key=login.public,
        lease_s=LEASE_S,
        hard_cap_s=3600,
    )
    handle = provider.create(request, offer, create_token("o-1", "demo", 1, offer, 0))
    until(lambda: provider.describe(handle).ready)
    (node,) = provider.describe(handle).nodes
    until(lambda: "in" in ssh(aws, tmp_path, node, login, "sudo -n true && echo in"))
    user, lease = ssh(aws, tmp_path, node, login, "whoami; cat .mgpu/lease").splitlines()
    assert (user, lease.isdecimal()) == ("ubuntu", True)
    until(lambda: aws.alive() == [])
    assert provider.describe(handle).nodes[0].phase is NodePhase.TERMINATED
    assert "itself" in provider.describe(handle).nodes[0].reason


def ssh(aws: FakeAws, folder: Path, node: NodeState, login: HostKey, command: str) -> str:
    """One command, with the host key pinned to what the provider tells; nothing where nobody answers yet."""
    key, known = folder / "login", folder / "known"
    key.write_text(login.private)
    key.chmod(0o600)
    known.write_text(f"{node.address} {node.host_key}\n")
    options = [f"UserKnownHostsFile={known}", "StrictHostKeyChecking=yes", "BatchMode=yes", "ConnectTimeout=3"]
    words = ["ssh", "-F", "none", "-i", str(key), *(w for option in options for w in ("-o", option))]
    target = [f"{node.user}@{node.address}", command]
    done = subprocess.run([*aws.prefix, *words, *target], capture_output=True, text=True, timeout=30)
    assert "REMOTE HOST IDENTIFICATION" not in done.stderr
    assert "Host key verification failed" not in done.stderr
    return done.stdout
