"""Faults of provider `local` on request, by control files that tests and users write (docs/local.md).

    <root>/instances/<id>/control.json   what happens to one machine: a notice and its end, or its end at once
    <root>/control.json                  what happens to the provider's answers: no capacity, lost, wrong, late

Nothing here happens unless a file asks for it. Two seams are all there is: a node process carries out its `Orders`, and
the provider looks through `creating` and `unseen`. A file with anything else in it changes nothing, and is named: one
machine's in its node.log, the provider's by `check`. Standard library only: node processes start fast.
"""

from __future__ import annotations

import fcntl
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mgpu_train.agent.host.layout import NOTICE

from mgpu.errors import AmbiguousCreate, InputError, InvalidRequest, NoCapacity, Transient
from mgpu.providers.local import files
from mgpu.providers.local.nodes import Instance

FILE = "control.json"
INTERRUPTED = "interrupted by the provider"
FEWER = "the provider had no more capacity"
FAULTS = ("lost", "error", "lost-before", "fewer")
_LATEST = 253402300799.0  # the end of the year 9999: what RFC 3339 can say


class Garbage(ValueError):
    """A control file with something else in it; the message says what."""


# --- one machine: what tests, users and `mgpu local` ask for


def notice(instance: Instance, seconds: float) -> float:
    """The provider takes this machine in so many seconds, and warns it now; returns when (UNIX seconds).

    Raises:
        InputError: there is no such machine, it is gone, or the time is negative.
    """
    at = _in(seconds)
    _order(instance, {"action": "notice", "at": at})
    return at


def kill(instance: Instance) -> None:
    """The provider takes this machine now, without a word. Raises what `notice` raises."""
    _order(instance, {"action": "kill"})


def _in(seconds: float) -> float:
    at = time.time() + seconds
    if seconds >= 0 and at <= _LATEST:
        return at
    raise InputError(f"{seconds:g} s: not a time from now on", "", "Give 0 or more seconds.")


def _order(instance: Instance, order: Mapping[str, Any]) -> None:
    if not instance.registered:
        raise InputError(
            f"provider local has no machine {instance.id}", f"looked in {instance.root}", "See `mgpu ls --json`."
        )
    if instance.settle():
        raise InputError(f"machine {instance.id} is gone already", instance.end_reason(), "See `mgpu ls`.")
    files.replace(instance.record / FILE, order)
    _wake(instance)


def _wake(instance: Instance) -> None:
    node_process = instance.node_process()
    if node_process is not None and node_process.begun:
        node_process.process.send(signal.SIGUSR1)
        node_process.process.send(signal.SIGCONT)  # nothing on a machine keeps its provider from taking it


class Orders:
    """What a node process has been asked for. Once read, an order runs by a clock that nobody can set."""

    def __init__(
        self,
        instance: Instance,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        log: Callable[[str], object] = sys.stderr.write,
    ) -> None:
        """`wall` (UNIX seconds), `monotonic` (seconds) and `log` are for tests."""
        self._file = instance.record / FILE
        self._notice = instance.home / NOTICE
        self._wall, self._monotonic, self._log = wall, monotonic, log
        self._read: bytes | None = None
        self._announced: dict[str, str] | None = None  # what the machine is told
        self._end = math.inf
        self._failing: str | None = None  # what is named already

    def left_s(self) -> float:
        """Looks at the file, tells the machine, and returns the seconds until the machine goes; inf: it stays."""
        try:
            self._obey(_bytes(self._file))
            if self._announced and not self._notice.exists():
                files.replace(self._notice, self._announced)
            self._failing = None
        except Garbage as error:  # each one is looked at once
            self._log(f"{self._file}: {error}\n")
        except OSError as error:
            if error.strerror != self._failing:
                self._log(f"{self._file}: {error}\n")
            self._failing = error.strerror
        return self._end - self._monotonic()

    def _obey(self, data: bytes | None) -> None:
        if data == self._read:
            return
        self._read = data
        at = math.inf if data is None else _moment(data)
        self._end = self._monotonic() + at - self._wall()
        self._announced = {"action": "terminate", "time": rfc3339(at)} if 0 < at < math.inf else None
        self._notice.unlink(missing_ok=True)  # a new time is a new notice


def _moment(data: bytes) -> float:
    """When the machine is to go (UNIX seconds); 0: at once. Raises Garbage."""
    order = _mapping(data)
    if order == {"action": "kill"}:
        return 0.0
    if set(order) == {"action", "at"} and order["action"] == "notice" and _is_moment(order["at"]):
        return order["at"]
    raise Garbage('neither {"action": "notice", "at": UNIX seconds} nor {"action": "kill"}')


def rfc3339(at: float) -> str:
    """UNIX seconds as EC2's metadata writes a time, to the millisecond."""
    whole, milliseconds = divmod(int(at * 1000), 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{milliseconds:03d}Z"


# --- the provider's answers


def no_capacity(root: Path, seconds: float) -> float:
    """For so many seconds creates and repairs are refused for want of capacity; 0: no more.

    Returns when there is some again (UNIX seconds). Raises `InputError` for a negative time.
    """
    until = _in(seconds)
    _set(root, "no_capacity_until", until if seconds else 0)
    return until


def stale(root: Path, seconds: float) -> None:
    """From now on `describe` tells what was true so many seconds before; 0: the truth again."""
    _set(root, "describe_stale_s", seconds)


def next_creates(root: Path, *faults: str) -> None:
    """What happens to the next creates and repairs, one each, after those that were asked for already.

    `lost`: made, the answer does not arrive. `lost-before`: nothing made, the answer does not arrive. `error`: made, an
    internal error is answered. `fewer`: one node fewer comes up.
    """
    with _locked(root):
        wanted = _wanted(root)
        _write(root, {**wanted, "create": [*wanted.get("create", ()), *faults]})


def check(root: Path) -> None:
    """Raises `InvalidRequest` for a control file that cannot be used."""
    try:
        _answers(root)
    except (OSError, Garbage) as error:
        path = root / FILE
        raise InvalidRequest(f"{path} cannot be used", str(error), "Mend it (docs/local.md) or remove it.") from error


@contextmanager
def creating(root: Path, *, known: bool) -> Iterator[str]:
    """What was asked to happen to this create or repair; yields its name, empty for none. `known`: its token is.

    Raises:
        NoCapacity: there is none for now, and the token is new.
        AmbiguousCreate, Transient: as asked for, before or after the machines were made.
    """
    why = f"{root / FILE} asks for it"
    left = _wanted(root).get("no_capacity_until", 0) - time.time()
    if left > 0 and not known:
        raise NoCapacity(
            "provider local has no capacity", f"{why}, for {left:.0f} s more", "Wait, or `mgpu local no-capacity 0`."
        )
    fault = _take(root)
    if fault == "lost-before":
        raise AmbiguousCreate("provider local: no answer to the create", why)
    yield fault
    if fault == "lost":
        raise AmbiguousCreate("provider local: the answer to the create was lost", why)
    if fault == "error":
        raise Transient("provider local: internal error after the create", why)


def unseen(root: Path) -> Callable[[float], bool]:
    """Tells of a moment (UNIX seconds) whether `describe` does not know yet what happened then."""
    stale_s, now = _wanted(root).get("describe_stale_s", 0), time.time()
    return lambda at: stale_s > 0 and now - at < stale_s


def _take(root: Path) -> str:
    """Takes what is to happen to the next create: of all who ask, one gets it."""
    if not _wanted(root).get("create"):
        return ""
    with _locked(root):
        wanted = _wanted(root)
        first, *rest = wanted.get("create") or [""]
        _write(root, {**wanted, "create": rest})
    return first


def _set(root: Path, name: str, value: float) -> None:
    with _locked(root):
        _write(root, {**_wanted(root), name: value})


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    with (root / f".{FILE}.lock").open("a", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _write(root: Path, wanted: Mapping[str, Any]) -> None:
    files.replace(root / FILE, {name: value for name, value in wanted.items() if value})


def _wanted(root: Path) -> dict[str, Any]:
    try:
        return _answers(root)
    except (OSError, Garbage):
        return {}  # `check` names it


def _answers(root: Path) -> dict[str, Any]:
    data = _bytes(root / FILE)
    wanted = {} if data is None else _mapping(data)
    unknown = wanted.keys() - {"no_capacity_until", "create", "describe_stale_s"}
    if unknown:
        raise Garbage(f"unknown: {', '.join(sorted(unknown))}")
    for name in wanted.keys() - {"create"}:
        if not _is_moment(wanted[name]):
            raise Garbage(f"{name}: not a number of seconds")
    creates = wanted.get("create", [])
    if not isinstance(creates, list) or any(fault not in FAULTS for fault in creates):
        raise Garbage(f"create: not a list of {', '.join(FAULTS)}")
    return wanted


def _mapping(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Garbage(f"not JSON: {error}") from error
    if not isinstance(found, dict):
        raise Garbage("not a JSON object")
    return found


def _is_moment(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LATEST


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
