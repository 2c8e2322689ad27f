"""Tables and words on terminals of any width: nothing is broken inside a word."""

from __future__ import annotations

import pytest

from mgpu.table import Table
from mgpu.words import number, sparkline, wrapped

RUNS = Table(
    ("run", "state", "begun"),
    [("bert-large-0918-k3m9x", "succeeded", "3 d ago"), ("bert-large-0921-w8f4z", "running, no supervisor", "1 h ago")],
)
WORDS = {word for row in (RUNS.columns, *RUNS.rows) for cell in row for word in cell.split()}


@pytest.mark.parametrize("width", [30, 41, 42, 43, 50, 58, 59, 80])
def test_every_word_is_whole_at_any_width_and_lines_fit_where_words_do(width):
    lines = RUNS.lines(width)
    shown = " ".join(lines).split()
    assert set(shown) - WORDS <= {"─" * count for count in range(1, 200)}
    assert all(shown.count(word) == sum(" ".join(row).split().count(word) for row in RUNS.rows) for word in ("3", "1"))
    if width >= RUNS.least:
        assert max(map(len, lines)) <= width


def test_without_a_terminal_a_row_is_a_line():
    lines = RUNS.lines()
    assert len(lines) == 4
    assert lines[3] == "bert-large-0921-w8f4z   running, no supervisor   1 h ago"


def test_columns_that_can_be_spared_go_first():
    assert RUNS.fitting(43, ("begun", "state")).columns == ("run", "state", "begun")
    assert RUNS.fitting(RUNS.least - 1, ("begun", "state")).columns == ("run", "state")
    assert RUNS.fitting(5, ("begun", "state")).columns == RUNS.columns, "below each other there is room for all"


def test_cells_of_a_column_may_stay_whole():
    whole = Table(RUNS.columns, RUNS.rows, whole=("begun",))
    assert whole.least == RUNS.least + len("3 d ago") - len("begun")
    assert RUNS.lines(RUNS.least)[2].endswith("3 d")
    assert whole.lines(whole.least)[2].endswith("3 d ago")
    assert whole.fitting(whole.least - 1, ("state",)).least == whole.least - len("supervisor") - 3


def test_a_table_that_does_not_fit_has_its_rows_below_each_other():
    assert RUNS.lines(20)[:3] == ["run bert-large-0918-k3m9x", "  state   succeeded", "  begun   3 d ago"]


def test_names_and_values_stay_beside_each_other_and_a_long_path_goes_over_the_edge():
    path = "s3://bucket/" + "x" * 40
    table = Table(("run", "a"), [("checkpoint", f"step 10 in {path}"), ("state", "succeeded")])
    assert table.lines(30)[2:] == ["checkpoint   step 10 in", f"             {path}", "state        succeeded"]
    assert len(table.lines(30)[1]) == 30


@pytest.mark.parametrize(
    ("values", "blocks", "line"),
    [
        ([1.0, 1.5, 2.0], True, "▁▅█"),
        ([2.01, None, 1.9, 1.9, 1.96], False, "8.115"),
        ([3.0, 3.0], True, "▁▁"),
        ([None], True, "·"),
        ([], True, ""),
        ([-1e300, 1e300], False, "18"),
    ],
)
def test_a_line_of_values(values, blocks, line):
    assert sparkline(values, blocks=blocks) == line


@pytest.mark.parametrize(
    ("value", "words"), [(1.89345, "1.893"), (51234.6, "51235"), (0.00001234, "1.234e-05"), (-0.5, "-0.5"), (12, "12")]
)
def test_a_number_for_people(value, words):
    assert number(value) == words


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("a run-id of-its own", 8, ["a run-id", "of-its", "own"]),
        ("  say `mgpu attach x`, or not", 14, ["  say", "  `mgpu attach x`,", "  or not"]),
        ("one\n\ntwo", 80, ["one", "", "two"]),
        ("", 80, [""]),
    ],
)
def test_words_and_commands_are_not_broken(text, width, lines):
    assert wrapped(text, width) == lines
