"""One task after the other, each tried until it is through or its time is over."""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import os
import random
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol
from urllib.parse import urlsplit

from mgpu_train.store.bulk.message import Keys, Settings, Task
from mgpu_train.store.bulk.sign import NOTHING, UNSIGNED, query_string, signed
from mgpu_train.store.bulk.wire import FEW, NEVER, Trouble, Wire, body_of, refused
from mgpu_train.store.crc import more
from mgpu_train.store.pace import Pace

_PIECE = 256 << 10  # bytes between file and socket; the cache holds them
_WRITE = 64 << 10  # bytes a call: more make larger folios, which ext4 took up to four times the CPU for (Linux 6.18)
_LEAST_PIECE = 4 << 10
_PIECES_A_SECOND = 8  # under a bound on bytes per second: no connection is quiet for long
Send = Callable[[socket.socket], None]


class Tasks(Protocol):
    """Where workers get their tasks, and whom they tell."""

    settings: Settings
    pace: Pace
    keys: Keys

    def next(self) -> Task:
        """The next task that is still wanted; waits for it."""
        ...

    def answer(self, task: Task, **told: Any) -> None:
        """A task is over."""
        ...

    def moved(self, count: int) -> None:
        """So many bytes went through a socket; negative ones have to go again."""
        ...

    def stumbled(self, trouble: Trouble) -> None:
        """A try failed, and there will be another."""
        ...

    def unwanted(self, task: Task, within_s: float = 0) -> bool:
        """True: nobody waits for this task any more, or not after some time."""
        ...

    def turn(self, task: Task) -> AbstractContextManager[None]:
        """Inside it nobody else writes to the file of this task: those who wait for its own lock spin."""
        ...


class Worker:
    """Holds one connection and one piece in memory."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks, self._pace = tasks, tasks.pace
        self._wire = Wire(tasks.settings.connect_s, tasks.settings.read_s)
        rate = tasks.pace.bytes_per_s
        piece = _PIECE if rate is None else max(_LEAST_PIECE, min(_PIECE, rate // _PIECES_A_SECOND))
        self._piece = memoryview(bytearray(piece))
        self._sent = self._got = self._crc = 0  # bytes of this try; bytes of this task that stay, and their checksum

    def run(self) -> None:
        """Works until there is no next task, which the tasks raise."""
        while True:
            task = self._tasks.next()
            try:
                answer = self._patiently(task)
            except Exception as error:  # noqa: BLE001 - a bug costs this task: without an answer it would never end
                answer = {"error": Trouble("bug", f"{type(error).__name__}: {error}"[:200]).told}
            self._tasks.answer(task, **answer)

    def _patiently(self, task: Task) -> dict[str, Any]:
        """The answer to a task, after as many tries as there is time for.

        The first failure starts the clock, and so does the first after one that has brought something.
        """
        retry_s, end = self._tasks.settings.retry_s, None
        failures = self._got = self._crc = 0
        while True:
            before = self._got
            try:
                return self._once(task)
            except Trouble as trouble:
                if trouble.stale:
                    continue
                if self._got > before:
                    failures, end = 0, None
                failures += 1
                end = end or time.monotonic() + retry_s
                if failures >= trouble.tries or time.monotonic() > end:
                    return {"error": trouble.told}
                self._tasks.stumbled(trouble)
                pause = min(retry_s / 12, retry_s / 300 * 2**failures) * random.uniform(0.5, 1)
                if self._tasks.unwanted(task, pause):
                    return {"error": _unwanted().told}

    def _once(self, task: Task) -> dict[str, Any]:
        self._sent = 0
        try:
            self._check(task)
            return self._put(task) if task.method == "PUT" else self._get(task)
        except BaseException:
            self._tasks.moved(-self._sent)  # it has to be sent again
            raise

    def _put(self, task: Task) -> dict[str, Any]:
        with _opened(task) as file:
            crc, payload = self._sums(task, file)
            own = base64.b64encode(crc.to_bytes(8, "big")).decode()
            headers = {"content-length": str(task.length), "x-amz-checksum-crc64nvme": own}
            answer = self._ask(task, headers, payload, lambda sock: self._send(task, file, sock, crc))
            with self._wire.watched():
                body_of(answer)
        return {"etag": answer.headers.get("ETag", ""), "crc": crc}

    def _get(self, task: Task) -> dict[str, Any]:
        first = task.offset + self._got  # where the last try was cut
        answer = self._ask(task, {"range": f"bytes={first}-{task.offset + task.length - 1}"}, NOTHING)
        with self._wire.watched(), _opened(task) as file:
            _check_range(answer, first, task.length - self._got)
            self._receive(task, file if task.file else None, answer)
        return {"crc": self._crc}

    def _ask(
        self, task: Task, headers: dict[str, str], payload: str, send: Send | None = None
    ) -> http.client.HTTPResponse:
        secure, host = task.route.url.startswith("https:"), urlsplit(task.route.url).netloc
        query = query_string(task.query)
        headers = signed(
            task.method,
            task.path,
            query,
            {"host": host, **headers},
            payload=UNSIGNED if secure else payload,
            keys=self._tasks.keys,
            region=task.route.region,
        )
        target = f"{task.path}?{query}" if query else task.path
        answer = self._wire.ask(task.route, task.method, target, headers, send)
        if answer.status >= 300:
            with self._wire.watched():
                document = body_of(answer)
            self._wire.close()  # part of a body may stand in it unread
            raise refused(answer.status, document)
        return answer

    def _sums(self, task: Task, file: io.FileIO) -> tuple[int, str]:
        """CRC64NVME and, where no TLS protects them, SHA-256 of the bytes that a task sends."""
        digest = None if task.route.url.startswith("https:") else hashlib.sha256()
        crc = 0
        for piece in self._pieces(task, file):
            crc = more(piece, crc)
            if digest:
                digest.update(piece)
        return crc, digest.hexdigest() if digest else ""

    def _pieces(self, task: Task, file: io.FileIO) -> Iterator[memoryview]:
        left = task.length
        with _on_disk():
            file.seek(task.offset)
        while left:
            with _on_disk():
                count = file.readinto(self._piece[:left])
            if not count:
                raise Trouble("changed", "it became shorter while it was sent", tries=NEVER)
            yield self._piece[:count]
            left -= count

    def _send(self, task: Task, file: io.FileIO, sock: socket.socket, crc: int) -> None:
        sent = 0
        for piece in self._pieces(task, file):
            self._check(task)
            self._pace.take(len(piece))
            sent = more(piece, sent)
            view = piece
            while view:
                view = view[sock.send(view) :]
            self._sent += len(piece)
            self._tasks.moved(len(piece))
        if sent != crc:
            raise Trouble("changed", "it changed while it was sent", tries=NEVER)

    def _receive(self, task: Task, file: io.FileIO | None, answer: http.client.HTTPResponse) -> None:
        wanted = task.length - self._got
        promised = answer.length == wanted  # by its head: if fewer come, the connection has ended too early
        if file:
            file.seek(task.offset + self._got)
        read = self._wire.reader(answer)
        while count := read(self._piece[: task.length - self._got]):
            self._check(task)
            piece = self._piece[:count]
            if file:
                with self._tasks.turn(task):
                    _write(file, piece)
            self._crc = more(piece, self._crc)
            self._got += count
            self._pace.take(count)
            self._tasks.moved(count)
        if missing := task.length - self._got:
            told = f"{wanted - missing} bytes came where {wanted} were asked for"
            raise Trouble("network", told) if promised else Trouble("short", told, tries=FEW)

    def _check(self, task: Task) -> None:
        if self._tasks.unwanted(task):
            raise _unwanted()


def _unwanted() -> Trouble:
    return Trouble("cancelled", "", tries=NEVER)


@contextmanager
def _opened(task: Task) -> Iterator[io.FileIO]:
    """The file of a task; one to send must still be the one that was meant."""
    sends = task.method == "PUT"
    with _on_disk():
        flags = os.O_RDONLY | os.O_NONBLOCK if sends else os.O_WRONLY
        file = io.FileIO(os.open(task.file or os.devnull, flags | os.O_CLOEXEC), "rb" if sends else "wb")
    with file:
        if sends and identity(os.fstat(file.fileno())) != task.identity:
            raise Trouble("changed", "it changed while it was sent", tries=NEVER)
        yield file


def identity(found: os.stat_result) -> tuple[int, ...]:
    """What is another after a file was replaced, cut or written to."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _write(file: io.FileIO, piece: memoryview) -> None:
    with _on_disk():
        while piece:
            piece = piece[file.write(piece[:_WRITE]) :]


@contextmanager
def _on_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Trouble("file", error.strerror or str(error), tries=NEVER, status=error.errno or 0) from error


def _check_range(answer: http.client.HTTPResponse, first: int, length: int) -> None:
    """Some servers send all of an object whatever part of it was asked for."""
    begin = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", "bytes 0-"))
    if begin is None or int(begin[1]) != first or answer.length not in (None, length):
        told = answer.headers.get("Content-Range") or f"{answer.length} bytes"
        raise Trouble("short", f"{told} came where {length} from {first} on were asked for", tries=FEW)
