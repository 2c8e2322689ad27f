"""What a run file takes from the environment of the operator's command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mgpu.errors import InputError
from mgpu.spec.model import RunSpec


def values(names: Sequence[str], key: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that the run file names under `key`.

    Raises:
        InputError: one of them is not set; all of these are named.
    """
    missing = _missing(names, environ)
    if missing:
        raise InputError(
            f"{key}: {', '.join(missing)} not set in the environment",
            "The run file names them, and their values come from the environment of this command.",
            f"Set them, e.g. `export {missing[0]}=...`, or take them out of `{key}:`.",
        )
    return {name: environ[name] for name in names}


def unset(spec: RunSpec, environ: Mapping[str, str]) -> list[str]:
    """What a launch with this environment would refuse, in words."""
    named = {"secrets": spec.secrets, "image.secrets": spec.image.secrets if spec.image else ()}
    return [
        f"{key}: {', '.join(missing)} not set in the environment: a launch needs them"
        for key, names in named.items()
        if (missing := _missing(names, environ))
    ]


def _missing(names: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    return [name for name in names if name not in environ]
