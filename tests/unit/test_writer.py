"""A terminal or a pipe that takes nothing keeps nobody; what it takes later has its order, and says what is missing."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from waiting import until

from mgpu import console as console_module
from mgpu import events, writer
from mgpu.console import Console

MORE_THAN_A_PIPE = 4 * (64 << 10)
MUCH = 20 * MORE_THAN_A_PIPE


class Pipe:
    """A pipe, or a terminal, that nobody reads until `taken` is called."""

    def __init__(self, *, terminal: bool = False) -> None:
        self._reads, self.fd = pty.openpty() if terminal else os.pipe()
        self._stuffing = 0

    def full(self) -> Pipe:
        os.set_blocking(self.fd, False)
        try:
            while True:
                self._stuffing += os.write(self.fd, b"." * 512)
        except BlockingIOError:
            os.set_blocking(self.fd, True)
        return self

    def as_stderr(self, monkeypatch, most: int = writer.MOST) -> writer.Writer:
        stream = os.fdopen(self.fd, "w", encoding="utf-8", closefd=False)
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setitem(writer._known, stream, made(self, most))
        return writer.of(stream)

    def taken(self, until: writer.Writer) -> str:
        """All that has been given to `until`, as it arrives here."""
        got = b""

        def read() -> None:
            nonlocal got
            while data := os.read(self._reads, 1 << 16):
                got += data
                if b"<over>" in got:
                    return

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        until.drain()
        until.write("<over>")
        reader.join()
        stuffing, self._stuffing = self._stuffing, 0
        return got.decode()[stuffing:].replace("<over>", "")

    def taken_now(self) -> None:
        os.read(self._reads, 1 << 20)

    def left(self) -> None:
        os.close(self._reads)


def made(pipe: Pipe, most: int = writer.MOST) -> writer.Writer:
    return writer.Writer(pipe.fd, "utf-8", most=most)


def test_whoever_prints_goes_on_and_nothing_of_it_is_lost():
    pipe = Pipe()
    out, lines = made(pipe), [f"line {n} ✓\n" for n in range(MORE_THAN_A_PIPE // 10)]
    for line in lines:
        out.write(line)
    assert pipe.taken(out) == "".join(lines)


def test_what_nobody_takes_in_time_is_counted_in_its_place():
    pipe = Pipe().full()
    out = made(pipe, most=1000)
    for n in range(500):
        out.write(f"before {n}\n")
    out.leave_out(7)
    shown = pipe.taken(out)
    out.write("after\n")
    kept = re.findall(r"before (\d+)\n", shown)
    assert kept == [str(n) for n in range(len(kept))], "the oldest, in their order"
    assert 10 < len(kept) < 200
    assert shown.endswith(
        f"  {507 - len(kept)} lines left out here: nobody took them (`mgpu logs` has what nodes print)\n"
    )
    assert pipe.taken(out) == "after\n"


def test_of_a_bar_that_nobody_sees_only_the_newest_state_waits(monkeypatch):
    pipe = Pipe(terminal=True).full()
    monkeypatch.setenv("TERM", "xterm")
    out, console = pipe.as_stderr(monkeypatch), Console()
    for step in range(500):
        console.emit(events.MetricsSampled("run-1", 1, 0.0, step=step, steps=500, phase="training", values={}))
        console._bar.refresh()
        if step == 250:
            console.emit(events.Note("a word"))
    console.done()
    shown = pipe.taken(out)
    assert shown.count("training") < 100, "a terminal takes some more after it was full"
    assert "a word" in shown
    assert "step 499/500" in shown
    assert shown.rstrip().endswith("\x1b[?25h\r\x1b[1A\x1b[2K"), "the cursor is there again"


def test_lines_of_nodes_wait_a_moment_for_a_reader_and_are_left_out_then(monkeypatch):
    pipe = Pipe().full()
    out = pipe.as_stderr(monkeypatch, most=1000)
    monkeypatch.setattr(console_module, "ROOM_S", 0.0)
    console = Console(show_logs=True)
    for _ in range(3):
        console.emit(events.LogChunk(0, 0, b"x\n" * 100))
    console.emit(events.Note("a word, for which there is still room"))
    shown = pipe.taken(out).split("\n")
    assert shown[:100] == ["[0] x"] * 100
    assert [line[:16] for line in shown[100:]] == ["  201 lines left", ""]


def test_a_line_that_was_asked_for_waits_for_its_reader(monkeypatch):
    """What `mgpu exec` brings is a result."""
    pipe = Pipe().full()
    out, console = pipe.as_stderr(monkeypatch, most=1000), Console()
    console.say("x" * 2000, whole=True)
    said = threading.Thread(target=console.say, args=("at last",), kwargs={"patient": True}, daemon=True)
    said.start()
    shown = pipe.taken(out)
    said.join()
    shown += pipe.taken(out)
    assert "left out" not in shown
    assert "at last\n" in shown


def test_a_reader_that_has_left_ends_nothing():
    pipe = Pipe()
    out = made(pipe)
    pipe.left()
    out.write("x" * MORE_THAN_A_PIPE)
    out.drain()
    out.write("more")
    out.drain()
    assert out.wait(0)


def test_a_terminal_that_another_process_has_set_not_to_block_is_written_to_all_the_same():
    pipe = Pipe()
    out, lines = made(pipe), "line\n" * MORE_THAN_A_PIPE
    fcntl.fcntl(pipe.fd, fcntl.F_SETFL, fcntl.fcntl(pipe.fd, fcntl.F_GETFL) | os.O_NONBLOCK)
    out.write(lines)
    assert pipe.taken(out) == lines


def test_files_are_written_to_as_ever(tmp_path):
    with (tmp_path / "log").open("w") as file:
        assert writer.of(file) is None


def command(program: str, **streams) -> subprocess.Popen[bytes]:
    head = "from mgpu import writer; from mgpu.console import Console; c = Console(); "
    return subprocess.Popen([sys.executable, "-c", head + program], **streams)


def test_a_result_stands_below_what_was_said_before_it():
    said = f"c.say('x' * {MUCH}, whole=True); c.text('result'); c.flush(); c.say('next')"
    with command(said, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        lines = process.stdout.read().decode().split()
    assert [line[:6] for line in lines] == ["xxxxxx", "result", "next"]


def test_a_command_whose_lines_were_asked_for_ends_when_they_are_read():
    """`mgpu exec RUN -- COMMAND 2>&1 | less`: its reader takes minutes."""
    said = f"writer.CLOSE_S = 0; c.say('x' * {MUCH}, whole=True, patient=True)"
    with command(said, stderr=subprocess.PIPE) as process:
        assert len(process.stderr.read()) == MUCH + 1


def test_threads_that_print_first_at_the_same_time_have_one_writer_to_a_stream(monkeypatch):
    pipe, begun = Pipe(), []

    class Counted(writer.Writer):
        def __init__(self, fd: int, encoding: str) -> None:
            begun.append(fd)
            super().__init__(fd, encoding)

    monkeypatch.setattr(writer, "Writer", Counted)
    stream, together = os.fdopen(pipe.fd, "w", closefd=False), threading.Barrier(8)

    def first(_n: int) -> writer.Writer | None:
        together.wait()
        return writer.of(stream)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(first, range(8)))) == len(begun) == 1


def test_a_state_of_a_bar_that_is_left_out_is_nothing_to_wait_for():
    looks = threading.Event()

    class Late(writer.Writer):
        def _next(self) -> bytes:
            if self._waiting and not self._left:
                looks.wait()
            return super()._next()

    pipe = Pipe().full()
    out = Late(pipe.fd, "utf-8", most=1000)
    out.write("x" * 2000)
    out.write("a state, without a line end")
    pipe.taken_now()
    until(lambda: not out._left)
    with out._changed:
        looks.set()
        out.drain()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_command_ends_although_nobody_reads_what_it_says(terminal):
    pipe = Pipe(terminal=terminal).full()
    said = f"writer.CLOSE_S = 0; c.say('x' * {MORE_THAN_A_PIPE})"
    with command(said, stderr=pipe.fd) as process:
        assert process.wait() == 0
