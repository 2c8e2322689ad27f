"""What other machines know of runs, where the backend is a bucket. Where it is a folder, nothing here does anything.

    <backend>/mgpu/records/<run>.json     its record; replaced only by who has read what is there
    <backend>/mgpu/unsettled/<run>        exists while something of it may be left to do: an index of the records;
                                          beside it is what somebody is still to be told (`mgpu.backend.outbox`)
    <backend>/mgpu/locks/<run>.json       who supervises it (`mgpu.backend.lease`)
    <backend>/mgpu/stops/<run>            exists when `mgpu stop` asked for the end

On this machine there is a copy of each record, with the version that it is a copy of, and the lock as it is where the
backend is a folder: what looks at a run looks at these files. While this machine supervises a run, a thread keeps the
lock, and brings what others ask for.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu.backend import location, outbox
from mgpu.backend.location import Backend
from mgpu.errors import StackError
from mgpu.run.record import files
from mgpu.run.record.folder import Folder, runs
from mgpu.run.record.supervisor_lock import Holder, held, me, replace_holder, unheld

if TYPE_CHECKING:
    from mgpu_train.store import Store

    from mgpu.backend.lease import Lease, Seen

_RECORDS, _UNSETTLED, _LOCKS, _STOPS = "records/", outbox.UNSETTLED, "locks/", "stops/"
_LARGEST = 16 << 20  # bytes of a record
_BROUGHT = "brought"  # in the copy: written when records were brought
_PULL_EVERY_S = 2.0  # at most: commands that wait look at a record many times a second
_AT_ONCE = 16  # records that are read at the same time
_UNSENT_S = 600.0  # after which no submission is under way any more: a backend that is away is not waited for so long
_TRIES = 3  # to write a record: each has the store's own behind it
_pulled: dict[Path, float] = {}  # by the backend's folder here, when its records were brought last,
_stays: dict[Path, float] = {}  # and when it was asked last whether all was moved
_renewals: dict[str, LockRenewal] = {}  # of the runs that are supervised here
_listed: dict[str, bool] = {}  # by store and run: whether this process has put it into the index, or taken it out
_sent: dict[Path, set[str]] = {}  # by the run's folder: digests of what was sent since it was known what is there
_away = False  # while a command shows what this machine knows of a backend that does not answer
_seen: dict[
    str, tuple[float, tuple[Holder | None, bool]]
] = {}  # by run, when its lock was looked at last, and whose it was


class Lost(Exception):
    """Somebody else has written the record since it was read here."""


# ---- records


def pull(*, fresh: bool = False) -> None:
    """Brings the copies of all records up to date, but of runs that are supervised here; not where that was done a
    moment ago, unless they are to be `fresh`. Those of runs that were removed elsewhere go, and of submissions that
    never came there. Raises StackError."""
    if _away:
        return
    here = location.current()
    store = here.shared
    recent = time.monotonic() - _pulled.get(here.root, -_PULL_EVERY_S) < _PULL_EVERY_S
    if store is None or (recent and not fresh):
        return
    from concurrent.futures import ThreadPoolExecutor

    copies = [path.parent for path in runs().glob("*/.version")]  # before: a run that begins meanwhile is none of them
    with here.asking("asked for its runs"):
        require_here(here)
        there = {stat.key.removeprefix(_RECORDS).removesuffix(".json"): stat.version for stat in store.list(_RECORDS)}
        changed = [run for run, version in there.items() if _version(run) != version and not held(Folder(run).lock)]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="mgpu-pull") as pool:
            list(pool.map(lambda run: _bring(store, run), changed))
        _send_stops(store)
    for path in copies:
        if path.name not in there and not held(Folder(path.name).lock):
            shutil.rmtree(path, ignore_errors=True)
    _drop_unsent(there)
    _pulled[here.root] = time.monotonic()
    files.replace(here.root / _BROUGHT, b"")


def _drop_unsent(there: Collection[str]) -> None:
    """Removes what submissions have left on this machine that never came into the backend, which has the runs `there`.
    None of them is under way: it would be newer, or hold the lock. One that comes late is brought from there."""
    copies = (path for path in runs().glob("*/record.json") if path.parent.name not in there)
    old = [path for path in copies if not _version(path.parent.name) and _age_s(path) > _UNSENT_S]
    if not old:
        return
    with unheld(runs() / ".opening") as over:
        for path in old if over else ():
            folder = Folder(path.parent.name)
            with suppress(FileNotFoundError), unheld(folder.lock) as free:
                if free and not _version(path.parent.name) and _said(path).get("state") == "queued":
                    shutil.rmtree(folder.root, ignore_errors=True)


def _age_s(path: Path) -> float:
    """Of a file's newest change; 0 once another command has removed it."""
    with suppress(FileNotFoundError):
        return time.time() - path.stat().st_ctime
    return 0.0


def _said(record: Path) -> Mapping[str, Any]:
    """A record's fields as they are here; none of one that cannot be read."""
    try:
        whole = json.loads(record.read_bytes())
    except (OSError, ValueError):
        return {}
    return whole if isinstance(whole, dict) else {}


def forget(run_id: str) -> None:
    """What this machine has of a run may be what the backend never got: the next look brings what is there."""
    (Folder(run_id).root / ".version").unlink(missing_ok=True)


def cure_of(run_id: str) -> str:
    """What helps where a record cannot be read. Of a bucket its object counts: where only the copy here is damaged,
    which nobody writes to now, the next look brings another one, unless the disk is full, say."""
    with suppress(OSError), unheld(Folder(run_id).lock) if _version(run_id) else nullcontext(False) as free:
        if free:
            _keep_version(run_id, "of none")
    what = "its folder" if location.current().folder else f"{location.current().place}/{_RECORDS}{run_id}.json"
    return f"Use the newer mgpu that wrote it; else end what `mgpu ls` shows of it, and move {what} away."


def known_s_ago() -> float | None:
    """How old the newest that this machine knows of a bucket's runs is; None: it knows nothing of any."""
    versions = [path.stat().st_mtime for path in runs().glob("*/.version")]
    brought = location.current().root / _BROUGHT
    if not versions:
        return None
    return max(0.0, time.time() - max(*versions, brought.stat().st_mtime if brought.exists() else 0.0))


@contextmanager
def as_known() -> Iterator[None]:
    """While the block runs the backend is not asked for records, supervisors and logs: what looks at them sees what
    this machine knows."""
    global _away
    _away = True
    try:
        yield
    finally:
        _away = False


def require_here(here: Backend) -> None:
    """Raises InputError for a bucket whose content was moved elsewhere, as it was a moment ago; and StoreError."""
    from mgpu_train.store import NotFound

    recent = time.monotonic() - _stays.get(here.root, -_PULL_EVERY_S) < _PULL_EVERY_S
    if here.shared is not None and not location.is_named() and not recent:
        with suppress(NotFound):
            raise location.moved(here, here.shared.get(location.MOVED, _LARGEST).decode())
        _stays[here.root] = time.monotonic()


def unsettled() -> list[str] | None:
    """Runs that may need something, with their records brought up to date; None: the backend is a folder, and has no
    such list. Raises StackError."""
    here = location.current()
    store = here.shared
    if store is None:
        return None
    from concurrent.futures import ThreadPoolExecutor

    with here.asking("asked for its runs"):
        require_here(here)
        keys = outbox.parted(store, (stat.key for stat in store.list(_UNSETTLED)))
        there = [key.removeprefix(_UNSETTLED) for key in keys]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="mgpu-pull") as pool:
            whole = list(pool.map(lambda run: held(Folder(run).lock) or _bring(store, run), there))
        _send_stops(store)
    return [run for run, is_there in zip(there, whole, strict=True) if is_there]


def push(run_id: str, record: bytes, *, settled: bool) -> None:
    """Writes a record for the others to see; `settled`: nothing of the run is left to do.

    Raises:
        Lost: another one was written since it was read here; that one stays.
        StackError: the backend does not answer.
    """
    here = location.current()
    store = here.shared
    if store is None:
        return
    with here.asking("written"):
        # before: a run that nobody finds is a run that nobody ends
        listed = not settled and _list(store, run_id, unsettled=True)
        version = _written(store, run_id, record)
        _keep_version(run_id, version)  # at once: what follows may fail
        if listed and store.stat(f"{_UNSETTLED}{run_id}") is None:  # by whoever settled it a moment ago
            store.put(f"{_UNSETTLED}{run_id}", b"")
        if settled and _list(store, run_id, unsettled=False):
            there = store.stat(f"{_RECORDS}{run_id}.json")
            if there is not None and there.version != version:  # it was begun again meanwhile
                _list(store, run_id, unsettled=True)


def _written(store: Store, run_id: str, record: bytes) -> str:
    """Writes a record over the one that is known here, or over one that this process has sent without that it knew
    whether it came; the version that it has. Raises Lost, StoreError."""
    from mgpu_train.store import Ambiguous, NotFound

    key, known = f"{_RECORDS}{run_id}.json", _version(run_id)
    sent = _sent.setdefault(Folder(run_id).root, set())
    sent.add(_digest(record))
    unsure = Ambiguous(f"{key}: {_TRIES} times it was not there after it was written")
    for _ in range(_TRIES):
        try:
            if known:
                store.replace(key, record, known)
            else:
                store.put_if_absent(key, record)
        except Ambiguous as error:
            unsure = error
        try:
            there = store.read(key, _LARGEST)  # what was written, perhaps by a try whose answer was lost, or by another
        except NotFound:
            if known:  # it was removed
                raise Lost from None
            continue
        if there.data == record:
            sent.clear()
            return there.version
        if there.version != known and _digest(there.data) not in sent:
            raise Lost
        known = there.version
    raise unsure


def _digest(record: bytes) -> str:
    return hashlib.sha256(record).hexdigest()


def _list(store: Store, run_id: str, *, unsettled: bool) -> bool:
    """Keeps the index of runs that may need something; once for each run that this process writes. False: it is so."""
    key = f"{store.url} {run_id}"
    if _listed.get(key) is unsettled:
        return False
    if unsettled:
        store.put(f"{_UNSETTLED}{run_id}", b"")
    else:
        store.delete(f"{_UNSETTLED}{run_id}")
    _listed[key] = unsettled
    return True


def remove(run_id: str) -> None:
    """Removes all that other machines know of a run, and what somebody is still to be told of it; absent is success.
    Raises StackError."""
    here = location.current()
    with here.asking("written"):
        outbox.remove(here.ours, f"runs/{run_id}")
    store = here.shared
    if store is None:
        return
    with here.asking("written"):
        for key in (f"{_RECORDS}{run_id}.json", f"{_STOPS}{run_id}", f"{_LOCKS}{run_id}.json", f"{_UNSETTLED}{run_id}"):
            store.delete(key)
    _listed.pop(f"{store.url} {run_id}", None)


def _bring(store: Store, run_id: str, *, mine: bool = False) -> bool:
    """False: there is none. The copy of a run that is supervised here changes only for who does so (`mine`)."""
    from mgpu_train.store import NotFound

    try:
        found = store.read(f"{_RECORDS}{run_id}.json", _LARGEST)
    except NotFound:  # removed a moment ago, or not written yet
        return False
    folder = Folder(run_id)
    folder.make()
    with nullcontext(True) if mine else unheld(folder.lock) as free:
        if free:  # else somebody has begun to supervise it since this was read
            files.replace(folder.record, found.data)
            _keep_version(run_id, found.version)
            _listed.pop(f"{store.url} {run_id}", None)  # another has written it, and perhaps the index
    return True


def _version(run_id: str) -> str:
    try:
        return (Folder(run_id).root / ".version").read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _keep_version(run_id: str, version: str) -> None:
    files.replace(Folder(run_id).root / ".version", version.encode())


# ---- who supervises


def holder(run_id: str) -> tuple[Holder | None, bool]:
    """Who supervises a run by what the backend says, or did last, and whether that is so now; of a folder nothing is
    said. Raises StackError."""
    if _away:
        return None, False
    here = location.current()
    if here.shared is None:
        return None, False
    at, known = _seen.get(run_id, (-_PULL_EVERY_S, (None, False)))
    if time.monotonic() - at < _PULL_EVERY_S:
        return known
    from mgpu.backend import lease

    with here.asking("asked who supervises a run"):
        seen = lease.look(here.shared, f"{_LOCKS}{run_id}.json", _lasts_s())
    found = (None, False) if seen is None else (_holder(seen.said), not seen.over and not _dead(seen.said))
    _seen[run_id] = time.monotonic(), found
    return found


@contextmanager
def holding(run_id: str, token: str, *, force: bool = False) -> Iterator[bool]:
    """Holds the run for this machine while the block runs, besides the lock that is held here already; False: another
    machine does. Raises StackError."""
    here = location.current()
    if here.shared is None:
        yield True
        return
    from mgpu_train.store import StoreError

    from mgpu.backend.lease import Lease

    said = {**asdict(me(token)), "space": _space()}
    lasts_s = _lasts_s()
    grip = Lease(here.shared, f"{_LOCKS}{run_id}.json", said, lasts_s)
    taken_at = time.monotonic()
    with here.asking("asked who supervises a run"):
        require_here(here)
        other = grip.take(_dead, force=force)
    if other is not None:
        _note(run_id, other)
        yield False
        return
    renewal = _renewals[run_id] = LockRenewal(here.shared, run_id, grip, lasts_s, taken_at)
    try:
        pull_one(run_id, mine=True)
        with suppress(StoreError):
            renewal.agree_on_stop()  # who only passes by does not stay until the first turn
        renewal.start()
        with files.sending(run_id, lambda: renewal.lost):
            yield True
    finally:
        _renewals.pop(run_id, None)
        renewal.end()


def earlier_hosts(run_id: str) -> frozenset[str]:
    """Of all who supervised a run before this process, which does so now: where several died one after the other, what
    the first one left may still be there."""
    return _renewals[run_id].hosts if run_id in _renewals else frozenset()


def unsure_s(run_id: str) -> float:
    """For how many seconds the lock of a run that is supervised here has been so old that another machine may soon have
    it, or has. 0: the run is certainly this process's, as far as the backend is concerned."""
    return _renewals[run_id].unsure_s if run_id in _renewals else 0.0


class LockRenewal:
    """While a run is supervised here: keeps its lock, and brings what other machines ask for."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        grip: Lease,
        lasts_s: float,
        taken_at: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._run_id, self._grip, self._clock = store, run_id, grip, clock
        self._lasts_s, self._every_s = lasts_s, lasts_s / 3
        self._over, self.lost = threading.Event(), False
        self._renewed = taken_at
        self._thread = threading.Thread(target=self._work, name="mgpu-lock-renewal", daemon=True)

    @property
    def hosts(self) -> frozenset[str]:
        """Of those who had the run before."""
        return self._grip.hosts

    @property
    def unsure_s(self) -> float:
        """For how long nothing may be begun any more: from two thirds of the lock's time after its newest writing was
        begun, so that what was begun just before is through when anybody may take it."""
        return max(0.0, self._clock() - self._renewed - self._lasts_s * 2 / 3)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def end(self) -> None:
        """Lets go of the run; a backend that does not answer lets go of it by itself, when the lock is old."""
        from mgpu_train.store import StoreError

        self._over.set()
        if self._thread.ident:
            self._thread.join()
        if not self.lost:
            with suppress(StoreError, StackError):
                _send_stop_of(self._store, self._run_id)
            with suppress(StoreError):
                self._grip.release()

    def _work(self) -> None:
        from mgpu_train.store import StoreError

        while not self._over.wait(min(_LOOK_S, self._every_s)):
            with suppress(StoreError, StackError):  # the next turn may do better; until then it is watched from here
                if not self._turn():
                    return

    def _turn(self) -> bool:
        """False: another machine has the run."""
        began = self._clock()
        if began - self._renewed >= self._every_s:
            if (other := self._grip.renew()) is not None:
                self.lost = True
                _note(self._run_id, other)
                return False
            self._renewed = began
        self.look_for_stop()
        _send_stop_of(self._store, self._run_id)
        return True

    def agree_on_stop(self) -> None:
        """Before this machine supervises: what was asked for here counts only if the backend has it, or never had it.
        Another machine may have begun the run again since. Raises StoreError."""
        stop = Folder(self._run_id).stop
        self.look_for_stop()
        _send_stop_of(self._store, self._run_id)
        sent = stop.exists() and not stop.read_bytes().startswith(_NOT_SENT)
        if sent and self._store.stat(f"{_STOPS}{self._run_id}") is None:
            stop.unlink(missing_ok=True)

    def look_for_stop(self) -> None:
        """Writes down here what another machine has asked for. Raises StoreError."""
        stop = Folder(self._run_id).stop
        if not stop.exists() and self._store.stat(f"{_STOPS}{self._run_id}") is not None:
            stop.touch()


_LOOK_S = 5.0  # between two looks whether another machine has asked for the end


def pull_one(run_id: str, *, mine: bool = False) -> bool:
    """Brings the copy of one record up to date, unless the run is supervised here, and not by who asks (`mine`); False:
    the bucket has none. Raises StackError."""
    here = location.current()
    store = here.shared
    if store is None:
        return True
    with here.asking("asked for a run"):
        found = store.stat(f"{_RECORDS}{run_id}.json")
        if found is not None and found.version != _version(run_id):
            _bring(store, run_id, mine=mine)
    return found is not None


def _note(run_id: str, seen: Seen) -> None:
    """Writes down here whose the run is: what looks at the lock's file finds that one."""
    replace_holder(Folder(run_id).lock, _holder(seen.said) or Holder("", 0, 0, "", "another machine"))


def _holder(said: Mapping[str, Any]) -> Holder | None:
    try:
        return Holder(**{name: said[name] for name in Holder.__dataclass_fields__})
    except KeyError:
        return None


def _dead(said: Mapping[str, Any]) -> bool:
    """Whether that holder is a process of this very machine that has ended; of others nobody here can know."""
    whose = _holder(said)
    return whose is not None and said.get("space") == _space() and not whose.process.alive


def _space() -> str:
    """By which two processes know that they see the same processes: the boot, and the namespace of process ids."""
    from mgpu_train.agent.machine import procs

    return f"{procs.boot_id()}/{Path('/proc/self/ns/pid').stat().st_ino}"


def _lasts_s() -> float:
    from mgpu.context import timeouts

    return timeouts().lock_s


# ---- to stop

_NOT_SENT = b"asked for on this machine\n"  # its file begins so until a bucket has it; else that is empty


def ask_to_stop(run_id: str) -> None:
    """Asks whoever supervises the run to end it, on whichever machine. Raises StackError: it is asked for here, and
    whichever command reaches the backend from here next says so there."""
    here = location.current()
    ask_here_to_stop(run_id)
    if here.shared is None:
        return
    try:
        with here.asking("written"):
            _send_stop(here.shared, run_id)
    except StackError as error:
        raise StackError(
            f"run {run_id}: no other machine knows yet that it is to end",
            f"{error.what}: {error.why}",
            "A supervisor on this machine ends it all the same. All others hear it by the next command on this machine "
            f"that reaches the backend: `mgpu stop {run_id}` waits for the end, too.",
        ) from error


def ask_here_to_stop(run_id: str) -> None:
    """Asks whoever supervises the run on this machine, now or next, to end it. Raises OSError."""
    folder = Folder(run_id)
    folder.make()
    folder.stop.write_bytes(_NOT_SENT + _use(folder))


def _send_stop(store: Store, run_id: str) -> None:
    store.put(f"{_STOPS}{run_id}", b"")
    with suppress(FileNotFoundError):  # the run has ended meanwhile, and was begun again
        os.truncate(Folder(run_id).stop, 0)


def _send_stops(store: Store) -> None:
    """What was asked for on this machine while the bucket was away, also of runs that another one supervises."""
    from mgpu_train.store import StoreError

    for stop in runs().glob("*/stop"):
        with suppress(StoreError):  # the next look tries again
            _send_stop_of(store, stop.parent.name)


def _send_stop_of(store: Store, run_id: str) -> None:
    """Sends what was asked for here and did not come into the bucket. For a run that is over it is none any more, nor
    for one that was submitted again since. Raises StoreError."""
    folder = Folder(run_id)
    with suppress(FileNotFoundError):  # withdrawn a moment ago, or there is none
        asked = folder.stop.read_bytes()
        if not asked.startswith(_NOT_SENT):
            return
        known, use = _said(folder.record), asked.removeprefix(_NOT_SENT)
        # empty: nobody knew, or an earlier mgpu has written it
        earlier = use != _use(folder) if use else folder.stop.stat().st_mtime < (known.get("submitted_at") or 0.0)
        if earlier:
            folder.stop.unlink()
        elif known and known.get("ended_at") is None:
            _send_stop(store, run_id)


def _use(folder: Folder) -> bytes:
    """By which it is known that a run was submitted again; empty: nothing is known of it here."""
    at = _said(folder.record).get("submitted_at")
    return b"" if at is None else json.dumps(at).encode()


def withdraw_stop(run_id: str) -> None:
    """Forgets that an earlier use of the run was to stop. Raises StackError."""
    here = location.current()
    Folder(run_id).stop.unlink(missing_ok=True)
    if here.shared is not None:
        with here.asking("written"):
            here.shared.delete(f"{_STOPS}{run_id}")
