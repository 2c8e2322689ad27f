"""The plug-in's own process: it goes with the engine that has begun it, and what this machine lacks is no bug."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mgpu.iac import plugin
from mgpu.iac.protocol.servicer import Servicer


@pytest.mark.parametrize("dies", ["when it is told the port", "while the plug-in begins"])
def test_it_ends_with_the_engine_that_has_begun_it(monkeypatch: pytest.MonkeyPatch, dies: str):
    """And not with whoever has its orphans."""
    parent, watched = [100], list[int]()
    ended = threading.Event()

    def engine_dies(*_: Any) -> None:
        parent[0] = 1

    def watch(of: int) -> None:
        watched.append(of)
        ended.set()

    def serve(*_: Any) -> tuple[Any, int]:
        if dies == "while the plug-in begins":
            engine_dies()
        return SimpleNamespace(wait_for_termination=lambda: ended.wait(20)), 1234

    monkeypatch.setattr(plugin.os, "getppid", lambda: parent[0])
    monkeypatch.setattr(plugin, "serve", serve)
    monkeypatch.setattr(plugin, "_end_when_orphaned", watch)
    monkeypatch.setattr(sys, "argv", ["pulumi-resource-mgpu"])
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=engine_dies, flush=lambda: None))
    plugin.main()
    assert watched == [100]


class Aborted(Exception):
    """The call has ended."""


@pytest.mark.parametrize(
    ("error", "words", "trace"),
    [
        (RuntimeError("can't start new thread"), "this machine has not enough threads", False),
        (ZeroDivisionError("of ours"), "a bug in pulumi-resource-mgpu", True),
    ],
)
def test_what_this_machine_lacks_is_told_without_a_trace(error: Exception, words: str, trace: bool):
    said = list[str]()

    def abort(_code: Any, words: str) -> None:
        said.append(words)
        raise Aborted

    def schema() -> str:
        raise error

    context: Any = SimpleNamespace(abort=abort)
    with pytest.raises(Aborted):
        Servicer({}, schema).GetSchema(None, context)
    (told,) = said
    assert (words in told, "Traceback" in told) == (True, trace)
