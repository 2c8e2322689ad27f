"""Launching machines as EC2 does: what the template says is what they get, and refusals are named."""

from __future__ import annotations

import base64
import math
from typing import Any

from moto.core.types import Base64EncodedString
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.utils import convert_tag_spec
from moto.iam.models import iam_backends

from fakes.aws import keys, market, reservations
from fakes.aws.cloud import Cloud
from fakes.aws.rules import Pool

Data = dict[str, Any]


def refuse(code: str, message: str) -> EC2ClientError:
    """An error as EC2 gives it."""
    return EC2ClientError(code, message)


def template(backend: Any, specification: Data) -> tuple[Data, Data]:
    """What a launch template says, and how an answer names it."""
    if name := specification.get("LaunchTemplateName"):
        found = backend.get_launch_template_by_name(name)
    else:
        found = backend.get_launch_template(specification.get("LaunchTemplateId"))
    version = found.get_version(specification.get("Version", "$Default"))
    named = {"LaunchTemplateId": found.id, "LaunchTemplateName": found.name, "Version": str(version.number)}
    return dict(version.data), named


def pool(backend: Any, data: Data, market_name: str) -> tuple[Pool, Any]:
    """Where the machines would come from, and the subnet they would be in."""
    kind = data.get("InstanceType") or "m1.small"
    if not market.known(kind):
        raise refuse("InvalidParameterValue", f"The following supplied instance types do not exist: [{kind}]")
    subnet = _subnet(backend, data)
    zone = subnet.availability_zone
    if zone not in market.zones(kind, backend.region_name):
        text = f"Your requested instance type ({kind}) is not supported in your requested Availability Zone ({zone})."
        raise refuse("Unsupported", text)
    return Pool(kind, zone, market_name), subnet


def _subnet(backend: Any, data: Data) -> Any:
    interfaces = data.get("NetworkInterfaces") or [{}]
    if named := data.get("SubnetId") or interfaces[0].get("SubnetId"):
        return backend.get_subnet(named)
    ours = backend.get_default_subnets()
    if not ours:
        raise refuse("VPCIdNotSpecified", "No default VPC for this user. GroupName is only supported for EC2-Classic.")
    zone = data.get("Placement", {}).get("AvailabilityZone")
    if zone and zone not in ours:
        raise refuse("InvalidParameterValue", f"Invalid availability zone: [{zone}]")
    return ours[zone or min(ours)]


def check(cloud: Cloud, backend: Any, data: Data, subnet: Any) -> None:
    """Raises what EC2 says about a template that cannot be launched."""
    interfaces = data.get("NetworkInterfaces") or []
    if interfaces and (data.get("SecurityGroupIds") or data.get("SecurityGroups")):
        text = "Network interfaces and an instance-level security groups may not be specified on the same request"
        raise refuse("InvalidParameterCombination", text)
    if len(interfaces) > 1 and any(each.get("AssociatePublicIpAddress") for each in interfaces):
        text = "The associatePublicIPAddress parameter cannot be specified when launching with multiple interfaces."
        raise refuse("InvalidParameterCombination", text)
    if wrong := _wrong_cards(interfaces):
        raise refuse("InvalidParameterCombination", wrong)
    groups = [*(data.get("SecurityGroupIds") or []), *(one for each in interfaces for one in each.get("Groups") or [])]
    for group in groups:
        found = backend.get_security_group_from_id(group)
        if found is None or found.vpc_id != subnet.vpc_id:
            raise refuse("InvalidGroup.NotFound", f"The security group '{group}' does not exist in {subnet.vpc_id}")
    if data.get("ImageId") not in backend.amis:
        raise refuse("InvalidAMIID.NotFound", f"The image id '[{data.get('ImageId')}]' does not exist")
    group = (data.get("Placement") or {}).get("GroupName")
    if group and (backend.account_id, backend.region_name, group) not in cloud.groups:
        raise refuse("InvalidPlacementGroup.Unknown", f"The Placement Group '{group}' is unknown.")
    profile(backend, data)


def _wrong_cards(interfaces: list[Data]) -> str:
    """What is wrong with how interfaces are laid out on network cards, in words; nothing: an empty string."""
    places = [(int(each.get("NetworkCardIndex") or 0), int(each.get("DeviceIndex") or 0)) for each in interfaces]
    if interfaces and (0, 0) not in places:
        return "The primary network interface must be on network card index 0"
    if len(set(places)) < len(places):
        return "Each network interface requires a device index of its own on its network card"
    first = next((each for each, at in zip(interfaces, places, strict=True) if at == (0, 0)), {})
    return "EFA-only network interfaces cannot be primary" if first.get("InterfaceType") == "efa-only" else ""


def profile(backend: Any, data: Data) -> Any | None:
    """The instance profile that is named; None if none is."""
    named = data.get("IamInstanceProfile") or {}
    wanted = named.get("Name") or named.get("Arn", "").rpartition("/")[2]
    if not wanted:
        return None
    for each in iam_backends[backend.account_id][backend.partition].instance_profiles.values():
        if each.name == wanted:
            return each
    text = f"Value ({wanted}) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance Profile name"
    raise refuse("InvalidParameterValue", text)


def granted(
    cloud: Cloud, wanted: Pool, subnet: Any, count: int, max_usd: float | None, reservation: Any = None
) -> tuple[int, Any]:
    """How many of `count` the pool can give now, and the refusal of the rest (None if there is no rest)."""
    if reservation is not None:
        return reservations.granted(reservation, count)
    price = cloud.rules.usd(wanted)
    if wanted.market == "spot" and max_usd is not None and max_usd < price:
        text = f"Your Spot request price of {max_usd} is lower than the minimum required Spot request price of {price}."
        return 0, refuse("SpotMaxPriceTooLow", text)
    limits = [_by_quota(cloud, wanted), _by_capacity(cloud, wanted), _by_addresses(subnet)]
    most, refusal = min(limits, key=lambda limit: limit[0])
    return (count, None) if most >= count else (max(int(most), 0), refusal)


def _by_quota(cloud: Cloud, wanted: Pool) -> tuple[float, Any]:
    code = market.quota_code(wanted.instance_type, wanted.market)
    used = sum(
        market.vcpus(life.pool.instance_type)
        for life in cloud.lives.by_id.values()
        if life.counts(cloud.rules.dead_count_s)
        and not life.reservation
        and life.pool.region == wanted.region
        and market.quota_code(life.pool.instance_type, life.pool.market) == code
    )
    limit = cloud.rules.quota(code)
    left = (limit - used) // market.vcpus(wanted.instance_type)
    if wanted.market == "spot":
        return left, refuse("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
    text = (
        f"You have requested more vCPU capacity than your current vCPU limit of {limit:.0f} allows for the instance "
        "bucket that the specified instance type belongs to. Please visit http://aws.amazon.com/contact-us/ec2-request "
        "to request an adjustment to this limit."
    )
    return left, refuse("VcpuLimitExceeded", text)


def _by_capacity(cloud: Cloud, wanted: Pool) -> tuple[float, Any]:
    most, code = cloud.rules.capacity(wanted)
    if most is None:
        return math.inf, None
    used = sum(life.pool == wanted and not life.reservation for life in cloud.lives.alive())
    text = (
        f"We currently do not have sufficient {wanted.instance_type} capacity in the Availability Zone you requested "
        f"({wanted.zone}). Our system will be working on provisioning additional capacity."
    )
    return most - used, refuse(code, text)


def _by_addresses(subnet: Any) -> tuple[float, Any]:
    text = f"There are not enough free addresses in subnet '{subnet.id}' to satisfy the requested number of instances."
    return subnet.available_ip_address_count, refuse("InsufficientFreeAddressesInSubnet", text)


def launch(cloud: Cloud, backend: Any, wanted: Pool, subnet: Any, data: Data, count: int, **marks: Any) -> Any:
    """Makes the machines; moto's reservation of them. `marks`: client_token, tags of instances on top."""
    check(cloud, backend, data, subnet)
    held = reservations.target(cloud, backend, data, wanted)
    tags = convert_tag_spec(data.get("TagSpecifications") or [])
    tags["instance"] = {**tags.get("instance", {}), **marks.pop("tags", {})}
    interfaces = [_interface(number, each, subnet) for number, each in enumerate(data.get("NetworkInterfaces") or [])]
    reservation = backend.run_instances(
        data["ImageId"],
        count,
        _user_data(data),
        [],
        instance_type=wanted.instance_type,
        is_instance_type_default=False,
        region_name=backend.region_name,
        subnet_id=subnet.id,
        security_group_ids=[] if interfaces else data.get("SecurityGroupIds") or [],
        nics=interfaces,
        private_ip=data.get("PrivateIpAddress"),
        associate_public_ip=False if len(interfaces) > 1 else None,
        tags=tags,
        key_name=data.get("KeyName"),
        ebs_optimized=data.get("EbsOptimized") or False,
        instance_initiated_shutdown_behavior=data.get("InstanceInitiatedShutdownBehavior"),
        metadata_options=data.get("MetadataOptions") or {},
        lifecycle=wanted.market if wanted.market in ("spot", "capacity-block") else None,
        **({"block_device_mappings": disks} if (disks := _disks(data)) else {}),
        **marks,
    )
    locked = not keys.opens(backend, _disks(data))
    for instance in reservation.instances:
        _finish(backend, instance, data, tags.get("network-interface", {}))
        place = held or reservations.open_for(cloud, wanted)
        instance.capacity_reservation_id = place.id if place else None
        cloud.lives.begin(instance, wanted, locked=locked, reservation=place.id if place else "")
    return reservation


def _interface(number: int, given: Data, subnet: Any) -> Data:
    """moto knows interfaces by their device index, which is not unique where there are several cards."""
    return {"DeleteOnTermination": True, **given, "DeviceIndex": number, "SubnetId": subnet.id}


class DiskType(str):
    """A type of disk with its speed, which moto forgets on the way from a machine's mappings to its volumes."""

    speed: Data

    @classmethod
    def of(cls, ebs: Data) -> DiskType:
        """As a mapping has it."""
        made = cls(ebs.get("VolumeType") or "gp2")
        names = {"iops": "Iops", "throughput": "Throughput"}
        made.speed = {name: int(ebs[said]) for name, said in names.items() if ebs.get(said)}
        return made


def _disks(data: Data) -> list[Data]:
    return [
        {
            **each,
            "Ebs": {
                "VolumeSize": 8,
                "DeleteOnTermination": True,
                **each["Ebs"],
                "VolumeType": DiskType.of(each["Ebs"]),
            },
        }
        for each in data.get("BlockDeviceMappings") or []
        if "Ebs" in each
    ]


def _user_data(data: Data) -> Base64EncodedString | None:
    given = data.get("UserData")
    return Base64EncodedString(str(given)) if given else None


def user_data(instance: Any) -> bytes:
    """What the machine is given, decoded."""
    return base64.b64decode(str(instance.user_data)) if instance.user_data else b""


def _finish(backend: Any, instance: Any, data: Data, interface_tags: dict[str, str]) -> None:
    if found := profile(backend, data):
        instance.iam_instance_profile = {"Arn": found.arn, "Id": found.id}
    placement = data.get("Placement") or {}
    instance.placement.group_name = placement.get("GroupName", "")
    for given, eni in zip(data.get("NetworkInterfaces") or [{}], instance.nics.values(), strict=True):
        eni.add_tags(interface_tags)
        eni.delete_on_termination = given.get("DeleteOnTermination", True)
        eni.device_index = int(given.get("DeviceIndex", 0))
        eni.network_card = int(given.get("NetworkCardIndex", 0))
        eni.interface_type = given.get("InterfaceType", "interface")
    if data.get("NetworkInterfaces"):
        instance.security_groups = list(instance.nics[0]._group_set)
