"""`image:` of a run file: the container image that the nodes run."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from mgpu_train.config import EnvName, Text
from pydantic import Field

from mgpu.spec.block import Block
from mgpu.spec.values import form

# names of images as registries take them; only the host, which ends at the first `/`, may have capitals
_HOST = r"([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(:[0-9]{1,5})?"
_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_NAME = rf"({_HOST}/)?{_PART}(/{_PART})*"
_TAG, _DIGEST = r":[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", r"@sha256:[0-9a-f]{64}"
_REPOSITORY = rf"^{_NAME}$"
_REFERENCE = rf"^{_NAME}({_TAG}({_DIGEST})?|{_DIGEST})$"
ANY_NAME = re.compile(rf"{_NAME}({_TAG})?({_DIGEST})?")  # also without a tag, which means `latest`

_Repository = form(_REPOSITORY, "registry/name in lower case, without tag or digest", max_length=255)
_Reference = form(_REFERENCE, "repository:tag or repository@sha256:..., the repository in lower case", max_length=512)


def no_reference(given: str) -> str:
    """What is wrong with an image's name that does not say which one; "" where it is no name at all."""
    return f"has no tag: write {given}:TAG" if re.fullmatch(_NAME, given) else ""


Platform = Literal["linux/amd64", "linux/arm64"]


class ImageSpec(Block):
    """`image:` the container image that nodes run: one that exists, or one that mgpu builds and pushes."""

    reference: Annotated[str, _Reference] | None = Field(
        None, description="an image that exists, repository:tag or repository@sha256:... (default: one is built)"
    )
    repository: Annotated[str, _Repository] | None = Field(
        None, description="where what is built is pushed, registry/name (default with provider aws: the one of `base`)"
    )
    context: Text | None = Field(
        None, description="folder to build from, relative to the run file (default: the trainer's, as mgpu ships it)"
    )
    dockerfile: Text = Field("Dockerfile", description="the Dockerfile, a file in `context`")
    args: dict[EnvName, Text] = Field({}, description="values of the Dockerfile's ARGs; nothing secret (default: none)")
    target: Text | None = Field(None, min_length=1, description="stage to build (default: the last one)")
    platform: Platform = Field("linux/amd64", description="what the nodes' machines are")
    ca_file: Text | None = Field(
        None,
        description="certificates that the build trusts besides, a PEM file; absolute or relative to the run file; "
        "ends in no layer (default: none)",
    )
    secrets: tuple[EnvName, ...] = Field(
        (),
        description="names; the build gets their values from the operator's environment, no layer does (default: none)",
    )

    @property
    def builds(self) -> bool:
        """Whether mgpu builds it."""
        return self.reference is None
