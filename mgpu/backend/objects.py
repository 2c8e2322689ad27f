"""Objects in mgpu's folder of the backend, one key each, changed only by who has read what is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from mgpu.backend import location
from mgpu.errors import InputError, StackError

_LARGEST = 64 << 20  # bytes
_TRIES = 100
_VERSION = 1

Plain = dict[str, Any]
T = TypeVar("T")


def read(key: str) -> Plain | None:
    """The object; None: there is none. Raises StackError, and InputError: it is of another version, or damaged."""
    here = location.current()
    if here.shared is not None:
        found = _read(key)
        return None if found is None else found[0]
    try:
        return _parsed(key, (here.root / key).read_bytes())  # a client of stores takes long to import
    except FileNotFoundError:
        return None


def change(key: str, how: Callable[[Plain | None], Plain]) -> Plain:
    """Changes the fields that `how` makes of the object as it is, None: there is none; where somebody else is faster,
    of what that one has made of it. Its other fields stay: a newer mgpu may have written them. Returns the whole.
    What `how` raises is raised, and nothing is written.

    Raises:
        StackError: the backend does not answer, or others never stop writing.
        InputError: as `read` does.
    """

    def changed(found: Plain | None) -> Plain:
        return {**(found or {"version": _VERSION}), **how(found)}

    return write(key, f"{key} of the backend", _TRIES, lambda: _read(key), changed, _data)


def write(
    key: str,
    what: str,
    tries: int,
    look: Callable[[], tuple[T, str] | None],
    how: Callable[[T | None], T],
    data: Callable[[T], bytes],
) -> T:
    """As `change`, for whatever `look` reads there, with its version, and `data` writes; `what` it is, in words."""
    from mgpu_train.store import Ambiguous

    here = location.current()
    for _ in range(tries):
        found = look()
        before, version = found or (None, "")
        after = how(before)
        if after == before:
            return after
        with here.asking("written"):
            try:
                store = here.ours
                if store.put_if_absent(key, data(after)) if found is None else store.replace(key, data(after), version):
                    return after
            except Ambiguous:  # it is seen there, or done again
                continue
    raise StackError(f"{what} could not be written", f"Others have written it {tries} times meanwhile.")


def _data(plain: Plain) -> bytes:
    return json.dumps(plain, indent=1).encode()


def _read(key: str) -> tuple[Plain, str] | None:
    from mgpu_train.store import NotFound

    here = location.current()
    try:
        with here.asking("read"):
            found = here.ours.read(key, _LARGEST)
    except NotFound:
        return None
    return _parsed(key, found.data), found.version


def _parsed(key: str, data: bytes) -> Plain:
    here = location.current()
    try:
        whole = json.loads(data)
        version = whole["version"]
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(f"{here.place}/{key} cannot be read", str(error), "Mend it, or remove it.") from error
    if version != _VERSION:
        cure = "Use the newest mgpu on every machine that shares a backend."
        raise InputError(f"{here.place}/{key} is of version {version}", f"This mgpu reads version {_VERSION}.", cure)
    return whole
