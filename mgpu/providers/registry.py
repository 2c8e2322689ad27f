"""The providers by name. A provider's module is imported when it is asked for, and not before."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module

from mgpu.errors import InputError
from mgpu.providers.base import Provider

# name -> module and class; a test holds this table, the modules and the contract tests together
_PROVIDERS = {
    "aws": ("mgpu.providers.aws.provider", "AwsProvider"),
    "local": ("mgpu.providers.local.provider", "LocalProvider"),
}


def names() -> tuple[str, ...]:
    """All providers, in alphabetical order."""
    return tuple(sorted(_PROVIDERS))


def get(name: str, options: Mapping[str, str] | None = None) -> Provider:
    """The provider of this name, with the run file's block of it (flattened) as options.

    Raises:
        InputError: there is none of this name; the nearest one and all others are named.
    """
    if name not in _PROVIDERS:
        near = difflib.get_close_matches(name, _PROVIDERS, n=1)
        raise InputError(
            f"provider: this version of mgpu has no provider {name!r}",
            f"did you mean {near[0]!r}?" if near else "",
            f"Known providers: {', '.join(names())}.",
        )
    module, cls = _PROVIDERS[name]
    return getattr(import_module(module), cls)(options)
