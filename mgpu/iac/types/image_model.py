"""The Image resource's properties: what is built or named, and what is in the registry.

Each is one word, the same in Python and on the wire: where Pulumi's SDK translates names, it translates the keys of a
user's map as well, and `args` has the user's own.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from mgpu.iac.types.fleet_model import Properties
from mgpu.image import compat, place
from mgpu.image.publish import Published, Site
from mgpu.image.registry.reference import Reference
from mgpu.providers import registry
from mgpu.providers.base import Provider
from mgpu.spec.block import Word
from mgpu.spec.image import ImageSpec, Platform

_SITE = {"folder", "provider", "options", "regions", "hash", "certificates"}


class _Image(Properties):
    """What inputs and outputs have in common."""

    folder: str = Field(
        description="folder that `context` and `certificates` are relative to, absolute: the run file's"
    )
    provider: Word = Field(description="who rents out the machines: it knows the default repository")
    options: dict[str, str] = Field({}, description="settings of this provider")
    regions: tuple[Word, ...] = Field((), description="where machines may be; the repository is in the first one")
    context: str | None = Field(None, description="folder to build from; none: the trainer's")
    dockerfile: str = Field("Dockerfile", description="the Dockerfile, a file in the context")
    args: dict[str, str] = Field({}, description="values of the Dockerfile's ARGs")
    target: str | None = Field(None, description="stage to build; none: the last one")
    platform: Platform = Field("linux/amd64", description="what the nodes' machines are")
    certificates: str | None = Field(None, description="a PEM file that the build trusts besides: `image.ca_file`")
    secrets: tuple[str, ...] = Field((), description="names of environment variables that the build gets as secrets")
    hash: str = Field("", description="of all that it is built from; of one that exists its digest's digits; never set")

    @property
    def ca(self) -> Path | None:
        """The file of certificates."""
        return Path(self.folder) / self.certificates if self.certificates else None

    def sold_by(self) -> Provider:
        """The provider, with the settings that its fleet has. Raises InputError."""
        return registry.get(self.provider, self.options)


class ImageInputs(_Image):
    """The keys of `image:`, and where they stand. Of all these only what the image is, and where, diffs."""

    reference: str | None = Field(None, description="an image that exists: repository:tag or repository@sha256:...")
    repository: str | None = Field(None, description="where what is built is pushed: registry/name")

    def spec(self) -> ImageSpec:
        """As a run file's block. Raises pydantic.ValidationError."""
        given = self.model_dump(exclude=_SITE, exclude_defaults=True)
        return ImageSpec.model_validate(given | ({"ca_file": self.certificates} if self.certificates else {}))

    def site(self) -> Site:
        """Where it is built, by the user and in the environment of this process. Raises AuthError, InputError."""
        return place.site(self.spec(), Path(self.folder), self.sold_by(), self.regions, os.environ)


class ImageOutputs(_Image):
    """The image in its registry."""

    reference: str = Field(description="what may run: repository@sha256:...")
    repository: str = Field(description="registry/name")
    tag: str = Field(description="its name there besides: the hash of its inputs, or the tag that was named")
    digest: str = Field(description="sha256:...")
    bytes: int = Field(description="of all layers, compressed")
    labels: dict[str, str] = Field({}, description="what it says it fits: its CUDA, PyTorch and Python")

    @classmethod
    def of(cls, wanted: ImageInputs, published: Published) -> ImageOutputs:
        """What was made of these inputs."""
        name = Reference.parse(published.reference)
        found = {
            "reference": published.reference,
            "repository": name.repository,
            "tag": published.tag,
            "digest": name.digest,
            "bytes": published.image_bytes,
            "labels": compat.said(published.labels),
        }
        return cls.model_validate(wanted.model_dump() | found)
