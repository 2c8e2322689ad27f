"""moto and machines together: what EC2 is asked for is a Linux machine, and what becomes of it EC2 says."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.aws import FakeAws
from fakes.aws.leftovers import held, mounts_below, processes_of
from fakes.aws.visitor import Node, Visitor
from waiting import until


@pytest.fixture
def aws(namespaces: None, tmp_path: Path) -> Iterator[FakeAws]:
    with FakeAws.start(tmp_path / "aws", machines=True) as aws:
        aws.quick()  # single calls are judged
        yield aws


def rented(aws: FakeAws, visitor: Visitor) -> Node:
    """A machine by boto3, from the request to the facts that EC2 gives of it."""
    ec2 = aws.client("ec2")
    launched = ec2.run_instances(
        ImageId=aws.image(),
        InstanceType="g4dn.xlarge",
        MinCount=1,
        MaxCount=1,
        UserData=visitor.letting_in,
        InstanceInitiatedShutdownBehavior="terminate",
    )
    facts = ec2.describe_instances(InstanceIds=[launched["Instances"][0]["InstanceId"]])["Reservations"][0][
        "Instances"
    ][0]
    return Node(
        visitor,
        {
            "id": facts["InstanceId"],
            "private_address": facts["PrivateIpAddress"],
            "public_address": facts.get("PublicIpAddress"),
            "zone": facts["Placement"]["AvailabilityZone"],
        },
    )


def state(aws: FakeAws, node: Node) -> str:
    found = aws.client("ec2").describe_instances(InstanceIds=[node.id])["Reservations"][0]["Instances"][0]
    return found["State"]["Name"]


def test_from_run_instances_to_terminated(aws, tmp_path):
    """The chain: EC2's request, a machine with that identity, whose power-off EC2 and the bill see."""
    visitor = Visitor(aws.pid, tmp_path)
    nodes = [rented(aws, visitor), rented(aws, visitor)]
    for node in nodes:
        identity = json.loads("".join(node.metadata("dynamic/instance-identity/document")))
        assert (identity["instanceId"], identity["availabilityZone"]) == (node.id, node.zone)
    until(lambda: state(aws, nodes[0]) == "running")
    nodes[0].ssh("sudo sh -c 'sleep 0.2; poweroff' >/dev/null 2>&1 &")
    until(lambda: state(aws, nodes[0]) == "terminated")
    assert nodes[0].id not in aws.alive()
    assert nodes[1].run("hostname")
    aws.client("ec2").terminate_instances(InstanceIds=[nodes[1].id])
    until(lambda: state(aws, nodes[1]) == "terminated")
    with pytest.raises(ConnectionError):
        nodes[1].run("true", seconds=0)


def test_a_killed_fake_leaves_no_machine(aws, tmp_path):
    node = rented(aws, Visitor(aws.pid, tmp_path))
    init = node.run("sudo", "readlink", "/proc/1/ns/pid")
    with held(init):
        os.kill(aws.pid, signal.SIGKILL)
        until(lambda: not processes_of(init))
    until(lambda: not mounts_below(tmp_path))


def test_troubles_of_one_machine(aws, tmp_path):
    """Its metadata service fails, its wire is cut, its kernel hangs: EC2 says that it runs, and ends it, too."""
    node = rented(aws, Visitor(aws.pid, tmp_path))
    node.run("true")
    aws.metadata(node.id, "500")
    assert node.metadata("meta-data/instance-id") == ["500"]
    aws.metadata(node.id, None)
    aws.interrupt(node.id, 600)
    assert json.loads(node.metadata("meta-data/spot/instance-action")[0])["action"] == "terminate"
    aws.cut(node.id)
    with pytest.raises(ConnectionError):
        node.run("true", seconds=0)
    aws.mend(node.id)
    assert node.run("hostname")
    aws.freeze(node.id)
    with pytest.raises(ConnectionError):
        node.run("true", seconds=0)
    assert state(aws, node) == "running"
    aws.kill(node.id)
    until(lambda: state(aws, node) == "terminated")
