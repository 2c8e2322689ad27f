"""What spot machines cost: the bid is the cap as it is written, and their price that of the moment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError

from mgpu.providers.aws.catalog.spot_price import spot_price
from mgpu.providers.aws.instances import fleet_request


@pytest.mark.parametrize(
    ("cap", "nodes", "bid"), [(0.29, 1, "0.29000"), (0.3, 3, "0.10000"), (4, 3, "1.33333"), (70, 2, "35.00000")]
)
def test_the_bid_is_a_machines_share_of_the_cap(cap: float, nodes: int, bid: str):
    needed: Any = SimpleNamespace(max_price_usd_per_hour=cap, nodes=nodes)
    assert fleet_request._price_cap(SimpleNamespace(requirements=needed)) == bid  # type: ignore[arg-type]


def test_no_cap_in_whole_cents_bids_less_than_it_says():
    for cents in range(1, 10_000):
        needed: Any = SimpleNamespace(max_price_usd_per_hour=cents / 100, nodes=1)
        bid = fleet_request._price_cap(SimpleNamespace(requirements=needed))  # type: ignore[arg-type]
        assert float(bid) == cents / 100


def account(answer: Any) -> Any:
    def history(**asked: Any) -> Any:
        assert (asked["InstanceTypes"], asked["AvailabilityZone"], asked["MaxResults"]) == (
            ["p4d.24xlarge"],
            "us-east-1a",
            1,
        )
        if isinstance(answer, Exception):
            raise answer
        return {"SpotPriceHistory": answer}

    return SimpleNamespace(client=lambda *_: SimpleNamespace(describe_spot_price_history=history))


@pytest.mark.parametrize(
    ("answer", "usd"),
    [
        ([{"SpotPrice": "11.25"}], 11.25),
        ([], None),
        (ClientError({"Error": {"Code": "UnauthorizedOperation", "Message": "no"}}, "DescribeSpotPriceHistory"), None),
    ],
)
def test_the_price_of_the_moment_is_asked_for_and_nothing_depends_on_the_answer(answer: Any, usd: float | None):
    assert spot_price(account(answer), "us-east-1", "us-east-1a", "p4d.24xlarge") == usd
