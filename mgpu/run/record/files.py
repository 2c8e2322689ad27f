"""What another machine needs of a run beside its record, where the backend is a bucket. Where it is a folder, nothing
here does anything.

    <backend>/mgpu/runs/<run>/kept.json            the run file, and of each archive its key, size and checksum
    <backend>/mgpu/runs/<run>/<archive>.tar.gz     `work`: the code; `program`: the Pulumi program, of an own stack
    <backend>/mgpu/runs/<run>/whole/<path>         small files that are written anew: the stack's configuration
    <backend>/mgpu/runs/<run>/grown/<path>/<n>     files that only grow (logs, metrics, journals), from byte n on; none
                                                   of these is written twice
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu.backend import location
from mgpu.errors import InputError, StackError
from mgpu.events import ignore
from mgpu.run.record.folder import Folder
from mgpu.run.record.supervisor_lock import held

if TYPE_CHECKING:
    from mgpu_train.store import Stat, Store

ARCHIVES = ("work", "program")
RUN_FILE = "mgpu.yaml"
_WHOLE = ("pulumi/Pulumi*.yaml", "metrics/rank-*.jsonl")
_GROWN = ("logs/*", "metrics/instances/*", "journal/*")
# of each growing file how much of it is in the backend, as far as this machine knows; of others when they were written;
# and what keeps others away meanwhile: who is to begin machines does not wait until hours of logs are on their way
_SENT, _SENDING = ".sent.json", ".sending"
_WRITTEN, _WRITING = ".written.json", ".writing"
_KEPT = ".kept.json"  # which submission's run file, code and program this machine has
_SEND_EVERY_S = 180.0
_soon: dict[str, threading.Event] = {}  # by run that is supervised here: its files are to be sent now
_FOLLOW_EVERY_S = 5.0
_followed: dict[str, float] = {}  # by run, when its files were brought last
_LARGEST = 64 << 20  # bytes of a small file
_PIECE = 8 << 20  # bytes of what has grown at a time


def keep(run_id: str) -> None:
    """Puts the run file and the archives where other machines find them; before its record. Raises StackError."""
    keep_folder(Folder(run_id).root, _at(run_id))


def keep_folder(root: Path, at: str) -> None:
    """As `keep`, for any folder that has a run file, `mgpu.yaml`, and archives; they go below the key `at`."""
    here = location.current()
    store = here.shared
    if store is None:
        return
    archives = {}
    with here.asking("written"):
        for name in ARCHIVES:
            if (root / name).is_dir():
                key = f"{at}{name}.tar.gz"
                with _packed(root / name) as path:
                    sent = store.put_file(key, path)
                archives[name] = {"key": key, "size": sent.size, "crc64nvme": sent.crc64nvme}
        _say(store, root, at, {"run_file": (root / RUN_FILE).read_text(encoding="utf-8"), "archives": archives})


def keep_same(run_id: str, source: Path) -> None:
    """As `keep`, for a run whose files are those that `keep_folder` has kept of `source`, or `bring_folder` brought: it
    has no archives of its own. Raises StackError."""
    here = location.current()
    if here.shared is not None:
        with here.asking("written"):
            _say(here.shared, Folder(run_id).root, _at(run_id), json.loads((source / _KEPT).read_bytes()))


def _say(store: Store, root: Path, at: str, kept: dict[str, Any]) -> None:
    text = json.dumps(kept).encode()
    store.put(f"{at}kept.json", text)
    replace(root / _KEPT, text)


def bring(run_id: str) -> None:
    """Brings what this machine lacks to go on with the run, or has of an earlier submission. Raises StackError."""
    here = location.current()
    store = here.shared
    if store is None or not bring_folder(Folder(run_id).root, _at(run_id)):
        return
    with here.asking("read"):
        for found, path in _there(store, run_id, "whole"):
            if not path.exists():
                replace(path, store.get(found.key, _LARGEST))
    bring_grown(run_id)


def bring_folder(root: Path, at: str) -> bool:
    """Brings what `keep_folder` has kept, where this machine has something else; False: there is nothing. Raises
    StackError."""
    from mgpu_train.store import NotFound

    here, path = location.current(), root / _KEPT
    store = here.shared
    if store is None:
        return root.is_dir()
    with here.asking("read"):
        try:
            text = store.get(f"{at}kept.json", _LARGEST)
        except NotFound:  # it is submitted by this machine, right now
            return False
        kept = json.loads(text)
        if not path.exists() or path.read_bytes() != text:  # a run that is resumed takes its code as it is then
            for name, archive in kept["archives"].items():
                try:
                    _unpack(store, archive, root / name)
                except NotFound:
                    what = f"the backend {here.address} has no {archive['key']} any more"
                    raise StackError(what, f"It is the `{name}` that {at} begins with.") from None
            replace(root / RUN_FILE, kept["run_file"].encode())
            replace(path, text)
    return True


def bring_run_file(root: Path, at: str) -> None:
    """Brings of what `keep_folder` has kept the run file alone. Raises StackError, InputError: there is none."""
    from mgpu_train.store import NotFound

    here = location.current()
    if here.shared is None:
        return
    with here.asking("read"):
        try:
            kept = json.loads(here.shared.get(f"{at}kept.json", _LARGEST))
        except NotFound:
            raise InputError(f"the backend {here.address} has no {at}kept.json", "", "See `mgpu ls`.") from None
    replace(root / RUN_FILE, kept["run_file"].encode())


def send(run_id: str, *, small: bool = False) -> None:
    """Sends what has grown or changed; `small`: of the small files alone. Raises StackError."""
    here, root = location.current(), Folder(run_id).root
    store = here.shared
    if store is None:
        return
    with here.asking("written"):
        with _alone(root, _WRITING, _WRITTEN) as known:
            for path in _found(root, _WHOLE):
                name, written = str(path.relative_to(root)), path.stat().st_mtime_ns
                if known.get(name) != written:
                    store.put(f"{_at(run_id)}whole/{name}", path.read_bytes())
                    known[name] = written
                    replace(root / _WRITTEN, json.dumps(known).encode())
        if not small:
            _send_grown(store, run_id)


def _send_grown(store: Store, run_id: str) -> None:
    root = Folder(run_id).root
    with _alone(root, _SENDING, _SENT) as sent:
        for path in _found(root, _GROWN):
            name = str(path.relative_to(root))
            with path.open("rb") as file:
                begin = file.seek(sent.get(name, 0))
                while data := file.read(_PIECE):
                    sent[name] = begin + _put_piece(store, f"{_at(run_id)}grown/{name}/{begin:015}", data)
                    replace(root / _SENT, json.dumps(sent).encode())
                    begin = file.seek(sent[name])


def _put_piece(store: Store, key: str, data: bytes) -> int:
    """How many bytes of it the backend has now: these, or what is there already. That came by a try whose answer was
    lost; or this machine has slept on the way, and whoever has taken the run over has sent more, and goes on behind
    it. A store that refuses is asked again after growing pauses, as long as for any other request: of a run that is
    over there may be no next turn."""
    from mgpu_train.store import Ambiguous, Unavailable

    from mgpu.acquire.pauses import patiently
    from mgpu.context import timeouts

    def put() -> int:
        unsure = Ambiguous(f"{key}: it was not there after it was written")
        try:
            if store.put_if_absent(key, data):
                return len(data)
        except Unavailable as error:
            unsure = Ambiguous(str(error))
        if (there := store.stat(key)) is not None:  # where this gets no answer, it has been patient enough itself
            return there.size
        raise unsure

    return patiently(put, timeouts().store_retry_s, lambda pause_s: bool(time.sleep(pause_s)), ignore, (Ambiguous,))


@contextmanager
def sending(run_id: str, lost: Callable[[], bool]) -> Iterator[None]:
    """While the block runs, sends every few minutes what has grown, and the rest at its end; not when the run is `lost`
    to another machine. In a thread of its own: it may take longer on its way than the run's lock lasts."""
    soon, over = threading.Event(), threading.Event()

    def work() -> None:
        last = False
        while not last:
            soon.wait(_SEND_EVERY_S)
            soon.clear()
            last = over.is_set()
            with suppress(OSError, StackError):  # the next turn may do better
                if not lost():
                    send(run_id)

    thread = threading.Thread(target=work, name="mgpu-sender", daemon=True)
    thread.start()
    _soon[run_id] = soon
    try:
        yield
    finally:
        _soon.pop(run_id, None)
        over.set()
        soon.set()
        thread.join()


def send_soon(run_id: str) -> None:
    """Has the files of a run that is supervised here sent now, not in some minutes; waits for nothing."""
    if run_id in _soon:
        _soon[run_id].set()


def bring_grown(run_id: str) -> None:
    """Brings what other machines have sent of growing files, and this one has not. Raises StackError."""
    here, root = location.current(), Folder(run_id).root
    store = here.shared
    if store is None:
        return
    with here.asking("read"), _alone(root, _SENDING, _SENT) as sent:
        for found, part in _there(store, run_id, "grown"):
            path, begin = part.parent, int(part.name)
            size = path.stat().st_size if path.exists() else 0
            if begin <= size < begin + found.size:  # else it is here, or what comes before it never came
                data = store.get(found.key, _LARGEST)
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                with path.open("ab") as file:
                    file.write(data[size - begin :])
                sent[str(path.relative_to(root))] = begin + found.size
        if sent:
            replace(root / _SENT, json.dumps(sent).encode())


def follow(run_id: str, *, last: bool = False) -> None:
    """As `bring_grown`, for who looks often: not of a run that is supervised here, and every few seconds, but for the
    `last` look. Raises StackError."""
    recent = time.monotonic() - _followed.get(run_id, -_FOLLOW_EVERY_S) < _FOLLOW_EVERY_S
    if location.current().folder is None and (last or not recent):
        if not held(Folder(run_id).lock):
            bring_grown(run_id)
        _followed[run_id] = time.monotonic()


def remove(run_id: str) -> None:
    """Removes all of it from the backend; absent is success. Raises StackError."""
    remove_folder(_at(run_id))


def remove_folder(at: str) -> None:
    """Removes all that a bucket has below the key `at`; absent is success. Raises StackError."""
    here = location.current()
    store = here.shared
    if store is None:
        return
    with here.asking("written"):
        for found in [*store.list(at)]:
            store.delete(found.key)


def _at(run_id: str) -> str:
    return f"runs/{run_id}/"


def _there(store: Store, run_id: str, kind: str) -> Iterator[tuple[Stat, Path]]:
    """What is there of this kind, and where it belongs in the run's folder; a key that leads out of it is not ours."""
    from mgpu_train.store.base import key_problem

    root, below = Folder(run_id).root, f"{_at(run_id)}{kind}/"
    for found in store.list(below):
        if key_problem(found.key) is None:
            yield found, root / found.key.removeprefix(below)


def _found(root: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(path for each in patterns for path in root.glob(each) if path.is_file() and path.name[0] != ".")


@contextmanager
def _alone(root: Path, lock: str, known: str) -> Iterator[dict[str, int]]:
    """What is `known` to be in the backend, while nobody else of this machine brings or sends it: two who follow a run
    would write everything twice."""
    root.mkdir(parents=True, mode=0o700, exist_ok=True)
    with (root / lock).open("a", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        path = root / known
        yield dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


@contextmanager
def _packed(folder: Path) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile(dir=folder.parent, prefix=".packed-") as file:
        with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
            archive.add(folder, arcname=".")
        file.flush()
        yield Path(file.name)


def _unpack(store: Store, archive: dict[str, Any], folder: Path) -> None:
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True, mode=0o700)
    packed = aside / ".packed"
    try:
        store.get_file(archive["key"], packed, size=archive["size"], crc64nvme=archive["crc64nvme"])
        with tarfile.open(packed) as file:
            inside = _inside(file, (aside / "tree").resolve())
            file.extractall(aside / "tree", inside, **_FILTER)  # noqa: S202  `_inside` looks at each
        shutil.rmtree(folder, ignore_errors=True)
        (aside / "tree").rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


# Debian 12 has Python 3.11.2, which knows none
_FILTER: dict[str, Any] = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}


def _inside(archive: tarfile.TarFile, folder: Path) -> Iterator[tarfile.TarInfo]:
    """Its members, each looked at when those before it are unpacked: nothing leaves the folder; links are the user's.

    Raises StackError.
    """
    for member in archive:
        if not (folder / member.name).resolve().is_relative_to(folder):
            raise StackError(
                "an archive in the backend is none of mgpu's",
                f"It would write {member.name}, which is outside of its folder.",
                "Find out who else writes there.",
            )
        yield member


def replace(path: Path, data: bytes) -> None:
    """Writes a file of this user's alone: a reader sees the old one or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    aside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}")
    aside.write_bytes(data)
    aside.chmod(0o600)
    aside.replace(path)
