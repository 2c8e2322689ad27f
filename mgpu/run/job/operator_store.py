"""The object store as the operator opens it: by its environment, and by what the run file's provider block names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mgpu.plan import rank
from mgpu.providers import registry
from mgpu.providers.base import StoreAccess
from mgpu.run.record.record import Record
from mgpu.spec.model import RunSpec

if TYPE_CHECKING:
    from mgpu_train.store import Store


def for_spec(url: str, spec: RunSpec) -> Store:
    """A store of a run with this run file. Raises StoreError: the address or the profile means nothing."""
    return _opened(url, spec.provider, rank.requirements(spec).provider_options)


def for_record(url: str, record: Record) -> Store:
    """A store of a run that is remembered. Raises StoreError: the address or the profile means nothing."""
    return _opened(url, record.provider, record.options)


def _opened(url: str, provider: str, options: Mapping[str, str]) -> Store:
    from mgpu_train.store import open_store

    if not (options and url.startswith("s3://")):
        return open_store(url)
    named = registry.get(provider, options)
    return open_store(url, named.store_environment(os.environ) if isinstance(named, StoreAccess) else None)
