"""DescribeInstances: read lag, pages, and an answer for a thousand machines in a tenth of moto's time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any
from xml.sax.saxutils import escape

from moto.ec2 import utils
from moto.ec2.exceptions import InvalidInstanceIdError, InvalidParameterCombination
from moto.ec2.responses.instances import InstanceResponse

from fakes.aws.cloud import Cloud
from fakes.aws.patching import existing, replace

MORE_FILTERS = {"client-token": "client_token", "instance-lifecycle": "lifecycle"}
NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"

Seen = tuple[Any, Any]  # reservation, instance


def install(cloud: Cloud) -> None:
    """From now on."""
    existing(utils, "filter_dict_attribute_mapping").update(MORE_FILTERS)

    def describe_instances(self: Any) -> str:
        self.error_on_dryrun()
        ids = self._get_param("InstanceIds", [])
        if ids and self._get_param("MaxResults"):
            text = "The parameter instancesSet cannot be used with the parameter maxResults"
            raise InvalidParameterCombination(text)
        seen = _seen(cloud, self.ec2_backend, self._filters_from_querystring(), set(ids))
        limit = min(int(self._get_param("MaxResults") or 1000), cloud.rules.page)
        start = int(self._get_param("NextToken") or 0)
        token = str(start + limit) if len(seen) > start + limit else None
        return _answer(seen[start : start + limit], token)

    replace(InstanceResponse, "describe_instances", describe_instances)


def _seen(cloud: Cloud, backend: Any, filters: dict[str, Any], ids: set[str]) -> list[Seen]:
    """What a reader sees now: the state of `lag_s` ago."""
    at = time.time() - cloud.rules.lag_s
    rows = [
        (reservation, instance)
        for reservation in list(backend.reservations.values())
        for each in reservation.instances
        if (not ids or each.id in ids)
        and (instance := cloud.lives.by_id[each.id].seen(at) if each.id in cloud.lives.by_id else each)
    ]
    if unknown := ids - {instance.id for _, instance in rows}:
        raise InvalidInstanceIdError(sorted(unknown) if len(unknown) > 1 else unknown.pop())
    return [row for row in rows if utils.passes_filter_dict(row[1], filters)] if filters else rows


def _answer(rows: list[Seen], token: str | None) -> str:
    """Reservations with the instances of this page alone."""
    pages: dict[str, tuple[Any, list[Any]]] = {}
    for reservation, instance in rows:
        pages.setdefault(reservation.id, (reservation, []))[1].append(instance)
    shown = [
        {
            "reservationId": one.id,
            "ownerId": one.owner_id,
            "groupSet": [],
            "instancesSet": [_instance(i) for i in found],
        }
        for one, found in pages.values()
    ]
    body = "".join(_xml({"requestId": "fake", "reservationSet": shown, "nextToken": token}))
    return f'<DescribeInstancesResponse xmlns="{NAMESPACE}">{body}</DescribeInstancesResponse>'


def _xml(fields: dict[str, Any]) -> Iterator[str]:
    """As the EC2 protocol writes a structure; what is None is left out."""
    for name, value in fields.items():
        if value is None:
            continue
        yield f"<{name}>"
        yield from _inside(value)
        yield f"</{name}>"


def _inside(value: Any) -> Iterable[str]:
    if isinstance(value, dict):
        return _xml(value)
    if isinstance(value, list):
        return (part for each in value for part in ("<item>", *_xml(each), "</item>"))
    if isinstance(value, bool):
        return (str(value).lower(),)
    if isinstance(value, datetime):
        return (value.strftime("%Y-%m-%dT%H:%M:%S.000Z"),)
    return (escape(str(value)),)


def _instance(it: Any) -> dict[str, Any]:
    why, options = it.state_reason, it.metadata_options
    return {
        "instanceId": it.id,
        "imageId": it.image_id,
        "instanceState": {"code": it._state.code, "name": it._state.name},
        "privateDnsName": it.private_dns_name,
        "dnsName": it.public_dns_name or "",
        "reason": it._reason,
        "keyName": it.key_name,
        "amiLaunchIndex": it.ami_launch_index,
        "instanceType": it.instance_type,
        "launchTime": it.launch_time,
        "placement": {
            "availabilityZone": it.availability_zone,
            "groupName": it.placement.group_name,
            "tenancy": "default",
        },
        "monitoring": {"state": it.monitoring_state},
        "subnetId": it.subnet_id,
        "vpcId": it.vpc_id,
        "privateIpAddress": it.private_ip_address,
        "ipAddress": it.public_ip_address,
        "sourceDestCheck": bool(it.source_dest_check),
        "groupSet": _groups(it.security_groups),
        "stateReason": {"code": why.code, "message": why.message} if why.code else None,
        "architecture": it.architecture,
        "rootDeviceType": it.root_device_type,
        "rootDeviceName": it.root_device_name,
        "blockDeviceMapping": [_disk(name, disk) for name, disk in it.get_block_device_mapping],
        "virtualizationType": it.virtualization_type,
        "clientToken": it.client_token or "",
        "tagSet": _tags(it),
        "hypervisor": it.hypervisor,
        "networkInterfaceSet": [_interface(each) for each in it.network_interfaces],
        "iamInstanceProfile": {"arn": p["Arn"], "id": p["Id"]} if (p := it.iam_instance_profile) else None,
        "ebsOptimized": bool(it.ebs_optimized),
        "instanceLifecycle": it.lifecycle,
        "capacityReservationId": getattr(it, "capacity_reservation_id", None),
        "metadataOptions": {
            "state": options.state,
            "httpTokens": options.http_tokens,
            "httpPutResponseHopLimit": options.http_put_response_hop_limit,
            "httpEndpoint": options.http_endpoint,
        },
    }


def _disk(name: str, disk: Any) -> dict[str, Any]:
    ebs = {"volumeId": disk.volume_id, "status": "attached", "attachTime": disk.attach_time}
    return {"deviceName": name, "ebs": {**ebs, "deleteOnTermination": bool(disk.delete_on_termination)}}


def _tags(what: Any) -> list[dict[str, str]]:
    return [{"key": tag["key"], "value": tag["value"]} for tag in what.get_tags()]


def _groups(groups: Iterable[Any]) -> list[dict[str, str]]:
    return [{"groupId": group.id, "groupName": group.name} for group in groups]


def _interface(it: Any) -> dict[str, Any]:
    public = {"publicIp": it.public_ip, "publicDnsName": "", "ipOwnerId": it.owner_id} if it.public_ip else None
    return {
        "networkInterfaceId": it.id,
        "subnetId": it.subnet.id,
        "vpcId": it.vpc_id,
        "description": it.description,
        "ownerId": it.owner_id,
        "status": it.status,
        "macAddress": it.mac_address,
        "privateIpAddress": it.private_ip_address,
        "sourceDestCheck": bool(it.source_dest_check),
        "groupSet": _groups(it._group_set),
        "attachment": {
            "attachmentId": it.attachment_id,
            "deviceIndex": it.device_index,
            "networkCardIndex": getattr(it, "network_card", 0),
            "status": "attached",
            "deleteOnTermination": bool(it.delete_on_termination),
        },
        "association": public,
        "privateIpAddressesSet": [{"privateIpAddress": it.private_ip_address, "primary": True, "association": public}],
        "interfaceType": it.interface_type,
    }
