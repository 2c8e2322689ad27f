"""A security group that the run file names is of one region: offers of others are passed over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mgpu.errors import NoOffer
from mgpu.providers.aws.instances import network
from mgpu.providers.aws.options import Options

OPTIONS = Options.of({"security_group_id": "sg-1"})


def account() -> Any:
    """One that has this group in us-east-1."""

    def client(_: str, region: str) -> Any:
        def describe_security_groups(Filters: list[dict[str, Any]]) -> dict[str, Any]:  # noqa: N803
            assert Filters == [{"Name": "group-id", "Values": ["sg-1"]}]
            return {"SecurityGroups": [{"GroupId": "sg-1"}] if region == "us-east-1" else []}

        return SimpleNamespace(describe_security_groups=describe_security_groups)

    return SimpleNamespace(client=client, once=lambda _, ask: ask())


def test_a_group_counts_where_it_is():
    assert network.group_of(account(), OPTIONS, "us-east-1", "vpc-1") == "sg-1"


def test_a_region_without_the_group_is_passed_over():
    with pytest.raises(NoOffer, match="sg-1 in us-east-2") as told:
        network.group_of(account(), OPTIONS, "us-east-2", "vpc-2")
    assert told.value.scope == "region"
    assert "`regions`" in told.value.next_step
