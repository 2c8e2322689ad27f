"""Where the image of a run goes, and who we are there: what the run file, its provider and this environment say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mgpu.image import auth
from mgpu.image.publish import Site
from mgpu.spec.image import ImageSpec


class Lender(Protocol):
    """What a provider knows of images; every `mgpu.providers.base.Provider` is one."""

    def image_repository(self, regions: Sequence[str]) -> str | None:
        """Where images for machines in these regions go: `registry/name`; None: nowhere."""
        ...

    def registry_client(self, region: str) -> Any:
        """A client of ECR in a region; None: this environment's own credentials are all that there is."""
        ...


def site(image: ImageSpec, folder: Path, provider: Lender, regions: Sequence[str], environ: Mapping[str, str]) -> Site:
    """The site of a run's image. `folder`: the run file's; the provider is asked for a repository where none is named.

    Raises:
        AuthError, InputError: the provider cannot say, as there are no good credentials.
    """
    asks = image.builds and image.repository is None
    return Site(
        folder,
        provider.image_repository(regions) if asks else None,
        environ,
        login=lambda registry: login(registry, provider),
    )


def login(registry: str, provider: Lender) -> auth.Auth:
    """Who we are for a registry: for ECR whom the provider's own settings say."""
    return auth.of(registry, lambda region: provider.registry_client(region) or auth.ecr_client(region))
