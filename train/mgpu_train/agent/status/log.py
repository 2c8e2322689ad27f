"""The run's log: raw bytes of the launcher, which writes by itself, and the agent's own lines between them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

PREFIX = "[agent] "
_WINDOW = 64 * 1024  # bytes at the log's end that are searched for the cause of an end
_MARK_S = 1.0
_REST_S = 0.05  # an unbuffered program writes a line in pieces (each argument of one print): the rest comes at once
_LOOKS = 10
_LONGEST = 300  # characters of a line that goes into a status
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?")
# an uncaught exception's last line, with torch's rank before it; torchrun's own ChildFailedError says nothing new
_EXCEPTION = re.compile(
    r"^(?:\[\w+\]:\s*)?(?!torch\.distributed\.elastic)[\w.]*(?:Error|Exception|Interrupt|Exit)\b(?::|$)"
)
# what torchrun says of its ranks: the agent has it from torchrun itself. It may stand behind a line that was not ended
_OF_TORCHRUN = re.compile(r"(?:^torchrun: |torchrun: rank \d+ |[EWI]\d{4} [\d:.]+ \d+ torch/distributed/elastic/).*")
# torchrun's word for a rank that was killed; SIGTERM is what torchrun itself sends to the others
_KILLED = re.compile(r"\bSignal \d+ \((?!SIGTERM\b)SIG\w+\) received by PID \d+")
_PEER_LOST = re.compile(r"gloo|nccl|TCPStore|ProcessGroup|DistBackendError|DistNetworkError", re.IGNORECASE)


class Log:
    """Appends to the run's log; `own` counts the agent's bytes, so that they are not taken for a sign of life."""

    def __init__(self, path: Path, sleep: Callable[[float], None] = time.sleep) -> None:
        self.path = path
        self.own = 0
        self._sleep = sleep
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    @property
    def size(self) -> int:
        """Bytes in the log."""
        return os.fstat(self.fd).st_size

    def say(self, text: str) -> None:
        """Writes one line of the agent's own. A line that a program is at has 50 ms to be ended before it. On a full
        disk it is lost: that must not end training."""
        with suppress(OSError):
            looks = 1
            while (torn := self._torn()) and looks < _LOOKS:
                self._sleep(_REST_S / _LOOKS)
                looks += 1
            line = ("\n" if torn else "") + PREFIX + clean(text) + "\n"
            self.own += os.write(self.fd, line.encode())

    def _torn(self) -> bool:
        size = self.size
        return size > 0 and os.pread(self.fd, 1, size - 1) != b"\n"


class LogTimes:
    """Writes down when the log had which size, in seconds in which it grew: lines of a program have no times of their
    own, and nobody else sees when they come."""

    def __init__(self, log: Log, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._log, self._clock = log, clock
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size, self._at = log.size, float("-inf")

    def mark(self, *, at_once: bool = False) -> None:
        """Notes the size if it has grown; at most once a second, unless `at_once`. A full disk is no error."""
        size, now = self._log.size, self._clock()
        if size > self._size and (at_once or abs(now - self._at) >= _MARK_S):
            with suppress(OSError):
                os.write(self._fd, f"{size} {now:.1f}\n".encode())
            self._size, self._at = size, now


def clean(text: str, limit: int = 4000) -> str:
    """One line without escapes or control characters, not longer than `limit` characters."""
    line = "".join(letter for letter in " ".join(_ESCAPE.sub("", text).split()) if letter.isprintable())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def hide(text: str, secrets: Iterable[str]) -> str:
    """The text with every secret value replaced; very short values are no secrets and would hit by chance."""
    for value in sorted((value for value in secrets if len(value) >= 4), key=len, reverse=True):
        text = text.replace(value, "***")
    return text


def tail(log: Log, begin: int) -> tuple[str, ...]:
    """The lines of the launcher at the end of the log, since `begin`, without torchrun's and the agent's own. Of a log
    that is shorter, which somebody has emptied since, all of it is."""
    size = log.size
    begin = max(begin if begin <= size else 0, size - _WINDOW)
    lines = os.pread(log.fd, _WINDOW, begin).decode(errors="replace").splitlines()
    lines = [_OF_TORCHRUN.sub("", line) for line in lines if not line.startswith(PREFIX)]
    return tuple(line for line in lines if any(map(str.isalnum, line)))


def errors(lines: Iterable[str]) -> list[str]:
    """The lines that uncaught exceptions end with: a program may print the same words of its own accord."""
    return [line for line in lines if _EXCEPTION.match(line)]


def last_words(lines: Sequence[str]) -> str:
    """The line that says best why the launcher ended; "" if it said nothing."""
    raised = errors(lines)
    killed = [found[0] for line in lines if (found := _KILLED.search(line))]
    # of several exceptions those that only tell of a lost peer are consequences
    causes = [line for line in raised if not peer_lost(line)] or killed or raised or lines
    return clean(causes[-1], _LONGEST) if causes else ""


def peer_lost(words: str) -> bool:
    """True for the words of a rank that lost its peers."""
    return bool(_PEER_LOST.search(words))
