"""What an image is made of, as one hash: the same inputs anywhere give the same tag, and any other input another one.

What is not in it ends in no layer: the CA file, secrets, times, owners, where the folder lies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from mgpu.image.build.context import BuildContext, Entry
from mgpu.spec.image import ImageSpec

_FORMAT = b"mgpu image inputs 1"  # counts itself: another one makes all tags new
_TAG_DIGITS = 32


def inputs_hash(context: BuildContext, spec: ImageSpec, bases: Mapping[str, str]) -> str:
    """SHA-256 of all inputs of a build, 64 hex digits. `bases`: the digest of each image that the Dockerfile names."""
    whole = _packed(
        _FORMAT,
        context.recipe,
        _packed() if spec.target is None else _packed(spec.target.encode()),
        spec.platform.encode(),
        _sorted(spec.args),
        _sorted(bases),
        *map(_entry, context.entries),
    )
    return hashlib.sha256(whole).hexdigest()


def tag(digest: str) -> str:
    """The tag of an image whose inputs have this hash."""
    return f"mgpu-{digest[:_TAG_DIGITS]}"


def _entry(entry: Entry) -> bytes:
    path, kind, value, _ = entry
    name = path.encode("utf-8", "surrogateescape")
    return b"%c%d:%b%b" % (ord(kind), len(name), name, value)


def _sorted(named: Mapping[str, str]) -> bytes:
    return _packed(*(each.encode() for pair in sorted(named.items()) for each in pair))


def _packed(*parts: bytes) -> bytes:
    """Each part after its length: no two lists of parts make the same bytes."""
    return b"".join([b"%d:%b" % (len(part), part) for part in parts])
