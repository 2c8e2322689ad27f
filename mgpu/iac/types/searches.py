"""How many searches for a fleet have come to their end, whichever machine made them: the next one asks by other tokens.

<backend>/mgpu/searches.json     {"version": 1, "fleets": {"<owner>/<fleet>": <searches>}}

A provider may answer for days to a token that it knows as it did then, that there is no capacity or with machines that
have ended, and the journal, which knows what was asked for, is one machine's: `pulumi up` in CI has a fresh one each
time. Of a stack that `mgpu launch` has made the run's record counts, and nothing of it is here.
"""

from __future__ import annotations

from typing import Any

from mgpu.backend import objects
from mgpu.errors import InputError, StackError
from mgpu.events import Emit, Warned

_KEY = "searches.json"


def ended(owner: str, fleet: str, emit: Emit) -> int:
    """How many there were; 0 where the backend is one that mgpu keeps nothing in, or does not answer, which is told."""
    try:
        found = objects.read(_KEY)
    except InputError:
        return 0
    except StackError as error:
        emit(Warned(f"fleet {fleet}: nobody knows how many searches for it have ended: {error.what}"))
        return 0
    return _fleets(found).get(f"{owner}/{fleet}", 0)


def end(owner: str, fleet: str, emit: Emit) -> None:
    """Another one has: it was refused with nothing left, or what it made has ended. As `ended` where it cannot be
    written: then the next one may be answered as this one was."""
    name = f"{owner}/{fleet}"
    try:
        objects.change(_KEY, lambda found: {"fleets": _fleets(found) | {name: _fleets(found).get(name, 0) + 1}})
    except InputError:
        return
    except StackError as error:
        emit(Warned(f"fleet {fleet}: that a search for it has ended could not be written: {error.what}"))


def _fleets(found: dict[str, Any] | None) -> dict[str, int]:
    return dict((found or {}).get("fleets") or {})
