"""What a registry has: asked by its HTTP API, without an engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu.image.registry import failures
from mgpu.image.registry.auth import Auth, nobody
from mgpu.image.registry.http import Answer, Api, RetryPolicy
from mgpu.image.registry.reference import Reference, is_digest

_OCI, _DOCKER = "application/vnd.oci.image", "application/vnd.docker.distribution.manifest"
_INDEXES = (f"{_OCI}.index.v1+json", f"{_DOCKER}.list.v2+json")
_ACCEPT = (*_INDEXES, f"{_OCI}.manifest.v1+json", f"{_DOCKER}.v2+json")


@dataclass(frozen=True)
class ImageManifest:
    """One image of one platform, as a registry keeps it: digest and compressed bytes of its layers, lowest first; and
    what it says of itself, labels and the folder that its programs run in ("": none is named)."""

    digest: str
    platform: str
    layers: tuple[tuple[str, int], ...]
    config_bytes: int
    labels: Mapping[str, str]
    workdir: str

    @property
    def bytes(self) -> int:
        """What a machine that has nothing of it loads."""
        return self.config_bytes + sum(size for _, size in self.layers)


def find(
    reference: str,
    auth: Auth = nobody,
    *,
    retry: RetryPolicy | None = None,
    ca_file: Path | None = None,
    made_by_push: bool = False,
) -> str | None:
    """The digest behind a reference; None: the registry has no such tag or digest, or no such repository.

    `made_by_push`: it is ours to push to, and a registry that shows our login no such repository may have none yet.

    Raises:
        ImageError: the registry refuses, cannot be reached, or answers what no registry does.
    """
    wanted = Reference.parse(reference)
    api = Api(wanted, auth, retry, ca_file)
    answer = api.ask("HEAD", f"manifests/{wanted.wanted}", _ACCEPT, made_by_push=made_by_push)
    if answer.status == 404:
        return None
    if "Docker-Content-Digest" not in answer.headers:  # not all registries say it to HEAD
        answer = api.ask("GET", f"manifests/{wanted.wanted}", _ACCEPT)
    return _digest(wanted, answer)


def manifest(
    reference: str,
    auth: Auth = nobody,
    platform: str = "linux/amd64",
    *,
    retry: RetryPolicy | None = None,
    ca_file: Path | None = None,
) -> ImageManifest | None:
    """The image of `platform` behind a reference, whose own digest the result has; None: it is for others, or absent.

    Raises:
        ImageError: as `find` does; a manifest that is not what its digest says.
    """
    wanted = Reference.parse(reference)
    api = Api(wanted, auth, retry, ca_file)
    digest, data = _load(api, wanted, wanted.wanted)
    if data is not None and "manifests" in data:
        inner = _of_index(wanted, data, platform)
        _, data = _load(api, wanted, inner) if inner else ("", None)
    if data is None:
        return None
    found = _read(api, wanted, digest, data)
    return found if found.platform == platform else None


def _of_index(wanted: Reference, data: dict[str, Any], platform: str) -> str:
    try:
        return next((each["digest"] for each in data["manifests"] if _platform(each.get("platform")) == platform), "")
    except (AttributeError, KeyError, TypeError) as error:
        raise failures.nonsense(wanted, "an index that is none") from error


def _read(api: Api, wanted: Reference, digest: str, data: dict[str, Any]) -> ImageManifest:
    try:
        layers = tuple((str(each["digest"]), int(each["size"])) for each in data["layers"])
        answer = api.ask("GET", f"blobs/{data['config']['digest']}")
        if f"sha256:{hashlib.sha256(answer.body).hexdigest()}" != data["config"]["digest"]:
            raise failures.nonsense(wanted, "a configuration that is not its digest's")
        config = json.loads(answer.body)
        says = config.get("config") or {}
        labels = {str(name): str(value) for name, value in (says.get("Labels") or {}).items()}
        size, workdir = int(data["config"]["size"]), str(says.get("WorkingDir") or "")
        return ImageManifest(digest, _platform(config), layers, size, labels, workdir)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise failures.nonsense(wanted, "a manifest that is no image's") from error


def _load(api: Api, wanted: Reference, name: str) -> tuple[str, dict[str, Any] | None]:
    answer = api.ask("GET", f"manifests/{name}", _ACCEPT)
    if answer.status == 404:
        return "", None
    digest = _digest(wanted, answer)
    try:
        data = json.loads(answer.body)
    except ValueError as error:
        raise failures.nonsense(wanted, "a manifest that is no JSON") from error
    if not isinstance(data, dict) or (is_digest(name) and digest != name):
        raise failures.nonsense(wanted, f"another manifest than {name}")
    return digest, data


def _digest(wanted: Reference, answer: Answer) -> str:
    said = answer.headers.get("Docker-Content-Digest", "")
    counted = f"sha256:{hashlib.sha256(answer.body).hexdigest()}" if answer.body else said
    if not is_digest(counted) or said not in ("", counted):
        raise failures.nonsense(wanted, f"the digest {said!r}, which its manifest has not")
    if wanted.digest not in ("", counted) and not answer.body:
        raise failures.nonsense(wanted, f"the digest {said!r} for {wanted.digest}")
    return counted


def _platform(said: Mapping[str, Any] | None) -> str:
    return f"{(said or {}).get('os')}/{(said or {}).get('architecture')}"
