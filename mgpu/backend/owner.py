"""The owner tag of everything that is rented: one for each backend, so that every machine that shares it finds all."""

from __future__ import annotations

from contextlib import suppress

from mgpu import paths
from mgpu.backend import location
from mgpu.backend.location import Backend

_KEY = "owner"
_LARGEST = 1 << 10  # bytes


def owner(here: Backend | None = None) -> str:
    """The tag: random, made once for a backend (default: this command's), kept in it.

    Raises:
        StackError: the backend does not answer.
        InputError: it is none that mgpu can keep records at.
    """
    here = here or location.current()
    if here.shared is None:
        return paths.owner(here.root)
    known = here.root / _KEY
    try:
        return known.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        pass
    from mgpu_train.store import Ambiguous

    with here.asking("asked for the owner's tag"):
        if here.shared.stat(_KEY) is None:
            with suppress(Ambiguous):  # it is read back
                here.shared.put_if_absent(_KEY, f"{paths.new_owner()}\n".encode())
        tag = here.shared.get(_KEY, _LARGEST).decode().strip()
    return paths.keep_owner(here.root, tag)
