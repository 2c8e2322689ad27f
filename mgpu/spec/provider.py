"""The providers that are installed: entries of the group `mgpu.providers`, ours and anybody's.

An entry is read without importing the provider: it says what the provider can do, how its block of the run file looks,
and which class to import when machines are asked for.

    [project.entry-points."mgpu.providers"]
    local = "mgpu.providers.local.options:ENTRY"
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from mgpu_train import entries
from mgpu_train.config import NoticeSource
from mgpu_train.entries import Entries
from pydantic import BaseModel, ConfigDict, Field

from mgpu.errors import InputError
from mgpu.spec.block import ProviderOptions

GROUP = "mgpu.providers"


class Capabilities(BaseModel):
    """What a provider can do; callers ask here and never `if provider == ...`."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    spot: bool = Field(default=False, description="sells machines on the spot market")
    multi_node: bool = Field(default=False, description="rents out several machines that reach each other")
    this_machine: bool = Field(
        default=False, description="nodes run on the operator's own machine: they see its files, and have booted"
    )
    image_repository: bool = Field(default=False, description="has a place for images; see `ImageHost`")
    starts_from_image: bool = Field(
        default=False,
        description="its machines are containers of the run's image: it has to be named, and nothing is pulled on them",
    )
    idempotent_create: bool = Field(
        default=False, description="one token makes at most one gang, at the provider's own"
    )
    repairs_single_nodes: bool = Field(
        default=True,
        description="a lost machine can be replaced alone; else a gang comes and ends as one, and is made anew",
    )
    listing_lag_s: float = Field(
        default=0, description="seconds after a request: `find` and `list_owned` may not show it"
    )
    platform: str = Field(
        default="",
        description="what all of its machines are, e.g. linux/amd64: images for others are refused; empty: any",
    )
    boot_s: float = Field(
        default=0, description="seconds from the grant until the slowest machines answer by SSH; 0: not known"
    )
    end_s: float = Field(default=0, description="seconds that machines may take to end, at the worst; 0: not known")
    look_every_s: float = Field(
        default=0, description="seconds between two looks at machines that run and answer; 0: as often as is useful"
    )
    notices: NoticeSource = Field(
        default="none",
        description="where a node finds its interruption notice; a class, package.module:Class, is one that nodes have",
    )
    account_options: frozenset[str] = Field(
        default=frozenset(), description="settings that say whose account it is and where; others change no listing"
    )


@dataclass(frozen=True)
class Registries:
    """Container registries that a provider's own credentials open: its class is a `mgpu.image.place.ImageHost`."""

    host: str  # the pattern of their names
    make: str  # how one gets a repository there, as a sentence
    renew: str  # what to do where the login is refused, as sentences


@dataclass(frozen=True)
class ProviderEntry:
    """What an entry of the group names. The entry's own name is the provider's, and that of its block."""

    provider: str  # "package.module:Class", a `mgpu.providers.base.Provider`; imported when it is asked for
    options: type[ProviderOptions]  # the provider's block of the run file
    capabilities: Capabilities
    registries: Registries | None = None


@functools.cache
def installed() -> Entries[ProviderEntry]:
    """The providers of this environment."""
    return entries.read(GROUP, ProviderEntry)


def entry(name: str) -> ProviderEntry:
    """The entry of this name.

    Raises:
        InputError: there is none; the nearest one and all others are named.
    """
    if name in installed().found:
        return installed().found[name]
    what, near = installed().complaint(name)
    why = f"did you mean {near!r}?" if near else ""
    raise InputError(f"provider: {what}", why, f"Known providers: {', '.join(installed().names)}.")


def of_registry(host: str) -> tuple[ProviderEntry, Registries] | None:
    """The provider that has this registry, and what is known of it; None: docker's configuration says who opens it."""
    known = ((each, each.registries) for each in installed().found.values() if each.registries)
    return next(((each, has) for each, has in known if re.fullmatch(has.host, host)), None)


def starts_from_image(name: str) -> bool:
    """Whether this provider's nodes are containers of the run's image; False where there is no such provider."""
    found = installed().found.get(name)
    return found is not None and found.capabilities.starts_from_image


def on_this_machine(name: str) -> bool | None:
    """Whether this provider's nodes run on the operator's own machine; None: there is no provider of this name."""
    found = installed().found.get(name)
    return found.capabilities.this_machine if found else None
