"""What a test has told the fake's EC2 about capacity, quotas, prices and pace."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend

from fakes.aws import market
from fakes.aws.pace import Pace


@dataclass(frozen=True)
class Pool:
    """What a machine is taken from."""

    instance_type: str
    zone: str
    market: str

    @property
    def region(self) -> str:
        """That its zone is in."""
        return self.zone[:-1]

    @property
    def zone_id(self) -> str:
        """The same zone, as all accounts call it."""
        zones = RegionsAndZonesBackend.zones.get(self.region, [])
        return next((zone.zone_id for zone in zones if zone.name == self.zone), "")


@dataclass(frozen=True)
class About:
    """Which pools a rule is about; `*` and `?` as in file names; a zone by its name or its id."""

    instance_type: str = "*"
    zone: str = "*"
    market: str = "*"

    def covers(self, pool: Pool) -> bool:
        """Whether the pool is one of them."""
        zone = fnmatchcase(pool.zone, self.zone) or fnmatchcase(pool.zone_id, self.zone)
        return zone and fnmatchcase(pool.instance_type, self.instance_type) and fnmatchcase(pool.market, self.market)


@dataclass
class Rules(Pace):
    """The newest rule about a pool is the one that holds."""

    capacities: list[tuple[About, int | None, str]] = field(default_factory=list)
    prices: list[tuple[About, float]] = field(default_factory=list)
    quotas: dict[str, float] = field(default_factory=dict)
    forget_s: float = 3600.0  # on the wall's clock: what was made long ago, mgpu tells by that
    page: int = 1000
    fewer: list[int] = field(default_factory=list)
    stubborn: int = 0
    unpaid_s: float = 0.0  # how long a Capacity Block that was bought is payment-pending
    new_offering_ids: bool = False  # each question gives offerings of Capacity Blocks new ids

    def starts_s(self, pool: Pool) -> float:
        """From the grant of a machine until it runs."""
        return self.metal_s if ".metal" in pool.instance_type else self.pending_s

    def capacity(self, pool: Pool) -> tuple[int | None, str]:
        """How many machines of the pool can run at once (None: any), and the code that says there are no more."""
        for about, count, code in reversed(self.capacities):
            if about.covers(pool):
                return count, code
        return None, ""

    def usd(self, pool: Pool, at: float | None = None) -> float:
        """Per hour and machine."""
        for about, usd in reversed(self.prices):
            if about.covers(pool):
                return usd
        if pool.market == "spot":
            return market.spot_usd(pool.instance_type, pool.zone, time.time() if at is None else at)
        return market.on_demand_usd(pool.instance_type, pool.region)

    def quota(self, code: str) -> float:
        """In vCPUs."""
        return self.quotas.get(code, market.DEFAULT_QUOTA_VCPUS)
