"""One command on a node: an argument list and standard input in; status and output out, in bounded memory and time."""

from __future__ import annotations

import contextlib
import shlex
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager

from mgpu.errors import CommandFailed
from mgpu.remote.connection import FOREIGN, Connection
from mgpu.remote.library import paramiko
from mgpu.remote.targets import Result, check_arguments, login_line

PIECE = 32_768  # what SSH servers take in one packet
_FULL_S = 0.02  # the server's window is full: when to look again


def run_command(
    connection: Connection,
    argv: Sequence[str],
    stdin: bytes | Iterable[bytes] = b"",
    *,
    timeout: float,
    max_output: int,
) -> Result:
    """Runs `argv` exactly as given and waits for its end, `timeout` seconds at most.

    Raises:
        ConnectionFailed: the connection was lost, or the time was over; the command may still run.
    """
    check_arguments(argv)
    doing = f"no end of `{abridged(argv)}`"
    with connection.translated(doing), closing(connection.open_session(timeout)) as channel:
        with deadline(connection, channel, timeout, doing):
            channel.exec_command(login_line(argv))
            exchange = _Exchange(channel, stdin, max_output)
            exchange.pump()
            channel.status_event.wait()
        result = exchange.result()
        # no end of output came: the server leaves that out, or the connection was cut and something is missing
        if (not channel.eof_received or result.status < 0) and not connection.answers():
            raise connection.failure(doing)
        return result


def checked(connection: Connection, argv: Sequence[str], result: Result) -> Result:
    """Returns `result`. Raises CommandFailed when its status is not 0."""
    if result.status == 0:
        return result
    stderr = result.stderr[-4096:].decode("utf-8", "replace").strip()
    ended = f"ended with status {result.status}" if result.status > 0 else "was ended by a signal"
    raise CommandFailed(
        f"{connection.target.label}: `{abridged(argv)}` {ended}", stderr, status=result.status, stderr=stderr
    )


def abridged(argv: Sequence[str]) -> str:
    """The command as one short line, for messages."""
    line = " ".join(shlex.join(argv).split())
    return line if len(line) <= 80 else line[:77] + "..."


@contextmanager
def deadline(connection: Connection, channel: paramiko.Channel, seconds: float, doing: str) -> Iterator[None]:
    """Closes `channel` when its time is over, which wakes whatever waits on it, and raises ConnectionFailed then.

    paramiko waits without limit for the answers to some of its requests.
    """
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        with contextlib.suppress(*FOREIGN):  # the connection may be as dead as what was waited for
            channel.close()

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError as error:  # there is no thread left for it, and without one it could wait for ever
        raise connection.failure(doing, f"{error}.") from error
    try:
        yield
    except FOREIGN:
        if not expired.is_set():
            raise
    finally:
        timer.cancel()
    if expired.is_set():
        raise connection.failure(doing, f"No answer within {seconds:.3g} s.")


class Tail:
    """The last `limit` bytes of a stream, and how many came before them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pieces: deque[bytes] = deque()
        self._held = 0
        self.dropped = 0

    def add(self, data: bytes) -> None:
        """Takes the next bytes."""
        self._pieces.append(data)
        self._held += len(data)
        while self._held > self._limit:
            first = self._pieces.popleft()
            surplus = min(len(first), self._held - self._limit)
            if surplus < len(first):
                self._pieces.appendleft(first[surplus:])
            self._held -= surplus
            self.dropped += surplus

    def value(self) -> bytes:
        """What is kept."""
        return b"".join(self._pieces)


class _News(threading.Event):
    """Set by what comes on either stream, and by their end."""

    def clear(self) -> None:
        """Called for a stream that is empty: the other one may not be."""

    def heard(self) -> None:
        """From here on what has not come yet is news."""
        super().clear()


class _Exchange:
    """Moves three streams at once in one thread: neither side ever waits for the other with its hands full."""

    def __init__(self, channel: paramiko.Channel, stdin: bytes | Iterable[bytes], max_output: int) -> None:
        self._channel = channel
        self._source = _pieces(stdin)
        self._next = b""
        self._feeding = True
        self._stdout, self._stderr = Tail(max_output), Tail(max_output)

    def pump(self) -> None:
        """Returns when the command has ended, or the channel was closed."""
        channel, news = self._channel, _News()
        # not `channel.fileno()`: who closes the channel closes that, and the number may be another's by the next look
        for buffer in (channel.in_buffer, channel.in_stderr_buffer):
            buffer.set_event(news)
        while True:
            news.heard()
            # looked at before the drain: whatever came before the end is in the buffers by now
            finished = channel.closed or channel.exit_status_ready()
            ended = channel.closed or channel.eof_received
            moved = self._drain()
            if ended and not moved and (finished or not self._feeding):
                return
            moved |= self._feeding and self._feed()
            if moved:
                continue
            if ended:  # output is over, input is not: nothing more comes
                channel.status_event.wait(_FULL_S)
            else:
                news.wait(_FULL_S if self._feeding else None)

    def result(self) -> Result:
        """What came; the status must be there."""
        dropped = self._stdout.dropped + self._stderr.dropped
        return Result(self._channel.recv_exit_status(), self._stdout.value(), self._stderr.value(), dropped)

    def _drain(self) -> bool:
        channel, moved = self._channel, False
        if channel.recv_ready():
            self._stdout.add(channel.recv(4 * PIECE))
            moved = True
        if channel.recv_stderr_ready():
            self._stderr.add(channel.recv_stderr(4 * PIECE))
            moved = True
        return moved

    def _feed(self) -> bool:
        channel = self._channel
        if channel.closed or not channel.send_ready():
            return False
        self._next = self._next or next(self._source, b"")
        if not self._next:
            self._feeding = False
            channel.shutdown_write()
            return True
        try:
            self._next = self._next[channel.send(self._next) :]
        except OSError:
            self._feeding = False  # the command ended without reading all of it: its status says whether that is bad
        return True


def _pieces(stdin: bytes | Iterable[bytes]) -> Iterator[bytes]:
    for block in (stdin,) if isinstance(stdin, bytes) else stdin:
        for start in range(0, len(block), PIECE):
            yield block[start : start + PIECE]
