"""The Pulumi package schema of the plugin, derived from the models that the plugin checks with."""

from __future__ import annotations

import json
from typing import Any

from pydantic.alias_generators import to_camel

from mgpu import __version__
from mgpu.iac.aws import schema as aws
from mgpu.iac.tokens import FLEET, FLEET_GUARD, IMAGE, SSH_KEY
from mgpu.iac.types.fleet_model import FleetInputs, FleetOutputs, Properties
from mgpu.iac.types.image_model import ImageInputs, ImageOutputs

_STRING = {"type": "string"}
_ANY = {"$ref": "pulumi.json#/Any"}
_JSON_TYPES = {"string": "string", "integer": "integer", "number": "number", "boolean": "boolean"}


def package() -> dict[str, Any]:
    """The schema as plain data."""
    return {
        "name": "mgpu",
        "version": __version__,
        "description": "Machines with GPUs, rented as one fleet",
        "license": "Apache-2.0",
        "config": {"variables": _CONFIG},
        "provider": {"description": "Whose machines, and where keys and journals lie", "inputProperties": _CONFIG},
        "resources": {
            SSH_KEY: _SSH_KEY,
            IMAGE: _image(),
            FLEET_GUARD: _FLEET_GUARD,
            FLEET: _fleet(),
            **aws.resources(),
        },
    }


def to_json() -> str:
    """The schema as the engine asks for it."""
    return json.dumps(package())


_CONFIG = {
    "owner": {**_STRING, "description": "owner tag of everything that costs money (default: made once per user)"},
    "stateDir": {**_STRING, "description": "folder of keys and journals (default: mgpu's state folder)"},
    "account": {**_STRING, "description": "AWS account of the resources mgpu:aws, 12 digits; others are refused"},
    "region": {**_STRING, "description": "region of the resources mgpu:aws"},
    "profile": {**_STRING, "description": "profile of ~/.aws (default: what AWS's own tools would take)"},
    "endpointUrl": {**_STRING, "description": "address of all AWS services (default: AWS's own)"},
}

_PATH = {**_STRING, "description": "file of the private key (default: in mgpu's state folder)"}
_SSH_KEY: dict[str, Any] = {
    "description": "An ed25519 pair; the private half is a secret and a 0600 file.",
    "inputProperties": {"path": _PATH},
    "properties": {
        "path": _PATH,
        "publicKey": {**_STRING, "description": "OpenSSH format, one line"},
        "privateKey": {**_STRING, "secret": True, "description": "OpenSSH format"},
        "privateKeyFile": {**_STRING, "description": "the 0600 file; empty: it is missing, `up` writes it again"},
    },
    "required": ["path", "publicKey", "privateKey", "privateKeyFile"],
}

_GUARDED = {
    "fleet": {**_STRING, "description": "name of the fleet"},
    "owner": {**_STRING, "description": "owner tag"},
    "provider": {**_STRING, "description": "who rents out the machines"},
    "options": {
        "type": "object",
        "additionalProperties": _STRING,
        "description": "settings of this provider",
    },
}
_EARLIER = {
    "type": "array",
    "items": _ANY,
    "description": "providers that the fleet had before, with their settings: they are looked at, too",
}
_FLEET_GUARD: dict[str, Any] = {
    "description": "Goes after its fleet, and ends what a crash left outside the state.",
    "inputProperties": _GUARDED,
    "requiredInputs": ["provider"],
    "properties": {**_GUARDED, "earlier": _EARLIER},
    "required": list(_GUARDED),
}


def _image() -> dict[str, Any]:
    inputs, outputs = _properties(ImageInputs), _properties(ImageOutputs)
    del inputs["hash"]
    return {
        "description": "A container image in its registry: found there, or built and pushed.",
        "inputProperties": inputs,
        "requiredInputs": ["folder", "provider"],
        "properties": outputs,
        "required": ["reference", "repository", "tag", "digest", "hash"],
    }


def _fleet() -> dict[str, Any]:
    inputs, outputs = _properties(FleetInputs), _properties(FleetOutputs)
    required = [to_camel(name) for name, field in FleetInputs.model_fields.items() if field.is_required()]
    return {
        "description": "N equal machines.",
        "inputProperties": inputs,
        "requiredInputs": [name for name in required if name not in ("name", "owner")],
        "properties": outputs,
        "required": list(outputs),
    }


def _properties(model: type[Properties]) -> dict[str, Any]:
    fields = model.model_json_schema(by_alias=True, mode="serialization")["properties"]
    return {name: _type(field) | {"description": field.get("description", "")} for name, field in fields.items()}


def _type(field: dict[str, Any]) -> dict[str, Any]:
    """JSON schema -> Pulumi's type language, as far as our models go; a nested model is `Any`."""
    if "anyOf" in field:  # a type, or null
        (field,) = (each for each in field["anyOf"] if each.get("type") != "null")
    kind = field.get("type")
    if kind in _JSON_TYPES:
        return {"type": kind}
    if kind == "array":
        return {"type": "array", "items": _type(field["items"])}
    if kind == "object" and "additionalProperties" in field:
        return {"type": "object", "additionalProperties": _type(field["additionalProperties"])}
    return dict(_ANY)
