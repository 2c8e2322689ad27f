"""Writes mgpu/providers/aws/catalog/offers.json.gz, by which provider aws plans before any refresh.

python scripts/write_aws_offers.py               moto's dumps of AWS (machine types, zones) and aws_on_demand.toml
python scripts/write_aws_offers.py --from FILE   what `mgpu offers aws --refresh` has kept, without its quotas
"""

from __future__ import annotations

import argparse
import gzip
import json
import tomllib
from datetime import UTC, date, datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from mgpu.providers.aws.catalog.machine_types import machine_of
from mgpu.providers.aws.catalog.snapshot import SHIPPED, Machine, Region, Snapshot, save

PRICES = Path(__file__).with_name("aws_on_demand.toml")


def main() -> None:
    """Writes the file and says what is in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--from", dest="refreshed", type=Path, help="a refreshed snapshot, under XDG_CACHE_HOME/mgpu/aws"
    )
    refreshed = parser.parse_args().refreshed
    snapshot = (
        Snapshot.model_validate_json(gzip.decompress(refreshed.read_bytes())).without_account()
        if refreshed
        else _built()
    )
    save(snapshot, SHIPPED)
    SHIPPED.chmod(0o644)
    priced = sum(bool(region.on_demand or region.spot) for region in snapshot.regions.values())
    counts = f"{len(snapshot.machines)} types, {len(snapshot.regions)} regions, {priced} of them with prices"
    print(f"{SHIPPED.name}: {counts}, {SHIPPED.stat().st_size} bytes")  # noqa: T201  a program of the checkout


def _built() -> Snapshot:
    machines = {name: machine for name, entry in _types().items() if (machine := machine_of(entry))}
    prices = tomllib.loads(PRICES.read_text(encoding="utf-8"))
    dumps = files("moto.ec2") / "resources" / "instance_type_offerings" / "availability-zone-id"
    names = sorted(entry.name.removesuffix(".json.gz") for entry in dumps.iterdir())
    regions = {name: _region(_json(dumps / f"{name}.json.gz"), machines, prices.get(name, {})) for name in names}
    sources = [f"machine types and zones: AWS, as dumped by moto {version('moto')}"]
    sources += [f"on-demand prices of {name}: {entry['source']}" for name, entry in prices.items()]
    return Snapshot(sources=tuple(sources), machines=machines, regions=regions)


def _types() -> dict[str, Any]:
    return _json(files("moto.ec2") / "resources" / "instance_types.json.gz")


def _region(offerings: list[dict[str, str]], machines: dict[str, Machine], prices: dict[str, Any]) -> Region:
    zones: dict[str, list[str]] = {}
    for offering in offerings:
        if offering["InstanceType"] in machines:
            zones.setdefault(offering["InstanceType"], []).append(offering["Location"])
    day: date | None = prices.get("date")
    return Region(
        zones={name: tuple(sorted(found)) for name, found in sorted(zones.items())},
        on_demand=prices.get("prices", {}),
        on_demand_at=datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp() if day else 0,
    )


def _json(path: Any) -> Any:
    return json.loads(gzip.decompress(path.read_bytes()))


if __name__ == "__main__":
    main()
