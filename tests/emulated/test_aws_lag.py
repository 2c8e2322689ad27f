"""EC2 shows for minutes nothing of what it has made, and the answer that told of it is lost: nothing stays billed.

The operator's clock and the fake's go together: whoever sleeps makes all that there is in the fake so much older.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.aws import FakeAws
from fakes.fleets import HOST_KEY
from mgpu_train.timeouts import Timeouts

from mgpu import acquire, journal
from mgpu.acquire import search
from mgpu.errors import Conflict, Interrupted
from mgpu.iac.types import generations
from mgpu.iac.types.sweep import sweep
from mgpu.plan.model import BoughtAs, Offer, Requirements
from mgpu.providers import registry
from mgpu.providers.aws import names
from mgpu.providers.base import FleetRequest, create_token

HERE, SHOWN_AFTER_S = "us-east-1", 180.0
TRIES = 3  # of one call by botocore
TIMEOUTS = Timeouts(destroy_s=1800, describe_every_s=20)  # seconds of a clock that only sleep moves


class Operator:
    """One who rents two machines on the fake, and whose search somebody cancels when an answer has been lost."""

    def __init__(self, aws: FakeAws, folder: Path) -> None:
        self.aws, self.folder, self.now = aws, folder, time.time()
        self.provider = registry.get("aws", aws.options)
        self.cancelled = threading.Event()
        self.crashes = False

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.aws.age(seconds)
        self.cancelled.set()

    def wait(self, seconds: float) -> bool:
        """Of the engine's own `cancelled`."""
        self.sleep(seconds)
        return False

    def acquire(self, market: BoughtAs = "spot", generation: int = 1) -> acquire.Acquired:
        with generations.open_journal(self.folder, "o", "f") as entries:
            clocks: Any = {"clock": self.clock, "sleep": self.sleep, "now": self.clock}
            return acquire.acquire(
                self.provider, request(generation), [offer(market)], entries, timeouts=TIMEOUTS,
                cancelled=self.cancelled, **clocks,
            )  # fmt: skip

    def patiently(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, when all that may not be shown yet is."""

        def later(*given: Any) -> Any:
            self.sleep(names.LAG_S)
            return call(*given)

        return later

    def clock(self) -> float:
        return self.now

    def sweep(self) -> None:
        call: Any = SimpleNamespace(settings=SimpleNamespace(state_dir=self.folder), emit=print, cancelled=self)
        sweep(call, self.provider, "o", "f", TIMEOUTS, now=self.clock)

    @property
    def journalled(self) -> list[str]:
        with generations.open_journal(self.folder, "o", "f") as entries:
            return [entry["kind"] for entry in journal.read(entries.path)]


@pytest.fixture
def operator(aws: FakeAws, tmp_path: Path) -> Operator:
    aws.base(HERE)
    aws.lag(SHOWN_AFTER_S)
    return Operator(aws, tmp_path)


def offer(market: BoughtAs = "spot") -> Offer:
    return Offer(
        provider="aws", instance_type="g5.xlarge", gpu="A10G", gpus=1, market=market, price_usd_per_hour=1, region=HERE,
        zone=f"{HERE}a", fetched_at=0,
    )  # fmt: skip


def request(generation: int = 1) -> FleetRequest:
    needed = Requirements(provider="aws", nodes=2, max_price_usd_per_hour=9, max_hours=1, gpus_per_node=1)
    return FleetRequest(
        fleet="f", generation=generation, owner="o", requirements=needed, ssh_public_key=HOST_KEY, lease_s=600,
        hard_cap_s=3600,
    )  # fmt: skip


def test_how_long_ec2_may_show_nothing_is_said_once():
    assert registry.get("aws").capabilities.listing_lag_s == names.LAG_S >= 300


@pytest.mark.parametrize("market", ["spot", "on-demand"])
def test_a_token_tells_what_a_lost_answer_has_made_and_that_is_ended(operator: Operator, aws: FakeAws, market):
    aws.lose_answers("CreateFleet", n=TRIES)
    began = operator.now
    with pytest.raises(Interrupted):
        operator.acquire(market)
    assert (len(aws.bill()), aws.alive()) == (2, [])
    assert operator.journalled == ["intent", "undone"]
    first_word = next(call.at for call in aws.calls("TerminateInstances"))
    assert first_word, "it was ended by its id"
    assert operator.now - began < SHOWN_AFTER_S + 60, "nobody waits for the listing twice"


@pytest.mark.parametrize("market", ["spot", "on-demand"])
def test_a_token_that_has_made_nothing_makes_nothing_more(operator: Operator, aws: FakeAws, market):
    aws.unavailable("CreateFleet", n=TRIES)
    began = operator.now
    with pytest.raises(Interrupted):
        operator.acquire(market)
    assert aws.bill() == []
    assert operator.now - began < 30, "EC2's word was enough"
    late = create_token("o", "f", 1, offer(market), 0)
    with pytest.raises(Conflict):
        operator.provider.create(request(), offer(market), late)
    assert aws.bill() == [], "as a call does that was on its way for long"


def test_without_a_word_on_the_token_it_is_looked_for_as_long_as_it_may_not_be_shown(operator: Operator, aws: FakeAws):
    aws.lose_answers("CreateFleet", n=TRIES)
    aws.fault("CreateFleet", code="Denied", skip=TRIES)
    with pytest.raises(Interrupted):
        operator.acquire()
    assert (len(aws.bill()), aws.alive()) == (2, [])
    assert operator.journalled[-1] == "undone"


@pytest.mark.parametrize("answered", [False, True])
def test_a_sweep_ends_what_is_listed_only_minutes_after_a_crash(
    operator: Operator, aws: FakeAws, monkeypatch: pytest.MonkeyPatch, answered: bool
):
    def die(*_: object) -> None:
        raise MemoryError

    if not answered:
        aws.lose_answers("CreateFleet", n=TRIES)
    with monkeypatch.context() as patched:
        patched.setattr(search.Search, "_undo", die)  # the plug-in is gone before it can
        with pytest.raises(MemoryError):
            operator.acquire()
    assert len(aws.alive()) == 2
    operator.provider.destroy = operator.patiently(operator.provider.destroy)
    operator.sweep()
    assert aws.alive() == []
    assert operator.journalled == ["intent", *(["created"] if answered else []), "generation_used", "undone"]
    began = operator.now
    operator.sweep()
    assert operator.now == began, "it is known that nothing is left"
