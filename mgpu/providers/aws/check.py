"""Everything at AWS that renting needs, looked at side by side: one finding each, with a cure where it is not there.

First who the caller is; without that nothing else can be asked. Then permissions, whether all regions tell what is in
them, and of each region that matters its network, the key of its disks, its base, who may log in, and its quotas.
"""

from __future__ import annotations

import ipaddress
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from typing import Any

from mgpu.errors import AuthError, InputError, MgpuError, NoOffer
from mgpu.plan.model import Requirements
from mgpu.providers.aws import names
from mgpu.providers.aws.bootstrap.ingress_rules import SSH, rules
from mgpu.providers.aws.catalog import quota_findings
from mgpu.providers.aws.failures import calling
from mgpu.providers.aws.iam import operator_policies, permissions
from mgpu.providers.aws.instances import disk_key, network, session_manager, teardown
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.reservations import offers as reserved
from mgpu.providers.aws.session import Account
from mgpu.providers.base import Finding
from mgpu.words import utc

_SKEW_S, _WORST_SKEW_S = 60.0, 240.0  # AWS refuses signatures that are five minutes off
_AT_ONCE = 16
_SHOWN = 3  # of the actions that are missing; the policy to paste has all

_Look = Callable[[], Iterable[Finding]]


def findings(
    account: Account, options: Options, requirements: Requirements | None, here: Callable[[], str]
) -> tuple[Finding, ...]:
    """All of them; `here` says which address others see this machine at, CIDR (InputError: nobody knows)."""
    try:
        identity, said_at = _identity(account)
    except MgpuError as error:
        return (Finding.of("credentials", error),)
    looks: dict[str, _Look] = {"permissions": lambda: _permissions(account, identity, requirements)}
    looks["listing"] = lambda: [_listing(account)]
    if options.address == "ssm":
        looks["permissions ssm"] = lambda: _permissions(account, identity, requirements, "sessions", " --ssm")
    if options.reservation:
        looks["reservation"] = lambda: [_reservation(account, options, requirements)]
    try:
        for region in _regions(account, options, requirements):
            looks |= _of_region(account, options, requirements, region, here)
    except MgpuError as error:
        refused = Finding.of("regions", error)
        looks["regions"] = lambda: [refused]
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        found = list(pool.map(lambda item: _safely(*item), looks.items()))
    return (_credentials(account, identity), _clock(said_at), *(each for some in found for each in some))


def _safely(subject: str, look: _Look) -> list[Finding]:
    try:
        return list(look())
    except MgpuError as error:
        return [Finding.of(subject, error)]


def _ok(subject: str, detail: str) -> Finding:
    return Finding(subject=subject, status="ok", detail=detail)


def _warning(subject: str, detail: str, cure: str) -> Finding:
    return Finding(subject=subject, status="warning", detail=detail, cure=cure)


# --- who, and when ----------------------------------------------------------------------------------------------------


def _identity(account: Account) -> tuple[dict[str, Any], float]:
    """Who AWS says that we are, and its clock (UNIX seconds; 0: it does not say). Raises AuthError, InputError."""
    region = account.home_region
    with calling("asking whose credentials these are", region, scope="provider"):
        answer = account.client("sts", region).get_caller_identity()
    account.id()
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return answer, parsedate_to_datetime(date).timestamp() if date else 0.0


def _credentials(account: Account, identity: dict[str, Any]) -> Finding:
    arn = identity["Arn"]
    profile = account.options.profile or os.environ.get("AWS_PROFILE") or ""
    detail = f"account {identity['Account']}, {arn}" + (f", profile {profile}" if profile else "")
    if arn.endswith(":root"):
        cure = "Make a user or role with the policies of `mgpu policy aws`."
        return _warning("credentials", f"{detail}: the owner of the whole account", cure)
    if os.environ.get("AWS_SESSION_TOKEN") and not profile:
        cure = "The operator needs them until a run ends: a profile (`aws sso login`, a role) is renewed by itself."
        return _warning("credentials", f"{detail}; temporary ones in AWS_SESSION_TOKEN, which nobody renews", cure)
    return _ok("credentials", detail)


def _clock(said_at: float) -> Finding:
    off = time.time() - said_at
    words = f"{abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} AWS's"
    if not said_at or abs(off) <= _SKEW_S:
        return _ok("clock", words if said_at else "AWS did not say what time it is")
    status = "failed" if abs(off) > _WORST_SKEW_S else "warning"
    return Finding(subject="clock", status=status, detail=words, cure="Set the clock (NTP): AWS refuses 5 minutes.")


# --- permissions ------------------------------------------------------------------------------------------------------


def _permissions(
    account: Account,
    identity: dict[str, Any],
    requirements: Requirements | None,
    name: str = "machines",
    flag: str = "",
) -> Iterator[Finding]:
    """Of the operator's policy of this name, which `mgpu policy aws` prints with the flag."""
    subject = f"permissions{flag.replace(' --', ' ')}"
    if identity["Arn"].endswith(":root"):
        yield _ok(subject, "the account's owner may do everything")
        return
    regions = requirements.regions if requirements else ()
    document = operator_policies.documents(identity["Account"], regions, home=account.home_region)[name]
    told = permissions.told(account, identity["Arn"], document)
    needed = len(operator_policies.actions(document))
    if told.missing - {permissions.SIMULATE} or (told.missing and not told.untold):
        yield Finding(
            subject=subject,
            status="failed",
            detail=f"{len(told.missing)} of {needed} actions are missing: {_some(told.missing)}",
            cure=f"Have this policy attached to them; `mgpu policy aws{flag}` prints all that is needed.",
            document=operator_policies.narrowed(document, told.missing),
        )
    elif told.untold:
        detail = f"{len(told.tried)} of {needed} actions were tried and are allowed; of the others nothing is known"
        cure = "Allow iam:SimulatePrincipalPolicy, and all of them are looked at."
        yield _warning(subject, detail, cure)
    else:
        yield _ok(subject, f"all {needed} actions are allowed")


def _some(actions: Iterable[str]) -> str:
    first, rest = sorted(actions)[:_SHOWN], sorted(actions)[_SHOWN:]
    return ", ".join(first) + (f" and {len(rest)} more" if rest else "")


def _reservation(account: Account, options: Options, requirements: Requirements | None) -> Finding:
    subject = "reservation"
    found = reserved.look(account, options, requirements.regions if requirements else ())
    it = found.reservation
    words = f"{it.id}, {it.kind} of {it.machines} x {it.instance_type} in {it.zone}: {it.state}, {it.free} free"
    detail = words + (f", ends {utc(it.ends_at)}" if it.ends_at else "")
    hindrance = reserved.obstacle(found, requirements.nodes if requirements else 1, time.time())
    if hindrance is not None:
        return Finding(subject=subject, status="failed", detail=f"{detail}; {hindrance.reason}", cure=hindrance.cure)
    if it.state != "active":
        return _warning(subject, detail, f"It begins {utc(it.begins_at)}: launch then.")
    return _ok(subject, detail)


def _listing(account: Account) -> Finding:
    """Of what each run's end and `mgpu gc` list; here of nobody."""
    closed = teardown.list_owned(account, "nobody").closed
    refused = sorted(region for region, error in closed.items() if isinstance(error, AuthError))
    forbidden = ", ".join(sorted(closed.keys() - {*refused}))
    beside = f", but where your organization forbids it: {forbidden}" if forbidden else ""
    detail = f"machines, addresses and disks, in all regions{beside}"
    if not refused:
        return _ok("listing", detail)
    cure = (
        "A region that was enabled a moment ago takes them in some minutes; those of a session have to be made for all "
        "regions (`sts_regional_endpoints = regional`)."
    )
    return _warning("listing", f"{detail}; not these, which do not take the credentials: {', '.join(refused)}", cure)


# --- one region -------------------------------------------------------------------------------------------------------


def _regions(account: Account, options: Options, requirements: Requirements | None) -> tuple[str, ...]:
    """Those of the run file, or that of its reservation, else where the account is at home. Raises InputError: one that
    there is not; ProviderError."""
    named = requirements.regions if requirements else ()
    if options.reservation:
        return (reserved.look(account, options, named).reservation.region,)
    return account.require_regions(named or (account.home_region,))


def _of_region(
    account: Account, options: Options, requirements: Requirements | None, region: str, here: Callable[[], str]
) -> dict[str, _Look]:
    looks: dict[str, _Look] = {
        f"network {region}": lambda: [_network(account, options, region)],
        f"disks {region}": lambda: [disk_key.finding(account, region)],
        f"roles {region}": lambda: [_roles(account, options, region)],
        f"login {region}": lambda: [_login(account, options, region, here)],
    }
    if not options.reservation:  # whose machines count against no quota any more
        looks[f"quotas {region}"] = lambda: quota_findings.findings(account, options, requirements, region)
    return looks


def _network(account: Account, options: Options, region: str) -> Finding:
    subject = f"network {region}"
    found = network.subnets(account, options, region)
    if not found:
        cure = f"Name subnets of {region} in `aws.subnet_ids`, or `aws ec2 create-default-subnet`."
        return Finding(subject=subject, status="failed", detail="there is no subnet for machines", cure=cure)
    free = sum(each["AvailableIpAddressCount"] for each in found)
    zones = sorted({each["AvailabilityZone"] for each in found})
    detail = f"{found[0]['VpcId']}: subnets in {', '.join(zones)}, {free} free addresses"
    if options.address == "private" and options.via is None:
        cure = "Set `aws.jump_host` and `aws.jump_host_key`, unless this machine is in that network."
        return _warning(subject, f"{detail}; machines get private addresses alone, and no jump host is named", cure)
    if options.address == "ssm":
        leading = [each for each in found if session_manager.leads_out(account, region, each)]
        if not leading:
            return Finding.of(subject, session_manager.no_way_out(region, found[0]["VpcId"]))
        detail = f"{detail}; {len(leading)} of {len(found)} subnets lead to Systems Manager"
    return _ok(subject, detail)


def _roles(account: Account, options: Options, region: str) -> Finding:
    profile = network.require_roles(account, options, region)
    reaper = options.reaper_role or names.REAPER_ROLE
    detail = f"instance profile {profile}, role {reaper}"
    if options.address == "ssm":
        session_manager.require_rights(account, region, profile)
        missing = session_manager.missing_rights(account, profile)
        if missing:
            cure = (
                "Attach AWS's policy AmazonSSMManagedInstanceCore to its role, or have Default Host Management give it."
            )
            return _warning(f"roles {region}", f"{detail}; machines may not {', '.join(missing)}", cure)
        detail = f"{detail}; machines may register with Systems Manager"
    return _ok(f"roles {region}", detail)


def _login(account: Account, options: Options, region: str, here: Callable[[], str]) -> Finding:
    """Whether the group lets this machine, or the jump host, in; or what leads there without."""
    subject = f"login {region}"
    subnets = network.subnets(account, options, region)
    if not subnets:
        raise NoOffer("without a network nobody can log in", "", "See `network`.")
    group = network.group_of(account, options, region, subnets[0]["VpcId"])
    sources = sorted(_let_in(account, region, group))
    detail = f"{group} lets in {', '.join(sources) or 'nobody'} on port {SSH}"
    if options.address == "private":
        who = options.via.address if options.via else "a machine in that network"
        return _ok(subject, f"{detail}; nodes are reached through {who}")
    if options.address == "ssm":
        version = session_manager.require_program()
        return _ok(subject, f"{detail}; nobody has to be: {session_manager.PROGRAM} {version} leads to nodes")
    cure = f"`mgpu bootstrap aws --region {region} --allow-ssh ADDRESS`"
    if options.security_group_id:
        cure = f"Let ADDRESS in on port {SSH} of {group}, which is yours."
    try:
        ours = here()
    except InputError as error:
        return _warning(subject, f"{detail}; {error.what}", f"If that is not you: {cure.replace('ADDRESS', 'CIDR')}")
    if any(_within(ours, source) for source in sources):
        return _ok(subject, f"{detail}; this machine is {ours}")
    detail = f"{detail}, and this machine is {ours}"
    return Finding(subject=subject, status="failed", detail=detail, cure=cure.replace("ADDRESS", ours))


def _let_in(account: Account, region: str, group: str) -> Iterator[str]:
    """The networks that a security group lets in on port 22, and its other sources by their names."""
    filters = [{"Name": "group-id", "Values": [group]}]
    with calling(f"looking at security group {group}", region):
        found = account.client("ec2", region).describe_security_groups(Filters=filters)["SecurityGroups"]
    for each in found:
        for source, rule in rules(each.get("IpPermissions", ())):
            every = rule["IpProtocol"] == "-1"
            if source != group and (every or rule.get("FromPort", 0) <= SSH <= rule.get("ToPort", 0)):
                yield source


def _within(network: str, source: str) -> bool:
    if not re.match(r"[0-9a-f]*[.:]", source):  # a group, a prefix list
        return False
    inner, outer = ipaddress.ip_network(network), ipaddress.ip_network(source)
    return inner.version == outer.version and outer.supernet_of(inner)  # type: ignore[arg-type]
