"""What one create asks EC2 for, as values: the launch template's data and CreateFleet's parameters. No calls."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from decimal import ROUND_DOWN, Decimal
from typing import Any

from mgpu.plan.model import Offer
from mgpu.providers.aws import names
from mgpu.providers.aws.instances import machines
from mgpu.providers.aws.instances.machine_image import MachineImage
from mgpu.providers.aws.instances.network import Kind, Place
from mgpu.providers.aws.instances.user_data import user_data
from mgpu.providers.aws.options import Disk, Options
from mgpu.providers.base import FleetRequest
from mgpu.providers.start import HostKey

_MOST_AT_LEAST = 1000  # that MinTargetCapacity takes
_PRICE_STEP = Decimal("0.00001")  # of a dollar, in which a price is told
_NO_PRICE = "0.00001"  # dollars an hour: no machine is sold for that
Parameters = dict[str, Any]


@dataclass(frozen=True)
class Order:
    """A gang to be made of one offer by one token, for these ranks."""

    request: FleetRequest
    offer: Offer
    token: str
    ranks: tuple[int, ...]
    options: Options

    @property
    def region(self) -> str:
        """Where it is asked for."""
        return self.offer.region

    @property
    def name(self) -> str:
        """Of its launch template and its placement group."""
        return names.template(self.token)

    @property
    def what(self) -> str:
        """In words, for messages."""
        return f"asking for {len(self.ranks)} x {self.offer.instance_type} {self.offer.market} @ {self.offer.place}"

    @property
    def digest(self) -> str:
        """The same for two orders exactly if they ask for the same; prices change and do not count."""
        offer = self.offer.model_dump(mode="json", include={"instance_type", "market", "region", "zone"})
        asked = self.request.model_dump(mode="json", exclude={"requirements": {"stores"}})
        parts = (asked, offer, list(self.ranks))
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def marks(self) -> dict[str, str]:
        """The tags of everything that is made: the user's, and those by which it is found again."""
        return {
            **self.options.tags,
            names.OWNER: self.request.owner,
            names.FLEET: self.request.fleet,
            names.GENERATION: str(self.request.generation),
            names.TOKEN: self.token,
        }

    @property
    def market(self) -> str:
        """As CreateFleet calls it."""
        reserved = self.offer.reservation
        return names.CAPACITY_BLOCK if reserved and reserved.prepaid else self.offer.market

    def clustered(self, kind: Kind) -> bool:
        """Whether the gang gets a placement group: where it talks by EFA. All others would only find fewer machines in
        one. The replacement of one machine would be alone in its. A reservation stands where it stands: a Capacity
        Block is close together without a group."""
        several = kind.cluster and len(self.ranks) > 1 and self.cards(kind) > 0
        return several and self.offer.reservation is None

    def group(self, kind: Kind) -> str:
        """The placement group of its machines: its own, or the reservation's; empty: none."""
        if self.offer.reservation:
            return self.offer.reservation.group
        return self.name if self.clustered(kind) else ""

    def cards(self, kind: Kind) -> int:
        """EFA interfaces of a machine: as many as it can have, where several machines talk to each other."""
        return kind.efa_cards if self.request.requirements.nodes > 1 and self.options.network == "auto" else 0

    def wants_address(self, kind: Kind) -> bool:
        """Whether a public address has to be rented: EC2 gives none to a machine with several interfaces."""
        return self.options.address == "public" and self.cards(kind) > 1


def template(
    order: Order,
    place: Place,
    kind: Kind,
    image: MachineImage,
    host_key: HostKey,
    hard_cap_at: int,
    usd_per_hour: float,
) -> Parameters:
    """The launch template's data. `hard_cap_at`: UNIX seconds; `usd_per_hour`: of one machine, now."""
    request = order.request
    script = user_data(request, machines.USER, host_key, hard_cap_at)
    group = order.group(kind)
    placement = {"Placement": {"GroupName": group}} if group else {}
    return {
        "ImageId": image.id,
        "UserData": base64.b64encode(script.encode()).decode(),
        "IamInstanceProfile": {"Name": place.instance_profile},
        "InstanceInitiatedShutdownBehavior": "terminate",  # power-off is the node's own end, and has to end the bill
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpEndpoint": "enabled",
            "HttpPutResponseHopLimit": 1,
            "InstanceMetadataTags": "disabled",  # else what an account has set for all its machines counts
        },
        "BlockDeviceMappings": [
            _disk(image, request.requirements.disk_gib, order.options.disk or Disk()),
            *(_beside(device, ebs) for device, ebs in image.others),
        ],
        "NetworkInterfaces": _interfaces(order, place, kind),
        **placement,
        **_reserved(order),
        "TagSpecifications": [
            {
                "ResourceType": "instance",
                "Tags": names.tag_list(_machine_marks(order, host_key, hard_cap_at, usd_per_hour)),
            },
            {"ResourceType": "volume", "Tags": names.tag_list(order.marks)},
            {"ResourceType": "network-interface", "Tags": names.tag_list(order.marks)},
        ],
    }


def fleet(order: Order, subnet_id: str) -> Parameters:
    """CreateFleet's parameters: all machines or none, of one type, in one zone."""
    count, spot = len(order.ranks), order.offer.market == "spot"
    pool = {"InstanceType": order.offer.instance_type, "SubnetId": subnet_id}
    together = {
        "SingleInstanceType": True,
        "SingleAvailabilityZone": True,
        "MinTargetCapacity": min(count, _MOST_AT_LEAST),
    }
    market: Parameters = {"OnDemandOptions": {"AllocationStrategy": "lowest-price", **together}}
    if order.market == names.CAPACITY_BLOCK:
        market = {}  # it has no options: what is missing of the gang is seen by its answer
    if spot:
        pool["MaxPrice"] = _price_cap(order.request)
        strategy = {"AllocationStrategy": "price-capacity-optimized", "InstanceInterruptionBehavior": "terminate"}
        market = {"SpotOptions": {**strategy, **together}}
    return {
        "Type": "instant",
        "ClientToken": order.token,
        "LaunchTemplateConfigs": [
            {
                "LaunchTemplateSpecification": {"LaunchTemplateName": order.name, "Version": "1"},
                "Overrides": [pool],
            }
        ],
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": count,
            "DefaultTargetCapacityType": order.market,
        },
        # those of the template do not count where a policy demands tags of the request itself
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": names.tag_list(order.marks)} for kind in ("fleet", "instance", "volume")
        ],
        **market,
    }


def for_nothing(asked: Parameters) -> Parameters:
    """The same call for machines at a price at which there are none."""
    changed = dict(asked)
    if "OnDemandOptions" in asked:
        changed["OnDemandOptions"] = {**asked["OnDemandOptions"], "MaxTotalPrice": _NO_PRICE}
    if "SpotOptions" in asked:
        changed["LaunchTemplateConfigs"] = [
            {**config, "Overrides": [{**pool, "MaxPrice": _NO_PRICE} for pool in config["Overrides"]]}
            for config in asked["LaunchTemplateConfigs"]
        ]
    return changed


def _reserved(order: Order) -> Parameters:
    """Machines of a reservation start in it or not at all."""
    if order.offer.reservation is None:
        return {}
    target = {"CapacityReservationTarget": {"CapacityReservationId": order.offer.reservation.id}}
    only: Parameters = {"CapacityReservationSpecification": target}
    if order.market == names.CAPACITY_BLOCK:
        only["InstanceMarketOptions"] = {"MarketType": names.CAPACITY_BLOCK}
    return only


def _price_cap(request: FleetRequest) -> str:
    """One machine's share of what the whole fleet may cost, rounded down."""
    # as it is written: 0.29 is less as a binary fraction, and a bid of 0.28999 refuses machines at 0.29
    share = Decimal(repr(request.requirements.max_price_usd_per_hour)) / request.requirements.nodes
    return f"{share.quantize(_PRICE_STEP, ROUND_DOWN):f}"


def _machine_marks(order: Order, host_key: HostKey, hard_cap_at: int, usd_per_hour: float) -> dict[str, str]:
    return {
        **order.marks,
        names.NAME: order.request.fleet,
        names.RANKS: machines.ranks_tag(order.ranks),
        names.PRICE: repr(usd_per_hour),
        names.HARD_CAP_AT: str(hard_cap_at),
        names.HOST_KEY: host_key.public,
        names.ONE_USE_KEY: host_key.public,
    }


def _disk(image: MachineImage, gib: int, wanted: Disk) -> Parameters:
    speed = {
        "Iops": wanted.iops,
        "Throughput": wanted.throughput_mib_s,
        "VolumeInitializationRate": wanted.initialization_mib_s,
    }
    ebs = {
        "VolumeSize": max(gib, image.root_gib),
        "VolumeType": wanted.type,
        **{name: value for name, value in speed.items() if value is not None},
        "Encrypted": True,
        "DeleteOnTermination": True,
    }
    return {"DeviceName": image.root_device, "Ebs": ebs}


def _beside(device: str, ebs: Parameters) -> Parameters:
    """A disk that the image brings beside the root's, as it has it; but it goes with the machine."""
    # EC2 takes what is in it from the image; of the rest, what a mapping does not say is EC2's default
    said = ("VolumeType", "Iops", "Throughput", *(() if ebs.get("SnapshotId") else ("VolumeSize",)))
    kept = {name: ebs[name] for name in said if ebs.get(name)}
    return {"DeviceName": device, "Ebs": {**kept, "Encrypted": True, "DeleteOnTermination": True}}


def _interfaces(order: Order, place: Place, kind: Kind) -> list[Parameters]:
    """One interface, with EFA where the only card has it; or one for ordinary traffic on the first card, which carries
    the machine's addresses, and one for EFA alone on every card that can have it."""
    efa = order.cards(kind)
    common = {"Groups": [place.security_group_id], "DeleteOnTermination": True}
    on_first = efa >= kind.cards  # else the first card is for ordinary traffic alone
    first: Parameters = {**common, "DeviceIndex": 0, "NetworkCardIndex": 0, "InterfaceType": "interface"}
    if efa < 2:
        type_ = "efa" if efa and on_first else "interface"
        return [{**first, "InterfaceType": type_, "AssociatePublicIpAddress": order.options.address == "public"}]
    cards = range(efa) if on_first else range(1, efa + 1)
    return [first] + [  # the second device on the first card, the first one on all others
        {**common, "DeviceIndex": int(card == 0), "NetworkCardIndex": card, "InterfaceType": "efa-only"}
        for card in cards
    ]
