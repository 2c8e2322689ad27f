"""Pulumi's wire format <-> plain Python, and the errors that cross it.

The one module that knows the protocol's magic keys. Our plugin answers `acceptSecrets: false`: the engine then takes
the secret mark off what it sends, and puts it back on every property that had one. Only outputs that are born secret
are marked here. A value that is not known yet, in a preview, is `UNKNOWN` on both sides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from google.protobuf import json_format, struct_pb2
from pulumi.runtime.proto import provider_pb2, status_pb2

from mgpu.errors import MgpuError
from mgpu.iac import failures

UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"
"""Stands for a value that only an update will know."""

_SIGNATURE = "4dabf18193072939515e22adb298388d"
_SECRET = "1b47061264138c4ac30d75fd1eb44270"  # noqa: S105  the protocol's mark of a secret, not one


def has_unknown(value: Any) -> bool:
    """Whether something in a value will be known only after an update."""
    if isinstance(value, dict):
        return any(map(has_unknown, value.values()))
    if isinstance(value, list):
        return any(map(has_unknown, value))
    return value == UNKNOWN


def from_struct(struct: struct_pb2.Struct) -> dict[str, Any]:
    """The properties of a message as plain data; whole numbers become `int`, marked secrets their value."""
    return {key: _plain(value) for key, value in json_format.MessageToDict(struct).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return _plain(value.get("value")) if _SIGNATURE in value else {key: _plain(item) for key, item in value.items()}
    return value


def to_struct(values: Mapping[str, Any], secret: Collection[str] = ()) -> struct_pb2.Struct:
    """Plain data as the properties of a message; those named in `secret` are marked, so that state encrypts them."""
    marked = {key: {_SIGNATURE: _SECRET, "value": value} if key in secret else value for key, value in values.items()}
    return json_format.ParseDict({k: v for k, v in marked.items() if v is not None}, struct_pb2.Struct())


class PartialFailure(Exception):
    """A resource exists but is not what was asked for: state keeps it, and the next `up` goes on from there."""

    def __init__(self, resource_id: str, outputs: Mapping[str, Any], cause: MgpuError) -> None:
        super().__init__(str(cause))
        self.resource_id = resource_id
        self.outputs = outputs
        self.cause = cause

    def to_status(self) -> bytes:
        """The `grpc-status-details-bin` that tells the engine so."""
        detail = provider_pb2.ErrorResourceInitFailed(
            id=self.resource_id,
            properties=to_struct(self.outputs),
            reasons=[failures.describe(self.cause)],
            refresh_before_update=True,
        )
        status = status_pb2.Status(code=2, message=self.cause.what)  # 2 = UNKNOWN, what the engine expects here
        status.details.add().Pack(detail)
        return status.SerializeToString()
