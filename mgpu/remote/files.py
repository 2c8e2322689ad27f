"""Files of a node over one persistent SFTP session. Every call has a deadline; answers are waited for in batches."""

from __future__ import annotations

import contextlib
import posixpath
import secrets
import stat
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from mgpu_train.timeouts import Timeouts

from mgpu.errors import RemoteError
from mgpu.remote.command import PIECE, deadline
from mgpu.remote.connection import FOREIGN, Connection
from mgpu.remote.library import CMD_DATA, CMD_READ, CMD_WRITE, int64, paramiko
from mgpu.remote.targets import check_path

READ_LIMIT = 64 << 20  # bytes that `read` takes into memory
_REASONS = {
    "": "The node refused.",
    "Failure": "SFTP says no more than `Failure`, of a full disk, too (`df -h`), or of a folder where a file is to be.",
}
_NO_SFTP = (
    "Its sshd_config needs a line `Subsystem sftp internal-sftp`. With another one than that what a login shell says "
    "gets in between."
)
# times `poll_s` between two tries: a node that has no memory or no process left has none for SFTP either, for a moment
_AGAIN = (1, 2, 4, 8)
BATCH = 64 * PIECE  # bytes asked for at once: as much as the channel's window lets through


class Files:
    """Reads and writes files through one connection; one caller at a time, others wait."""

    def __init__(self, connection: Connection, timeouts: Timeouts) -> None:
        self._connection = connection
        self._timeouts = timeouts
        self._lock = threading.RLock()
        self._client: paramiko.SFTPClient | None = None

    def write(self, path: str, data: bytes, mode: int) -> None:
        """Writes aside, then renames: a reader sees the old file or the new one. Makes missing folders (0700)."""
        aside = posixpath.join(posixpath.dirname(path), f".{posixpath.basename(path)}.{secrets.token_hex(4)}")
        with self._session("write", path, self._timeouts.sync_s) as sftp:
            try:
                out = sftp.open(aside, "wx")
            except FileNotFoundError:
                _make_folders(sftp, posixpath.dirname(path))
                out = sftp.open(aside, "wx")
            try:
                with out:
                    out.chmod(mode)  # before the first byte is in it
                    for start in range(0, len(data), BATCH):
                        _write_batch(sftp, out, start, data[start : start + BATCH])
                sftp.posix_rename(aside, path)
            except OSError:
                sftp.remove(aside)
                raise

    def read(self, path: str) -> bytes:
        """The whole file. Raises FileNotFoundError; RemoteError above 64 MiB."""
        with self._session("read", path, self._timeouts.command_s) as sftp, sftp.open(path, "rb") as file:
            size = file.stat().st_size or 0
            if size > READ_LIMIT:
                raise RemoteError(f"{self._name}: {path} is too large to be read into memory", "", "Fetch it.")
            return b"".join(_read_all(sftp, file, 0, size))

    def read_from(self, path: str, offset: int, limit: int) -> bytes | None:
        """Up to `limit` bytes from `offset` on; none when there are no new ones, or no such file. None: it ends before
        that."""
        try:
            with self._session("read", path, self._timeouts.command_s) as sftp:
                length = min(limit, (sftp.stat(path).st_size or 0) - offset)
                if length <= 0:
                    return None if length < 0 else b""
                with sftp.open(path, "rb") as file:
                    return b"".join(_read_all(sftp, file, offset, length))
        except FileNotFoundError:
            return b""

    def blocks(self, path: str) -> Generator[bytes]:
        """The file as it is now, block by block; what is appended meanwhile is left out. Raises FileNotFoundError."""
        seconds = self._timeouts.sync_s
        with self._session("fetch", path, seconds) as sftp, sftp.open(path, "rb") as file:
            yield from _read_all(sftp, file, 0, file.stat().st_size or 0)

    def exists(self, path: str) -> bool:
        """True when there is a file or folder of this name."""
        try:
            with self._session("look at", path, self._timeouts.command_s) as sftp:
                sftp.stat(path)
        except FileNotFoundError:
            return False
        return True

    def close(self) -> None:
        """Ends the SFTP session; the next call opens another."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(*FOREIGN):  # it says goodbye, and the connection may be lost
                client.close()

    @property
    def _name(self) -> str:
        return self._connection.target.label

    @contextmanager
    def _session(self, verb: str, path: str, seconds: float) -> Iterator[paramiko.SFTPClient]:
        """The SFTP client for one operation, and the one place that translates its errors."""
        check_path(path)
        doing = f"could not {verb} {path}"
        with self._lock:
            with self._connection.translated(doing):
                client = self._client or self._open(doing)
            channel = _channel(client)
            try:
                with deadline(self._connection, channel, seconds, doing):
                    yield client
            except BaseException as error:
                if isinstance(error, FileNotFoundError) and verb != "write":  # then it is a folder that cannot be made
                    raise
                if _is_refusal(error) and not channel.closed:
                    raise RemoteError(f"{self._name}: {doing}", _REASONS.get(str(error), str(error))) from error
                self.close()  # answers may be under way that nobody waits for any more
                with self._connection.translated(doing):
                    raise

    def _open(self, doing: str) -> paramiko.SFTPClient:
        seconds, pauses = self._timeouts.command_s, iter(_AGAIN)
        while True:
            channel = self._connection.open_session(seconds)
            try:
                with deadline(self._connection, channel, seconds, doing):
                    channel.invoke_subsystem("sftp")
                    self._client = paramiko.SFTPClient(channel)
                    return self._client
            except FOREIGN as error:
                channel.close()
                if not self._connection.answers():
                    raise
                if (pause := next(pauses, None)) is None:
                    why = f"Its SSH server starts no SFTP session: {error}"
                    raise RemoteError(f"{self._name}: {doing}", why, _NO_SFTP) from error
            time.sleep(pause * self._timeouts.poll_s)


class _Answers:
    """Collects the answers to requests that were sent together; paramiko hands them over by this method's name."""

    def __init__(self) -> None:
        self.got: dict[int, tuple[int, paramiko.Message]] = {}

    def _async_response(self, kind: int, message: paramiko.Message, number: int) -> None:
        self.got[number] = (kind, message)


def _ask(sftp: Any, requests: Iterable[tuple[object, ...]]) -> list[tuple[int, paramiko.Message]]:
    """Sends all requests, then waits for all answers: one round trip.

    paramiko's own prefetch needs a thread a call, which prints a traceback when the connection is lost; its pipelined
    writes never look at the last answers.
    """
    answers = _Answers()
    numbers = [sftp._async_request(answers, *request) for request in requests]
    while len(answers.got) < len(numbers):
        sftp._read_response()
    return [answers.got[number] for number in numbers]


def _write_batch(sftp: Any, file: paramiko.SFTPFile, offset: int, data: bytes) -> None:
    starts = range(0, len(data), PIECE)
    requests = [(CMD_WRITE, file.handle, int64(offset + start), data[start : start + PIECE]) for start in starts]
    for _kind, message in _ask(sftp, requests):
        sftp._convert_status(message)  # raises what the node refused


def _read_batch(sftp: Any, file: paramiko.SFTPFile, offset: int, length: int) -> bytes:
    """Up to `length` bytes from `offset` on; fewer only at the end, or where the server is terse."""
    starts = range(offset, offset + length, PIECE)
    sizes = [min(PIECE, offset + length - start) for start in starts]
    requests = [(CMD_READ, file.handle, int64(start), size) for start, size in zip(starts, sizes, strict=True)]
    pieces = []
    for size, (kind, message) in zip(sizes, _ask(sftp, requests), strict=True):
        pieces.append(message.get_string() if kind == CMD_DATA else _at_end(sftp, message))
        if len(pieces[-1]) < size:  # what follows a gap is asked for again
            break
    return b"".join(pieces)


def _at_end(sftp: Any, message: paramiko.Message) -> bytes:
    with contextlib.suppress(EOFError):
        sftp._convert_status(message)
    return b""


def _read_all(sftp: paramiko.SFTPClient, file: paramiko.SFTPFile, offset: int, length: int) -> Iterator[bytes]:
    end = offset + length
    while offset < end and (part := _read_batch(sftp, file, offset, min(BATCH, end - offset))):
        yield part
        offset += len(part)


def _make_folders(sftp: paramiko.SFTPClient, folder: str) -> None:
    for depth in range(1, len(parts := folder.split("/")) + 1):
        name = "/".join(parts[:depth]) or "/"
        try:
            sftp.mkdir(name, 0o700)
        except OSError:  # SFTP has no code for "exists"
            if not stat.S_ISDIR(sftp.stat(name).st_mode or 0):
                raise


def _channel(client: paramiko.SFTPClient) -> paramiko.Channel:
    channel = client.get_channel()
    if channel is None:
        raise EOFError("The SFTP session is closed.")
    return channel


def _is_refusal(error: BaseException) -> bool:
    # an answer of the SFTP server, as paramiko raises it; lost connections are OSErrors of other kinds
    return isinstance(error, OSError) and not isinstance(error, TimeoutError | ConnectionError)
