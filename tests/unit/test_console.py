"""F40: what a node prints is shown, and never acted on by the terminal."""

from __future__ import annotations

import io
import json
import sys
import threading

import pytest

from mgpu import console as console_module
from mgpu import events
from mgpu.console import BAR_EVERY_S, LONGEST_LINE, Console, LogLines, neutral
from mgpu.errors import QuotaExceeded


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]52;c;ZXZpbA==\x07clip", "clip"),
        ("\x1b]0;title\x1b\\x", "x"),
        ("a\x00b\x08c\x7fd", "abcd"),
        ("\x9b31mx", "31mx"),
        ("tab\tstays", "tab\tstays"),
    ],
)
def test_escape_sequences_are_taken_out(raw, shown):
    assert neutral(raw) == shown


def test_lines_are_the_same_however_the_bytes_arrive():
    data = "one\ntwo\xe9\n".encode() + b"\xff\xfe broken\nrest"
    whole = LogLines(3).feed(data)
    lines = LogLines(3)
    pieces = [line for byte in data for line in lines.feed(bytes([byte]))]
    assert pieces == whole
    assert pieces[0] == "[3] one"
    assert lines.flush() == ["[3] rest"]


def test_the_lines_of_a_machine_and_of_the_one_in_its_place_are_not_joined():
    lines = LogLines(0)
    assert lines.feed(b"one\nhal", 0) == ["[0] one"]
    assert lines.feed(b"f\nstep 12", 7) == ["[0] half"]
    assert lines.feed(b"starting\n", 0) == ["[0] step 12", "[0] starting"]


def test_a_line_without_end_is_shown_in_pieces_with_bounded_memory():
    lines = LogLines(0)
    shown = [line for _ in range(50) for line in lines.feed(b"x" * 1000)]
    assert shown
    assert len(lines._rest) <= LONGEST_LINE


def test_of_a_long_line_nothing_is_left_out():
    line = "".join(f"{number}é " for number in range(3000)).strip()
    shown = LogLines(0).feed(f"{line}\nnext\n".encode())
    assert "".join(each.removeprefix("[0] ") for each in shown[:-1]) == line
    assert shown[-1] == "[0] next"
    assert max(map(len, shown)) <= LONGEST_LINE + len("[0] ")


def test_of_a_redrawn_line_the_last_state_is_shown():
    assert LogLines(0).feed(b" 10%\r 50%\r100%\r\n") == ["[0] 100%"]


def test_a_bar_without_a_line_end_is_shown_now_and_then():
    """As tqdm draws it, for hours."""
    now = [0.0]
    lines = LogLines(0, lambda: now[0])
    assert lines.feed(b"\r 1%") == []
    now[0] = BAR_EVERY_S
    assert lines.feed(b"\r 2%") == ["[0]  2%"]
    assert lines.feed(b"\r 3%") == []
    now[0] = 2 * BAR_EVERY_S
    assert lines.feed(b"") == ["[0]  3%"]
    now[0] = 3 * BAR_EVERY_S
    assert lines.feed(b"") == [], "nothing has moved"
    assert lines.feed(b"\r100%\ndone\n") == ["[0] 100%", "[0] done"]
    now[0] = 9 * BAR_EVERY_S
    assert lines.feed(b"no line end, and no bar") == []


def sampled(step, steps=None, *, phase="training", **values):
    return events.MetricsSampled("run-1", 1, 5.0, step=step, steps=steps, phase=phase, values=values)


def test_a_validation_is_a_line_once(capsys):
    console = Console()
    for step in (20, 21, 22):
        console.emit(sampled(step, validation_loss=2.5, validation_step=20))
    console.emit(sampled(40, validation_loss=2.5, validation_step=40))
    said = [line.strip() for line in capsys.readouterr().err.splitlines() if "validation" in line]
    assert said == ["validation at step 20: loss 2.5000", "validation at step 40: loss 2.5000"]


def test_results_go_to_stdout_and_progress_to_stderr(capsys):
    console = Console()
    console.emit(events.PhaseStarted("provisioning", "2 nodes"))
    console.emit(sampled(50, validation_loss=2.5, validation_step=50))
    console.table(("run", "state"), [("demo-1", "running")])
    out, err = capsys.readouterr()
    assert "demo-1" in out
    assert "provisioning" in err
    assert "2.5000" in err
    assert "provisioning" not in out


def test_an_error_is_what_why_and_next_step(capsys):
    Console().error(QuotaExceeded("no quota", "Limit L-417A185B is 0.", "Raise it in the console."))
    lines = capsys.readouterr().err.splitlines()
    assert [line.strip() for line in lines] == ["error: no quota", "Limit L-417A185B is 0.", "Raise it in the console."]


def test_nobody_to_ask_is_a_no(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert Console().confirm("rent it?") is False


def test_json_is_the_only_thing_on_stdout(capsys):
    console = Console(as_json=True)
    console.data({"a": 1})
    console.next("mgpu ls")
    assert json.loads(capsys.readouterr().out) == {"a": 1}


def test_plain_progress_is_one_line_in_a_while(capsys):
    console = Console()
    for step in range(100):
        console.emit(sampled(step, 100, loss=2.0, tokens_per_s=10.0))
    assert len(capsys.readouterr().err.splitlines()) == 1


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        (sampled(None, phase="launching"), ""),  # a program of the user's own says no steps
        (sampled(50), "step 50"),
        (sampled(None, 300, phase="launching"), ""),
        (sampled(3, 300, loss=2.5, tokens_per_s=1000.0), "step 3/300  loss 2.5000  1,000 tokens/s"),
    ],
)
def test_the_live_bar_shows_what_is_known(event, shown, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")  # a dumb one has no live bar
    console = Console()
    console.emit(event)
    console.emit(event)
    console.done()
    text = neutral(terminal.getvalue())
    assert event.phase in text
    assert shown in text
    assert "None" not in text


def test_what_next_lines_are_for_stands_in_one_column(capsys):
    Console().next("mgpu logs a", "mgpu stop    end it", "mgpu run --stack b      again")
    assert capsys.readouterr().err.splitlines() == [
        "next: mgpu logs a",
        "      mgpu stop             end it",
        "      mgpu run --stack b    again",
    ]


def test_the_way_back_is_one_line(capsys):
    way = "  back after 17.2 s: detected 0.9 s, stopped 1.2 s, repaired 6.3 s, resumed 8.8 s"
    console = Console()
    console.emit(events.Recovered(7, 0.94, 1.2, 6.3, 8.8))
    console.emit(sampled(12, 20))
    console.emit(events.Recovered(7, 0.94, 1.2, 6.3, 8.8))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == way, "whether steps were done again is not known of a program that says none"
    assert lines[-1] == f"{way}; 7 steps done again"


def test_a_table_in_a_pipe_is_not_folded_and_has_no_blanks_at_the_end(capsys):
    Console().table(("run", "demo"), [("state", "x" * 300), ("step", "3")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "x" * 300 in lines[2]
    assert all(line == line.rstrip() for line in lines)


def test_a_reader_that_left_ends_no_run(monkeypatch):
    """`mgpu launch 2>&1 | head`, a terminal that was closed: the teardown still has to happen."""

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stderr", Closed())
    console = Console(show_logs=True)
    console.emit(events.PhaseStarted("teardown"))
    console.emit(events.LogChunk(0, 0, b"a line\nrest"))
    console.interactive = True
    console.emit(sampled(1, 10, loss=2.0, tokens_per_s=10.0))
    console.error(QuotaExceeded("no quota", "why", "next"))
    console.done()


@pytest.mark.parametrize("event", [events.Note, events.Warned, events.PhaseStarted])
def test_no_event_acts_on_the_terminal(event, capsys):
    Console().emit(event("before\x1b]52;c;ZXZpbA==\x07after"))
    assert "beforeafter" in capsys.readouterr().err


WIDE = (
    ("machine", "RAM", "price", "age"),
    [("p4d.24xlarge", "1152", "21.958", "306 d"), ("g5.xlarge", "16", "1.006", "now")],
)


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> list[str]:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", str(columns))
    Console().table(*WIDE, spare=("RAM", "age"))
    return neutral(terminal.getvalue()).splitlines()


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (34, ["machine", "RAM", "price", "age"]),
        (33, ["machine", "price", "age"]),
        (26, ["machine", "price"]),
        (5, ["machine", "RAM", "price", "age"]),  # below each other
    ],
)
def test_a_narrow_terminal_does_without_spare_columns(columns, shown, monkeypatch, capsys):
    head, _, first, *_ = on_a_terminal(monkeypatch, columns)
    left_out = [name for name in WIDE[0] if name not in shown]
    if columns > 10:
        assert head.split() == shown
        assert ("1152" in first) is ("RAM" in shown)
    assert (", ".join(left_out) in capsys.readouterr().err) if left_out else not capsys.readouterr().err


def test_a_wait_is_explained_where_it_is_long(monkeypatch, capsys):
    monkeypatch.setattr(console_module, "SILENCE_S", 0.01)
    said = threading.Event()

    class Loud(Console):
        def say(self, text: str, style: str = "") -> None:
            super().say(text, style)
            said.set()

    with Loud().waiting("asking aws"):
        assert said.wait(10)
    assert capsys.readouterr().err == "asking aws\n"


def test_a_short_wait_is_not_worth_a_word(monkeypatch, capsys):
    monkeypatch.setattr(console_module, "SILENCE_S", 0.05)
    with Console().waiting("asking aws"):
        pass
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(10)
    assert capsys.readouterr().err == ""
