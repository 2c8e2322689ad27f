"""`mgpu check aws` on the fake: what is missing is found, named, and comes with its cure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.aws import PROGRAMS, FakeAws

from mgpu.errors import InputError
from mgpu.plan.model import Requirements
from mgpu.providers.aws import check
from mgpu.providers.aws.catalog import quotas
from mgpu.providers.aws.iam import operator_policies
from mgpu.providers.aws.instances import disk_key
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.provider import AwsProvider
from mgpu.providers.aws.session import Account
from mgpu.providers.base import Finding

HERE, ACCOUNT = "us-east-1", "123456789012"
INSIDE = "203.0.113.7/32"  # the fake's base lets it in
POLICY = operator_policies.documents(ACCOUNT)["machines"]


def unknown() -> str:
    raise InputError("nobody knows", "", "")


def found(
    requirements: Requirements | None = None, here: Callable[[], str] = lambda: INSIDE, **options: str
) -> dict[str, Finding]:
    if requirements:
        requirements = requirements.model_copy(update={"provider_options": options})
    every = AwsProvider(options).findings(requirements, here)
    return {
        (f"{each.subject} {each.detail}" if each.subject.startswith("quota ") else each.subject): each for each in every
    }


def needing(**changed: Any) -> Requirements:
    given = {
        "provider": "aws", "nodes": 2, "gpu": ("A100-40GB",), "gpus_per_node": 8, "market": "on-demand",
        "max_price_usd_per_hour": 99, "max_hours": 1, "provider_options": {}, "regions": (HERE,),
    }  # fmt: skip
    return Requirements(**{**given, **changed})


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # all regions, which cost the fake a minute in this file; tests/unit/providers/aws/test_closed_regions.py has it
    monkeypatch.setattr(check, "_listing", lambda _: check._ok("listing", "not asked"))


@pytest.fixture
def user(aws: FakeAws, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Calls are a user's from now on, who may do what it is given: the policy less some actions."""
    iam = aws.client("iam")
    aws.base()
    iam.create_user(UserName="me", Path="/staff/")
    key = iam.create_access_key(UserName="me")["AccessKey"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    aws.enforce()

    def may(*without: str, ssm: bool = False) -> None:
        more = operator_policies.documents(ACCOUNT)["sessions"]["Statement"] if ssm else []
        policy = {**POLICY, "Statement": [*POLICY["Statement"], *more]}
        narrow = operator_policies.narrowed(policy, operator_policies.actions(policy) - set(without))
        # moto judges calls as if their resource were `*`, so it is told the same without resources and conditions
        also = {"Effect": "Allow", "Action": sorted(operator_policies.actions(narrow)), "Resource": "*"}
        only = {"simulated": narrow, "called": {"Version": "2012-10-17", "Statement": [also]}}
        for name, document in only.items():
            iam.put_user_policy(UserName="me", PolicyName=name, PolicyDocument=json.dumps(document))

    return may


# --- all is well ------------------------------------------------------------------------------------------------------


def test_where_all_is_there_every_line_is_green(aws: FakeAws):
    aws.base()
    every = found()
    assert {each.status for each in every.values()} == {"ok"}, every
    assert {subject.split()[0] for subject in every} == {
        "credentials", "clock", "permissions", "listing", "network", "disks", "roles", "login", "quota",
    }  # fmt: skip


def a_key(aws: FakeAws, policy: dict[str, Any] | None = None) -> str:
    """The customer's own, which is the default of this region's disks from now on."""
    key = aws.client("kms").create_key(**{"Policy": json.dumps(policy)} if policy else {})["KeyMetadata"]["Arn"]
    aws.client("ec2").modify_ebs_default_kms_key_id(KmsKeyId=key)
    return key


def test_a_key_that_ec2_may_not_use_is_named_with_what_its_policy_needs(aws: FakeAws):
    aws.base()
    key = a_key(aws)
    line = found()[f"disks {HERE}"]
    assert line.status == "warning"
    assert key in line.detail
    aws.client("kms").put_key_policy(
        KeyId=key, PolicyName="default", Policy=json.dumps({"Version": "2012-10-17", "Statement": [line.document]})
    )
    assert found()[f"disks {HERE}"].status == "ok"


@pytest.mark.parametrize(
    "off", [{"Effect": "Deny"}, {"Principal": {"AWS": "arn:aws:iam::123456789012:root"}}, {"Action": "kms:Decrypt"},
            {"Condition": {"StringEquals": {"kms:CallerAccount": "210987654321"}}},
            {"Condition": {"StringEquals": {"kms:ViaService": "ec2.eu-west-1.amazonaws.com"}}},
            {"Condition": {"StringEquals": {"aws:PrincipalTag/team": "finance"}}},
            {"Condition": {"StringLike": {"aws:PrincipalArn": "*admin*"}}}],
)  # fmt: skip
def test_a_policy_that_is_about_something_else_lets_ec2_do_nothing(aws: FakeAws, off: dict[str, Any]):
    aws.base()
    a_key(aws, {"Version": "2012-10-17", "Statement": [{**disk_key.statement(ACCOUNT, HERE), **off}]})
    assert found()[f"disks {HERE}"].status == "warning"


def test_a_key_whose_policy_cannot_be_read_is_a_warning(aws: FakeAws, user: Callable[..., None]):
    a_key(aws)
    user("kms:GetKeyPolicy")
    line = found()[f"disks {HERE}"]
    assert line.status == "warning"
    assert "not known" in line.detail


def test_nothing_is_made_or_changed(aws: FakeAws, user: Callable[..., None]):
    user("iam:SimulatePrincipalPolicy")
    before = len(aws.calls())
    found()
    reads = ("Describe", "Get", "List", "Simulate")
    for call in aws.calls()[before:]:
        assert call.action.startswith(reads) or call.parameters["DryRun"], call
    ec2 = aws.client("ec2")
    assert ec2.describe_launch_templates()["LaunchTemplates"] == ec2.describe_addresses()["Addresses"] == []


def test_the_command_gives_its_findings_in_json(aws: FakeAws, tmp_path: Path):
    aws.base()
    command = [sys.executable, "-m", "mgpu", "check", "aws", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ, timeout=60)
    assert done.returncode in (0, 3), done
    lines = {each["subject"]: each for each in json.loads(done.stdout)["checks"]}
    assert lines["permissions"]["status"] == "ok"
    assert "Pulumi engine" in lines


# --- who --------------------------------------------------------------------------------------------------------------


def test_without_good_credentials_nothing_else_is_asked(aws: FakeAws):
    aws.expire()
    (only,) = found().values()
    assert (only.subject, only.status) == ("credentials", "failed")
    assert "expired" in only.detail
    assert "sso login" in only.cure
    assert {call.action for call in aws.calls()} == {"GetCallerIdentity"}


def test_another_account_s_credentials_are_named(aws: FakeAws):
    (only,) = found(account="999999999999").values()
    assert only.status == "failed"
    assert "999999999999" in only.detail
    assert ACCOUNT in only.detail


def test_credentials_that_nobody_renews_are_a_warning(aws: FakeAws, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    assert found()["credentials"].status == "warning"


@pytest.mark.parametrize(("off_s", "status"), [(0, "ok"), (-50, "ok"), (100, "warning"), (-280, "failed")])
def test_a_clock_that_is_off_is_told_before_aws_refuses(off_s: float, status: str):
    assert check._clock(time.time() + off_s).status == status


# --- permissions ------------------------------------------------------------------------------------------------------


def test_who_has_the_policy_may_do_all(user: Callable[..., None]):
    user()
    assert found()["permissions"].status == "ok"


@pytest.mark.parametrize("action", ["ec2:TerminateInstances", "iam:PassRole", "scheduler:CreateSchedule"])
def test_a_permission_that_lacks_comes_as_a_policy_to_paste(user: Callable[..., None], action: str):
    user(action)
    line = found()["permissions"]
    assert (line.status, action in line.detail) == ("failed", True)
    assert line.document is not None
    assert operator_policies.actions(line.document) == {action}
    assert all(each in POLICY["Statement"][0].keys() | {"Condition"} for each in line.document["Statement"][0])


def test_who_may_not_ask_iam_is_told_what_can_be_tried(user: Callable[..., None]):
    user("iam:SimulatePrincipalPolicy")
    line = found()["permissions"]
    assert line.status == "warning"
    assert "iam:SimulatePrincipalPolicy" in line.cure
    user("iam:SimulatePrincipalPolicy", "ec2:AllocateAddress", "ssm:GetParameters")
    line = found()["permissions"]
    assert line.status == "failed"
    assert line.document is not None
    missing = {"iam:SimulatePrincipalPolicy", "ec2:AllocateAddress", "ssm:GetParameters"}
    assert operator_policies.actions(line.document) == missing


def test_without_the_right_to_list_regions_permissions_are_told_all_the_same(user: Callable[..., None]):
    user("ec2:DescribeRegions")
    every = found()
    assert every["regions"].status == "failed"
    assert operator_policies.actions(every["permissions"].document or {}) == {"ec2:DescribeRegions"}


def test_a_session_is_judged_by_its_role():
    from mgpu.providers.aws.iam import permissions

    user = f"arn:aws:iam::{ACCOUNT}:user/me"
    assert permissions.principal_of(Account(Options()), user) == user


def test_a_session_s_role_has_a_path_that_only_iam_knows(aws: FakeAws):
    from mgpu.providers.aws.iam import permissions

    aws.client("iam").create_role(RoleName="Dev", Path="/team/", AssumeRolePolicyDocument="{}")
    session = f"arn:aws:sts::{ACCOUNT}:assumed-role/Dev/me"
    account = Account(Options(), attempts=1)
    assert permissions.principal_of(account, session) == f"arn:aws:iam::{ACCOUNT}:role/team/Dev"
    aws.deny("GetRole")
    assert permissions.principal_of(account, session) == f"arn:aws:iam::{ACCOUNT}:role/Dev"


# --- a region ---------------------------------------------------------------------------------------------------------


def test_without_a_base_the_command_that_makes_it_is_named(aws: FakeAws):
    every = found()
    for subject in (f"roles {HERE}", f"login {HERE}"):
        assert every[subject].status == "failed"
        assert f"mgpu bootstrap aws --region {HERE}" in every[subject].cure


def test_without_a_default_vpc_it_is_said_how_to_have_one(aws: FakeAws):
    aws.base()
    ec2 = aws.client("ec2")
    for each in ec2.describe_subnets()["Subnets"]:
        ec2.delete_subnet(SubnetId=each["SubnetId"])
    line = found()[f"network {HERE}"]
    assert (line.status, "create-default-subnet" in line.cure) == ("failed", True)
    for each in ec2.describe_security_groups()["SecurityGroups"]:
        if each["GroupName"] != "default":
            ec2.delete_security_group(GroupId=each["GroupId"])
    for each in ec2.describe_internet_gateways()["InternetGateways"]:
        for place in each["Attachments"]:
            ec2.detach_internet_gateway(InternetGatewayId=each["InternetGatewayId"], VpcId=place["VpcId"])
    ec2.delete_vpc(VpcId=ec2.describe_vpcs()["Vpcs"][0]["VpcId"])
    line = found()[f"network {HERE}"]
    assert line.status == "failed"
    assert "create-default-vpc" in line.cure


def test_subnets_of_elsewhere_are_found_out(aws: FakeAws):
    aws.base()
    line = found(subnet_ids="subnet-1")[f"network {HERE}"]
    assert (line.status, "aws.subnet_ids" in line.cure) == ("failed", True)


@pytest.mark.parametrize(
    ("here", "status"), [("203.0.113.7/32", "ok"), ("203.0.113.8/32", "failed"), ("2001:db8::1/128", "failed")]
)
def test_who_is_not_let_in_is_told_how_to_be(aws: FakeAws, here: str, status: str):
    aws.base()
    line = found(here=lambda: here)[f"login {HERE}"]
    assert line.status == status
    if status == "failed":
        assert line.cure == f"`mgpu bootstrap aws --region {HERE} --allow-ssh {here}`"


def test_an_address_that_nobody_knows_is_a_warning(aws: FakeAws):
    aws.base()
    line = found(here=unknown)[f"login {HERE}"]
    assert line.status == "warning"
    assert INSIDE in line.detail


def test_private_machines_need_a_jump_host_and_no_way_in_from_here(aws: FakeAws):
    aws.base()
    every = found(needing(), unknown, address="private")
    assert every[f"network {HERE}"].status == "warning"
    assert "jump_host" in every[f"network {HERE}"].cure
    key = "ssh-ed25519 AAAA"
    every = found(needing(), unknown, address="private", jump_host="me@bastion", jump_host_key=key)
    assert every[f"network {HERE}"].status == every[f"login {HERE}"].status == "ok"


def test_session_manager_needs_its_program_rights_on_both_sides_and_a_way_out(aws: FakeAws, user, monkeypatch):
    def lines() -> dict[str, Finding]:
        return found(needing(), unknown, address="ssm")

    user()
    iam, ec2 = aws.client("iam"), aws.client("ec2")
    alone = json.dumps({"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]})
    iam.put_role_policy(RoleName="mgpu-node", PolicyName="mgpu-node", PolicyDocument=alone)
    every = lines()
    assert {subject for subject, each in every.items() if each.status == "failed"} == {
        "permissions ssm", f"network {HERE}", f"roles {HERE}", f"login {HERE}"
    }  # fmt: skip
    allowed = operator_policies.actions(every["permissions ssm"].document or {})
    assert {"ssm:StartSession", "ssm:ResumeSession", "ssmmessages:OpenDataChannel"} <= allowed
    assert "ssmmessages:OpenDataChannel" in every[f"roles {HERE}"].detail
    assert every[f"roles {HERE}"].cure == f"Run `mgpu bootstrap aws --region {HERE} --ssm`."
    assert "mgpu policy aws --ssm" in every[f"network {HERE}"].cure
    assert "session-manager-plugin" in every[f"login {HERE}"].detail

    monkeypatch.setenv("PATH", f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}")
    aws.base()
    aws.endpoints()
    user(ssm=True)
    every = lines()
    assert {each.status for each in every.values()} == {"ok"}, every
    (group,) = ec2.describe_security_groups(GroupNames=["mgpu-nodes"])["SecurityGroups"]
    into = [each for each in group["IpPermissions"] if each["IpProtocol"] == "tcp"]
    ec2.revoke_security_group_ingress(GroupId=group["GroupId"], IpPermissions=into)
    assert "lets in nobody" in lines()[f"login {HERE}"].detail
    assert lines()[f"login {HERE}"].status == "ok"


def test_a_role_of_ones_own_that_lets_no_agent_register_is_a_warning(aws: FakeAws, monkeypatch):
    """The account's Default Host Management may give it what it lacks."""
    aws.base()
    aws.endpoints()
    monkeypatch.setenv("PATH", f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}")
    iam = aws.client("iam")
    trust = json.dumps({"Version": "2012-10-17", "Statement": []})
    iam.create_role(RoleName="mine", AssumeRolePolicyDocument=trust)
    iam.create_instance_profile(InstanceProfileName="mine")
    iam.add_role_to_instance_profile(InstanceProfileName="mine", RoleName="mine")
    line = found(needing(), unknown, address="ssm", instance_profile="mine")[f"roles {HERE}"]
    assert (line.status, "AmazonSSMManagedInstanceCore" in line.cure) == ("warning", True)


def test_a_region_that_there_is_not_is_named_and_the_rest_is_looked_at(aws: FakeAws):
    every = found(needing(regions=("us-east-9",)))
    assert "us-east-9" in every["regions"].detail
    assert every["permissions"].status == "ok"


def test_one_region_that_does_not_answer_hides_nothing_of_another(aws: FakeAws):
    aws.base()
    aws.base("us-west-2")
    aws.errors("DescribeSubnets", "InternalError", region="us-west-2")
    every = found(needing(regions=(HERE, "us-west-2")))
    assert every["network us-west-2"].status == "failed"
    assert every[f"network {HERE}"].status == "ok"


# --- quotas -----------------------------------------------------------------------------------------------------------

P, G = "L-417A185B", "L-DB2E81BA"


def quota_lines(every: dict[str, Finding]) -> dict[str, Finding]:
    lines = [each for each in every.values() if each.subject == f"quota {HERE}"]
    return {each.detail.partition("(")[2].partition(")")[0]: each for each in lines}


def test_a_quota_of_nothing_is_a_warning_with_the_command_that_raises_it(aws: FakeAws):
    aws.ask("quota", code=P, vcpus=0)
    lines = quota_lines(found())
    assert lines.keys() == {each.code for each in quotas.QUOTAS}
    assert (lines[P].status, lines[G].status) == ("warning", "ok")
    assert f"--quota-code {P} --region {HERE}" in lines[P].cure


def test_a_fleet_beyond_its_quota_is_a_failure_that_says_how_much_it_needs(aws: FakeAws):
    aws.base()
    aws.ask("quota", code=P, vcpus=96)
    (line,) = quota_lines(found(needing(nodes=1))).values()
    assert line.status == "ok"
    (line,) = quota_lines(found(needing(nodes=2))).values()
    assert line.status == "failed"
    assert "the fleet needs 192" in line.detail
    assert line.cure.endswith("--desired-value 192`")


def test_a_fleet_that_another_market_has_room_for_is_warned_of(aws: FakeAws):
    aws.base()
    aws.ask("quota", code=P, vcpus=0)
    lines = quota_lines(found(needing(market="spot-then-on-demand")))
    assert (lines[P].status, lines["L-7212CCBC"].status) == ("warning", "ok")


def test_a_gpu_that_nobody_has_is_said(aws: FakeAws):
    every = found(needing(gpu=("A1OO",)))
    assert every[f"quotas {HERE}"].status == "failed"
    assert "A1OO" in every[f"quotas {HERE}"].detail
