"""What a builder is sent: the context, and what is for the build alone, where the Dockerfile asks for it.

A Dockerfile that speaks of `.build` gets the folder `.build/` in its context: `ca.pem`, certificates to trust besides,
and `secrets/NAME`. Any builder can hand them to a stage that is thrown away; in all other contexts they are not.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from mgpu.errors import ImageError
from mgpu.image.context import Context

_ASKED = re.compile(rb"\.build\b|\.buil\[d\]")


def asks(recipe: bytes) -> bool:
    """Whether a Dockerfile takes `.build/`; what its comments say does not count."""
    return any(_ASKED.search(line) for line in recipe.splitlines() if not line.lstrip().startswith(b"#"))


def write(context: Context, stream: IO[bytes], ca: bytes, secrets: Mapping[str, str]) -> None:
    """Writes the archive. Raises InputError where a file of the context has changed."""
    if asks(context.recipe):
        if ca:
            stream.write(_entry(".build/ca.pem", ca))
        for name, value in sorted(secrets.items()):
            stream.write(_entry(f".build/secrets/{name}", value.encode()))
    context.write_tar(stream)


def read_ca(path: Path | None) -> bytes:
    """A CA file's bytes, none without one. Raises ImageError."""
    try:
        return path.read_bytes() if path else b""
    except OSError as error:
        raise ImageError(f"{path} cannot be read", error.strerror or "", "Mend image.ca_file.") from error


def _entry(name: str, data: bytes) -> bytes:
    header = tarfile.TarInfo(name)
    header.size, header.mode, header.mtime = len(data), 0o600, 315_532_800  # the layer's cache does not see the time
    return header.tobuf() + data + bytes(-len(data) % tarfile.BLOCKSIZE)
