"""The caller of `mgpu reconcile`, where AWS is slower or elsewhere than usual."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError

from mgpu.providers.aws.bootstrap.resource import Found, Site
from mgpu.providers.aws.passes import documents
from mgpu.providers.aws.passes.manager import PassesManager
from mgpu.providers.aws.passes.resource import ROLES, Passes

ACCOUNT = "123456789012"
WANTED = Passes(
    name="mgpu-reconcile-1", image=f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/mgpu/trainer@sha256:1", command="true",
    backend="s3://b/p", buckets=("mine",), key="awskms://1234", subnets=("subnet-1",), security_group="sg-1",
)  # fmt: skip
NO_ROLE: Any = {
    "Error": {
        "Code": "InvalidParameterException",
        "Message": "Unable to assume the service linked role. Please verify that the ECS service linked role exists.",
    }
}


class Ecs:
    """An account's first cluster makes ECS's own role, which ECS does not know at once."""

    def __init__(self, refusals: int) -> None:
        self.left, self.clusters = refusals, list[str]()

    def create_cluster(self, clusterName: str) -> None:  # noqa: N803 - as AWS names it
        if self.left:
            self.left -= 1
            raise ClientError(NO_ROLE, "CreateCluster")
        self.clusters.append(clusterName)


def align(ecs: Ecs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassesManager, "secrets", lambda *_: frozenset())
    monkeypatch.setattr(PassesManager, "_align_role", lambda *_: None)
    account: Any = SimpleNamespace(client=lambda *_: ecs)
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    site = Site(account, "us-east-1", clock=lambda: now[0], sleep=sleep)
    PassesManager(site).align(Found("it", WANTED.model_copy(update={"cluster_there": False}), {}), WANTED)


def test_the_first_cluster_of_an_account_waits_for_the_role_that_it_makes(monkeypatch):
    ecs = Ecs(refusals=3)
    align(ecs, monkeypatch)
    assert ecs.clusters == [WANTED.name]


def test_a_role_that_never_comes_is_told(monkeypatch):
    with pytest.raises(ClientError, match="service linked role"):
        align(Ecs(refusals=1000), monkeypatch)


@pytest.mark.parametrize(
    ("region", "partition"), [("us-east-1", "aws"), ("us-gov-west-1", "aws-us-gov"), ("cn-north-1", "aws-cn")]
)
@pytest.mark.parametrize("which", ROLES)
def test_the_roles_open_nothing_of_another_partition(region, partition, which):
    """IAM takes no document that names one."""
    document = documents.policy(documents.Place(ACCOUNT, region), WANTED, which)
    resources = json.dumps([each["Resource"] for each in document["Statement"]])
    assert resources.count("arn:") == resources.count(f"arn:{partition}:")
    assert len(json.dumps(document, separators=(",", ":"))) < 10240, "characters of all that is in one role"
