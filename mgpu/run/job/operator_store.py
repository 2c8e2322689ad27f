"""The object store as the operator opens it: by its environment, and by what the run file's provider block names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu.context import timeouts
from mgpu.errors import InputError
from mgpu.providers import registry
from mgpu.providers.base import StoreAccess
from mgpu.run.record.record import Record
from mgpu.spec.load import first
from mgpu.spec.model import RunSpec
from mgpu.spec.provider import installed

if TYPE_CHECKING:
    from mgpu_train.store import Store


def for_spec(url: str, spec: RunSpec) -> Store:
    """A store of a run with this run file. Raises StoreError: the address or the profile means nothing."""
    blocks = ((name, getattr(spec, name)) for name in installed().names)
    return _opened(url, {name: block.flat() for name, block in blocks if block is not None})


def for_record(url: str, record: Record) -> Store:
    """A store of a run that is remembered. Raises StoreError: the address or the profile means nothing."""
    return _opened(url, record.candidates or {record.provider: record.options})


def for_address(url: str, run_file: Path, profile: str | None = None) -> Store:
    """A store that is known by its address alone: with `profile`, or as this run file has it, where there is one.

    Raises:
        InputError: no provider has profiles.
        StoreError: the address or the profile means nothing.
    """
    if not url.startswith("s3://"):
        return _opened(url, {})
    if profile is None:
        return _by(run_file, url)
    found = installed().found
    having = next((name for name, each in found.items() if "profile" in each.options.model_fields), None)
    if having is None:
        raise InputError("--profile: no provider has profiles", "", "Leave it out.")
    return _opened(url, {having: {"profile": profile}})


def passing() -> tuple[type[Exception], ...]:
    """What a store raises that may answer later, also because somebody renews the operator's credentials meanwhile."""
    from mgpu_train.store import Expired, Unavailable

    return Unavailable, Expired


def _by(run_file: Path, url: str) -> Store:
    try:
        return for_spec(url, first(run_file))
    except InputError:  # there is none, or it has mistakes: it was not asked about
        return _opened(url, {})


def _opened(url: str, providers: Mapping[str, Mapping[str, str]]) -> Store:
    """With the credentials that the first of these providers names which has settings, and credentials at all."""
    from mgpu_train.store import open_store

    set_up = [(name, options) for name, options in providers.items() if options and url.startswith("s3://")]
    for named in (registry.get(name, options) for name, options in set_up):
        if isinstance(named, StoreAccess):
            return open_store(url, named.store_environment(os.environ), timeouts=timeouts())
    return open_store(url, timeouts=timeouts())
