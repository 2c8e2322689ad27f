"""Where the image of a run goes, and who we are there: what the run file, its provider and this environment say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from mgpu.image.publish import Site
from mgpu.image.registry import auth
from mgpu.spec.image import ImageSpec


@runtime_checkable
class ImageHost(Protocol):
    """A provider with a place for images: one with `Capabilities.image_repository`."""

    def image_repository(self, regions: Sequence[str]) -> str:
        """Where images for machines in these regions go unless the run file says: `registry/name`."""
        ...

    def pulled_by_role(self, registry: str) -> Mapping[str, str]:
        """How machines ask for a login of this registry, by their own role, as their side of it
        (`mgpu_train.agent.host.ecr`) takes it; empty: they have to be given one."""
        ...

    def registry_login(self, registry: str) -> tuple[str, str, float]:
        """With the credentials of this provider's settings: a name, a password, and when they end, UNIX seconds; asked
        for `Registries` of its entry alone. Raises ProviderError."""
        ...


def site(image: ImageSpec, folder: Path, provider: object, regions: Sequence[str], environ: Mapping[str, str]) -> Site:
    """The site of a run's image. `folder`: the run file's; the provider is asked for a repository where none is named.

    Raises:
        AuthError, InputError: the provider cannot say, as there are no good credentials.
    """
    asked = provider if image.builds and image.repository is None else None
    return Site(
        folder,
        asked.image_repository(regions) if isinstance(asked, ImageHost) else None,
        environ,
        login=lambda registry: auth.of(registry, provider),
    )


def pulled_by_role(registry: str, provider: object) -> Mapping[str, str]:
    """What the provider's machines need to ask for a login of this registry by themselves; empty: they cannot."""
    return provider.pulled_by_role(registry) if isinstance(provider, ImageHost) else {}
