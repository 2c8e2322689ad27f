"""The providers by name. A provider's module is imported when it is asked for, and not before."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name

from mgpu.errors import InputError, MgpuError
from mgpu.providers.base import Provider
from mgpu.spec.provider import entry, installed

EMBEDDED = "local"  # needs no account: what is asked where nothing names a provider


def names() -> tuple[str, ...]:
    """All providers that are installed, in alphabetical order."""
    return installed().names


def get(name: str, options: Mapping[str, str] | None = None) -> Provider:
    """The provider of this name, with the run file's block of it (flattened) as options.

    Raises:
        InputError: there is none of this name, its package does not work, or an option means nothing to it.
    """
    named = entry(name).provider
    try:
        return resolve_name(named)(options)
    except MgpuError:
        raise
    except Exception as error:  # whatever somebody else's package does: it is to hinder no other provider
        raise InputError(
            f"provider {name}: {named} does not work",
            f"{type(error).__name__}: {error}",
            "Install again the package that brings it.",
        ) from error
