"""What a builder is sent: the context, and what is for the build alone, where the Dockerfile asks for it.

A Dockerfile with a COPY or ADD of `.build` gets the folder `.build/` in its context: `ca.pem`, certificates to trust
besides, and `secrets/NAME`. Any builder can hand them to a stage that is thrown away; a Dockerfile that would take them
into its image is refused, and in all other contexts they are not.
"""

from __future__ import annotations

import hashlib
import posixpath
import tarfile
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

from mgpu.errors import ImageError, InputError
from mgpu.image import bases
from mgpu.image.bases import Named
from mgpu.image.context import Context
from mgpu.image.ignore import Rules

_FOLDER = ".build"
_PLAIN = (_FOLDER, ".buil[d]")  # the second one may match nothing


def asks(recipe: bytes) -> bool:
    """Whether a COPY or ADD of a Dockerfile names `.build/`, or something in it."""
    return _asks(bases.read(recipe, {}))


def require_thrown_away(named: Named, target: str | None, dockerfile: str, secrets: Collection[str]) -> None:
    """Raises InputError where `.build` would end in the image: by its name, or along with what lies beside it.

    `secrets`: their names; without any it is about certificates.
    """
    kept = named.kept(target)
    for each in named.copied if _asks(named) else ():
        if each.stage in kept and any(_along(source, secrets) for source in each.sources):
            what = "image.secrets" if secrets else "image.ca_file"
            why = f"`{each.text}` takes `.build` along, where they are, and its stage is not thrown away."
            cure = (
                "Put what it copies into a folder (`COPY app /app`), or use BuildKit's --mount=type=secret instead of "
                "`.build`: docs/image.md."
            )
            raise InputError(f"{what} would end in the image: {dockerfile}, line {each.line}", why, cure)


def write(context: Context, stream: IO[bytes], ca: bytes, secrets: Mapping[str, str]) -> None:
    """Writes the archive, in which the Dockerfile is `context.recipe`. Raises InputError where a file of the context
    has changed."""
    if asks(context.recipe):
        if ca:
            stream.write(_entry(".build/ca.pem", ca))
        for name, value in sorted(secrets.items()):
            stream.write(_entry(f".build/secrets/{name}", value.encode()))
    own = next((each for each in context.entries if each.path == context.dockerfile), None)
    if own is not None and own.value != hashlib.sha256(context.recipe).digest():
        stream.write(_entry(own.path, context.recipe, 0o755 if own.kind == "x" else 0o644))
        context = replace(context, entries=tuple(each for each in context.entries if each is not own))
    context.write_tar(stream)


def read_ca(path: Path | None) -> bytes:
    """A CA file's bytes, none without one. Raises ImageError."""
    try:
        return path.read_bytes() if path else b""
    except OSError as error:
        raise ImageError(f"{path} cannot be read", error.strerror or "", "Mend image.ca_file.") from error


def _asks(named: Named) -> bool:
    sources = (source for each in named.copied for source in each.sources)
    return any(_path(source).split("/")[0] in _PLAIN for source in sources)


def _along(source: str, secrets: Collection[str]) -> bool:
    """Whether a source matches `.build`, a folder around it, or something in it. Patterns are Go's filepath.Match."""
    path = _path(source)
    if not path:
        return True
    try:
        rules = Rules((path,))
    except ValueError:  # builders do not take it either
        return False
    inside = (f"{_FOLDER}/ca.pem", f"{_FOLDER}/secrets", *(f"{_FOLDER}/secrets/{name}" for name in secrets))
    return any(rules.look(each, each.rpartition("/")[2], rules.root)[0] for each in (_FOLDER, *inside))


def _path(source: str) -> str:
    """From the context's root, as builders clean it; "" for the root."""
    return posixpath.normpath(f"/{source.lstrip('/')}")[1:]


def _entry(name: str, data: bytes, mode: int = 0o600) -> bytes:
    header = tarfile.TarInfo(name)
    header.size, header.mode, header.mtime = len(data), mode, 315_532_800  # the layer's cache does not see the time
    return header.tobuf(tarfile.GNU_FORMAT, errors="surrogateescape") + data + bytes(-len(data) % tarfile.BLOCKSIZE)
