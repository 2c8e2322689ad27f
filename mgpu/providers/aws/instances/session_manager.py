"""Machines that SSH reaches through Session Manager: they have no public address, and let nobody in.

An agent on the machine, which AWS's images bring, keeps a connection to AWS open. For that it needs rights, and a way
out of its network; until it has registered, nothing reaches the machine. On the operator's side a program of AWS's own
carries the stream.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from typing import Any

from mgpu.errors import InputError, NoOffer, PermissionDenied
from mgpu.providers.aws import names
from mgpu.providers.aws.failures import calling
from mgpu.providers.aws.instances import listing
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.session import Account
from mgpu.providers.base import ProxyCommand

PROGRAM = "session-manager-plugin"
DOCUMENT = "AWS-StartSSHSession"  # the kind of session that is a connection to sshd
AGENT = (
    "ssm:UpdateInstanceInformation",
    *(f"ssmmessages:{what}{kind}Channel" for what in ("Create", "Open") for kind in ("Control", "Data")),
)
"""What the agent may have to do, of AWS's own policy AmazonSSMManagedInstanceCore: register, and carry sessions."""

NOT_REGISTERED = (
    "its agent has not registered with Systems Manager: it still boots, or has no right or no way to do so "
    "(`mgpu check aws` looks at both)"
)
_LEAST = (1, 2, 764, 0)  # AWS supports none before it: it signs what it asks for, and takes the token by a variable
_VERSION_S = 10.0
_GUIDE = "https://docs.aws.amazon.com/systems-manager/latest/userguide"
_INSTALL = f"Install it: {_GUIDE}/session-manager-working-with-install-plugin.html"
_IDS = 50  # that one page of instances has


def require_program() -> str:
    """The version of AWS's program on PATH. Raises InputError: there is none, or it is too old."""
    path = shutil.which(PROGRAM)
    if path is None:
        raise InputError(f"there is no {PROGRAM} on PATH", "`aws.address: ssm` goes by AWS's own program.", _INSTALL)
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, encoding="utf-8", errors="replace", timeout=_VERSION_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"{path} does not say its version", str(error), _INSTALL) from error
    version = answer.stdout.strip()
    if not re.fullmatch(r"\d+(\.\d+)+", version):
        raise InputError(f"{path} does not say its version", answer.stderr.strip() or version, _INSTALL)
    if tuple(map(int, version.split("."))) < _LEAST:
        least = ".".join(map(str, _LEAST))
        raise InputError(f"{path} is too old: {version}", f"AWS supports {least} and newer.", _INSTALL)
    return version


def proxy_command(options: Options, region: str, machine: str) -> ProxyCommand:
    """What carries SSH to a machine."""
    whose = {"--profile": options.profile, "--endpoint-url": options.endpoint_url}
    given = [word for flag, value in whose.items() if value for word in (flag, value)]
    return ProxyCommand(command=("{python}", "-P", "-m", "mgpu.providers.aws.session_proxy", region, machine, *given))


def unregistered(account: Account, region: str, ids: Iterable[str]) -> set[str]:
    """Those of these machines that no session can reach yet. Raises ProviderError."""
    wanted = sorted(ids)
    client = account.client("ssm", region) if wanted else None
    online = set[str]()
    for some in listing.in_batches(wanted, _IDS):
        filters = [{"Key": "InstanceIds", "Values": some}]
        with calling("asking which machines have registered with Systems Manager", region):
            found = account.pages(client, "describe_instance_information", "InstanceInformationList", Filters=filters)
            online |= {each["InstanceId"] for each in found if each["PingStatus"] == "Online"}
    return set(wanted) - online


def leads_out(account: Account, region: str, subnet: dict[str, Any]) -> bool:
    """Whether a machine without a public address can reach Systems Manager from this subnet. Raises ProviderError."""
    vpc = subnet["VpcId"]
    tables = account.once(("routes", region, vpc), lambda: _tables(account, region, vpc))
    own = [each for each in tables if any(it.get("SubnetId") == subnet["SubnetId"] for it in each["Associations"])]
    main = [each for each in tables if any(it.get("Main") for it in each["Associations"])]
    routes = [route for table in own or main for route in table["Routes"]]
    return any(map(_is_way_out, routes)) or account.once(
        ("endpoint", region, vpc), lambda: _has_endpoint(account, region, vpc)
    )


def missing_rights(account: Account, profile: str) -> tuple[str, ...]:
    """The actions that agents of machines with this instance profile may not do; none, too, where nobody may ask IAM.
    Raises ProviderError."""
    return account.once(("agent", profile), lambda: _missing_rights(account, profile))


def require_rights(account: Account, region: str, profile: str) -> None:
    """Raises NoOffer where base's own role would let no machine be reached; ProviderError. What a role of the user's
    lacks, the account's Default Host Management may give."""
    missing = missing_rights(account, profile) if profile == names.NODE_ROLE else ()
    if missing:
        raise NoOffer(
            f"aws {region}: role {profile} does not let machines be reached through Session Manager",
            f"It lacks {', '.join(missing)}.",
            f"Run `mgpu bootstrap aws --region {region} --ssm`.",
            scope="region",
        )


def no_way_out(region: str, place: str) -> NoOffer:
    """No subnet there lets a machine be reached."""
    return NoOffer(
        f"aws {region}: no subnet in {place} leads to Systems Manager for machines without a public address",
        "Its route table sends nothing to a NAT gateway, and its network has no endpoint of ssmmessages.",
        "Name subnets behind a NAT gateway in `aws.subnet_ids`, or make interface endpoints of ssm and ssmmessages.",
        scope="zone",
    )


def _tables(account: Account, region: str, vpc: str) -> list[dict[str, Any]]:
    filters = [{"Name": "vpc-id", "Values": [vpc]}]
    with calling("looking for a way out of the network", region):
        return list(
            account.pages(account.client("ec2", region), "describe_route_tables", "RouteTables", Filters=filters)
        )


def _is_way_out(route: dict[str, Any]) -> bool:
    """A NAT gateway, a transit gateway, a machine; an internet gateway is for public addresses alone."""
    everywhere = route.get("DestinationCidrBlock") == "0.0.0.0/0" and route.get("State") != "blackhole"
    return everywhere and not route.get("GatewayId", "").startswith("igw-")


def _has_endpoint(account: Account, region: str, vpc: str) -> bool:
    filters = [{"Name": "vpc-id", "Values": [vpc]}]
    with calling("looking for endpoints of Systems Manager", region):
        ec2 = account.client("ec2", region)
        found = account.pages(ec2, "describe_vpc_endpoints", "VpcEndpoints", Filters=filters)
        return any(each["ServiceName"].endswith(".ssmmessages") for each in found)


def _missing_rights(account: Account, profile: str) -> tuple[str, ...]:
    iam = account.client("iam", account.home_region)
    with calling(f"looking for instance profile {profile}", ""):
        roles = iam.get_instance_profile(InstanceProfileName=profile)["InstanceProfile"]["Roles"]
    asked: dict[str, Any] = {"PolicySourceArn": roles[0]["Arn"], "ActionNames": list(AGENT)} if roles else {}
    try:
        with calling("asking IAM what machines may do", ""):
            found = account.pages(iam, "simulate_principal_policy", "EvaluationResults", **asked) if asked else ()
            return tuple(each["EvalActionName"] for each in found if each["EvalDecision"] != "allowed")
    except PermissionDenied:
        return ()
