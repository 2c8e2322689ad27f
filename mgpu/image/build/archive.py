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

from e2b_dockerfile_utils import PatternMatcher

from mgpu.errors import ImageError, InputError
from mgpu.image.build.bases import Copied, Named
from mgpu.image.build.context import BuildContext

_FOLDER = ".build"
_PLAIN = (_FOLDER, ".buil[d]")  # the second one may match nothing
_ANYWHERE = "?"  # where a file is that was put into a folder which only a base image names


def asks(named: Named) -> bool:
    """Whether a COPY or ADD of a Dockerfile names `.build/`, or something in it."""
    return any(_is_plain(source) for each in named.copied if each.origin is None for source in each.sources)


def require_thrown_away(named: Named, target: str | None, dockerfile: str, secrets: Collection[str]) -> None:
    """Raises InputError where `.build` would end in the image: by its name, or along with what lies beside it, also by
    way of a stage that is thrown away.

    `secrets`: their names; without any it is about certificates.
    """
    kept, strays = named.kept(target), dict[int, set[str]]()
    given = {f"{_FOLDER}/ca.pem", *(f"{_FOLDER}/secrets/{name}" for name in secrets)}
    for each in named.copied if asks(named) else ():
        there = given if each.origin is None else _strays_of(each.origin, named, strays)
        for source in each.sources:
            taken = {rest for path in there if (rest := _rest(source, path)) is not None}
            if taken and each.stage in kept:
                raise _kept(each, dockerfile, "image.secrets" if secrets else "image.ca_file", _ANYWHERE in taken)
            if each.origin is not None or not _is_plain(source):  # who names it knows what becomes of it
                strays.setdefault(each.stage, set()).update(_put(rest, each.into) for rest in taken)


def _kept(copied: Copied, dockerfile: str, what: str, unknown: bool) -> InputError:
    why = f"`{copied.text}` takes `.build` along, where they are, and its stage is not thrown away."
    cure = "Copy a folder of its own (`COPY app /app`), or use BuildKit's --mount=type=secret: docs/image.md."
    if unknown:
        why = (
            f"`{copied.text}` may take `.build` along, where they are: it was copied into a folder of that stage that"
            " only the stage's base image names."
        )
        cure = f"Name it in that stage, by WORKDIR. Or: {cure}"
    return InputError(f"{what} would end in the image: {dockerfile}, line {copied.line}", why, cure)


def write(context: BuildContext, stream: IO[bytes], ca: bytes, secrets: Mapping[str, str]) -> None:
    """Writes the archive, in which the Dockerfile is `context.recipe`, and the certificates and secrets that are given.
    Raises InputError where a file of the context has changed."""
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


def _is_plain(source: str) -> bool:
    return _path(source).split("/")[0] in _PLAIN


def _strays_of(stage: int, named: Named, strays: Mapping[int, set[str]]) -> set[str]:
    """What was taken along into a stage, and into those that it begins with."""
    parent = named.parents[stage]
    return strays.get(stage, set()) | (set() if parent is None else _strays_of(parent, named, strays))


def _put(rest: str, into: str | None) -> str:
    """Where a file is that a COPY has taken along."""
    return _ANYWHERE if into is None or rest == _ANYWHERE else _path(f"{into}/{rest}")


def _rest(source: str, path: str) -> str | None:
    """Where a file is below what a COPY takes, if it takes that or may. Patterns are Go's filepath.Match."""
    if path == _ANYWHERE:
        return path
    pattern, parts = _path(source), path.split("/")
    if not pattern:
        return path
    try:
        matcher = PatternMatcher([pattern])
    except ValueError:  # builders do not take it either
        return None
    for number in range(1, len(parts) + 1):
        if matcher.matches("/".join(parts[:number])):
            return "/".join(parts[number:])
    return None


def _path(source: str) -> str:
    """From the root of the context, or of a stage, as builders clean it; "" for the root."""
    return posixpath.normpath(f"/{source.lstrip('/')}")[1:]


def _entry(name: str, data: bytes, mode: int = 0o600) -> bytes:
    header = tarfile.TarInfo(name)
    header.size, header.mode, header.mtime = len(data), mode, 315_532_800  # the layer's cache does not see the time
    return header.tobuf(tarfile.GNU_FORMAT, errors="surrogateescape") + data + bytes(-len(data) % tarfile.BLOCKSIZE)
