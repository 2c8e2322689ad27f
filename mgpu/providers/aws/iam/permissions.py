"""Which of the operator's permissions these credentials lack: IAM simulates it, else calls that do nothing tell."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from mgpu.errors import InvalidRequest, PermissionDenied
from mgpu.providers.aws import names
from mgpu.providers.aws.failures import calling, code_of
from mgpu.providers.aws.iam import operator_policies
from mgpu.providers.aws.iam.policies import Document
from mgpu.providers.aws.instances import machine_image
from mgpu.providers.aws.session import Account

SIMULATE = "iam:SimulatePrincipalPolicy"
_AT_ONCE = 8
_DONE = "DryRunOperation"  # EC2's answer to one who may
# what a look has to be asked with
_ASKED: dict[str, dict[str, Any]] = {
    "DescribeCapacityBlockOfferings": {
        "InstanceType": "p5.48xlarge",
        "InstanceCount": 1,
        "CapacityDurationHours": 24,
    }
}
# asked for by policies that earlier versions printed, and that stand
_BEFORE: Document = {"StringEquals": {"iam:AWSServiceName": "ec2fleet.amazonaws.com"}}
_NOT_THERE = ("NoSuchEntity", "NoSuchEntityException")


class Told(NamedTuple):
    """What is known of permissions: those that were tried, those that lack, and why not all were tried."""

    tried: frozenset[str]
    missing: frozenset[str]
    untold: str = ""


def told(account: Account, arn: str, document: Document) -> Told:
    """Which actions of the document the identity `arn` lacks. Raises ProviderError: AWS does not answer."""
    try:
        return _simulated(account, principal_of(account, arn), document)
    except (InvalidRequest, PermissionDenied) as error:  # the first: what has no policies, as a federated user
        found = _tried(account, operator_policies.actions(document))
        also = {SIMULATE} if isinstance(error, PermissionDenied) else set[str]()
        return Told(found.tried, found.missing | also, error.what)


def principal_of(account: Account, arn: str) -> str:
    """The identity that has policies: of a session, the role that it has taken on. Raises ProviderError."""
    head, _, session = arn.partition(":assumed-role/")
    if not session:
        return arn
    role = session.partition("/")[0]
    try:
        with calling(f"looking for role {role}", ""):  # its ARN has a path that the session's has not
            return account.client("iam", account.home_region).get_role(RoleName=role)["Role"]["Arn"]
    except PermissionDenied:
        return f"{head.replace(':sts:', ':iam:')}:role/{role}"


def _simulated(account: Account, principal: str, document: Document) -> Told:
    iam = account.client("iam", account.home_region)

    def missing(statement: Document) -> set[str]:
        asked = {
            "ActionNames": statement["Action"],
            "ResourceArns": [_example(each, account.home_region) for each in statement["Resource"]],
            "ContextEntries": list(_facts({**_BEFORE, **statement.get("Condition", {})})),
        }
        with calling("asking IAM what these credentials may do", "", scope="account"):
            found = account.pages(
                iam, "simulate_principal_policy", "EvaluationResults", PolicySourceArn=principal, **asked
            )
            return {each["EvalActionName"] for each in found if each["EvalDecision"] != "allowed"}

    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        lacking = set[str]().union(*pool.map(missing, document["Statement"]))
    return Told(frozenset(operator_policies.actions(document)), frozenset(lacking))


def _example(pattern: str, region: str) -> str:
    """A resource that a pattern means."""
    return pattern if pattern == "*" else pattern.replace(":*:", f":{region}:").replace("*", "example")


def _facts(condition: Document) -> Iterator[Document]:
    """Facts of a request by which the condition holds."""
    for kind, keys in condition.items():
        for key, value in keys.items():
            first = "example" if kind == "Null" else value if isinstance(value, str) else value[0]
            variable = re.fullmatch(r"\$\{(.+)\}", first)
            for name in (key, *(variable.groups() if variable else ())):
                example = "example" if variable else first
                yield {"ContextKeyName": name, "ContextKeyValues": [example], "ContextKeyType": "string"}


def _tried(account: Account, needed: set[str]) -> Told:
    """What of this can be tried without making anything: looks, and EC2's dry runs."""
    region = account.home_region
    probes = {action: probe for action, probe in _probes(account, region) if action in needed}

    def denied(action: str) -> bool:
        try:
            with calling(f"trying {action}", region):
                _try(probes[action])
        except PermissionDenied:
            return True
        return False

    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        answers = dict(zip(probes, pool.map(denied, probes), strict=True))
    return Told(frozenset(probes), frozenset(action for action, no in answers.items() if no))


def _try(probe: Callable[[], object]) -> None:
    from botocore.exceptions import ClientError

    try:
        probe()
    except ClientError as error:
        if code_of(error) not in (_DONE, *_NOT_THERE):
            raise


def _probes(account: Account, region: str) -> Iterator[tuple[str, Callable[[], object]]]:
    ec2, iam = account.client("ec2", region), account.client("iam", region)
    for action in (*operator_policies.LOOKS, *names.SESSION_LOOKS):
        service, _, name = action.partition(":")
        if service == "ec2":
            yield action, _dry(ec2, name, **_ASKED.get(name, {}))
    tags = [{"Key": names.OWNER, "Value": "mgpu check"}]

    def new(kind: str) -> list[dict[str, Any]]:
        return [{"ResourceType": kind, "Tags": tags}]

    data = {"InstanceType": "g5.xlarge"}
    named = {"LaunchTemplateName": "mgpu-check", "TagSpecifications": new("launch-template")}
    yield "ec2:CreateLaunchTemplate", _dry(ec2, "CreateLaunchTemplate", LaunchTemplateData=data, **named)
    yield "ec2:AllocateAddress", _dry(ec2, "AllocateAddress", Domain="vpc", TagSpecifications=new("elastic-ip"))
    yield "iam:GetRole", lambda: iam.get_role(RoleName=names.REAPER_ROLE)
    yield "iam:GetInstanceProfile", lambda: iam.get_instance_profile(InstanceProfileName=names.NODE_ROLE)
    ssm = account.client("ssm", region)
    yield (
        "ssm:GetParameters",
        lambda: ssm.get_parameters(Names=[machine_image.PARAMETER.format(machine_image.KINDS[0])]),
    )
    yield "ssm:DescribeInstanceInformation", lambda: ssm.describe_instance_information(MaxResults=5)
    limits = account.client("service-quotas", region)
    yield "servicequotas:ListServiceQuotas", lambda: limits.list_service_quotas(ServiceCode="ec2", MaxResults=1)


def _dry(ec2: Any, operation: str, **arguments: Any) -> Callable[[], object]:
    from botocore import xform_name

    return lambda: getattr(ec2, xform_name(operation))(DryRun=True, **arguments)
