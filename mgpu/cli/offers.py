"""`mgpu offers`: what the providers sell, at which price, and how old that knowledge is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from mgpu.cli import complete
from mgpu.cli.common import agreement, parameters
from mgpu.console import Console
from mgpu.errors import InputError, NoOffer, ProviderError
from mgpu.words import count

if TYPE_CHECKING:
    from mgpu.plan.model import BoughtAs, Offer
    from mgpu.providers.base import Provider
    from mgpu.spec.text.change import Change

_ANY_PRICE = 1e9
_SHOWN = 300  # rows of the table
_SPARE = ("provider", "Gbit/s", "NVMe GiB", "vCPUs", "RAM GiB", "age", "link")  # what a narrow terminal does without


@click.command()
@click.argument("provider", required=False)
@click.argument("run_file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@parameters.set_option("Set a key of a provider's block: `--set aws.profile=work`; several times for several.")
@click.option("--gpu", multiple=True, shell_complete=complete.gpus, help="Only this GPU; may be given several times.")
@click.option("--gpus", type=click.IntRange(min=1), help="Only machines with this many GPUs.")
@click.option("--region", "regions", multiple=True, help="Only this region; may be given several times.")
@click.option("--market", type=click.Choice(["spot", "on-demand"]), help="Only this market.")
@click.option("--quota", is_flag=True, help="Show what the account's quotas leave, as of the last refresh.")
@click.option("--refresh", is_flag=True, help="Ask the provider first, and keep what it says.")
@click.option("--profile", help="Profile of provider aws, as `aws: {profile: ...}` of a run file.")
@parameters.json_option
def offers(
    provider: str | None,
    run_file: Path | None,
    keys: list[Change],
    gpu: tuple[str, ...],
    gpus: int | None,
    regions: tuple[str, ...],
    market: BoughtAs | None,
    quota: bool,
    refresh: bool,
    profile: str | None,
    as_json: bool,
) -> int:
    """List what PROVIDER sells (default: every provider): machines, prices, and their age. Rents nothing.

    It is asked with its block of RUN_FILE, where one is named; what that asks for is `mgpu plan`'s.
    """
    from mgpu.providers import registry

    console = Console(as_json=as_json)
    names = (provider,) if provider else registry.names()
    blocks = _of_run_file(names[0], run_file, keys) if run_file else _given(names, keys)
    sellers = _sellers(console, names, blocks, profile, alone=bool(provider))
    asked = [seller for seller in sellers if refresh and (provider or seller.configured())]
    partly = [_refresh(console, seller) for seller in asked]
    wanted = _Wanted(gpu, gpus, regions, market)
    others = None if provider else _Others()
    found = [offer for seller in sellers for offer in _on_sale(console, seller, wanted, others)]
    partly += [others.silent] if others else []
    if as_json:
        from mgpu.cli import results

        console.result(results.Offers(offers=found))
    elif quota:
        _show_quotas(console, found)
    elif found:
        _show(console, found)
    else:
        console.prose("nothing on sale meets this")
        for each in others.missed if others else ():
            console.say(each)
    return NoOffer.exit_code if any(partly) or not found else 0


@dataclass
class _Others:
    """Of several providers: what those say who have nothing, and whether one that is set up does not answer."""

    missed: list[str] = field(default_factory=list)
    silent: bool = False


class _Wanted(NamedTuple):
    """The filters of the command line; empty: any."""

    gpu: tuple[str, ...]
    gpus: int | None
    regions: tuple[str, ...]
    market: BoughtAs | None

    def meets(self, offer: Offer) -> bool:
        """Whether an offer passes all of them."""
        return (
            (not self.gpu or (offer.gpu or "").casefold() in map(str.casefold, self.gpu))
            and self.gpus in (None, offer.gpus)
            and (not self.regions or offer.region in self.regions)
            and self.market in (None, offer.market)
        )


def _of_run_file(name: str, path: Path, changes: Iterable[Change]) -> dict[str, dict[str, str]]:
    """The provider's block of a run file. Raises InputError: the file has mistakes, or is for others."""
    from mgpu.spec.load import first

    spec = first(path, changes)
    agreement.require_for(spec, name, path, "offers")
    options = spec.of(name).options
    return {name: options.flat()} if options else {}


def _given(names: Sequence[str], changes: Sequence[Change]) -> dict[str, dict[str, str]]:
    """The blocks of these providers that `changes` make. Raises InputError: some are about something else, or wrong."""
    from mgpu.spec.load import blocks

    if wrong := [each.given for each in changes if each.at[0] not in names or len(each.at) < 2]:
        what = f"--set {', '.join(wrong)}: no key of a block of {', '.join(names)}"
        why = "The keys of a block are those of its provider; machines are chosen by --gpu, --region and --market."
        raise InputError(what, why, f"Write `--set {names[0]}.KEY=VALUE`; `mgpu spec {names[0]}` prints the keys.")
    return {name: options.flat() for name, options in blocks(changes).items()}


def _sellers(
    console: Console, names: Iterable[str], blocks: Mapping[str, dict[str, str]], profile: str | None, *, alone: bool
) -> list[Provider]:
    """The providers of these names; unless it is the only one, one that does not work hides no other."""
    from mgpu.providers import registry

    found: list[Provider] = []
    for name in names:
        options = blocks.get(name, {})
        if profile:
            options = agreement.with_profile(name, options, profile, "Name the provider: `mgpu offers aws`.")
        try:
            found.append(registry.get(name, options))
        except InputError as error:
            if alone:
                raise
            console.say(f"warning: {error.what}: {error.why}", "yellow")
    return found


def _refresh(console: Console, seller: Provider) -> bool:
    """Asks one provider anew, where it has to be asked; True: not all of it answered."""
    from mgpu.providers.base import RefreshesOffers

    if not isinstance(seller, RefreshesOffers):
        return False
    with console.waiting(f"asking {seller.name} in all its regions"):
        done = seller.refresh_offers()
    console.say(f"{seller.name}: asked {count(len(done.regions), 'region')} for its prices")
    for region, why in done.failed.items():
        console.say(f"warning: {seller.name} {region}: {why}; what was known of it stays", "yellow")
    return bool(done.failed)


def _on_sale(console: Console, seller: Provider, wanted: _Wanted, others: _Others | None) -> list[Offer]:
    """What one sells. `others`: it is one of several, and says there why it has nothing; None: it was named."""
    from mgpu.plan.model import Requirements

    needed = Requirements(
        provider=seller.name,
        nodes=1,
        market=wanted.market or "spot-then-on-demand",
        max_price_usd_per_hour=_ANY_PRICE,
        max_hours=1,
    )
    # words as they were typed: the provider knows which name is the nearest
    needed = needed.model_copy(update={"gpu": wanted.gpu, "gpus_per_node": wanted.gpus or 0, "regions": wanted.regions})
    try:
        answer = seller.offers(needed)
    except (InputError, ProviderError) as error:
        if others is None:
            raise
        if isinstance(error, (InputError, NoOffer)) or not seller.configured():
            others.missed.append(f"{seller.name}: {error.why or error.what}")
        else:
            console.say(f"warning: {error.what}" + (f": {error.why}" if error.why else ""), "yellow")
            others.silent = True
        return []  # what one provider has not, another may have
    for note in answer.notes:
        console.say(f"note: {note}")
    if others is None and answer.source:
        console.say(f"source: {answer.source}", "dim")
    return [offer for offer in answer.offers if wanted.meets(offer)]


def _show(console: Console, found: list[Offer]) -> None:
    columns = ("provider", "machine", "GPUs", "GiB", "link", "vCPUs", "RAM GiB", "NVMe GiB", "Gbit/s", "where")
    prices = ("spot $/h", "on-demand $/h", "age")
    rows = [row for _, row in sorted(_rows(found), key=lambda pair: pair[0])]
    alone = len({offer.provider for offer in found}) == 1
    console.table((*columns, *prices), rows[:_SHOWN], spare=_SPARE if alone else _SPARE[1:])
    if len(rows) > _SHOWN:
        console.prose(
            f"and {len(rows) - _SHOWN} more: filter with --gpu, --gpus, --region, --market, or --json for all"
        )
    if any(offer.price_is_limit for offer in found):
        console.say(agreement.LIMIT)
    old = agreement.old_prices(found)
    if old:
        console.say(old, "yellow")


def _rows(found: Iterable[Offer]) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """A row a machine type and place, both markets in it, and what it is sorted by."""
    places: dict[tuple[Any, ...], dict[str, Offer]] = {}
    for offer in found:
        places.setdefault((offer.provider, offer.instance_type, offer.region, offer.zone), {})[offer.market] = offer
    for both in places.values():
        one = next(iter(both.values()))
        cheapest = min(offer.price_usd_per_hour for offer in both.values())
        where = f"{one.region} {one.zone}" if one.zone else one.region
        order = (one.provider, one.gpu or "", one.gpus, cheapest, one.instance_type, where)
        gpus = (f"{one.gpus} x {one.gpu}", f"{one.gpu_memory_gib:g}", one.interconnect) if one.gpu else ("none", "", "")
        network = f"{one.network_gbit_s:g}" if one.network_gbit_s else ""
        size = (one.vcpus, f"{one.memory_gib:g}", one.nvme_gib or "", network)
        age = _age(min(offer.fetched_at for offer in both.values()))
        cost = (_price(both.get("spot")), _price(both.get("on-demand")), age)
        yield order, (one.provider, one.instance_type, *gpus, *size, where, *cost)


def _price(offer: Offer | None) -> str:
    if offer is None:
        return ""
    return f"{agreement.mark(offer)}{offer.price_usd_per_hour:.3f}"


def _age(at: float) -> str:
    hours = max(0.0, time.time() - at) / 3600
    return f"{hours // 24:.0f} d" if hours >= 48 else f"{hours // 1:.0f} h" if hours >= 1 else "now"


def _show_quotas(console: Console, found: Iterable[Offer]) -> None:
    known = {(o.provider, o.region, o.quota): o.headroom for o in found if o.headroom is not None}
    rows = [(*key, room.name, room.limit_vcpus, room.left_vcpus, _age(room.at)) for key, room in sorted(known.items())]
    if rows:
        console.table(("provider", "region", "quota", "name", "limit vCPUs", "left vCPUs", "age"), rows)
    else:
        console.prose("no quotas are known; `mgpu offers --refresh` asks for them")
