"""How what runs on a local node is ended."""

from __future__ import annotations

import errno
import itertools
import os
import signal
from types import SimpleNamespace
from typing import Any, cast

from mgpu.providers.local import procs


class Running:
    """A process that is anybody's; `theirs`: it may not be signalled from here."""

    def __init__(self, *, theirs: bool = False) -> None:
        self.theirs, self.got = theirs, list[int]()

    @property
    def alive(self) -> bool:
        return signal.SIGTERM not in self.got

    def send(self, number: int) -> None:
        if self.theirs:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        self.got.append(number)


def test_what_another_user_runs_keeps_no_other_process_from_its_warning(monkeypatch):
    """`sudo ... &` on a node of a user who is not root."""
    clock = itertools.count()
    monkeypatch.setattr(procs, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _s: None))
    running = [Running(theirs=True), Running(), Running()]
    assert not procs.end(lambda: cast("Any", [each for each in running if each.alive]), term_s=3, kill_s=3600)
    assert [each.got for each in running[1:]] == [[signal.SIGTERM, signal.SIGCONT]] * 2
