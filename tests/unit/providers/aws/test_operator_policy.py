"""The operator's policies, read: as narrow as AWS lets them be, and small enough to be attached."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from mgpu.cli import cli
from mgpu.providers.aws import names
from mgpu.providers.aws.iam import operator_policies

ACCOUNT = "123456789012"
REGIONS = [(), ("us-east-1",), ("us-east-1", "us-west-2", "eu-west-1", "ap-northeast-1")]
LOOKS = re.compile(
    r"(ec2|ssm):Describe\w+|ec2:GetEbsDefaultKmsKeyId|pricing:GetProducts|servicequotas:ListServiceQuotas|"
    r"ecr:GetAuthorizationToken|ecs:((De)?[Rr]egister|Describe|List)TaskDefinitions?"  # the last know no narrower one
)
# what ends or changes a thing that is there; a name or a tag of ours has to say that it is ours
ON_THINGS = re.compile(
    r"\w+:(Delete|Terminate|Release|Disassociate|Associate|Authorize|Revoke|Detach|Remove|Update|Put|StartSession)"
)
BY_NAME = re.compile(r"mgpu|repository/mgpu/|document/AWS-StartSSHSession$")  # the last is AWS's own

documents = pytest.mark.parametrize(
    ("name", "regions"),
    [(name, regions) for name in ("machines", "sessions", "base", "reservations", "passes") for regions in REGIONS],
)


def statements(name, regions=()):
    return operator_policies.documents(ACCOUNT, regions)[name]["Statement"]


def by_tag(statement):
    tags = re.compile("(aws:Resource|ssm:resource)Tag/mgpu:")
    return any(tags.match(key) for key in statement.get("Condition", {}).get("Null", {}))


def too_wide(statement):
    """What is wider in a statement than it has to be."""
    for action in statement["Action"]:
        if "*" in action:
            yield f"all of {action}"
        for resource in statement["Resource"]:
            if resource == "*":
                if not LOOKS.fullmatch(action):
                    yield f"{action} on everything"
            elif ON_THINGS.match(action) and not by_tag(statement) and not BY_NAME.search(resource.split(":", 5)[5]):
                yield f"{action} on what is not ours: {resource}"
    if statement["Effect"] != "Allow" or statement.keys() & {"NotAction", "NotResource"}:
        yield "not a plain permission"


@documents
def test_nothing_is_wider_than_aws_lets_it_be(name, regions):
    assert [wide for each in statements(name, regions) for wide in too_wide(each)] == []


@pytest.mark.parametrize(
    "statement",
    [
        {"Action": ["ec2:*"], "Resource": ["arn:aws:ec2:*:1:instance/*"]},
        {"Action": ["ec2:CreateFleet"], "Resource": ["*"]},
        {"Action": ["ec2:TerminateInstances"], "Resource": ["arn:aws:ec2:*:1:instance/*"]},
        {"Action": ["iam:PutRolePolicy"], "Resource": ["arn:aws:iam::1:role/*"]},
    ],
)
def test_what_is_too_wide_is_seen(statement):
    assert list(too_wide({"Effect": "Allow", **statement}))


@documents
def test_a_document_fits_into_a_managed_policy(name, regions):
    text = json.dumps(operator_policies.documents(ACCOUNT, regions)[name], separators=(",", ":"))
    assert len(text) <= operator_policies.MOST_CHARACTERS


@documents
def test_statements_have_names_of_their_own_and_every_resource_is_of_the_account_or_of_aws(name, regions):
    found = statements(name, regions)
    assert len({each["Sid"] for each in found}) == len(found)
    assert all(each["Sid"].isalnum() for each in found)
    named = {resource for each in found for resource in each["Resource"]} - {"*"}
    owners = {resource.split(":")[4] for resource in named if not resource.endswith("document/AWS-StartSSHSession")}
    assert owners <= {ACCOUNT, ""}


def test_a_session_that_was_lost_is_gone_on_with_by_who_began_it():
    (own,) = [each for each in statements("sessions") if each["Action"] == ["ssm:ResumeSession"]]
    assert own["Condition"] == {"StringLike": {"ssm:resourceTag/aws:ssmmessages:session-id": "${aws:userid}"}}


def test_roles_are_passed_to_nobody_but_who_needs_them():
    for name, roles in (("machines", {names.NODE_ROLE, names.REAPER_ROLE}), ("base", {names.NODE_ROLE})):
        (each,) = [each for each in statements(name) if "iam:PassRole" in each["Action"]]
        assert {resource.rpartition("/")[2] for resource in each["Resource"]} == roles
        services = each["Condition"]["StringEquals"]["iam:PassedToService"]
        assert set(services) <= {"ec2.amazonaws.com", "scheduler.amazonaws.com"}


def test_who_rents_gives_runs_no_more_than_their_boundary_lets_them_have():
    giving = [each for each in statements("machines") if {"iam:CreateRole", "iam:PutRolePolicy"} & set(each["Action"])]
    bound = {"StringEquals": {"iam:PermissionsBoundary": f"arn:aws:iam::{ACCOUNT}:policy/mgpu-run"}}
    assert [(each["Resource"], each["Condition"]) for each in giving] == [
        ([f"arn:aws:iam::{ACCOUNT}:role/mgpu/run/*"], bound)
    ]
    assert not {"iam:CreatePolicyVersion", "iam:DeleteRolePermissionsBoundary", "iam:UpdateAssumeRolePolicy"} & {
        action for each in statements("machines") for action in each["Action"]
    }


def test_who_bootstraps_can_be_held_to_a_boundary_too():
    arn = f"arn:aws:iam::{ACCOUNT}:policy/theirs"
    found = operator_policies.documents(ACCOUNT, (), arn)["base"]["Statement"]
    bounded = [each for each in found if "iam:PutRolePolicy" in each["Action"]]
    assert [each["Condition"] for each in bounded] == [{"StringEquals": {"iam:PermissionsBoundary": arn}}]
    assert {"iam:CreateRole", "iam:PutRolePermissionsBoundary"} <= set(bounded[0]["Action"])
    free = {action for each in found if "Condition" not in each for action in each["Action"]}
    assert not {"iam:CreateRole", "iam:PutRolePolicy", "iam:DeleteRolePermissionsBoundary"} & free
    asked = ("--account", ACCOUNT, "--bootstrap", "--permissions-boundary", arn)
    assert json.loads(run(*asked).stdout)["Statement"] == found
    assert run("--account", ACCOUNT, "--permissions-boundary", arn).exit_code != 0


@pytest.mark.parametrize("name", ["machines", "base"])
def test_tags_are_put_on_what_is_being_made_or_on_what_is_ours(name):
    tagging = [each for each in statements(name) if "ec2:CreateTags" in each["Action"]]
    assert tagging
    assert all(by_tag(each) or "ec2:CreateAction" in each["Condition"]["StringEquals"] for each in tagging)


def test_regions_limit_where_things_are_made_and_not_where_they_are_ended():
    """What was rented elsewhere before has to be ended there."""
    found = {each["Sid"]: each.get("Condition", {}) for each in statements("machines", ("eu-west-1",))}
    made = {sid for sid, condition in found.items() if "aws:RequestedRegion" in condition.get("StringEquals", {})}
    assert made == {"Rent", "Start", "StartOn"}


def test_in_china_every_arn_is_of_that_partition():
    arns = [
        arn
        for each in operator_policies.documents(ACCOUNT, ["cn-north-1"])["machines"]["Statement"]
        for arn in each["Resource"]
    ]
    assert {arn.split(":")[1] for arn in arns if arn != "*"} == {"aws-cn"}


@pytest.mark.parametrize("name", ["machines", "sessions", "base", "reservations", "passes"])
def test_without_regions_an_account_of_govcloud_has_its_own_arns(name):
    document = operator_policies.documents(ACCOUNT, home="us-gov-west-1")[name]
    arns = [arn for each in document["Statement"] for arn in each["Resource"] if arn != "*"]
    assert {arn.split(":")[1] for arn in arns} == {"aws-us-gov"}
    assert len(json.dumps(document, separators=(",", ":"))) <= operator_policies.MOST_CHARACTERS


def test_a_document_can_be_narrowed_to_what_somebody_lacks():
    whole = operator_policies.documents(ACCOUNT)["machines"]
    some = operator_policies.narrowed(whole, {"ec2:CreateFleet", "iam:PassRole"})
    assert operator_policies.actions(some) == {"ec2:CreateFleet", "iam:PassRole"}
    assert {each["Sid"] for each in some["Statement"]} == {"Rent", "Start", "StartOn", "Pass"}
    assert all(each["Condition"] == other["Condition"] for each in some["Statement"] for other in whole["Statement"]
               if each["Sid"] == other["Sid"] and "Condition" in other)  # fmt: skip


# --- mgpu policy ------------------------------------------------------------------------------------------------------


def run(*arguments, here="us-east-1"):
    return CliRunner(env={"AWS_REGION": here}).invoke(cli, ["policy", "aws", *arguments])


def test_the_command_prints_one_document_and_asks_nobody(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert json.loads(run("--account", ACCOUNT).stdout) == operator_policies.documents(ACCOUNT)["machines"]
    assert json.loads(run("--account", ACCOUNT, "--ssm").stdout) == operator_policies.documents(ACCOUNT)["sessions"]
    assert run("--account", ACCOUNT, "--ssm", "--bootstrap").exit_code != 0
    asked = ("--account", ACCOUNT, "--region", "eu-west-1", "--bootstrap")
    assert json.loads(run(*asked).stdout) == operator_policies.documents(ACCOUNT, ["eu-west-1"])["base"]


def test_the_command_prints_the_arns_of_the_partition_that_this_machine_is_set_up_for():
    expected = operator_policies.documents(ACCOUNT, home="us-gov-west-1")["machines"]
    assert json.loads(run("--account", ACCOUNT, here="us-gov-west-1").stdout) == expected


def test_who_may_buy_is_another_document_and_machines_alone_buy_nothing():
    printed = json.loads(run("--account", ACCOUNT, "--reservations").stdout)
    assert printed == operator_policies.documents(ACCOUNT)["reservations"]
    both = printed, operator_policies.documents(ACCOUNT)["machines"]
    assert ["ec2:PurchaseCapacityBlock" in operator_policies.actions(each) for each in both] == [True, False]
    assert run("--account", ACCOUNT, "--reservations", "--bootstrap").exit_code != 0


def test_machines_may_be_started_in_a_reservation():
    (on,) = [each for each in statements("machines") if each["Sid"] == "StartOn"]
    assert f"arn:aws:ec2:*:{ACCOUNT}:capacity-reservation/*" in on["Resource"]


@pytest.mark.parametrize("wrong", [("--account", "12"), ("--account", ACCOUNT, "--region", "Frankfurt")])
def test_what_is_no_account_or_region_is_refused(wrong):
    result = run(*wrong)
    assert getattr(result.exception, "exit_code", None) == 2
    assert result.stdout == ""
