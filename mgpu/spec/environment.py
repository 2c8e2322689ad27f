"""What a run file takes from the environment of the operator's command."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from mgpu_train.config import EnvName
from pydantic import BaseModel

from mgpu.errors import InputError
from mgpu.spec.model import RunSpec

_NAME = get_args(EnvName)[1]  # what a field's type has where a value of it is the name of a variable


def values(names: Sequence[str], key: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that the run file names under `key`.

    Raises:
        InputError: one of them is not set; all of these are named.
    """
    missing = _missing(names, environ)
    if missing:
        raise InputError(
            f"{key}: {', '.join(missing)} not set in the environment",
            "The run file names them; their values, none of them empty, come from the environment of this command.",
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
    return [name for name in names if not environ.get(name)]  # a CI gives an empty one where it has none


def named(spec: RunSpec) -> list[str]:
    """All variables that a pass reads for runs of this file: those that a field of type `EnvName` names, of sinks and
    providers of other packages, too. An image was built before."""
    return sorted({*_named(spec.model_copy(update={"image": None}))})


def _named(block: BaseModel) -> Iterator[str]:
    for key, field in type(block).model_fields.items():
        names = _NAME in field.metadata or _has_name(field.annotation)
        for value in _leaves(getattr(block, key)):
            if isinstance(value, BaseModel):
                yield from _named(value)
            elif names and isinstance(value, str) and re.fullmatch(_NAME.pattern, value):
                yield value


def _has_name(kind: Any) -> bool:
    """Whether it has `EnvName` in it, but as the key of a mapping: such are set, not read."""
    parts = get_args(kind)[1:] if get_origin(kind) in (dict, Mapping) else get_args(kind)
    return _NAME in parts or any(map(_has_name, parts))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from _leaves(each)
    else:
        yield value
