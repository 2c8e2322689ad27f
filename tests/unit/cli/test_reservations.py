"""`mgpu reservations`: what can be reserved, bought at a price that was agreed to, listed; and a run file that names
one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from mgpu import paths
from mgpu.cli import cli
from mgpu.cli.common import agreement
from mgpu.console import Console
from mgpu.errors import AmbiguousCreate, InputError, NoCapacity, NoOffer
from mgpu.plan.model import Offer, Plan, Requirements, Reservation
from mgpu.providers import registry
from mgpu.providers.base import ReservationOffer, ReservationOffers, ReservationRequest, Reservations
from mgpu.providers.local.provider import LocalProvider

BEGINS, DAY = 2_000_000_000.0, 86_400.0
OFFER = ReservationOffer(
    id="cb-1", kind="Capacity Block", instance_type="p5.48xlarge", gpu="H100-80GB", gpus=8, machines=2,
    region="us-east-1", zone="us-east-1a", begins_at=BEGINS, ends_at=BEGINS + DAY, machines_end_at=BEGINS + 23 * 3600,
    usd=1920, account="1",
)  # fmt: skip
RESERVED = Reservation(
    id="cr-1", kind="Capacity Block", prepaid=True, state="scheduled", instance_type="p5.48xlarge", region="us-east-1",
    zone="use1-az1", machines=2, free=2, begins_at=BEGINS, ends_at=BEGINS + DAY, machines_end_at=BEGINS + 23 * 3600,
)  # fmt: skip


class Seller:
    """A provider that sells reservations, and nothing else."""

    name = "aws"

    def __init__(self) -> None:
        self.on_sale: tuple[ReservationOffer, ...] = (OFFER,)
        self.failed: dict[str, str] = {}
        self.asked: list[ReservationRequest] = []
        self.bought: list[tuple[ReservationOffer, str]] = []
        self.lost = False
        self.options: dict[str, str] = {}

    def find_reservations(self, wanted: ReservationRequest) -> ReservationOffers:
        self.asked.append(wanted)
        return ReservationOffers(offers=self.on_sale, failed=self.failed)

    def buy_reservation(self, offer: ReservationOffer, owner: str, token: str) -> Reservation:
        self.bought.append((offer, owner))
        if self.lost:
            raise KeyboardInterrupt  # whoever asked is gone
        return RESERVED

    def bought_reservation(self, offer: ReservationOffer, token: str, at: float) -> Reservation | None:
        return RESERVED if self.bought else None

    def list_reservations(self, regions: Sequence[str]) -> Reservations:
        return Reservations(reservations=(RESERVED,), failed=self.failed)


@pytest.fixture
def seller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, xdg: Path) -> Seller:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    made = Seller()

    def get(name: str, options: dict[str, str] | None = None) -> Any:
        made.options = options or {}
        return made if name == "aws" else LocalProvider()

    monkeypatch.setattr(registry, "get", get)
    return made


Mgpu = Callable[..., Result]


@pytest.fixture
def mgpu(seller: Seller) -> Mgpu:
    return lambda *args: CliRunner().invoke(cli, ["reservations", *args], standalone_mode=False)


def found(mgpu: Mgpu) -> None:
    assert mgpu("find", "--hours", "24").return_value == 0


# --- find, ls ---------------------------------------------------------------------------------------------------------


def test_find_asks_as_the_options_say_and_shows_the_price_of_a_gpu_hour(mgpu: Mgpu, seller: Seller):
    words = ("--gpu", "H100-80GB", "--gpus", "8", "--nodes", "2", "--hours", "20", "--from", "2033-05-18")
    done = mgpu("find", *words, "--region", "us-east-1", "--profile", "mine")
    assert seller.asked == [
        ReservationRequest(
            gpu=("H100-80GB",), gpus_per_node=8, nodes=2, hours=20, regions=("us-east-1",), begins_after=1_999_987_200
        )
    ]
    assert seller.options == {"profile": "mine"}
    row = next(line for line in done.stdout.splitlines() if line.startswith("cb-1"))
    assert "2 x p5.48xlarge" in row
    assert row.split()[-2:] == ["1,920.00", "5.000"]
    assert "mgpu reservations buy cb-1" in done.stderr


def test_find_takes_a_run_file_and_options_have_the_last_word(mgpu: Mgpu, seller: Seller, tmp_path: Path):
    (tmp_path / "mgpu.yaml").write_text(
        "{name: a, provider: aws, nodes: 4, gpus_per_node: 8, gpu: H100-80GB, max_hours: 40, regions: us-east-2, "
        "max_price_usd_per_hour: 9, train: {task: lm, strategy: ddp, steps: 1, global_batch: 32}, checkpoint: none, "
        "aws: {profile: mine}}"
    )
    assert mgpu("find").exception is None
    assert mgpu("find", "mgpu.yaml", "--nodes", "2").exception is None
    assert [(each.nodes, each.hours, each.regions, each.gpu) for each in seller.asked] == [
        (4, 40, ("us-east-2",), ("H100-80GB",)),
        (2, 40, ("us-east-2",), ("H100-80GB",)),
    ]
    assert isinstance(mgpu("find", "--nodes", "2").exception, InputError), "nobody says how long"


def test_find_as_json_has_hours_and_prices_and_says_what_is_not_known(mgpu: Mgpu, seller: Seller):
    seller.failed = {"eu-west-1": "denied"}
    done = mgpu("find", "--hours", "24", "--json")
    told = json.loads(done.stdout)
    assert (told["offers"][0]["offer"]["id"], told["offers"][0]["hours"]) == ("cb-1", 24)
    assert told["offers"][0]["usd_per_gpu_hour"] == 5
    assert (told["failed"], done.return_value) == ({"eu-west-1": "denied"}, 3)
    seller.on_sale, seller.failed = (), {}
    assert mgpu("find", "--hours", "24").return_value == NoOffer.exit_code


def test_ls_shows_what_is_free_and_when(mgpu: Mgpu):
    row = mgpu("ls").stdout.splitlines()[-1]
    assert row.startswith("cr-1")
    assert "2033-05-18 03:33 UTC" in row
    assert json.loads(mgpu("ls", "--json").stdout)["reservations"][0]["free"] == 2


def test_a_provider_that_sells_none_is_refused_with_those_that_do(mgpu: Mgpu):
    caught = mgpu("ls", "--provider", "local").exception
    assert isinstance(caught, InputError)
    assert "aws" in caught.next_step


# --- buy --------------------------------------------------------------------------------------------------------------


def test_buying_shows_the_whole_price_and_prints_what_a_run_file_needs(mgpu: Mgpu, seller: Seller):
    found(mgpu)
    done = mgpu("buy", "cb-1", "--yes", "--max-usd", "2000")
    assert seller.bought == [(OFFER, paths.owner())]
    assert "$1,920.00 for all of it" in done.stderr
    assert "cannot be cancelled" in done.stderr
    assert done.stdout.splitlines() == [
        "aws: {reservation: cr-1}", "regions: [us-east-1]", "nodes: 2", "gpus_per_node: 8", "market: on-demand",
        "max_hours: 23",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cb-1", "--yes"), "--max-usd"),
        (("cb-1", "--yes", "--max-usd", "1919"), "more than"),
        (("cb-1", "--yes", "--max-usd", "nan"), "not a number"),
        (("cb-1",), "nobody can be asked"),
        (("cb-2", "--yes", "--max-usd", "9999"), "is not known here"),
    ],
)
def test_without_a_yes_to_this_price_nothing_is_bought(mgpu: Mgpu, seller: Seller, words: tuple[str, ...], said: str):
    found(mgpu)
    caught = mgpu("buy", *words).exception
    assert isinstance(caught, InputError | click.BadParameter)
    assert said in str(caught)
    assert seller.bought == []


def test_on_a_terminal_it_asks_with_the_price(mgpu: Mgpu, seller: Seller, monkeypatch: pytest.MonkeyPatch):
    found(mgpu)
    questions: list[str] = []
    monkeypatch.setattr(Console, "confirm", lambda _, question: questions.append(question) or True)
    assert mgpu("buy", "cb-1").exception is None
    assert questions == ["buy it for $1,920.00?"]


@pytest.mark.parametrize(
    ("change", "buys"),
    [({"id": "cb-9"}, "cb-9"), ({"id": "cb-9", "usd": 1}, ""), ({"usd": 2500}, ""), ({"account": "2"}, "")],
)
def test_what_is_bought_is_what_is_on_sale_now_at_the_price_that_is_shown(
    mgpu: Mgpu, seller: Seller, change: dict[str, Any], buys: str
):
    """An id may be another one at each question; what is dearer now is above what was agreed to."""
    found(mgpu)
    seller.on_sale = (OFFER.model_copy(update=change),)
    caught = mgpu("buy", "cb-1", "--yes", "--max-usd", "2000").exception
    assert [offer.id for offer, _ in seller.bought] == ([buys] if buys else [])
    assert (caught is None) == bool(buys)


def test_what_an_earlier_command_has_bought_is_told_and_nothing_is_bought_again(
    mgpu: Mgpu, seller: Seller, monkeypatch: pytest.MonkeyPatch
):
    found(mgpu)
    seller.lost = True
    CliRunner().invoke(cli, ["reservations", "buy", "cb-1", "--yes", "--max-usd", "2000"])
    seller.lost = False
    done = mgpu("buy", "cb-1", "--yes", "--max-usd", "2000")
    assert (done.exception, "was bought by an earlier command" in done.stderr) == (None, True)
    assert done.stdout.startswith("aws: {reservation: cr-1}")
    assert len(seller.bought) == 1
    monkeypatch.setattr(Seller, "bought_reservation", lambda *_: None)
    seller.lost = True
    CliRunner().invoke(cli, ["reservations", "buy", "cb-1", "--yes", "--max-usd", "2000"])
    assert isinstance(mgpu("buy", "cb-1", "--yes", "--max-usd", "2000").exception, AmbiguousCreate)
    assert len(seller.bought) == 2


# --- the plan and the launch ------------------------------------------------------------------------------------------


def plan(**changed: Any) -> Plan:
    reserved = RESERVED.model_copy(update=changed)
    wanted = Requirements(provider="aws", nodes=2, max_price_usd_per_hour=9, max_hours=48)
    offer = Offer(
        provider="aws", instance_type="p5.48xlarge", market="on-demand", price_usd_per_hour=2, region="us-east-1",
        zone="use1-az1", reservation=reserved, fetched_at=BEGINS + 3600,
    )  # fmt: skip
    return Plan(requirements=wanted, offers=(offer,))


def test_the_plan_counts_until_the_machines_end(capsys: pytest.CaptureFixture[str]):
    agreement.show_plan(Console(), plan())
    said = " ".join(capsys.readouterr().err.split())
    assert "at aws use1-az1 in cr-1: $4.00 per hour for all nodes; at most $88.00 until the hard cap of 22 h" in said
    assert plan(begins_at=BEGINS + 7200).hours == 21
    assert plan(machines_end_at=None).hours == 48


def test_a_launch_does_not_wait_longer_than_the_run_file_says_for_a_beginning():
    soon = plan(begins_at=time.time() + 300)
    agreement.require_begun(soon, wait_minutes=10)
    with pytest.raises(NoCapacity, match=r"cr-1 begins \d{4}-.* UTC, in 5 min"):
        agreement.require_begun(soon, wait_minutes=1)
    other = soon.best.model_copy(update={"provider": "slurm", "reservation": None})
    agreement.require_begun(soon.model_copy(update={"offers": (soon.best, other)}), wait_minutes=1)
