"""The schema of the kinds of what mgpu makes at AWS, derived from the values that say what they should be."""

from __future__ import annotations

from typing import Any

from pydantic.alias_generators import to_camel

from mgpu.iac.aws.kinds import MANAGERS
from mgpu.providers.aws.bootstrap.resource import Resource

_WORDS = {"type": "array", "items": {"type": "string"}}


def resources() -> dict[str, Any]:
    """Every kind, by its token."""
    return {token: _resource(manager.resource) for token, manager in MANAGERS.items()}


def settable(resource: type[Resource]) -> dict[str, str]:
    """What a program may say of a resource: the wire's name -> ours."""
    return {to_camel(name): name for name in resource.model_fields if name not in resource.fixed()}


def _resource(resource: type[Resource]) -> dict[str, Any]:
    fields = resource.model_json_schema(by_alias=True)["properties"]
    properties = {name: _type(field) | {"description": field["description"]} for name, field in fields.items()}
    facts = {name: {"type": "string", "description": text} for name, text in resource.facts.items()}
    return {
        "description": (resource.__doc__ or "").partition("\n")[0],
        "inputProperties": {name: properties[name] for name in settable(resource)},
        "properties": properties | facts,
        "required": [name for name in (*properties, *facts) if name != "existing"],
    }


def _type(field: dict[str, Any]) -> dict[str, Any]:
    """Ours are texts, numbers, yes or no, and lists of texts; one that may be absent is a text."""
    kind = field.get("type", "string")
    return dict(_WORDS) if kind == "array" else {"type": kind}
