"""What EC2 has made by a token, by CreateFleet's own word, which may not be there yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError

from mgpu.errors import Transient
from mgpu.providers.aws.instances import launch

MISMATCH = ClientError({"Error": {"Code": "IdempotentParameterMismatch", "Message": "another call"}}, "CreateFleet")


@pytest.fixture
def asked(monkeypatch) -> list[dict[str, Any]]:
    """What CreateFleet was asked, of an order that is reduced to its words."""
    monkeypatch.setattr(launch, "_subnet", lambda *_: "subnet-1")
    monkeypatch.setattr(launch, "_known", lambda *_: None)
    monkeypatch.setattr(launch, "fleet", lambda *_: {"ClientToken": "t"})
    monkeypatch.setattr(launch, "for_nothing", lambda call: {**call, "for": "nothing"})
    return []


def account(asked: list[dict[str, Any]], *answers: Any) -> Any:
    left = list(answers)

    def create_fleet(**call: Any) -> Any:
        asked.append(call)
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return SimpleNamespace(client=lambda *_: SimpleNamespace(create_fleet=create_fleet))


ORDER: Any = SimpleNamespace(
    what="fleet f", region="r", options=None, ranks=(0,), offer=SimpleNamespace(reservation=None)
)


def test_an_answer_that_says_neither_machines_nor_errors_is_no_proof_that_there_is_nothing(asked):
    """The call is still at work: who took it for nothing would rent a second gang beside the first."""
    with pytest.raises(Transient, match="does not say yet"):
        launch.recall(account(asked, MISMATCH, {"FleetId": "fleet-1", "Instances": []}), ORDER)
    assert asked == [{"ClientToken": "t", "for": "nothing"}, {"ClientToken": "t"}]


def test_an_answer_with_errors_alone_is_one(asked):
    answer = {"FleetId": "fleet-1", "Instances": [], "Errors": [{"ErrorCode": "InsufficientInstanceCapacity"}]}
    assert launch.recall(account(asked, answer), ORDER) is None
    assert len(asked) == 1


def test_a_call_that_could_buy_nothing_may_say_nothing(asked):
    assert launch.recall(account(asked, {"FleetId": "fleet-1", "Instances": []}), ORDER) is None
