"""`mgpu reservations buy`: one of what `find` printed, after its whole price was agreed to."""

from __future__ import annotations

import click

from mgpu import paths
from mgpu.backend.owner import owner
from mgpu.cli.common import agreement, parameters
from mgpu.cli.reservations.seller import Found, Seller, recall, seller, to_paste
from mgpu.console import Console
from mgpu.errors import InputError, NoOffer
from mgpu.plan.model import Reservation
from mgpu.providers.base import ReservationOffer
from mgpu.words import utc

_SLACK_S = 60.0  # around an offer's times, where it is asked for again: providers round them


@click.command()
@click.argument("offer_id", metavar="ID")
@click.option("--max-usd", type=parameters.Number(min=0), help="Buy nothing that costs more than this, all of it.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask; needs --max-usd. The price is still shown.")
@parameters.json_option
def buy(offer_id: str, max_usd: float | None, yes: bool, as_json: bool) -> None:
    """Buy the reservation ID, as `mgpu reservations find` printed it. It is paid at once and cannot be given back.

    It shows the whole price, and asks. Exit code 3 where nobody knows whether it was bought: the same command looks
    for it before it buys anything.
    """
    from mgpu.acquire.purchase import Purchase

    if yes and max_usd is None:
        raise InputError("--yes needs --max-usd", "What is bought here cannot be given back.", "Add `--max-usd USD`.")
    console = Console(as_json=as_json)
    remembered = recall(offer_id)
    sold_by = seller(remembered.provider, remembered.options)
    purchase = Purchase(sold_by.provider, paths.state_dir() / "reservations" / sold_by.name, console.emit)
    with console.waiting("asking what is on sale, and what was bought before"):
        before = purchase.unfinished(remembered.offer.account)
        offer = None if before else _fresh(sold_by, remembered)
    if before:
        words = "was bought by an earlier command whose answer was lost; nothing else was bought now"
        console.say(f"{', '.join(each.id for _, each in before)} {words}", "yellow")
        _tell(console, sold_by, *before[0])
        return
    if offer is None:
        why = "Others may have bought it, or its price is another one now."
        raise NoOffer(f"{offer_id} is not on sale any more", why, "`mgpu reservations find` prints what is.")
    _show(console, offer)
    if max_usd is not None and not offer.usd <= max_usd:
        raise InputError(f"it costs ${offer.usd:,.2f}, more than `--max-usd {max_usd:g}`", "Nothing was bought.")
    _agree(console, offer, yes)
    with console.waiting(f"buying {offer.id}"):
        bought = purchase.buy(offer, owner())
    console.say(f"bought: {bought.id}, {bought.state}", "green")
    _tell(console, sold_by, offer, bought)


def _fresh(sold_by: Seller, remembered: Found) -> ReservationOffer | None:
    """The offer as it is on sale now: by its id, or the same machines at the same time and price under another one."""
    offer = remembered.offer
    times = {"begins_after": offer.begins_at - _SLACK_S, "ends_before": offer.ends_at + _SLACK_S}
    narrow = {"regions": (offer.region,), **times}
    found = sold_by.provider.find_reservations(remembered.wanted.model_copy(update=narrow)).offers
    named = [each for each in found if (each.id, each.account) == (offer.id, offer.account)]
    return next(iter([*named, *(each for each in found if each.same(offer))]), None)


def _show(console: Console, offer: ReservationOffer) -> None:
    gpus = f"{offer.machines * offer.gpus} x {offer.gpu}"
    console.say(f"{offer.kind} {offer.id}: {offer.machines} x {offer.instance_type} ({gpus}) in {offer.zone}")
    span = f"from {utc(offer.begins_at)} to {utc(offer.ends_at)}, {offer.hours:g} h"
    console.say(f"{span}; machines in it end by {utc(offer.machines_end_at)}")
    each = f"${offer.usd_per_gpu_hour:.3f} per GPU and hour, used or not"
    console.say(f"${offer.usd:,.2f} for all of it, paid at once: {each}")
    console.say("it cannot be cancelled, changed or given back", "yellow")


def _agree(console: Console, offer: ReservationOffer, yes: bool) -> None:
    """Raises InputError when the answer is no, or there is nobody to ask."""
    cure = "Add `--yes --max-usd USD` to agree to a price beforehand."
    agreement.consent(console, yes, f"buy it for ${offer.usd:,.2f}?", "Nothing was bought.", cure)


def _tell(console: Console, sold_by: Seller, offer: ReservationOffer, bought: Reservation) -> None:
    """Its result, and the lines of a run file that rents in it."""
    lines = to_paste(sold_by.name, bought, offer.gpus)
    if console.as_json:
        from mgpu.cli import results

        console.result(results.BoughtReservation(reservation=bought, run_file=lines))
    else:
        console.text("".join(f"{line}\n" for line in lines))
