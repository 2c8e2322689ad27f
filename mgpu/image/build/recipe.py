"""What an engine is to build, and how long it is waited for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mgpu.image.build import archive, bases
from mgpu.image.build.context import BuildContext


@dataclass(frozen=True)
class Recipe:
    """What is built: the files, and what `image:` says of them. `secrets`: values by name.

    Raises InputError where secrets or certificates would end in the image.
    """

    context: BuildContext
    args: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None
    platform: str = "linux/amd64"
    ca_file: Path | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    network: str | None = None

    def __post_init__(self) -> None:
        if self.secrets or self.ca_file:
            archive.require_thrown_away(self._named, self.target, self.context.dockerfile, self.secrets)

    @property
    def asks(self) -> bool:
        """Whether the Dockerfile, with these arguments, asks for `.build`."""
        return archive.asks(self._named)

    @property
    def _named(self) -> bases.Named:
        return bases.read(self.context.recipe, self.args, self.platform)


@dataclass(frozen=True)
class Limits:
    """Seconds: a short call; a whole build; a whole push or pull; and how long an engine may be silent in these,
    which comes on top of their deadline at worst."""

    call_s: float = 60.0
    build_s: float = 7200.0
    push_s: float = 7200.0
    silence_s: float = 1800.0
