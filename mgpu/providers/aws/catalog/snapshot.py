"""What AWS sells, as a value: machine types, and per region where they are, at which price, of which date.

One ships with the package (`offers.json.gz`, made by scripts/write_aws_offers.py), `mgpu offers aws --refresh` keeps a
newer one in the cache folder. No network and no boto3 here.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import Field, ValidationError

from mgpu import paths
from mgpu.plan.model import Value
from mgpu.providers.aws.options import Options

# variables of AWS's tools that say whose credentials there are: by themselves, and by other files
_KEYS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_ROLE_ARN",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_FILES = ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE")
SHIPPED = Path(__file__).with_name("offers.json.gz")
VERSION = 1


class Machine(Value):
    """A type of machine with GPUs of one kind."""

    gpu: str = Field(description="as run files name it")
    gpus: int
    gpu_memory_gib: float = Field(description="of one GPU")
    vcpus: int
    memory_gib: float
    nvme_disks: int = 0
    nvme_gib: int = Field(default=0, description="all disks together")
    interconnect: str = Field(default="", description="between the GPUs; empty: there is one")
    network_gbit_s: float = Field(default=0, description="the most, all cards together")
    efa_cards: int = Field(default=0, description="network cards that can have an EFA interface")


class QuotaState(Value):
    """An account's limit in one region."""

    name: str
    limit_vcpus: int
    used_vcpus: int


class Region(Value):
    """What one region has; zones by id (`use1-az1`), because their names differ between accounts."""

    zones: dict[str, tuple[str, ...]] = Field(default={}, description="machine type -> zone ids")
    on_demand: dict[str, float] = Field(default={}, description="machine type -> USD per hour")
    on_demand_at: float = Field(default=0, description="UNIX seconds")
    spot: dict[str, dict[str, float]] = Field(default={}, description="machine type -> zone id -> USD per hour")
    spot_at: float = Field(default=0, description="UNIX seconds")
    quotas: dict[str, QuotaState] = Field(default={}, description="by quota code; only from a refresh")
    quotas_at: float = Field(default=0, description="UNIX seconds")

    @property
    def at(self) -> float:
        """UNIX seconds of its newest price."""
        return max(self.on_demand_at, self.spot_at)


class Snapshot(Value):
    """All of it, and where it comes from."""

    version: int = VERSION
    sources: tuple[str, ...] = ()
    account: str = Field(default="", description="whose quotas these are")
    credentials: str = Field(default="", description="by which they were asked for, as `mark_of` has them")
    machines: dict[str, Machine] = Field(default={})
    regions: dict[str, Region] = Field(default={})

    def with_newer(self, other: Snapshot) -> Snapshot:
        """This one, with every region that the other knows more newly, and all machine types of both."""
        newer = {name: region for name, region in other.regions.items() if region.at >= self._at(name)}
        return self.model_copy(
            update={
                "sources": tuple(dict.fromkeys((*self.sources, *other.sources))),
                "account": other.account or self.account,
                "machines": {**self.machines, **other.machines},
                "regions": {**self.regions, **newer},
            }
        )

    def without_account(self) -> Snapshot:
        """What is the same for every account."""
        regions = {
            name: each.model_copy(update={"quotas": {}, "quotas_at": 0.0}) for name, each in self.regions.items()
        }
        return self.model_copy(update={"account": "", "credentials": "", "regions": regions})

    def _at(self, region: str) -> float:
        return self.regions[region].at if region in self.regions else 0.0


def current(options: Options) -> Snapshot:
    """The shipped snapshot, with what the last refresh by these options has found anew.

    A cache that cannot be read counts as absent: the next refresh replaces it. Quotas that may be another account's are
    left out: the run file names the account, or the credentials are those of the refresh.
    """
    shipped = _read(SHIPPED)
    try:
        cached = _read(cache_file(options))
    except (OSError, EOFError, zlib.error, ValidationError):
        return shipped
    ours = options.account == cached.account if options.account else mark_of(options) == cached.credentials
    return shipped.with_newer(cached if ours else cached.without_account())


def save(snapshot: Snapshot, path: Path) -> None:
    """Writes a snapshot in place of the one that is there: aside first, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as out:
            out.write(snapshot.model_dump_json(exclude_defaults=True).encode())
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def cache_file(options: Options, environment: Mapping[str, str] = os.environ) -> Path:
    """Where a refresh by these options is kept.

    Another profile or endpoint has one of its own: a fake's prices are never taken for AWS's.
    """
    who = (
        options.endpoint_url or environment.get("AWS_ENDPOINT_URL", ""),
        options.profile or environment.get("AWS_PROFILE", ""),
    )
    mark = f"-{_digest(who)}" if any(who) else ""
    return paths.cache_dir() / "aws" / f"offers{mark}.json.gz"


def mark_of(options: Options, environment: Mapping[str, str] = os.environ) -> str:
    """Of the credentials that variables name; empty: none does. The cache of one profile may see those of many accounts
    (`aws-vault exec`). A profile that the options name goes before variables with keys."""
    who = [environment.get(name, "") for name in (_FILES if options.profile else (*_FILES, *_KEYS))]
    return _digest(who) if any(who) else ""


def _digest(words: Iterable[str]) -> str:
    return hashlib.sha256(chr(10).join(words).encode()).hexdigest()[:12]


def _read(path: Path) -> Snapshot:
    found = Snapshot.model_validate_json(gzip.decompress(path.read_bytes()))
    if found.version != VERSION:
        raise OSError(f"{path}: version {found.version}, not {VERSION}")
    return found
