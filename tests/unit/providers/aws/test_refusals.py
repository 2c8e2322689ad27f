"""What EC2 says that it lacks for now ends no search, whether it is an answer or one of CreateFleet's reasons:
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError

from mgpu.errors import NoCapacity, Transient
from mgpu.providers.aws.failures import calling, refusal
from mgpu.providers.aws.instances import launch

ORDER: Any = SimpleNamespace(region="us-east-1", what="asking for 2 x p5.48xlarge", ranks=(0, 1))


@pytest.mark.parametrize(
    "code", ["InsufficientVolumeCapacity", "VolumeTypeNotAvailableInZone", "ServerInternal", "InternalError"]
)
def test_a_reason_that_another_zone_may_not_have_lets_the_search_go_on(code):
    found = launch._refused(ORDER, [{"ErrorCode": code, "ErrorMessage": "words"}], 0)
    assert isinstance(found, NoCapacity)
    assert code in found.what


@pytest.mark.parametrize("status", [400, 503])
def test_a_region_without_addresses_is_no_mistake_of_the_run_file(status):
    error = {"Error": {"Code": "InsufficientAddressCapacity", "Message": "words"}}
    with pytest.raises(NoCapacity) as told, calling("renting a public address", "us-east-1"):
        raise ClientError({**error, "ResponseMetadata": {"HTTPStatusCode": status}}, "AllocateAddress")  # type: ignore[typeddict-item]
    assert told.value.scope == "region", "no zone of it has more, and each would start a gang, and end it"


def test_tags_that_somebody_else_writes_just_now_are_written_by_the_next_call():
    error: Any = {"Error": {"Code": "ConcurrentTagAccess", "Message": "Allow sufficient wait time, then retry."}}
    with pytest.raises(Transient), calling("tagging i-1", "us-east-1"):
        raise ClientError(error, "CreateTags")


def test_tags_against_a_policy_of_tags_name_the_key():
    found = refusal("TagPolicyViolation", "words", "aws us-east-1: asking", scope="zone")
    assert found.next_step.startswith("Mend `aws.tags`.")
