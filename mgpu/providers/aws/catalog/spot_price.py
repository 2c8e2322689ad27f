"""What a spot machine costs now: prices of a refresh may be weeks old."""

from __future__ import annotations

from datetime import UTC, datetime

from mgpu.errors import ProviderError
from mgpu.providers.aws.failures import calling
from mgpu.providers.aws.session import Account


def spot_price(account: Account, region: str, zone: str, instance_type: str) -> float | None:
    """US dollars per hour of one machine in this zone (its name); None: AWS does not say."""
    try:
        with calling(f"asking for the spot price of {instance_type}", region):
            answer = account.client("ec2", region).describe_spot_price_history(
                InstanceTypes=[instance_type],
                AvailabilityZone=zone,
                ProductDescriptions=["Linux/UNIX"],
                StartTime=datetime.now(UTC),
                MaxResults=1,
            )
    except ProviderError:  # no reason not to rent: the bid holds all the same
        return None
    found = answer["SpotPriceHistory"]
    return float(found[0]["SpotPrice"]) if found else None
