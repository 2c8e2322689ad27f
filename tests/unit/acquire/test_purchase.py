"""A purchase that nobody can give back is made once, whichever answer and whichever process is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu.acquire.purchase import SHOWN_S, Purchase
from mgpu.errors import AmbiguousCreate, NoOffer, ProviderError, Transient
from mgpu.plan.model import Reservation
from mgpu.providers.base import ReservationOffer

OFFER = ReservationOffer(
    id="cb-1", kind="Capacity Block", instance_type="p5.48xlarge", gpu="H100-80GB", gpus=8, machines=2, region="r",
    zone="z", begins_at=1e9, ends_at=1e9 + 86400, machines_end_at=1e9 + 84000, usd=1000, account="1",
)  # fmt: skip
BOUGHT = Reservation(
    id="cr-1", kind="Capacity Block", prepaid=True, state="scheduled", instance_type="p5.48xlarge", region="r",
    zone="z", machines=2, free=2, begins_at=1e9,
)  # fmt: skip


class Shop:
    """Sells one block. `answers`: how purchases end; `shown_after_s`: when it shows what it has sold."""

    def __init__(self, *answers: Exception | None, shown_after_s: float = 0, sells: bool = True) -> None:
        self.answers, self.shown_after_s, self.sells = list(answers), shown_after_s, sells
        self.now, self.sold, self.looks = 1000.0, dict[str, float](), 0
        self.trouble: list[ProviderError] = []

    def buy_reservation(self, offer: ReservationOffer, owner: str, token: str) -> Reservation:
        if self.sells:
            self.sold[token] = self.now
        if (error := self.answers.pop(0)) is not None:
            raise error
        return BOUGHT

    def bought_reservation(self, offer: ReservationOffer, token: str, at: float) -> Reservation | None:
        self.looks += 1
        if self.trouble:
            raise self.trouble.pop()
        sold_at = self.sold.get(token)
        return BOUGHT if sold_at is not None and self.now >= sold_at + self.shown_after_s else None

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def purchase(shop: Shop, folder: Path) -> Purchase:
    return Purchase(shop, folder, now=lambda: shop.now, sleep=shop.sleep)  # type: ignore[arg-type]


@pytest.mark.parametrize("shown_after_s", [0, 200])
def test_after_a_lost_answer_what_was_bought_is_found(tmp_path: Path, shown_after_s: float):
    shop = Shop(AmbiguousCreate("lost"), shown_after_s=shown_after_s)
    shop.trouble = [Transient("busy")]
    assert purchase(shop, tmp_path).buy(OFFER, "me") == BOUGHT
    assert len(shop.sold) == 1
    assert purchase(shop, tmp_path).unfinished("1") == []


def test_what_is_not_shown_in_time_is_not_called_bought_or_not_and_nothing_else_is_bought_meanwhile(tmp_path: Path):
    shop = Shop(AmbiguousCreate("lost"), shown_after_s=SHOWN_S + 60)
    with pytest.raises(AmbiguousCreate, match="nothing is shown"):
        purchase(shop, tmp_path).buy(OFFER, "me")
    shop.now += 60
    assert purchase(shop, tmp_path).unfinished("2") == [], "another account's"
    assert purchase(shop, tmp_path).unfinished("1") == [(OFFER, BOUGHT)]
    looks = shop.looks
    assert purchase(shop, tmp_path).unfinished("1") == []
    assert shop.looks == looks, "it is closed"


@pytest.mark.parametrize("sells", [True, False])
def test_a_process_that_dies_in_it_leaves_what_the_next_one_has_to_know(tmp_path: Path, sells: bool):
    shop = Shop(KeyboardInterrupt(), shown_after_s=120, sells=sells)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        purchase(shop, tmp_path).buy(OFFER, "me")
    with pytest.raises(AmbiguousCreate, match="under way"):
        purchase(shop, tmp_path).unfinished("1")
    shop.now += SHOWN_S + 1
    assert purchase(shop, tmp_path).unfinished("1") == ([(OFFER, BOUGHT)] if sells else [])
    assert purchase(shop, tmp_path).unfinished("1") == []


def test_a_refusal_is_the_end_of_it(tmp_path: Path):
    shop = Shop(NoOffer("expired"), sells=False)
    with pytest.raises(NoOffer):
        purchase(shop, tmp_path).buy(OFFER, "me")
    assert purchase(shop, tmp_path).unfinished("1") == []
    assert shop.looks == 0


def test_the_intent_is_on_disk_before_anything_is_bought(tmp_path: Path):
    (tmp_path / "file").write_text("")
    shop = Shop(None)
    with pytest.raises(OSError, match="file"):
        purchase(shop, tmp_path / "file").buy(OFFER, "me")
    assert shop.sold == {}
