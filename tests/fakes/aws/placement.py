"""Placement groups and spot placement scores, which moto lacks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from moto.core.responses import ActionResult
from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.responses import EC2Response
from moto.ec2.utils import convert_tag_spec, generic_filter, random_id

from fakes.aws import launch, market, patching
from fakes.aws.cloud import Cloud
from fakes.aws.rules import Pool

BEST, WORST = 10, 1


class PlacementGroup(TaggedEC2Resource):
    """One, with the attributes that answers and filters name."""

    def __init__(self, backend: Any, name: str, strategy: str, tags: dict[str, str]) -> None:
        self.ec2_backend, self.group_name, self.strategy, self.state = backend, name, strategy, "available"
        self.id = self.group_id = random_id("pg")
        self.group_arn = f"arn:aws:ec2:{backend.region_name}:{backend.account_id}:placement-group/{name}"
        self.add_tags(tags)

    @property
    def tags(self) -> list[dict[str, str]]:
        """As they are now."""
        return self.get_tags()


def install(cloud: Cloud) -> None:
    """From now on there are some."""
    actions: dict[str, Callable[[Cloud, Any], ActionResult]] = {
        "create_placement_group": _create,
        "describe_placement_groups": _describe,
        "delete_placement_group": _delete,
        "get_spot_placement_scores": _scores,
    }
    for name, action in actions.items():
        patching.add_action(cloud, EC2Response, name, action)


def _key(response: Any, name: str) -> tuple[str, str, str]:
    return response.current_account, response.region, name


def _named(cloud: Cloud, response: Any, name: str) -> PlacementGroup:
    if found := cloud.groups.get(_key(response, name)):
        return found
    raise launch.refuse("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")


def _create(cloud: Cloud, response: Any) -> ActionResult:
    asked = response.params
    key = _key(response, asked["GroupName"])
    if key in cloud.groups:
        raise launch.refuse("InvalidPlacementGroup.Duplicate", f"The Placement Group '{key[2]}' already exists.")
    tags = convert_tag_spec(asked.get("TagSpecifications") or []).get("placement-group", {})
    made = PlacementGroup(response.ec2_backend, key[2], asked.get("Strategy") or "cluster", tags)
    cloud.groups[key] = made
    return ActionResult({"PlacementGroup": made})


def _describe(cloud: Cloud, response: Any) -> ActionResult:
    asked = response.params
    if names := asked.get("GroupNames"):
        found = [_named(cloud, response, name) for name in names]
    else:
        here = (response.current_account, response.region)
        found = [group for key, group in cloud.groups.items() if key[:2] == here]
    return ActionResult({"PlacementGroups": generic_filter(response._filters_from_querystring(), found)})


def _delete(cloud: Cloud, response: Any) -> ActionResult:
    name = response.params["GroupName"]
    group = _named(cloud, response, name)
    if any(
        life.instance.placement.group_name == name and life.instance.ec2_backend is group.ec2_backend
        for life in cloud.lives.alive()
    ):
        raise launch.refuse(
            "InvalidPlacementGroup.InUse", f"The placement group {name} is in use and may not be deleted."
        )
    del cloud.groups[_key(response, name)]
    response.ec2_backend.tags.pop(group.id, None)
    return ActionResult({})


def _scores(cloud: Cloud, response: Any) -> ActionResult:
    asked = response.params
    kinds, count = asked.get("InstanceTypes") or [], int(asked["TargetCapacity"])
    scores = []
    for region in asked.get("RegionNames") or sorted(RegionsAndZonesBackend.zones):
        zones = {zone.name: zone.zone_id for zone in RegionsAndZonesBackend.zones.get(region, [])}
        by_zone = {zone: max((_score(cloud, kind, zone, count) for kind in kinds), default=WORST) for zone in zones}
        if asked.get("SingleAvailabilityZone"):
            scores += [{"Region": region, "AvailabilityZoneId": zones[zone], "Score": n} for zone, n in by_zone.items()]
        elif by_zone:
            scores.append({"Region": region, "Score": max(by_zone.values())})
    scores.sort(key=lambda score: -score["Score"])
    return ActionResult({"SpotPlacementScores": scores[: int(asked.get("MaxResults") or 10)]})


def _score(cloud: Cloud, kind: str, zone: str, count: int) -> int:
    """From 3 to 9 by type and zone; the worst where there is not enough."""
    pool = Pool(kind, zone, "spot")
    if zone not in market.zones(kind, pool.region):
        return WORST
    most, _ = cloud.rules.capacity(pool)
    if most is not None:
        return BEST if most >= count else WORST
    return 3 + hashlib.sha256(f"score {kind} {zone}".encode()).digest()[0] % 7
