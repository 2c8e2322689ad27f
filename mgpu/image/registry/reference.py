"""Names of images: which registry, which repository in it, and a tag or a digest."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mgpu.errors import InputError
from mgpu.spec.image import ANY_NAME

HUB = "docker.io"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?\Z")


@dataclass(frozen=True)
class Reference:
    """`registry/name:tag` or `registry/name@digest`; with both, the digest counts."""

    registry: str
    name: str
    tag: str = ""
    digest: str = ""

    @classmethod
    def parse(cls, text: str) -> Reference:
        """What docker means by `text`: without a registry Docker Hub, without tag and digest `latest`.

        Raises:
            InputError: docker would take it for nothing.
        """
        if not ANY_NAME.fullmatch(text):
            why = "One is repository:tag or repository@sha256:... with 64 digits, the repository in lower case."
            raise InputError(f"{text!r} is not the name of an image", why)
        rest, _, digest = text.partition("@")
        head, slash, tail = rest.partition("/")
        named = bool(slash) and (head == "localhost" or "." in head or ":" in head)
        registry, path = (head, tail) if named else (HUB, rest)
        path, _, tag = path.partition(":")
        if registry in (HUB, f"index.{HUB}"):
            registry, path = HUB, path if "/" in path else f"library/{path}"
        return cls(registry, path, tag or ("" if digest else "latest"), digest)

    @property
    def repository(self) -> str:
        """`registry/name`."""
        return f"{self.registry}/{self.name}"

    @property
    def wanted(self) -> str:
        """What the registry is asked for: the digest, else the tag."""
        return self.digest or self.tag

    @property
    def local(self) -> bool:
        """Whether the registry is this machine's, which may be spoken to without TLS."""
        return bool(_LOOPBACK.match(self.registry))

    def at(self, digest: str) -> str:
        """The image of the repository that has this digest: what may run."""
        return f"{self.repository}@{digest}"

    def __str__(self) -> str:
        return self.at(self.digest) if self.digest else f"{self.repository}:{self.tag}"


def is_digest(text: str) -> bool:
    """Whether `text` is a digest as registries give them."""
    return bool(_DIGEST.match(text))
