"""The security group of base: SSH from addresses that were named, if any; everything between nodes, everything out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from mgpu.errors import CleanupFailed, InputError
from mgpu.providers.aws import names
from mgpu.providers.aws.bootstrap.ingress_rules import (
    cidr,
    everything,
    is_all,
    is_ssh,
    is_within,
    is_world,
    ports_of,
    rules,
    ssh_from,
)
from mgpu.providers.aws.bootstrap.resource import (
    Found,
    Resource,
    Site,
    base_tags,
    fixed,
    tags_of,
    tags_there,
)
from mgpu.providers.aws.failures import unless

_NONE = ("InvalidGroup.NotFound", "InvalidGroupId.NotFound", "InvalidGroupId.Malformed")
_NO_VPC = ("InvalidVpcID.NotFound", "InvalidVpcID.Malformed")
_DONE = ("InvalidPermission.Duplicate", "InvalidPermission.NotFound")
_USED = ("DependencyViolation", "InvalidGroup.InUse")
_SETTLE_S = 30.0  # until EC2 knows everywhere what it has just made


class SecurityGroup(Resource):
    """The nodes' security group."""

    facts: ClassVar[dict[str, str]] = {"groupId": "sg-...", "vpc": "the network it is in"}
    identity: ClassVar[tuple[str, ...]] = ("existing", "name", "vpc_id")

    name: str = Field(default=names.SECURITY_GROUP, description="name")
    vpc_id: str = Field(default="", description="network (default: the default VPC)")
    ssh: tuple[str, ...] = Field(default=(), description="addresses that may log in, CIDR")
    allow_world: bool = Field(default=False, description="lets `ssh` be the whole world, which is refused otherwise")
    allow_nobody: bool = Field(
        default=False, description="lets `ssh` be empty: machines are reached through Session Manager"
    )
    within: bool = fixed(True, "all traffic between members, allowed at both ends")
    out: bool = fixed(True, "all traffic out")
    others: tuple[str, ...] = fixed((), "other rules that let traffic in, which mgpu did not make")


def default_vpc(site: Site) -> str | None:
    """The region's default network; None: there is none."""
    found = site.client("ec2").describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    return found[0]["VpcId"] if found else None


def network(site: Site, vpc_id: str) -> str:
    """The network of this id; of none: the default one.

    Raises:
        InputError: there is no such network.
    """
    if not vpc_id:
        found = default_vpc(site)
        if found:
            return found
        raise InputError(
            f"there is no default VPC in {site.region}",
            "The security group has to be in the network that machines will be in.",
            f"Name one (`--vpc vpc-...`), or make one: `aws ec2 create-default-vpc --region {site.region}`.",
        )
    if unless(_NO_VPC, site.client("ec2").describe_vpcs, VpcIds=[vpc_id]) is None:
        raise InputError(f"there is no network {vpc_id} in {site.region}", "", "Check its id, the account and region.")
    return vpc_id


class SecurityGroupManager:
    """Asks EC2 for it."""

    kind: ClassVar[str] = "security group"
    resource: ClassVar[type[Resource]] = SecurityGroup

    def __init__(self, site: Site) -> None:
        self.site = site

    def complete(self, wanted: SecurityGroup) -> SecurityGroup:
        """With its networks as AWS writes them.

        Raises:
            InputError: nobody could log in, or the whole world could.
        """
        if wanted.existing is not None:
            return wanted
        networks = tuple(sorted({cidr(each) for each in wanted.ssh}))
        if not networks and not wanted.allow_nobody:
            step = "Name at least one address: 203.0.113.7/32. Where Session Manager leads to machines: `allow_nobody`."
            raise InputError("nobody could log in: `ssh` is empty", "", step)
        wide = [each for each in networks if is_world(each)]
        if wide and not wanted.allow_world:
            why = "Port 22 of every machine would be open to everybody."
            step = "Name your own addresses; `allow_world` (`--force-public-ssh`) lets it be so."
            raise InputError(f"{', '.join(wide)} is the whole world", why, step)
        return wanted.model_copy(update={"ssh": networks})

    def expected(self, wanted: SecurityGroup) -> dict[str, str]:
        """Only what was given."""
        known = {"groupId": wanted.existing, "vpc": wanted.vpc_id}
        return {key: value for key, value in known.items() if value}

    def look(self, wanted: SecurityGroup) -> Found[SecurityGroup] | None:
        """As it is."""
        found = self._describe(wanted)
        if found is None:
            return None
        into = list(rules(found.get("IpPermissions", ())))
        ssh = tuple(sorted(source for source, rule in into if is_ssh(rule)))
        out = list(rules(found["IpPermissionsEgress"]))
        into_it, out_of_it = (any(is_within(rule, found["GroupId"]) for _, rule in each) for each in (into, out))
        other = [(s, rule) for s, rule in into if not is_ssh(rule) and not is_within(rule, found["GroupId"])]
        facts = {"groupId": found["GroupId"], "vpc": found["VpcId"]}
        if wanted.existing is not None:
            state = wanted.model_copy(update={"lacks": tuple(_lacks(into_it, into, wanted))})
            return Found(found["GroupId"], state, facts, ours=False)
        state = {
            "tags": tags_there(wanted, tags_of(found.get("Tags"))),
            "ssh": ssh,
            "within": into_it and out_of_it,
            "out": any(source == "0.0.0.0/0" and is_all(rule) for source, rule in out),
            "others": tuple(sorted(f"{ports_of(rule)} from {source}" for source, rule in other)),
        }
        raw = {"others": [rule for _, rule in other]}
        ours = names.BASE in tags_of(found.get("Tags"))
        return Found(found["GroupId"], wanted.model_copy(update=state), facts, ours, raw)

    def make(self, wanted: SecurityGroup) -> Found[SecurityGroup]:
        """One that lets nobody in yet, with our tag."""
        vpc = network(self.site, wanted.vpc_id)
        tags = names.tag_list({names.NAME: wanted.name, **base_tags(wanted)})
        answer = self._ec2.create_security_group(
            GroupName=wanted.name,
            Description="nodes of mgpu",
            VpcId=vpc,
            TagSpecifications=[{"ResourceType": "security-group", "Tags": tags}],
        )
        bare = wanted.model_copy(update={"ssh": (), "within": False})  # EC2 allows all egress by itself
        return Found(answer["GroupId"], bare, {"groupId": answer["GroupId"], "vpc": vpc}, raw={"others": []})

    def align(self, found: Found[SecurityGroup], wanted: SecurityGroup) -> None:
        """Closes what should not be open, then opens what should be."""
        now, ec2, group = found.state, self._ec2, found.id
        close = [ssh_from(each) for each in now.ssh if each not in wanted.ssh] + found.raw["others"]
        let_in = [ssh_from(each) for each in wanted.ssh if each not in now.ssh]
        # EFA's traffic is let out to a group that is named alone: of "all addresses" it is none
        members = [] if now.within else [everything(group=group)]
        for rule in close:
            self._set(ec2.revoke_security_group_ingress, group, rule)
        for rule in let_in + members:
            self._set(ec2.authorize_security_group_ingress, group, rule)
        for rule in members + ([] if now.out else [everything()]):
            self._set(ec2.authorize_security_group_egress, group, rule)
        if now.tags != wanted.tags:
            self.site.patiently(
                lambda: ec2.create_tags(Resources=[group], Tags=names.tag_list(base_tags(wanted))), _NONE, _SETTLE_S
            )

    def delete(self, wanted: SecurityGroup) -> None:
        """Waits for whatever still uses it to go.

        Raises:
            CleanupFailed: something uses it.
        """
        from botocore.exceptions import ClientError

        found = self._describe(wanted)
        if found is None:
            return
        group = found["GroupId"]
        try:
            self.site.patiently(lambda: unless(_NONE, self._ec2.delete_security_group, GroupId=group), _USED)
        except ClientError as error:
            if error.response["Error"]["Code"] in _USED:
                raise self._in_use(group) from error
            raise
        if self._describe(wanted) is not None:
            raise CleanupFailed(f"security group {group} is still there", "EC2 accepted the request.", "Try again.")

    @property
    def _ec2(self) -> Any:
        return self.site.client("ec2")

    def _describe(self, wanted: SecurityGroup) -> dict[str, Any] | None:
        if wanted.existing is not None:
            answer = unless(_NONE, self._ec2.describe_security_groups, GroupIds=[wanted.existing])
            return answer["SecurityGroups"][0] if answer and answer["SecurityGroups"] else None
        vpc = wanted.vpc_id or default_vpc(self.site)
        if not vpc:  # with a network, everything in it has gone
            return None
        filters = [{"Name": "group-name", "Values": [wanted.name]}, {"Name": "vpc-id", "Values": [vpc]}]
        found = self._ec2.describe_security_groups(Filters=filters)["SecurityGroups"]
        return found[0] if found else None

    def _set(self, call: Any, group: str, rule: dict[str, Any]) -> None:
        """One rule; that it is there already is success, and a group that was just made is waited for."""
        self.site.patiently(lambda: unless(_DONE, call, GroupId=group, IpPermissions=[rule]), _NONE, _SETTLE_S)

    def _in_use(self, group: str) -> CleanupFailed:
        filters = [{"Name": "group-id", "Values": [group]}]
        found = self._ec2.describe_network_interfaces(Filters=filters)["NetworkInterfaces"]
        users = [(each.get("Attachment") or {}).get("InstanceId") or each["NetworkInterfaceId"] for each in found]
        why = (
            f"Used by {', '.join(users)}." if users else "EC2 says that something depends on it: another group's rule?"
        )
        return CleanupFailed(
            f"security group {group} cannot be deleted, and stays", why, "End what uses it, and run the same again."
        )


def _lacks(within: bool, into: list[tuple[str, dict[str, Any]]], wanted: SecurityGroup) -> Iterator[str]:
    if not within:
        yield "it does not let its own members reach each other on all ports, which training needs"
    world = {source for source, rule in into if ("IpRanges" in rule or "Ipv6Ranges" in rule) and is_world(source)}
    if world and not wanted.allow_world:
        yield f"it lets the whole world in ({', '.join(sorted(world))})"
