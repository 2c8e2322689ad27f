"""The backend: where stacks' state lies, and beside it what mgpu keeps of runs. By Pulumi's own key, in Pulumi's order:

    PULUMI_BACKEND_URL
    backend: {url: ...}      of the nearest Pulumi.yaml
    $XDG_STATE_HOME/mgpu     a folder of this machine

    <backend>/.pulumi/       Pulumi's, as it is documented for its file and cloud-storage backends
    <backend>/mgpu/          mgpu's own

An address is Pulumi's, `file:///folder` or `s3://bucket/prefix?region=...&endpoint=...&profile=...`. Cheap to import.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from mgpu import paths
from mgpu.errors import InputError, StackError

if TYPE_CHECKING:
    from mgpu_train.store import Store

VARIABLE = "PULUMI_BACKEND_URL"
_OURS = "mgpu"  # the folder beside Pulumi's own
# of an address's query, as Pulumi takes it -> what the store's client takes
_SETTINGS = {"region": "AWS_REGION", "endpoint": "AWS_ENDPOINT_URL_S3", "profile": "AWS_PROFILE"}


@dataclass(frozen=True)
class Backend:
    """One backend. `url`: as Pulumi takes it. `root`: mgpu's folder on this machine; where the backend is a bucket, a
    copy of what is in there, with what has not been written there yet. `folder`: the backend itself, where it is one.
    """

    url: str
    root: Path
    folder: Path | None

    @property
    def address(self) -> str:
        """The backend's address without its settings, for people to read and for stores."""
        return self.url.partition("?")[0]

    @property
    def place(self) -> str:
        """Where mgpu's own is, for people to read."""
        return str(self.root) if self.folder else f"{self.address.rstrip('/')}/{_OURS}"

    @property
    def state(self) -> Store:
        """All of the backend; the state of stacks is below `.pulumi`. Raises StackError."""
        return self._opened("")

    @property
    def shared(self) -> Store | None:
        """What mgpu keeps for all machines; None: a folder, where `root` is all there is. Raises StackError."""
        return None if self.folder is not None else self._opened(f"/{_OURS}")

    @property
    def ours(self) -> Store:
        """What mgpu keeps, on a folder, too. Raises StackError."""
        return self.shared or self._store(f"file://{self.root}")

    def _opened(self, below: str) -> Store:
        # a path as it is, without %-codes
        return self._store((f"file://{self.folder}" if self.folder else self.address.rstrip("/")) + below)

    def _store(self, address: str) -> Store:
        from mgpu_train.store import open_store

        from mgpu.context import timeouts

        given = dict(parse_qsl(urlsplit(self.url).query))
        ours = {ours: given[theirs] for theirs, ours in _SETTINGS.items() if theirs in given}
        environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")} | ours
        times = None if self.folder else timeouts()
        key = (address, times, *environment.items())
        if key not in _stores:  # each has connections, and perhaps a process
            with self.asking("opened"):
                _stores[key] = open_store(address, environment, timeouts=times)
        return _stores[key]

    @contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """Raises StackError for a StoreError of the block, but NotFound; `what` was to be done with the backend. A
        bucket that is silent is told (`tell_of_waits`)."""
        from mgpu_train.store import NotFound, StoreError

        try:
            with nullcontext() if self.folder else _told_of_silence(self.address, what):
                yield
        except NotFound:
            raise
        except StoreError as error:
            raise StackError(f"the backend {self.address} could not be {what}", str(error)) from error


_SILENCE_S = 5.0  # of a bucket, after which it is said
_SAID_EVERY_S = 60.0
_tell: Callable[[str], None] | None = None  # who says it
_said_at = float("-inf")


def tell_of_waits(how: Callable[[str], None]) -> None:
    """From here on `how` is told, from another thread, when this program's main thread has waited for a bucket for some
    seconds; once a minute at most."""
    global _tell
    _tell = how


@contextmanager
def _told_of_silence(address: str, what: str) -> Iterator[None]:
    if _tell is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    timer = threading.Timer(_SILENCE_S, _say_silence, (_tell, address, what))
    timer.daemon = True
    with suppress(RuntimeError):  # there is no thread left for it: the command goes on in silence
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say_silence(tell: Callable[[str], None], address: str, what: str) -> None:
    global _said_at
    from mgpu.context import timeouts

    if time.monotonic() - _said_at < _SAID_EVERY_S:
        return
    _said_at = time.monotonic()
    times = timeouts()
    # failing requests are repeated for `store_retry_s`, and the last round of them may take as long, and a read's time
    most_s = 2 * times.store_retry_s + times.store_connect_s + times.store_read_s
    tell(f"the backend {address} is still being {what}; no request waits longer than {most_s:.0f} s for an answer")


_stores: dict[tuple[Any, ...], Store] = {}  # by address and what opens it
_chosen: Path | None = None  # the folder of the run file that this command was given
_named: str | None = None  # while a command works on another backend than its own
MOVED = "moved"  # in mgpu's folder of a backend: where all of it has gone


def choose(folder: Path | None) -> None:
    """From here on the backend is that of the project in `folder`; None: of the present folder, as from the start."""
    global _chosen
    _chosen = folder


@contextmanager
def using(url: str) -> Iterator[Backend]:
    """While the block runs the backend is this one, whether it was moved or not. Raises InputError."""
    global _named
    before, _named = _named, url
    try:
        yield current()
    finally:
        _named = before


def current() -> Backend:
    """The backend of this command.

    Raises:
        InputError: its address is none that mgpu can keep records at, or all of it was moved elsewhere.
    """
    here = configured()
    if _named is None and here.folder and (here.root / MOVED).is_file():
        raise moved(here, (here.root / MOVED).read_text(encoding="utf-8"))
    return here


def configured() -> Backend:
    """As `current`, also where all of it was moved elsewhere, or was about to be."""
    if _named is not None:
        return _at(_named, "This command", paths.state_dir())
    url, where = os.environ.get(VARIABLE, ""), VARIABLE
    if not url:
        url, where = _of_project(_chosen) or ("", "")
    return _at(url, str(where), paths.state_dir())


def is_named() -> bool:
    """Whether this command works on a backend that it was told of (`using`)."""
    return _named is not None


def moved(here: Backend, to: str) -> InputError:
    """The error for a backend that was moved."""
    return InputError(
        f"the backend {here.address} was moved to {to}",
        "What it still has is as it was then.",
        f"Name the new one: `backend: {{url: '{to}'}}` in Pulumi.yaml, or {VARIABLE}.",
    )


def of_engine() -> Backend:
    """The backend of an engine that is at work here, which may be any of Pulumi's; where it is one that mgpu keeps no
    records at, a folder of this machine's stands for it."""
    try:
        return current()
    except InputError:
        return _at("", "", paths.state_dir())


def _at(url: str, where: str, state_dir: Path) -> Backend:
    ours = state_dir / "pulumi"
    scheme, _, rest = url.partition("://")
    if not url or url == ours.as_uri():
        return Backend(ours.as_uri(), state_dir, ours)
    if scheme == "file" and rest.startswith(("/", "~/")):
        folder = Path(unquote(rest.partition("?")[0])).expanduser()
        return Backend(url, folder / _OURS, folder)
    if scheme == "s3" and rest:
        mark = hashlib.sha256(url.partition("?")[0].rstrip("/").encode()).hexdigest()[:16]
        return Backend(url, state_dir / "backends" / mark, None)
    raise InputError(
        f"the backend {url} cannot be used",
        f"{where} names it. mgpu keeps the records of runs beside the state of stacks: in a folder or a bucket.",
        "Name file:///folder or s3://bucket/prefix, or none: a folder of this machine's is the default.",
    )


def _of_project(start: Path | None) -> tuple[str, Path] | None:
    """The address that the nearest Pulumi.yaml names, and which file that is."""
    try:
        folder = (start or Path.cwd()).resolve()
    except FileNotFoundError:  # this process's own folder was deleted
        return None
    for path in (each / "Pulumi.yaml" for each in (folder, *folder.parents)):
        try:
            text = path.read_text(encoding="utf-8")
        except OSError:
            continue
        return (url, path) if re.search(r"^[\"']?backend\b", text, re.MULTILINE) and (url := _url(text)) else None
    return None


def _url(text: str) -> str:
    import yaml

    try:
        return str(yaml.safe_load(text)["backend"]["url"] or "")
    except (yaml.YAMLError, LookupError, TypeError):
        return ""  # Pulumi itself says what is wrong with it
