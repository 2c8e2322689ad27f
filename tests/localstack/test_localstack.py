"""The same code against another imitation of AWS: what holds on one of them alone is that one's, and not AWS's.

LocalStack has its own S3; its EC2 hands out no addresses that lead anywhere, ignores client tokens and tells
one machine of several, and knows no placement groups; there is no ECR.
"""

from __future__ import annotations

import time

import boto3
import pytest
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.store import open_store

from mgpu.errors import CleanupFailed, Transient
from mgpu.plan.model import Offer, Requirements
from mgpu.providers.aws import names
from mgpu.providers.aws.bootstrap import resource
from mgpu.providers.aws.bootstrap.bucket import Bucket, BucketManager
from mgpu.providers.aws.bootstrap.resource import Site
from mgpu.providers.aws.bootstrap.roles import NodeRole, NodeRoleManager, ReaperRole, ReaperRoleManager
from mgpu.providers.aws.bootstrap.security_group import SecurityGroup, SecurityGroupManager
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.provider import AwsProvider
from mgpu.providers.aws.session import Account
from mgpu.providers.base import FleetRequest, Intent, NodePhase, create_token

HERE = "us-east-1"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0000000000000000000000000000000000000000"
THINGS = [
    (BucketManager, Bucket(keep=False)),
    (NodeRoleManager, NodeRole(bucket="mgpu-1", repository="mgpu/trainer")),
    (ReaperRoleManager, ReaperRole()),
    (SecurityGroupManager, SecurityGroup(ssh=("203.0.113.7/32",))),
]
WAIT_S = 30.0
resources = pytest.mark.parametrize(("kind", "asked"), THINGS, ids=lambda each: getattr(each, "__name__", ""))


@pytest.fixture
def site(aws) -> Site:
    return Site(Account(Options.of({}), attempts=1), HERE, WAIT_S)


def made(site, kind, asked):
    """Its manager, what it should be; it is there, and in line."""
    manager = kind(site)
    wanted = manager.complete(asked)
    resource.ensure(manager, wanted)
    return manager, wanted


# --- base -------------------------------------------------------------------------------------------------------------


@resources
def test_a_thing_of_base_is_made_found_and_deleted(site, kind, asked):
    manager, wanted = made(site, kind, asked)
    found = resource.look(manager, wanted)
    assert found is not None
    assert (found.state, found.ours) == (wanted, True)
    assert found.facts.keys() == type(asked).facts.keys()
    for _ in range(2):  # absent is success
        resource.remove(manager, wanted)
        assert resource.look(manager, wanted) is None


def drift_of(site, wanted):
    """What somebody else has changed."""
    s3, iam, ec2 = site.client("s3"), site.client("iam"), site.client("ec2")
    if isinstance(wanted, Bucket):
        s3.put_bucket_versioning(Bucket=wanted.name, VersioningConfiguration={"Status": "Suspended"})
        s3.delete_bucket_policy(Bucket=wanted.name)
        return {"versioned", "guarded"}
    if isinstance(wanted, SecurityGroup):
        group = ec2.describe_security_groups(GroupNames=[wanted.name])["SecurityGroups"][0]["GroupId"]
        world = {"IpProtocol": "tcp", "FromPort": 80, "ToPort": 80, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
        ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[world])
        return {"others"}
    name = names.NODE_ROLE if isinstance(wanted, NodeRole) else names.REAPER_ROLE
    iam.put_role_policy(RoleName=name, PolicyName="more", PolicyDocument=wanted.policy)
    return {"other_policies"}


@resources
def test_drift_is_seen_by_its_property_and_mended(site, kind, asked):
    manager, wanted = made(site, kind, asked)
    try:
        drifted = drift_of(site, wanted)
        found = resource.look(manager, wanted)
        assert found is not None
        assert {
            name for name in type(wanted).model_fields if getattr(found.state, name) != getattr(wanted, name)
        } == drifted
        resource.ensure(manager, wanted)
        found = resource.look(manager, wanted)
        assert found is not None
        assert found.state == wanted
    finally:
        resource.remove(manager, wanted)


def test_runs_write_their_commit_log_into_the_bucket_of_base(site):
    """By conditional writes; a bucket that holds anything is not deleted."""
    manager, wanted = made(site, BucketManager, Bucket(keep=False))
    store = open_store(f"s3://{wanted.name}/runs")
    CommitLog(store, "demo-1").take_over("writer", host="here", pid=1)
    CommitLog(store, "demo-1").begin_attempt(1, "writer")
    assert CommitLog(store, "demo-1").newest_attempt() == 1
    with pytest.raises(CleanupFailed, match="not empty"):
        resource.remove(manager, wanted)
    _empty(site, wanted.name)
    resource.remove(manager, wanted)


def _empty(site, bucket):
    s3 = site.client("s3")
    for each in s3.list_object_versions(Bucket=bucket)["Versions"]:
        s3.delete_object(Bucket=bucket, Key=each["Key"], VersionId=each["VersionId"])


# --- machines ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def stood(site):
    """Base, without bucket and repository: what machines stand on."""
    stands = [made(site, kind, asked) for kind, asked in THINGS[1:]]
    yield site
    for manager, wanted in reversed(stands):
        resource.remove(manager, wanted)


def offer(market):
    return Offer(
        provider="aws", instance_type="g5.xlarge", market=market, price_usd_per_hour=1.25, region=HERE,
        zone="us-east-1a", fetched_at=1,
    )  # fmt: skip


@pytest.mark.parametrize("market", ["spot", "on-demand"])
def test_a_machine_is_made_found_shown_listed_and_ended(stood, market):
    image = boto3.client("ec2").describe_images()["Images"][0]["ImageId"]
    needed = Requirements(
        provider="aws",
        nodes=1,
        max_price_usd_per_hour=9,
        max_hours=1,
        provider_options={"machine_image": image, "network": "plain"},
    )
    request = FleetRequest(
        fleet="demo", generation=1, owner=f"me-{market}", requirements=needed, ssh_public_key=KEY, lease_s=300,
        hard_cap_s=3600,
    )  # fmt: skip
    provider, chosen = AwsProvider(), offer(market)
    token = create_token(request.owner, "demo", 1, chosen, 0)
    handle = provider.create(request, chosen, token)
    intent = Intent(fleet="demo", generation=1, owner=request.owner, token=token, offer=chosen)
    found = provider.find(intent)
    assert found is not None
    assert found.ids == handle.ids
    nodes = provider.describe(handle).nodes
    assert [(node.rank, node.phase) for node in nodes] == [(0, NodePhase.RUNNING)]
    paid = 1.25 if market == "on-demand" else 1e-05  # of spot the price of the moment, as LocalStack has it
    assert all(node.price_usd_per_hour == paid and node.hard_cap_at > time.time() for node in nodes)
    # China's regions are its us-east-1, once more
    assert {each.ids for each in provider.list_owned(request.owner)} == {handle.ids}
    with pytest.raises(Transient, match=r"placement group .*: no good answer"):
        patiently_destroy(provider, handle)
    assert [node.phase for node in provider.describe(handle).nodes] == [NodePhase.TERMINATED]
    assert provider.list_owned(request.owner) == ()
    assert stood.client("scheduler").list_schedules()["Schedules"] == []


def patiently_destroy(provider, handle):
    """As far as it goes: LocalStack has no placement groups, so whether there is one cannot be told."""
    end = time.monotonic() + WAIT_S
    while not provider.destroy(handle):
        assert time.monotonic() < end
        time.sleep(0.1)
