"""`mgpu reservations ls`: what the account has reserved, and what of it is free."""

from __future__ import annotations

import click

from mgpu.cli.common import parameters
from mgpu.cli.reservations.seller import profile_option, provider_option, seller, tell_failed
from mgpu.console import Console
from mgpu.errors import ProviderError
from mgpu.plan.model import Reservation
from mgpu.words import utc

_SPARE = ("kind", "where")


@click.command("ls")
@click.option("--region", "regions", multiple=True, help="In this region; several times for several (default: all).")
@provider_option
@profile_option
@parameters.json_option
def list_(regions: tuple[str, ...], provider: str | None, profile: str | None, as_json: bool) -> int:
    """List what this account has reserved and is not over: machines, free ones, beginning and end."""
    console = Console(as_json=as_json)
    sold_by = seller(provider, {}, profile)
    with console.waiting(f"asking {sold_by.name} what is reserved"):
        found = sold_by.provider.list_reservations(regions)
    tell_failed(console, found.failed)
    if as_json:
        from mgpu.cli import results

        console.result(results.ReservationList(reservations=list(found.reservations), failed=found.failed))
    elif found.reservations:
        columns = ("reservation", "kind", "machines", "free", "where", "state", "begins", "ends")
        console.table(columns, [_row(each) for each in found.reservations], spare=_SPARE)
    else:
        console.prose("nothing is reserved")
    return ProviderError.exit_code if found.failed else 0


def _row(each: Reservation) -> tuple[object, ...]:
    return (
        each.id,
        each.kind,
        f"{each.machines} x {each.instance_type}",
        each.free,
        f"{each.region} {each.zone}",
        each.state,
        utc(each.begins_at),
        utc(each.ends_at) if each.ends_at else "when it is cancelled",
    )
