"""Which addresses the role of a run can open: what base and its owner have named, and nothing that looks so."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from mgpu.errors import InputError, InvalidRequest
from mgpu.providers.aws import failures, names
from mgpu.providers.aws.iam import policies, run_role
from mgpu.providers.aws.options import Options

ACCOUNT = "123456789012"


class Iam:
    """Knows one policy: what bounds the roles of runs; None: nobody has made it."""

    def __init__(self, *buckets: str) -> None:
        self.bound: dict[str, Any] | None = policies.run_boundary("us-east-1", ACCOUNT, buckets)

    def get_policy(self, PolicyArn: str) -> dict[str, Any]:  # noqa: N803 - as AWS names it
        assert PolicyArn == f"arn:aws:iam::{ACCOUNT}:policy/mgpu-run"
        if self.bound is None:
            from botocore.exceptions import ClientError

            raise ClientError({"Error": {"Code": "NoSuchEntity", "Message": ""}}, "GetPolicy")
        return {"Policy": {"DefaultVersionId": "v3"}}

    def get_policy_version(self, PolicyArn: str, VersionId: str) -> dict[str, Any]:  # noqa: N803
        assert VersionId == "v3"
        return {"PolicyVersion": {"Document": self.bound}}


class Account:
    home_region = "us-east-1"

    def __init__(self, iam: Iam) -> None:
        self.iam = iam

    def id(self) -> str:
        return ACCOUNT

    def client(self, service: str, region: str) -> Iam:
        assert service == "iam"
        return self.iam


def require(*urls: str, iam: Iam | None = None, **options: str) -> None:
    run_role.require(Account(iam or Iam("theirs")), Options(**options), urls)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "url",
    [
        f"s3://{names.bucket(ACCOUNT, 'us-east-1')}/runs",
        f"s3://{names.bucket(ACCOUNT, 'eu-west-2')}/runs/",
        f"s3://{names.bucket(ACCOUNT, 'us-east-1')}/runs/of-mine",
        "s3://theirs",
        "s3://theirs/deep/below",
    ],
)
def test_what_base_and_its_owner_have_named_is_opened(url):
    require(url)


@pytest.mark.parametrize(
    "url",
    [
        f"s3://{names.bucket(ACCOUNT, 'us-east-1')}",
        f"s3://{names.bucket(ACCOUNT, 'us-east-1')}/runs-of-mine",
        f"s3://{names.bucket(ACCOUNT, 'us-east-1')}/other/runs",
        f"s3://{names.bucket('999999999999', 'us-east-1')}/runs",
        f"s3://x{names.bucket(ACCOUNT, 'us-east-1')}/runs",
        "s3://theirs-too/runs",
    ],
)
def test_nothing_else_is(url):
    with pytest.raises(InputError, match="nodes may not use the bucket"):
        require(url)


def test_all_buckets_that_are_not_are_named_with_what_opens_them():
    with pytest.raises(InputError, match="one, two") as caught:
        require("s3://two/x", "s3://theirs/x", "s3://one/x")
    assert "mgpu bootstrap aws --data-bucket one --data-bucket two" in caught.value.next_step


def test_an_older_base_is_told_apart():
    iam = Iam()
    iam.bound = None
    with pytest.raises(InputError, match="no rights for single runs") as caught:
        require("s3://theirs/x", iam=iam)
    assert "mgpu bootstrap aws" in caught.value.next_step


def test_a_role_of_the_users_opens_what_it_opens_and_gets_nothing_from_us():
    require("s3://anybodys/x", instance_profile="mine")
    account = Account(Iam())
    assert run_role.grant(account, Options(instance_profile="mine"), "r", ["s3://x/y"], []) == {}  # type: ignore[arg-type]
    run_role.revoke(account, Options(instance_profile="mine"), "r")  # type: ignore[arg-type]


def test_names_of_roles_fit_and_are_one_a_run():
    long = "a" * 63
    assert names.run_role("run-1") == "mgpu-run-1"
    assert len(names.run_role(long)) <= 64
    assert names.run_role(long) != names.run_role(long[:-1] + "b")


class Made(Iam):
    """Makes roles, and remembers how; `refused` are the errors that come first, by call."""

    role: dict[str, Any] | None = None
    document = ""

    def __init__(self, *buckets: str) -> None:
        super().__init__(*buckets)
        self.refused = dict[str, list[str]]()

    def refuse(self, call: str) -> None:
        from botocore.exceptions import ClientError

        if left := self.refused.get(call):
            raise ClientError({"Error": {"Code": left.pop(), "Message": "words"}}, call)

    def get_role(self, RoleName: str) -> dict[str, Any]:  # noqa: N803
        from botocore.exceptions import ClientError

        raise ClientError({"Error": {"Code": "NoSuchEntity", "Message": RoleName}}, "GetRole")

    def create_role(self, **asked: Any) -> dict[str, Any]:
        self.refuse("CreateRole")
        self.role = asked
        return {"Role": {"Arn": "arn:aws:iam::1:role/it"}}

    def put_role_policy(self, **asked: Any) -> None:
        self.refuse("PutRolePolicy")
        self.document = asked["PolicyDocument"]


def test_the_role_of_a_run_has_the_users_tags_which_a_policy_may_demand():
    iam = Made("theirs")
    options = Options.model_validate({"tags": {"CostCenter": "4711"}})
    run_role.grant(Account(iam), options, "run-1", ["s3://theirs/x"], [])  # type: ignore[arg-type]
    assert iam.role is not None
    assert names.tag_list({"CostCenter": "4711", names.RUN: "run-1"}) == iam.role["Tags"]


def test_of_tags_that_differ_in_case_alone_iam_gets_one():
    """IAM: "Duplicate tag keys found. Please note that Tag keys are case insensitive"; EC2 takes them all."""
    iam = Made("theirs")
    options = Options.model_validate({"tags": {"team": "a", "Team": "b", "MGPU:Run": "c"}})
    run_role.grant(Account(iam), options, "run-1", ["s3://theirs/x"], [])  # type: ignore[arg-type]
    assert iam.role is not None
    assert iam.role["Tags"] == names.tag_list({"Team": "b", names.RUN: "run-1"})


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each wait was."""
    waits = list[float]()
    clock = {"clock": lambda: sum(waits), "sleep": waits.append}
    monkeypatch.setattr(run_role, "patiently", functools.partial(failures.patiently, **clock))
    return waits


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("CreateRole", "MalformedPolicyDocument"),  # "Invalid principal in policy": the nodes' role is new
        ("CreateRole", "NoSuchEntity"),  # the boundary is
        ("PutRolePolicy", "NoSuchEntity"),
    ],
)
def test_a_launch_right_after_the_bootstrap_waits_for_iam(slept, call, code):
    iam = Made("theirs")
    iam.refused[call] = [code] * 3
    run_role.grant(Account(iam), Options(), "run-1", ["s3://theirs/x"], [])  # type: ignore[arg-type]
    assert "s3:GetObject" in iam.document
    assert len(slept) == 3


def test_what_iam_never_takes_is_told(slept):
    iam = Made("theirs")
    iam.refused["CreateRole"] = ["MalformedPolicyDocument"] * 1000
    with pytest.raises(InvalidRequest, match="MalformedPolicyDocument"):
        run_role.grant(Account(iam), Options(), "run-1", ["s3://theirs/x"], [])  # type: ignore[arg-type]
    assert sum(slept) < 60
