"""What a gang stands on in its region: the subnet, the group, the roles, and what its machine type can do. Nothing is
made here; what is missing rules out the zone or the region, and the reason names the command that makes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mgpu.errors import NoCapacity, NoOffer
from mgpu.plan.model import Offer
from mgpu.providers.aws import names
from mgpu.providers.aws.failures import calling
from mgpu.providers.aws.instances import session_manager
from mgpu.providers.aws.instances.listing import is_absent, tags_of
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.session import Account
from mgpu.providers.base import NETWORK


@dataclass(frozen=True)
class Place:
    """Where a gang goes, all by id or name."""

    region: str
    zone: str
    subnet_id: str
    security_group_id: str
    instance_profile: str


@dataclass(frozen=True)
class Kind:
    """What a machine type can do that matters to its network."""

    cards: int  # network cards
    efa_cards: int  # those that can have an EFA interface
    cluster: bool  # may be in a cluster placement group


def find(account: Account, options: Options, offer: Offer, nodes: int) -> Place:
    """What stands ready for `nodes` machines of this offer.

    Raises:
        NoOffer: something is missing in the zone or the region (`scope` says which).
        InputError: this machine has nothing that carries `address: ssm`.
        NoCapacity: the subnets have too few addresses left.
        ProviderError: AWS refused, or did not answer.
    """
    region = offer.region
    require_enabled(account, region)
    subnet = _subnet(account, options, offer, nodes)
    _require_dialled(options, subnet)
    group = group_of(account, options, region, subnet["VpcId"])
    profile = require_roles(account, options, region)
    if options.address == "ssm":
        session_manager.require_program()
        session_manager.require_rights(account, region, profile)
    return Place(region, subnet["AvailabilityZone"], subnet["SubnetId"], group, profile)


def require_enabled(account: Account, region: str) -> None:
    """Raises NoOffer: the account has the region not enabled, and each call there would be refused as if the
    credentials were bad; ProviderError."""
    if region not in account.once("regions", account.regions):
        raise _missing(f"region {region}", "it is not enabled for this account", "Enable it in the AWS console.")


def subnets(account: Account, options: Options, region: str) -> list[dict[str, Any]]:
    """The subnets that machines may go to, as EC2 shows them. Raises NoOffer: no default VPC; ProviderError."""
    return account.once(("subnets", options.subnet_ids, region), lambda: _subnets(account, options, region))


def group_of(account: Account, options: Options, region: str, vpc: str) -> str:
    """The id of the nodes' security group in this network. Raises NoOffer: there is none, or that of the options is of
    another region; ProviderError."""
    if named := options.security_group_id:
        account.once(("group", region, named), lambda: _require_group(account, region, named))
        return named
    return account.once(("group", region, vpc), lambda: _group(account, region, vpc))


def require_roles(account: Account, options: Options, region: str) -> str:
    """The name of the nodes' instance profile. Raises NoOffer: it or the reaper's role is missing; ProviderError."""
    profile = options.instance_profile or names.NODE_ROLE
    account.once(("profile", profile), lambda: _require_role(account, region, "instance profile", profile))
    if not options.reaper_role:
        account.once("reaper", lambda: _require_role(account, region, "role", names.REAPER_ROLE))
    return profile


def kind(account: Account, region: str, instance_type: str) -> Kind:
    """What EC2 says of a machine type. Raises ProviderError."""
    return account.once(("kind", region, instance_type), lambda: _kind(account, region, instance_type))


def _kind(account: Account, region: str, instance_type: str) -> Kind:
    with calling(f"describing {instance_type}", region):
        answer = account.client("ec2", region).describe_instance_types(InstanceTypes=[instance_type])
    shown = answer["InstanceTypes"][0]
    network = shown.get("NetworkInfo", {})
    efa = network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0) if network.get("EfaSupported") else 0
    strategies = shown.get("PlacementGroupInfo", {}).get("SupportedStrategies", ())
    return Kind(cards=network.get("MaximumNetworkCards", 1), efa_cards=efa, cluster="cluster" in strategies)


def _subnet(account: Account, options: Options, offer: Offer, nodes: int) -> dict[str, Any]:
    """The subnet in the offer's zone with the most addresses left."""
    here = subnets(account, options, offer.region)
    in_zone = [each for each in here if offer.zone in (None, each["AvailabilityZone"], each.get("AvailabilityZoneId"))]
    if not in_zone:
        raise _no_subnet(options, offer, here)
    if options.address == "ssm":
        in_zone = [each for each in in_zone if session_manager.leads_out(account, offer.region, each)]
        if not in_zone:
            raise session_manager.no_way_out(offer.region, offer.zone or "this region")
    best = max(in_zone, key=lambda each: each["AvailableIpAddressCount"])
    if best["AvailableIpAddressCount"] < nodes:
        left = f"{best['SubnetId']} has {best['AvailableIpAddressCount']} free addresses"
        raise NoCapacity(
            f"aws {best['AvailabilityZone']}: {left}, {nodes} are needed", "", "Add a subnet.", scope="zone"
        )
    return best


def _no_subnet(options: Options, offer: Offer, here: list[dict[str, Any]]) -> NoOffer:
    region, zone = offer.region, offer.zone or "this region"
    if options.subnet_ids and not here:
        given = ", ".join(options.subnet_ids)
        return _missing(
            f"subnet in {region} among `aws.subnet_ids` ({given})",
            "",
            f"Add a subnet of {region}, or leave the key out.",
        )
    if options.subnet_ids:
        cure = f"Add subnets of more zones of {region} to `aws.subnet_ids`, or leave the key out."
        return NoOffer(f"aws {region}: none of `aws.subnet_ids` is in {zone}", "", cure, scope="zone")
    cure = f"`aws ec2 create-default-subnet --region {region}` makes one in each zone that is named to it."
    return NoOffer(f"aws {region}: no default subnet is in {zone}", "", cure, scope="zone")


def _subnets(account: Account, options: Options, region: str) -> list[dict[str, Any]]:
    ec2 = account.client("ec2", region)
    if options.subnet_ids:
        filters = [{"Name": "subnet-id", "Values": list(options.subnet_ids)}]  # a filter passes over those of elsewhere
    else:
        filters = [
            {"Name": "vpc-id", "Values": [_default_vpc(account, region)]},
            {"Name": "default-for-az", "Values": ["true"]},
        ]
    with calling("listing subnets", region):
        return list(account.pages(ec2, "describe_subnets", "Subnets", Filters=filters))


def _default_vpc(account: Account, region: str) -> str:
    with calling("looking for the default VPC", region):
        answer = account.client("ec2", region).describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])
    if not answer["Vpcs"]:
        cure = f"`aws ec2 create-default-vpc --region {region}`, or set `aws.subnet_ids` and `aws.security_group_id`."
        raise _missing(f"default VPC in {region}", "", cure)
    return answer["Vpcs"][0]["VpcId"]


def _require_group(account: Account, region: str, group: str) -> None:
    # not by its network: a group may be in several
    if not _groups(account, region, {"group-id": group}):
        why = "a security group exists in one region only"
        raise _missing(f"{group} in {region}", why, "Mend `aws.security_group_id`, or set `regions` to where it is.")


def _group(account: Account, region: str, vpc: str) -> str:
    found = _groups(account, region, {"group-name": names.SECURITY_GROUP, "vpc-id": vpc})
    ours = [each["GroupId"] for each in found if names.BASE in tags_of(each)]
    if not ours:
        raise _no_base(region, f"security group {names.SECURITY_GROUP} of ours in {vpc}", "security_group_id")
    return ours[0]


def _groups(account: Account, region: str, by: dict[str, str]) -> list[dict[str, Any]]:
    filters = [{"Name": name, "Values": [value]} for name, value in by.items()]
    with calling("looking for the security group", region):
        return account.client("ec2", region).describe_security_groups(Filters=filters)["SecurityGroups"]


def _require_role(account: Account, region: str, what: str, name: str) -> None:
    from botocore.exceptions import ClientError

    iam = account.client("iam", account.home_region)
    looks: dict[str, Callable[[], object]] = {
        "role": lambda: iam.get_role(RoleName=name),
        "instance profile": lambda: iam.get_instance_profile(InstanceProfileName=name),
    }
    with calling(f"looking for {what} {name}", ""):
        try:
            looks[what]()
        except ClientError as error:
            if not is_absent(error) and error.response["Error"]["Code"] != "NoSuchEntity":
                raise
            key = "reaper_role" if what == "role" else "instance_profile"
            if name not in (names.NODE_ROLE, names.REAPER_ROLE):
                raise _missing(
                    f"{what} {name}", "", f"Mend `aws.{key}`, or leave it out: then it is base's."
                ) from error
            raise _no_base(region, f"{what} {name}", key) from error


def _require_dialled(options: Options, subnet: dict[str, Any]) -> None:
    """Raises NoOffer where this machine dials private addresses of another network than the subnet's."""
    here = os.environ.get(NETWORK)
    if here and options.address != "ssm" and options.via is None and subnet["VpcId"] != here:
        why = f"This machine is in {here} and dials private addresses; {subnet['SubnetId']} is in {subnet['VpcId']}."
        cure = "Launch from elsewhere, or set `regions` or `aws.subnet_ids` to that network, or `aws: {address: ssm}`."
        raise NoOffer("aws: nobody could log in to machines there", why, cure, scope="zone")


def _no_base(region: str, missing: str, key: str) -> NoOffer:
    cure = f"Run `mgpu bootstrap aws --region {region}` once, or set `aws.{key}`."
    return _missing(missing, f"stack `base` was not made for {region}", cure)


def _missing(what: str, why: str, cure: str) -> NoOffer:
    return NoOffer(f"aws: there is no {what}", why, cure, scope="region")
