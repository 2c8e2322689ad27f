"""What pydantic found, in the user's words: the field as a path in the file, the message, the nearest valid name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mgpu.spec import command
from mgpu.spec.image import no_reference
from mgpu.spec.model import UNIONS, RunSpec
from mgpu.spec.text.document import Document, Where, dotted
from mgpu.spec.values import choice, refusal, shown

_LOOKED_UP = 500  # problems whose names are compared: far fewer are shown, and a file of thousands is no run file
NAMES: tuple[Where, ...] = (("env",), ("image", "args"))  # blocks whose keys are names of the user's


def where(error: Mapping[str, Any]) -> Where:
    """The field of an error, without what pydantic puts in between: a union's branch, the mark of a key's own name."""
    at: Where = error["loc"]
    for union, tags in UNIONS.items():
        if at[: len(union)] == union and at[len(union) : len(union) + 1] in [(tag,) for tag in tags]:
            return (*union, *at[len(union) + 1 :])
    named = next((len(block) + 1 for block in NAMES if at[: len(block)] == block), None)
    if named is None and at[-1] == "[key]" and error["type"] != "extra_forbidden":
        return at[:-1]
    return at[: named or _keys_in(at)]


def _keys_in(at: Where) -> int:
    """How many parts of a path are keys and items; what comes behind a plain value is a branch of its union."""
    block: type[BaseModel] | None = RunSpec
    for place, part in enumerate(at):
        if isinstance(part, str):
            info = _fields(block).get(part) if block else None
            if info is None or _has_keys(info.annotation):
                break  # an unknown key, or names of the user's behind it
            block = _model_in(info.annotation)
            if block is None:
                return place + 1 + sum(isinstance(each, int) for each in at[place + 1 : place + 2])
    return len(at)


def _has_keys(annotation: Any) -> bool:
    return get_origin(annotation) is dict or any(map(_has_keys, get_args(annotation)))


def word(
    error: Mapping[str, Any], document: Document, options: type[BaseModel] | None = None
) -> tuple[str, str | None]:
    """The message and the nearest valid name (None: there is none) for one of pydantic's errors. `options`: the block
    that `train.options` is."""
    at, given = where(error), error["input"]
    plain = document.marks[at].plain if at in document.marks else None
    match error["type"]:
        case "extra_forbidden":
            return "unknown key", nearest_key(at, options) if len(document.problems) < _LOOKED_UP else None
        case "missing":
            return f"is missing: {_description(at, options)}", None
        case "literal_error":
            message, near = choice(error, shown(given, plain))
            return message + (", or a block of keys" if at == ("checkpoint",) else ""), near
        case "string_type":
            return _not_text(given, plain), None
        case "tuple_type":
            return _not_a_list(at, given, plain), None
        case "string_pattern_mismatch" if at == ("image", "reference") and (said := no_reference(given)):
            return said, None
        case _:
            return refusal(error, shown(given, plain)), None


def _not_text(given: Any, plain: str | None) -> str:
    if plain is None:
        return f"text is needed, not {shown(given, plain)}"
    kind = "yes or no" if isinstance(given, bool) else "a number"
    return f'text is needed, and YAML reads `{plain}` as {kind}: write it in quotes, "{plain}"'


def _not_a_list(at: Where, given: Any, plain: str | None) -> str:
    if at in (("gpu",), ("regions",)):
        return _not_text(given, plain)
    if at != ("command",) or not isinstance(given, str):
        return "a list is needed: [first, second], or one item a line with `- ` before it"
    return command.as_list(given)


@lru_cache(maxsize=_LOOKED_UP)  # the runs of a sweep have the same ones
def nearest_key(at: Where, options: type[BaseModel] | None = None) -> str | None:
    """The valid key that an unknown one is nearest to: in its block, else the same name in another block."""
    key = str(at[-1]).lower().replace("-", "_")[:64]
    block = _block(at[:-1], options)
    near = get_close_matches(key, list(_fields(block)) if block else [], 1)
    if near:
        return near[0]
    return next((dotted(path) for path in _every_key(RunSpec) if path[-1] == key), None)


def _every_key(block: type[BaseModel], above: Where = ()) -> Iterator[Where]:
    for name, info in _fields(block).items():
        yield (*above, name)
        if inner := _model_in(info.annotation):
            yield from _every_key(inner, (*above, name))


def _description(at: Where, options: type[BaseModel] | None) -> str:
    block = _block(at[:-1], options)
    info = _fields(block).get(str(at[-1])) if block else None
    return (info.description if info else None) or "it has no default"


def _block(at: Where, options: type[BaseModel] | None) -> type[BaseModel] | None:
    block: type[BaseModel] | None = RunSpec
    if options is not None and at[:2] == ("train", "options"):
        block, at = options, at[2:]
    if at[:1] == ("expect",):
        at = (at[0], *at[2:])  # its blocks have names of the user's
    for part in at:
        if isinstance(part, str) and block is not None:
            info = _fields(block).get(part)
            block = _model_in(info.annotation) if info else None
    return block


def _fields(block: type[BaseModel]) -> dict[str, FieldInfo]:
    return {info.alias or name: info for name, info in block.model_fields.items()}


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for inner in get_args(annotation) if (model := _model_in(inner))), None)
