"""The figures at the end of a run of the tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import draw
import pytest
from figures import ALONE, KEPT, SLOWEST, Figures, Meter, cpu_s, folder


class Cache(dict[str, Any]):
    set = dict.__setitem__


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def figures(lines, monkeypatch):
    """What adds up reports; `figures(nodeid, seconds, cpu)` is one of them."""
    monkeypatch.delenv("MGPU_DRAW", raising=False)  # `make test-all` sets it, and then lists what is slow
    adds = Figures(SimpleNamespace(cache=Cache({KEPT: {"tests/unit/test_old.py::test_a": 3.0}})))

    def report(nodeid: str, seconds: float, cpu: float, **shared_s: tuple[float, bool]) -> None:
        told = {draw.shared(nodeid, name): each for name, each in shared_s.items()}
        given = SimpleNamespace(nodeid=nodeid, duration=seconds, cpu_s=cpu, shared_s=told, failed=False)
        adds.pytest_runtest_logreport(given)

    report.adds, report.kept = adds, adds._config.cache
    report.printed = lambda: adds.pytest_terminal_summary(SimpleNamespace(write_line=lines.append)) or lines
    return report


def test_set_up_call_and_teardown_are_added_up_by_file_and_by_folder(figures):
    for seconds, cpu in ((1.0, 0.5), (2.0, 1.0), (0.5, 0.0)):
        figures("tests/failure/fleet/links/test_links.py::test_a[1]", seconds, cpu)
    figures("tests/failure/fleet/test_kill.py::test_a", 2.0, 0.25)
    figures("tests/unit/plan/test_plan.py::test_a", 1.0, 1.0)
    said = [line.split() for line in figures.printed()]
    assert ["3.5", "1.5", "failure/fleet/links/test_links.py", "5.5", "1.8", "failure/fleet"] in said
    assert ["2.0", "0.2", "failure/fleet/test_kill.py", "1.0", "1.0", "unit/plan"] in said
    assert ["1.0", "1.0", "unit/plan/test_plan.py"] in said


def test_only_the_slowest_files_are_named_and_the_longest_comes_first(figures):
    for number in range(SLOWEST + 5):
        figures(f"tests/unit/test_{number}.py::test_a", float(number), 0.0)
    named = [line.split()[2] for line in figures.printed() if "unit/test_" in line]
    assert named == [f"unit/test_{number}.py" for number in range(SLOWEST + 4, 4, -1)]


def test_of_one_file_nothing_is_said(figures):
    figures("tests/unit/plan/test_plan.py::test_a", 1.0, 1.0)
    figures("tests/unit/plan/test_plan.py::test_b", 1.0, 1.0)
    assert figures.printed() == []


def test_a_run_of_one_test_forgets_no_other(figures):
    figures("tests/unit/plan/test_plan.py::test_a", 1.0, 1.0)
    figures("tests/unit/plan/test_plan.py::test_a", 0.256, 1.0)
    figures.adds.pytest_sessionfinish()
    assert figures.kept[KEPT] == {"tests/unit/test_old.py::test_a": 3.0, "tests/unit/plan/test_plan.py::test_a": 1.26}


def test_alone_a_test_takes_what_others_of_its_file_share_with_it_as_well(figures):
    file = "tests/unit/plan/test_plan.py"
    figures(f"{file}::test_a", 5.0, 1.0, made=(4.0, True))  # its set-up, in which `made` was made
    figures(f"{file}::test_a", 0.5, 1.0, made=(4.0, False))  # its call
    figures(f"{file}::test_b", 0.5, 1.0, made=(4.0, False))
    figures(f"{file}::test_c", 9.0, 1.0, quick=(0.5, True))  # set-ups that weigh less than the tests are not the point
    figures.adds.pytest_sessionfinish()
    took = {"made": 4.0, "test_a": 5.5, "test_b": 4.5, "test_c": 9.0}
    assert figures.kept[ALONE] == {f"{file}::{name}": seconds for name, seconds in took.items()}
    assert figures.kept[KEPT][f"{file}::test_b"] == 0.5, "side by side they take as long as they took"


@pytest.mark.parametrize(
    ("file", "name"),
    [("tests/unit/test_a.py", "unit"), ("tests/failure/test_a.py", "failure"), ("tests/test_a.py", ".")],
)
def test_a_folder_is_named_by_what_lies_below_tests(file, name):
    assert folder(file) == name


def test_a_report_says_how_much_cpu_its_step_has_used():
    meter = Meter()

    def step(work_s: float) -> float:
        end = cpu_s() + work_s
        while cpu_s() < end:
            pass
        wrapped = meter.pytest_runtest_makereport(SimpleNamespace(nodeid="tests/test_a.py::test_a"))
        next(wrapped)
        with pytest.raises(StopIteration) as returned:
            wrapped.send(SimpleNamespace())
        return returned.value.value.cpu_s

    much, none = step(0.2), step(0.0)
    assert much >= 0.2 > none >= 0


@pytest.mark.parametrize(
    ("options", "listed"),
    [
        ({}, True),
        ({"lf": False}, True),
        ({"lf": True}, False),
        ({"collectonly": True}, False),
        ({"keyword": "a"}, False),
    ],
    ids=["without a cache", "everything", "what failed", "nothing is run", "some"],
)
def test_slow_tests_are_listed_after_a_run_of_everything_alone(figures, monkeypatch, options, listed):
    monkeypatch.setenv("MGPU_DRAW", draw.ALL)
    monkeypatch.setattr(draw, "list_slow", lambda seconds: f"{len(seconds)} listed")
    figures("tests/unit/plan/test_plan.py::test_a", 1.0, 1.0)
    config = figures.adds._config
    config.option = SimpleNamespace(**{"collectonly": False, "keyword": "", "markexpr": "", **options})
    config.args_source = pytest.Config.ArgsSource.TESTPATHS
    assert figures.printed() == (["1 listed"] if listed else [])
