"""`mgpu reservations find`: what can be reserved, when, and at which price."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from mgpu.cli import complete
from mgpu.cli.common import parameters, wiring
from mgpu.cli.reservations.seller import profile_option, provider_option, remember, seller, tell_failed
from mgpu.console import Console
from mgpu.errors import InputError, NoOffer, ProviderError
from mgpu.providers.base import ReservationOffer, ReservationRequest
from mgpu.words import utc

_DATE = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M"])
_SPARE = ("hours", "ends", "where")


@click.command()
@click.argument("run_file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--gpu", multiple=True, shell_complete=complete.gpus, help="Of this GPU; may be given several times.")
@click.option("--gpus", type=click.IntRange(min=1), help="Of machines with this many GPUs.")
@click.option("--nodes", type=click.IntRange(min=1), help="So many machines.")
@click.option("--hours", type=parameters.Number(min=0, min_open=True), help="At least so long.")
@click.option("--region", "regions", multiple=True, help="In this region; several times for several (default: all).")
@click.option("--from", "begins", type=_DATE, help="Not before this time, UTC (default: as soon as possible).")
@click.option("--until", "ends", type=_DATE, help="Over by this time, UTC.")
@provider_option
@profile_option
@parameters.json_option
def find(
    run_file: Path | None,
    gpu: tuple[str, ...],
    gpus: int | None,
    nodes: int | None,
    hours: float | None,
    regions: tuple[str, ...],
    begins: datetime | None,
    ends: datetime | None,
    provider: str | None,
    profile: str | None,
    as_json: bool,
) -> int:
    """Find machines that can be reserved: what RUN_FILE asks for, or what the options say. Buys nothing.

    RUN_FILE is ./mgpu.yaml where no option says what is wanted; options have the last word.
    """
    console = Console(as_json=as_json)
    name, options, base = _of_run_file(run_file, alone=not (gpu or gpus or nodes or hours))
    given = {"gpu": gpu, "gpus_per_node": gpus, "nodes": nodes, "hours": hours, "regions": regions}
    wanted = {"nodes": 1, **base, **{key: value for key, value in given.items() if value}}
    if "hours" not in wanted:
        raise InputError("--hours is needed: how long the machines are to be reserved", "", "Add `--hours 24`.")
    asked = ReservationRequest.model_validate(
        {**wanted, "begins_after": _seconds(begins), "ends_before": _seconds(ends)}
    )
    sold_by = seller(provider or name, options if provider in (None, name) else {}, profile)
    with console.waiting(f"asking {sold_by.name} what can be reserved"):
        found = sold_by.provider.find_reservations(asked)
    remember(sold_by, asked, found.offers)
    for note in found.notes:
        console.say(f"note: {note}")
    tell_failed(console, found.failed)
    if as_json:
        from mgpu.cli import results

        told = [results.OnSale.of(each) for each in found.offers]
        console.result(results.FoundReservations(offers=told, failed=found.failed))
    elif found.offers:
        _show(console, found.offers)
    else:
        console.prose("nothing of this can be reserved now")
    if found.failed:
        return ProviderError.exit_code
    return 0 if found.offers else NoOffer.exit_code


def _of_run_file(path: Path | None, *, alone: bool) -> tuple[str | None, dict[str, str], dict[str, Any]]:
    """Provider, its options, and what a run file asks for; `alone`: nothing else says it."""
    if path is None and not alone:
        return None, {}, {}
    from mgpu.plan import rank
    from mgpu.spec.load import first

    needed = rank.requirements(first(path or Path(wiring.RUN_FILE)))
    wanted = needed.model_dump(include={"gpu", "gpus_per_node", "nodes", "regions"}) | {"hours": needed.max_hours}
    return needed.provider, needed.provider_options, wanted


def _seconds(moment: datetime | None) -> float | None:
    return moment.replace(tzinfo=UTC).timestamp() if moment else None


def _show(console: Console, offers: tuple[ReservationOffer, ...]) -> None:
    rows = [
        (
            each.id,
            f"{each.machines} x {each.instance_type}",
            f"{each.machines * each.gpus} x {each.gpu}",
            f"{each.region} {each.zone}",
            utc(each.begins_at),
            utc(each.ends_at),
            f"{each.hours:g}",
            f"{each.usd:,.2f}",
            f"{each.usd_per_gpu_hour:.3f}",
        )
        for each in offers
    ]
    columns = ("offer", "machines", "GPUs", "where", "begins", "ends", "hours", "USD", "USD per GPU-hour")
    console.table(columns, rows, spare=_SPARE)
    console.next(f"mgpu reservations buy {offers[0].id}    shows the whole price, and asks")
