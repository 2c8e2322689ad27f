"""Fleets on the fake AWS, made by plain boto3 and tagged as provider `aws` tags them: for what finds and ends them."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fakes.aws import FakeAws
from mgpu.plan.model import Offer
from mgpu.providers.aws import names
from mgpu.providers.aws.instances.machines import ranks_tag
from mgpu.providers.base import Handle, Intent

HERE = "us-east-1"
KIND = "g5.xlarge"
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFirst"


@dataclass(frozen=True)
class Rented:
    """What one create has made."""

    handle: Handle
    tags: dict[str, str]

    @property
    def ids(self) -> tuple[str, ...]:
        return self.handle.ids

    @property
    def intent(self) -> Intent:
        handle = self.handle
        offer = Offer(
            provider="aws", instance_type=KIND, market="on-demand", price_usd_per_hour=1, region=handle.region,
            fetched_at=0,
        )  # fmt: skip
        owner = self.tags[names.OWNER]
        return Intent(fleet=handle.fleet, generation=handle.generation, owner=owner, token=handle.token, offer=offer)


def rent(
    aws: FakeAws,
    nodes: int = 2,
    *,
    token: str = "token-1",  # noqa: S107  an idempotency token
    region: str = HERE,
    fleet: str = "demo",
    owner: str = "o-1",
    generation: int = 1,
    ranks: Iterable[int] | None = None,
    ranked: bool = True,
    template: bool = True,
    **more: str,
) -> Rented:
    """Machines of one create, which run. `ranks` are those that were asked for; not `ranked`: the create died before it
    tagged its machines with theirs. `more`: other tags of theirs."""
    asked = list(range(nodes) if ranks is None else ranks)
    tags = {
        names.OWNER: owner, names.FLEET: fleet, names.GENERATION: str(generation), names.TOKEN: token,
        names.RANKS: ranks_tag(asked), names.HOST_KEY: HOST_KEY, **more,
    }  # fmt: skip
    ec2 = client(aws, "ec2", region)
    if template:
        ec2.create_launch_template(LaunchTemplateName=names.template(token), LaunchTemplateData={"InstanceType": KIND})
    ids = _run(ec2, nodes, tags)
    for rank, name in zip(asked, ids, strict=True) if ranked else ():
        ec2.create_tags(Resources=[name], Tags=pairs({names.RANK: str(rank)}))
    by_rank = dict(zip(asked, ids, strict=True))
    handle = Handle(
        provider="aws", region=region, fleet=fleet, generation=generation, token=token, made_at=time.time(),
        ids=tuple(by_rank.get(rank, "") for rank in range(max(asked) + 1)),
    )  # fmt: skip
    return Rented(handle, tags)


def _run(ec2: Any, nodes: int, tags: dict[str, str]) -> list[str]:
    specs = [{"ResourceType": kind, "Tags": pairs(tags)} for kind in ("instance", "volume")]
    made = ec2.run_instances(
        ImageId=_image(ec2), InstanceType=KIND, MinCount=nodes, MaxCount=nodes, TagSpecifications=specs
    )
    return sorted(each["InstanceId"] for each in made["Instances"])


_IMAGES: dict[Any, str] = {}


def _image(ec2: Any) -> str:
    """A machine image of that client's region; the fake has the same ones after a reset."""
    if ec2 not in _IMAGES:
        _IMAGES[ec2] = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    return _IMAGES[ec2]


def address(aws: FakeAws, rented: Rented, machine: str = "") -> str:
    """An Elastic IP of that create, with this machine."""
    ec2 = client(aws, "ec2", rented.handle.region)
    spec = [{"ResourceType": "elastic-ip", "Tags": pairs(rented.tags)}]
    name = ec2.allocate_address(Domain="vpc", TagSpecifications=spec)["AllocationId"]
    if machine:
        ec2.associate_address(AllocationId=name, InstanceId=machine)
    return name


def disk(aws: FakeAws, rented: Rented) -> str:
    """A disk of that create that no machine has."""
    ec2 = client(aws, "ec2", rented.handle.region)
    zone = ec2.describe_availability_zones()["AvailabilityZones"][0]["ZoneName"]
    spec = [{"ResourceType": "volume", "Tags": pairs(rented.tags)}]
    return ec2.create_volume(AvailabilityZone=zone, Size=10, TagSpecifications=spec)["VolumeId"]


def templates(aws: FakeAws, region: str = HERE) -> set[str]:
    """Names of all launch templates."""
    return {
        each["LaunchTemplateName"] for each in client(aws, "ec2", region).describe_launch_templates()["LaunchTemplates"]
    }


def schedules(aws: FakeAws, region: str = HERE) -> dict[str, list[str]]:
    """Name of each schedule, and the machines that it ends."""
    scheduler = client(aws, "scheduler", region)
    pages = scheduler.get_paginator("list_schedules").paginate()
    found = [scheduler.get_schedule(Name=each["Name"]) for page in pages for each in page["Schedules"]]
    return {each["Name"]: json.loads(each["Target"]["Input"])["InstanceIds"] for each in found}


def client(aws: FakeAws, service: str = "ec2", region: str = HERE) -> Any:
    """A client of the fake, made once: to make one takes longer than most calls."""
    return _client(aws.endpoint, service, region)


@functools.cache
def _client(endpoint: str, service: str, region: str) -> Any:
    keys = {"aws_access_key_id": "AKIAFAKE", "aws_secret_access_key": "fake"}
    return _session().create_client(service, region, endpoint_url=endpoint, **keys)


@functools.cache
def _session() -> Any:
    from botocore.session import Session

    return Session(session_vars={"profile": (None, None, None, None)})


def reaper(aws: FakeAws, name: str = names.REAPER_ROLE) -> str:
    """The ARN of a role that Scheduler may take on and that may end machines."""
    iam = client(aws, "iam")
    trust = {"Effect": "Allow", "Principal": {"Service": "scheduler.amazonaws.com"}, "Action": "sts:AssumeRole"}
    made = iam.create_role(RoleName=name, AssumeRolePolicyDocument=_document(trust))
    ending = {"Effect": "Allow", "Action": "ec2:TerminateInstances", "Resource": "*"}
    iam.put_role_policy(RoleName=name, PolicyName=name, PolicyDocument=_document(ending))
    return made["Role"]["Arn"]


def _document(statement: dict[str, Any]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


def pairs(tags: dict[str, str]) -> list[dict[str, str]]:
    """Tags as AWS takes them."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]
