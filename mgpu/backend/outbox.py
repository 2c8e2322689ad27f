"""Messages that somebody is to be told, in the backend: whichever machine passes next delivers what waits.

    <backend>/mgpu/unsettled/outbox/<whose>/<sink>/<at>-<id>.json   waits; `claim` says who delivers it right now
    <backend>/mgpu/<whose>/told/<sink>/<id>                         was delivered
    <backend>/mgpu/<whose>/told/<sink>/<id>.<who>                   one of several who are told has taken it

`whose` is `runs/<run>`, or `submissions/<name>.<uid>` of a schedule. A message is delivered by who has claimed it, with
a conditional write, and the mark is there before the message goes: of any number that look at once one delivers it. A
claim whose holder died is over when it is `CLAIM_S` old, by the store's own clock. Who dies, or loses the backend,
between the delivery and its mark is the one case in which somebody is told twice, with the same id. What nobody could
deliver for `WAITS_S` is given up by the try that finds it so.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from mgpu.backend import location
from mgpu.errors import StackError
from mgpu.words import count

if TYPE_CHECKING:
    from mgpu_train.store import Store

UNSETTLED = "unsettled/"  # one listing of it says which runs may need something, and who is still to be told
_OUTBOX = f"{UNSETTLED}outbox/"
CLAIM_S = 120.0  # longer than any delivery takes: a program of the user's has 30 s
WAITS_S = 14 * 86400.0  # a service that is away longer than that will not come back, and its news are none any more
_LARGEST = 4 << 20  # bytes of a message
_TRIES = 5  # to keep one whose answer is lost
_seen: dict[str, list[str]] = {}  # by store: the keys of the newest listing that somebody has made

Message = dict[str, Any]


class NotKept(Exception):
    """A message did not come into the backend: it is lost, unless its event is said again."""


class GivenUp(Exception):
    """A message could not be delivered for so long that it does not wait any more."""


class Outbox:
    """What one sink of one run or schedule is to tell."""

    def __init__(self, whose: str, sink: str) -> None:
        self._waiting, self._told = f"{_OUTBOX}{whose}/{sink}/", f"{whose}/told/{sink}/"
        self._unmarked = set[str]()  # keys of what this one has delivered
        self._not_kept = ""  # the newest that did not come into the backend

    def keep(self, ident: str, at: float, message: Message) -> None:
        """Has it wait, unless it waits already or was delivered. `at`: UNIX seconds, the order of delivery. Raises
        NotKept."""
        from mgpu_train.store import Ambiguous

        key, data = f"{self._waiting}{at:015.3f}-{ident}.json", _claimed({"version": 1, "message": message}, "")
        self._not_kept = ""
        try:
            with _backend() as store:
                for _ in range(_TRIES):
                    told = f"{self._told}{ident}"
                    if store.stat(told) is not None:
                        return
                    if _noted(told):
                        store.put(told, b"")
                        return
                    with suppress(Ambiguous):
                        store.put_if_absent(key, data)
                        return
        except StackError as error:
            self._not_kept = ident
            raise NotKept(f"{error.what} ({error.why})") from error
        raise NotKept(f"{_TRIES} answers of the backend were lost")

    def note(self, ident: str) -> None:
        """Notes on this machine that a message was told while it could not be kept: the next time that it would be, it
        is marked instead."""
        path = location.current().root / self._told / ident
        with suppress(OSError):  # it is told again, with the same id
            path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
            path.touch()

    def noted(self, ident: str) -> bool:
        """Whether this machine has told a message while it could not be kept."""
        return _noted(f"{self._told}{ident}")

    def taken(self, ident: str) -> frozenset[str] | None:
        """Who of several that are told of a message has taken it; None: the backend does not say, and is not asked for
        what did not come into it a moment ago."""
        if ident == self._not_kept:
            return None
        mark = f"{self._told}{ident}."
        with suppress(StackError), _backend() as store:
            return frozenset(found.key.removeprefix(mark) for found in store.list(mark))
        return None

    def note_taken(self, ident: str, who: str) -> None:
        """Notes that one of several has taken a message, which the others may get later; a backend that is away cannot:
        that one is told again, with the same id."""
        with suppress(StackError), _backend() as store:
            store.put(f"{self._told}{ident}.{who}", b"")

    def deliver(self, tell: Callable[[Message], None]) -> bool:
        """Delivers what waits, in its order: what cannot be delivered holds up what is newer. False: somebody else is
        at it right now.

        Raises:
            StackError: the backend does not answer.
            GivenUp: `tell` could not, and it was the last try.
            Exception: what `tell` raises; that message waits for the next one who delivers.
        """
        with _backend() as store:
            keys = [found.key for found in store.list(self._waiting)]
        return all(self._deliver(key, tell) for key in keys)

    def give_up_late(self) -> str:
        """Gives up what has waited too long, for who cannot even try to deliver; what to say of it.

        Raises StackError.
        """
        with _backend() as store:
            late = [found.key for found in store.list(self._waiting) if _is_late(found.key)]
            for key in late:
                store.delete(key)
        return _given_up(len(late)) if late else ""

    def _deliver(self, key: str, tell: Callable[[Message], None]) -> bool:
        told = f"{self._told}{key.removesuffix('.json').rpartition('-')[2]}"
        with _backend() as store:
            claimed = _claim(store, key)
            if claimed is None:
                return True
            message, mine = claimed
            if mine and store.stat(told) is not None:  # whoever claimed it before has died after it had told it
                store.delete(key)
                return True
        if not mine:
            return False
        if key not in self._unmarked and not _noted(told):  # else the backend went away before it could be marked
            try:
                tell(message)
            except BaseException as error:
                late = isinstance(error, Exception) and _is_late(key)
                try:
                    with _backend() as store:
                        store.delete(key) if late else _let_go(store, key, mine)
                except StackError:
                    late = False  # the next try finds it
                if late:
                    raise GivenUp(f"{type(error).__name__}: {error}; {_given_up(1)}") from error
                raise
            self._unmarked.add(key)
        with _backend() as store:
            store.put(told, b"")  # first: a message that comes back finds it
            store.delete(key)
        return True


def waiting() -> list[str]:
    """Of whom somebody is still to be told: `runs/<run>`, `submissions/<name>.<uid>`. By the newest listing that this
    process has made of a bucket. Raises StackError."""
    with _backend() as store:
        keys = _seen.get(store.url)
        if keys is None or location.current().folder is not None:
            keys = [found.key for found in store.list(_OUTBOX)]
    return sorted({"/".join(key.removeprefix(_OUTBOX).split("/")[:2]) for key in keys})


def parted(store: Store, keys: Iterable[str]) -> Iterator[str]:
    """Of the keys of one listing of `UNSETTLED` those that are no messages; `waiting` goes by the others."""
    found = _seen[store.url] = list[str]()
    for key in keys:
        if key.startswith(_OUTBOX):
            found.append(key)
        else:
            yield key


def remove(store: Store, whose: str) -> None:
    """Removes what waits of a run or schedule; absent is success. Raises StoreError."""
    for found in [*store.list(f"{_OUTBOX}{whose}/")]:
        store.delete(found.key)


def keys(store: Store, whose: str) -> list[str]:
    """All keys of messages of a run or schedule, those that wait and the marks of those that were told. Raises
    StoreError."""
    return [found.key for prefix in (f"{whose}/told/", f"{_OUTBOX}{whose}/") for found in store.list(prefix)]


def _noted(told: str) -> bool:
    """Whether this machine has told it while the backend was away."""
    return (location.current().root / told).exists()


def _is_late(key: str) -> bool:
    return time.time() - float(key.rpartition("/")[2].partition("-")[0]) > WAITS_S


def _given_up(messages: int) -> str:
    return f"{count(messages, 'message')} given up after {WAITS_S / 86400:.0f} days"


def _claim(store: Store, key: str) -> tuple[Message, str] | None:
    """The message, and the claim if it is this caller's now, "": somebody else has it; None: it is gone."""
    from mgpu_train.store import Ambiguous, NotFound

    claim = secrets.token_hex(8)
    with suppress(NotFound):
        found = store.read(key, _LARGEST)
        whole = json.loads(found.data)
        message = whole["message"]
        if whole["claim"] and found.age_s <= CLAIM_S:
            return message, ""
        try:
            mine = store.replace(key, _claimed(whole, claim), found.version)
        except Ambiguous:
            mine = json.loads(store.get(key, _LARGEST))["claim"] == claim
        return message, claim if mine else ""
    return None


def _let_go(store: Store, key: str, claim: str) -> None:
    """Whoever comes next need not wait until the claim is over."""
    from mgpu_train.store import NotFound

    with suppress(NotFound):
        found = store.read(key, _LARGEST)
        whole = json.loads(found.data)
        if whole["claim"] == claim:
            store.replace(key, _claimed(whole, ""), found.version)


def _claimed(whole: Mapping[str, Any], claim: str) -> bytes:
    return json.dumps({**whole, "claim": claim}).encode()


@contextmanager
def _backend() -> Iterator[Store]:
    """Raises StackError for what it cannot do."""
    here = location.current()
    with here.asking("asked for who is still to be told"):
        yield here.ours
