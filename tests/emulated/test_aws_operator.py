"""The operator's policies allow what mgpu calls in its whole life, and nothing else; who has no more than they allow
gets through, and who lacks one action is told which."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import pytest
from fakes import awslife
from fakes.aws import FakeAws
from fakes.aws.fake import Called
from fakes.awslife import ACCOUNT, Life

from mgpu.errors import CleanupFailed, PermissionDenied
from mgpu.providers.aws import names
from mgpu.providers.aws.iam import operator_policies
from mgpu.providers.aws.iam.policies import Document

DOCUMENTS = operator_policies.documents(ACCOUNT)
# S3's permissions are not named as its operations are
S3 = {
    "AbortMultipartUpload": "AbortMultipartUpload",
    "GetBucketEncryption": "GetEncryptionConfiguration",
    "GetBucketLifecycleConfiguration": "GetLifecycleConfiguration",
    "GetPublicAccessBlock": "GetBucketPublicAccessBlock",
    "HeadBucket": "ListBucket",
    "HeadObject": "GetObject",
    "ListMultipartUploads": "ListBucketMultipartUploads",
    "ListObjectVersions": "ListBucketVersions",
    "ListObjectsV2": "ListBucket",
    "PutBucketEncryption": "PutEncryptionConfiguration",
    "PutBucketLifecycleConfiguration": "PutLifecycleConfiguration",
    "PutPublicAccessBlock": "PutBucketPublicAccessBlock",
}
NOT_JUDGED = ("pricing", "s3", "servicequotas")  # the first and last are the fake's own, and moto names S3's otherwise
FREE = "sts:GetCallerIdentity"  # AWS asks nobody for a permission to it


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def needed(call: Called) -> str:
    return f"{call.service}:{S3.get(call.action, call.action) if call.service == 's3' else call.action}"


@pytest.fixture(scope="module")
def lived(aws_server: FakeAws, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Called]]]:
    """What each step of one life has called."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for name, value in aws_server.env.items():
            patch.setenv(name, value)
        aws_server.reset()
        life, by_step, before = Life(aws_server), {}, 0
        for name, step in life.steps().items():
            step()
            calls = life.calls()
            by_step[name], before = calls[before:], len(calls)
        yield by_step


def part(step: str) -> str:
    parts = {"base": "base", "reached": "sessions", "bought": "reservations", "passes": "passes"}
    return parts.get(step.split()[0], "machines")


def may(name: str) -> set[str]:
    """By that policy; who reaches machines through sessions, or buys, or installs a caller, has that of who rents them,
    too."""
    beyond = {name, "base" if name == "base" else "machines"}
    return {action for each in beyond for action in operator_policies.actions(DOCUMENTS[each])}


# --- what is granted is what is called --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["machines", "sessions", "base", "reservations", "passes"])
def test_everything_that_is_called_is_granted_and_nothing_else(lived, name: str):
    called = {needed(call) for step, calls in lived.items() if part(step) == name for call in calls} - {FREE}
    granted = operator_policies.actions(DOCUMENTS[name])
    assert called - may(name) == set()
    asked_for = {
        action for action, with_ in operator_policies.CHECKED_WITH.items() if with_ in called or called & _also(action)
    }
    assert granted - called - asked_for == set()


def _also(action: str) -> set[str]:
    """Other calls at which AWS asks for it."""
    more = {
        "iam:PassRole": {"iam:AddRoleToInstanceProfile"},
        "iam:CreateServiceLinkedRole": {"ecs:CreateCluster"},
        "ec2:CreateTags": {"ec2:CreateSecurityGroup", "ec2:PurchaseCapacityBlock"},
    }
    return more.get(action, set())


@pytest.mark.parametrize("name", ["machines", "sessions", "base", "passes"])
def test_the_things_that_are_called_for_are_among_those_granted(lived, name: str):
    beyond = {name, "base" if name == "base" else "machines"}
    statements = [each for one in beyond for each in DOCUMENTS[one]["Statement"]]
    judged = 0
    for call in [call for step, calls in lived.items() if part(step) == name for call in calls]:
        for thing in things(call):
            judged += 1
            patterns = [each for one in statements if needed(call) in one["Action"] for each in one["Resource"]]
            assert any(fnmatchcase(thing, pattern) for pattern in patterns), (needed(call), thing, patterns)
    assert judged > (2 if name == "sessions" else 20)


def things(call: Called) -> Iterator[str]:
    """What a call is about, as ARNs, where it names that."""
    asked: dict[str, Any] = call.parameters
    where = f"{call.region}:{ACCOUNT}"
    for key, start in NAMED.items():
        value = asked.get(key)
        if value and call.service == start[0] and call.action not in start[2:]:
            for each in value if isinstance(value, list) else [value]:
                name = str(each).lstrip("/")
                if each == names.run_role("demo-1"):  # a role is meant with its path
                    name = f"{names.RUN_ROLES.lstrip('/')}{each}"
                yield start[1].format(where=where, region=call.region, account=ACCOUNT, name=name)
    if call.service == "s3" and asked.get("Bucket"):
        yield f"arn:aws:s3:::{asked['Bucket']}" + (f"/{asked['Key']}" if asked.get("Key") else "")


NAMED = {
    "RoleName": ("iam", "arn:aws:iam::{account}:role/{name}", "AddRoleToInstanceProfile",
                 "RemoveRoleFromInstanceProfile"),
    "InstanceProfileName": ("iam", "arn:aws:iam::{account}:instance-profile/{name}"),
    "repositoryName": ("ecr", "arn:aws:ecr:{where}:repository/{name}"),
    "resourceArn": ("ecr", "{name}"),
    "Name": ("scheduler", "arn:aws:scheduler:{where}:schedule/default/{name}"),
    "Names": ("ssm", "arn:aws:ssm:{region}::parameter/{name}", "DeleteParameters"),
    "Path": ("ssm", "arn:aws:ssm:{where}:parameter/{name}"),
    "cluster": ("ecs", "arn:aws:ecs:{where}:cluster/{name}"),
    "clusterName": ("ecs", "arn:aws:ecs:{where}:cluster/{name}"),
    "clusters": ("ecs", "arn:aws:ecs:{where}:cluster/{name}"),
    "taskDefinitions": ("ecs", "{name}"),
    "logGroupName": ("logs", "arn:aws:logs:{where}:log-group:{name}"),
    "Target": ("ssm", "arn:aws:ec2:{where}:instance/{name}"),
    "DocumentName": ("ssm", "arn:aws:ssm:{region}::document/{name}"),
    "InstanceIds": ("ec2", "arn:aws:ec2:{where}:instance/{name}"),
    "LaunchTemplateId": ("ec2", "arn:aws:ec2:{where}:launch-template/{name}"),
    "AllocationId": ("ec2", "arn:aws:ec2:{where}:elastic-ip/{name}"),
    "VolumeId": ("ec2", "arn:aws:ec2:{where}:volume/{name}"),
    "GroupId": ("ec2", "arn:aws:ec2:{where}:security-group/{name}"),
    "GroupName": ("ec2", "arn:aws:ec2:{where}:placement-group/{name}", "CreateSecurityGroup"),
    "SourceArn": ("iam", "{name}"),
}  # fmt: skip


def test_what_is_made_carries_the_tag_that_its_making_asks_for(lived):
    """Else AWS would refuse it: conditions are not judged by moto."""
    asking = {
        action: key
        for document in DOCUMENTS.values()
        for each in document["Statement"]
        for key in each.get("Condition", {}).get("Null", {})
        if key.startswith("aws:RequestTag/")
        for action in each["Action"]
        if ("vpc" not in str(each["Resource"]))
    }
    asking.pop("ec2:RunInstances")  # CreateFleet makes it, of the template
    found = set[str]()
    for call in [call for calls in lived.values() for call in calls if needed(call) in asking]:
        tags = [tag["Key"] for spec in call.parameters["TagSpecifications"] for tag in spec["Tags"]]
        assert asking[needed(call)] == f"aws:RequestTag/{tags[0]}" or asking[needed(call)][15:] in tags
        found.add(needed(call))
    assert found == set(asking)
    (asked,) = [call.parameters for call in lived["created"] if call.action == "CreateLaunchTemplate"]
    kinds = {spec["ResourceType"]: spec["Tags"] for spec in asked["LaunchTemplateData"]["TagSpecifications"]}
    for kind in ("instance", "volume", "network-interface"):
        assert "mgpu:owner" in [tag["Key"] for tag in kinds[kind]], kind
    (asked,) = [call.parameters for call in lived["created"] if call.action == "CreateFleet"]
    assert {spec["ResourceType"] for spec in asked["TagSpecifications"]} == {"fleet", "instance", "volume"}


# --- who has no more than that ----------------------------------------------------------------------------------------


class User:
    """A user with the policies less some actions. moto judges most calls as if their resource were `*`, and no
    conditions: so the actions count here, and the resources are judged above."""

    def __init__(self, aws: FakeAws, patch: pytest.MonkeyPatch) -> None:
        self.aws = aws
        iam = aws.client("iam")
        iam.create_user(UserName="me")
        key = iam.create_access_key(UserName="me")["AccessKey"]
        patch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
        patch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
        self.lose()
        aws.enforce()

    def lose(self, *actions: str) -> None:
        kept = {action for document in DOCUMENTS.values() for action in operator_policies.actions(document)} - set(
            actions
        )
        allowed = [{"Effect": "Allow", "Action": sorted(kept), "Resource": "*"}, _store()]
        document = json.dumps({"Version": "2012-10-17", "Statement": allowed})
        self.aws.client("iam").put_user_policy(UserName="me", PolicyName="mgpu", PolicyDocument=document)


def _store() -> Document:
    return {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}


@pytest.fixture
def user(aws: FakeAws, monkeypatch: pytest.MonkeyPatch) -> User:
    return User(aws, monkeypatch)


def test_who_has_these_policies_gets_through(user: User):
    life = Life(user.aws)
    for step in life.steps().values():
        step()
    findings = {each.subject: each for each in life.provider.findings(None, lambda: awslife.SSH)}
    assert findings["permissions"].status == "ok", findings["permissions"]
    assert user.aws.alive() == []


STEPS = ("base made", "checked", "created", "reserved", "described", "reached", "listed", "destroyed", "base deleted")


def test_who_lacks_one_action_is_told_which(user: User, lived):
    """Each step, once for each action that it calls, without that action; then with all of them. In the order of the
    calls: what is done once is not done again."""
    life, tried = Life(user.aws), set[str]()
    for number, (name, step) in enumerate(life.steps().items()):
        judged = [needed(call) for call in lived[name] if call.service not in NOT_JUDGED and name in STEPS]
        for action in [each for each in dict.fromkeys(judged) if each not in {FREE, *CAUGHT.get(name, ())}]:
            user.lose(action)
            forget(life, f"{number}{action}")
            with pytest.raises((PermissionDenied, CleanupFailed)) as caught:
                step()
            assert f"Allow {action} " in str(caught.value)
            tried.add(action)
        user.lose()
        forget(life, "a")
        step()
        if name == "created":  # what could not be ended for want of a permission
            own = life.handle and life.handle.token
            left = [each for each in life.provider.list_owned("me") if each.token != own]
            assert all(awslife.insist(lambda each=each: life.provider.destroy(each)) for each in left)
    assert len(tried) > 40
    assert user.aws.alive() == []


# what is done only after a refusal; and where moto answers 500 when a role that is in no profile is taken out again
CAUGHT = {
    "created": ("ec2:TerminateInstances", "scheduler:UpdateSchedule"),
    "base deleted": ("iam:DeleteInstanceProfile", "iam:DeleteRole"),
    "reached": ("iam:SimulatePrincipalPolicy",),  # without it nothing is known, and that stops nobody
}


def forget(life: Life, token: str) -> None:
    """What AWS has said before, for the next try: mgpu asks for the same again within a minute from memory alone."""
    life.account._told.clear()
    if life.handle is None:
        life.token = token.ljust(40, "0").replace(":", "-")
