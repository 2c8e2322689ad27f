"""Of many machines of which EC2 does not let some go, all others are asked to end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError

from mgpu.errors import InvalidRequest, PermissionDenied
from mgpu.providers.aws.instances import teardown

IDS = [f"i-{number:017x}" for number in range(400)]
PROTECTED = (
    "The instance '{}' may not be terminated. Modify its 'disableApiTermination' instance attribute and try again."
)
UNKNOWN = "The instance IDs '{}' do not exist"
DENIED = "User: me is not authorized to perform: ec2:TerminateInstances on resource: arn:aws:ec2:r:1:instance/{}"


class Ec2:
    """Ends all machines of a call, or none, where one of them is `bad`: it says which is the first."""

    def __init__(self, code: str, words: str, bad: set[str]) -> None:
        self._code, self._words, self._bad = code, words, bad
        self.ended = set[str]()
        self.calls = 0

    def terminate_instances(self, InstanceIds: list[str]) -> None:  # noqa: N803 - as AWS names it
        self.calls += 1
        bad = [name for name in InstanceIds if name in self._bad]
        if bad:
            named = ", ".join(bad) if self._words == UNKNOWN else bad[0]
            raise ClientError(
                {"Error": {"Code": self._code, "Message": self._words.format(named)}}, "TerminateInstances"
            )
        self.ended |= set(InstanceIds)


def terminated(ec2: Ec2) -> dict[str, Any]:
    account: Any = SimpleNamespace(client=lambda *_: ec2)
    return teardown._terminate(account, "us-east-1", IDS)


@pytest.mark.parametrize("every", [1, 2, 4, 150])
def test_all_that_nobody_has_protected_end(every):
    kept = set(IDS[::every])
    ec2 = Ec2("OperationNotPermitted", PROTECTED, kept)
    refused = terminated(ec2)
    assert ec2.ended == set(IDS) - kept
    assert refused.keys() == kept
    assert all(isinstance(error, InvalidRequest) and name in error.what for name, error in refused.items())
    assert ec2.calls <= 2 * len(kept) + 1, "one that names it, and one for it alone"


def test_all_that_ec2_knows_end():
    unknown = set(IDS[::4])
    ec2 = Ec2("InvalidInstanceID.NotFound", UNKNOWN, unknown)
    assert terminated(ec2) == {}
    assert ec2.ended == set(IDS) - unknown


def test_where_the_words_name_nobody_the_parts_are_halves():
    kept = {IDS[7], IDS[300]}
    ec2 = Ec2("OperationNotPermitted", "It is protected.", kept)
    assert terminated(ec2).keys() == kept
    assert ec2.ended == set(IDS) - kept


def test_who_may_end_none_is_told_soon():
    ec2 = Ec2("UnauthorizedOperation", DENIED, set(IDS))
    refused = terminated(ec2)
    assert refused.keys() == set(IDS)
    assert all(isinstance(error, PermissionDenied) for error in refused.values())
    assert ec2.calls < 110
