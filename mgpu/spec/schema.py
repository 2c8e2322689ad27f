"""The run file's JSON schema, for editors, and the list of its keys, for docs/formats.md; `mgpu spec` prints both."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from mgpu_train.strategies import entry as strategies
from mgpu_train.tasks import entry as tasks

from mgpu.spec.model import RunSpec

_NAMED = ("properties", "patternProperties", "$defs")
_SAID_DEFAULT = re.compile(r" ?\(default:? (.*)\)$")
_WORDS = {"object": "block", "string": "text"}


class Key(NamedTuple):
    """One key: its dotted name (`data[].from`), type, default (empty: an empty block) and meaning with unit."""

    name: str
    type: str
    default: str
    description: str


def schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a run file, with a description and default for every key."""
    generated = _without_null(without_titles(RunSpec.model_json_schema(by_alias=True)))
    command, env = generated["properties"]["command"], generated["properties"]["env"]
    args = generated["$defs"]["ImageSpec"]["properties"]["args"]
    for text_or_number in (
        command["items"],
        *(each for by in (env, args) for each in by["patternProperties"].values()),
    ):
        text_or_number["type"] = ["string", "number"]  # a number is passed on as it is written
    train = generated["$defs"]["TrainConfig"]["properties"]
    for key, names in (("task", tasks.installed().names), ("strategy", strategies.installed().names)):
        field = {word: value for word, value in train[key].items() if word not in ("type", "pattern", "maxLength")}
        train[key] = {"enum": list(names), **field}
    path = {"type": "string", "pattern": ":"}
    train["task"] = {"anyOf": [{"enum": train["task"].pop("enum")}, path], **train["task"]}
    for named in (env, args, generated["properties"]["expect"]):
        named["additionalProperties"] = False
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mgpu run file",
        **{word: value for word, value in generated.items() if word != "$defs"},
        "oneOf": [{"required": ["train"]}, {"required": ["command"]}],
        "$defs": generated["$defs"],
    }


def text() -> str:
    """The schema as `mgpu spec --json` prints it and docs/mgpu.schema.json holds it."""
    return json.dumps(schema(), indent=2) + "\n"


def keys(of: dict[str, Any] | None = None) -> list[Key]:
    """All keys of a schema (default: the run file's), a block's own line before those of its keys."""
    whole = schema() if of is None else _without_null(without_titles(of))
    return list(_keys(whole, whole.get("$defs", {}), ""))


def table(rows: list[Key]) -> str:
    """The keys as a Markdown table."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for row in rows:
        cells = (f"`{row.name}`", row.type, row.default, row.description)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def without_titles(node: Any, named: bool = False) -> Any:
    """A schema without the titles that pydantic makes up.

    `named`: the keys of this node are names of the user's, not words of JSON schema.
    """
    if isinstance(node, list):
        return [without_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {word: value for word, value in node.items() if named or word != "title"}
    return {word: without_titles(value, not named and word in _NAMED) for word, value in kept.items()}


def _without_null(node: Any) -> Any:
    """A schema in which a key without a value is left out, not `null`, and blocks and lists are empty by default."""
    if isinstance(node, list):
        return [_without_null(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {word: _without_null(value) for word, value in node.items()}
    if "default" in kept and not isinstance(kept["default"], (str, int, float)):
        del kept["default"]
    if {"type": "null"} in kept.get("anyOf", ()):
        branches = [branch for branch in kept.pop("anyOf") if branch != {"type": "null"}]
        kept = {**branches[0], **kept} if len(branches) == 1 else {**kept, "anyOf": branches}
    return kept


def _keys(block: dict[str, Any], defs: dict[str, Any], above: str) -> Iterator[Key]:
    for name, field in block.get("properties", {}).items():
        description = field.get("description") or _target(field, defs).get("description", "")
        said = _SAID_DEFAULT.search(description)
        default = f"`{json.dumps(field['default'])}`".replace('"', "") if field.get("default", "") != "" else ""
        if name in block.get("required", ()):
            default = "required"
        elif said:
            default, description = said[1], description[: said.start()]
        yield Key(above + name, _type(field, defs), default, description)
        for inner, dots in _blocks(field, defs):
            yield from _keys(inner, defs, f"{above}{name}{dots}")


def _blocks(field: dict[str, Any], defs: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    for each in (field, *field.get("anyOf", ()), *field.get("oneOf", ())):
        inner, dots = (each["items"], "[].") if "items" in each else (each, ".")
        if "properties" in _target(inner, defs):
            yield _target(inner, defs), dots
        for named in each.get("patternProperties", {}).values():
            if "properties" in _target(named, defs):
                yield _target(named, defs), ".NAME."


def _target(field: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    return defs[field["$ref"].rpartition("/")[2]] if "$ref" in field else {}


def _type(field: dict[str, Any], defs: dict[str, Any]) -> str:
    if "$ref" in field:
        return _type(_target(field, defs), defs)
    if choices := field.get("anyOf") or field.get("oneOf"):
        first, *others = dict.fromkeys(_type(choice, defs) for choice in choices)
        if "|" in first and others == [f"list of {first}"]:
            return f"{first}, or a list of them"
        return " or ".join((first, *others))
    if "enum" in field or "const" in field:
        return " | ".join(f"`{value}`" for value in field.get("enum") or [field["const"]])
    kind = field.get("type", "any")
    if kind == "array":
        return f"list of {_type(field.get('items', {}), defs)}"
    kinds: list[str] = kind if isinstance(kind, list) else [kind]
    return " or ".join(_WORDS.get(each, each) for each in kinds) + _bounds(field)


def _bounds(field: dict[str, Any]) -> str:
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "maximum": "<="}
    said = [f"{sign} {field[word]}" for word, sign in signs.items() if word in field]
    return f" {', '.join(said)}" if said else ""
