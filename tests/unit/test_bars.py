"""Bytes on their way: what a terminal shows, what a file gets, and that neither stops a transfer."""

from __future__ import annotations

import io
import signal
import sys
import threading

import pytest

from mgpu.bars import EVERY_S, Lines
from mgpu.console import Console, neutral
from mgpu.errors import Interrupted
from mgpu.words import amount


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1 << 20, "1.0 MiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_bytes_are_told_in_the_unit_that_fits(size, shown):
    assert amount(size) == shown


def test_without_a_terminal_it_is_a_line_in_a_while():
    now, said = [100.0], []
    lines = Lines("a001-step-5", 4 << 30, said.append, lambda: now[0])
    for _ in range(40):
        now[0] += EVERY_S / 4
        lines.add(100 << 20)
    assert len(said) == 10
    assert said[0] == "  a001-step-5: 400.0 MiB of 4.0 GiB, 40.0 MiB/s"


def test_what_is_sent_again_makes_no_more_than_all_of_it():
    now, said = [0.0], []
    lines = Lines("x", 10, said.append, lambda: now[0])
    now[0] = EVERY_S
    lines.add(25)
    assert said == ["  x: 10 B of 10 B, 2 B/s"]


def test_every_thread_counts():
    now, said = [0.0], []
    lines = Lines("x", 8000, said.append, lambda: now[0])
    threads = [threading.Thread(target=lambda: [lines.add(1) for _ in range(1000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    now[0] = EVERY_S
    lines.add(0)
    assert "7.8 KiB of 7.8 KiB" in said[0]


def test_a_terminal_gets_a_bar_that_is_gone_afterwards(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    console = Console()
    with console.transfer("a001-step-5", 4 << 20) as add:
        add(1 << 20)
        console.say("a line beside it")
    shown = terminal.getvalue()
    assert "a001-step-5" in neutral(shown)
    assert "1.0/4.0 MiB" in neutral(shown)
    assert "a line beside it" in shown
    assert shown.endswith("\x1b[2K"), "the bar's own line is cleared"


def test_a_file_gets_no_bar(capsys):
    with Console().transfer("a001-step-5", 4 << 20) as add:
        add(4 << 20)
    assert capsys.readouterr() == ("", "")


def test_an_error_takes_the_bar_away(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(KeyboardInterrupt), Console().transfer("x", 10):
        raise KeyboardInterrupt
    assert "\x1b[?25h" in terminal.getvalue(), "the cursor is back"


def test_ctrl_c_ends_the_threads_that_are_waited_for():
    before = signal.getsignal(signal.SIGINT)
    ended = []

    def move(add):
        try:
            while True:
                add(1)
        except Interrupted:
            ended.append(True)

    def interrupted():
        with Console().transfer("x", 10) as add:
            thread = threading.Thread(target=move, args=(add,), daemon=True)
            thread.start()
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                thread.join(10)  # as a pool of threads does

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert ended == [True]
    assert signal.getsignal(signal.SIGINT) is before
