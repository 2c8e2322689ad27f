"""Where the time of a run of the tests went: its slowest files and its folders, at the end of every run.

Seconds are those inside tests, with set-up and teardown: of workers side by side they add up to more than the wall
clock shows. CPU is what each worker has used, and the processes that it has waited for. What a test has left to others,
such as node processes that outlive their parent, is missing: it is the least that was used.
"""

from __future__ import annotations

import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import draw
import pytest

SLOWEST = 15
KEPT = "mgpu/seconds"  # in pytest's cache: what each test took the last time it ran
ALONE = "mgpu/alone"  # what it takes alone: with what tests of its file share; and that, by its own name


def cpu_s() -> float:
    """CPU time of this process and of all that it has waited for."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


def known(config: pytest.Config, which: str = KEPT) -> dict[str, float]:
    """Seconds by test, from earlier runs."""
    cache = getattr(config, "cache", None)  # absent with `-p no:cacheprovider`
    return cache.get(which, {}) if cache else {}


def folder(file: str) -> str:
    """`tests/unit/plan/test_plan.py` is in unit, `tests/failure/fleet/links/test_links.py` in failure/fleet."""
    below = file.removeprefix("tests/").split("/")[:-1]
    return "/".join(below[:2]) or "."


class Meter:
    """In the process that runs tests: says with each report how much CPU that step has used, and which fixtures the
    test shares with others of its file: how long they took, and whether it was the first."""

    def __init__(self) -> None:
        self._last = cpu_s()
        self._made = dict[str, float]()
        self._told = set[str]()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[Any]:
        began = time.monotonic()
        try:
            return (yield)
        finally:
            if fixturedef.scope == "module":
                self._made[draw.shared(request.node.nodeid, fixturedef.argname)] = time.monotonic() - began

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[Any]:
        report = yield
        now = cpu_s()
        report.cpu_s, self._last = now - self._last, now
        shares = {draw.shared(item.nodeid, name) for name in getattr(item, "fixturenames", ())} & self._made.keys()
        report.shared_s = {name: [self._made[name], name not in self._told] for name in shares}
        self._told |= shares
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_s"] = cpu_s()


class Figures:
    """In the process that reports: adds up, keeps and prints."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds = defaultdict[str, float](float)  # by test
        self._shared = dict[str, dict[str, float]]()  # by test, and by what it shares
        self._first = defaultdict[str, float](float)  # of what others share as well, by test
        self._cpu = defaultdict[str, float](float)
        self._workers_cpu_s = 0.0
        self._failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed
        self._seconds[report.nodeid] += report.duration
        self._cpu[report.nodeid] += getattr(report, "cpu_s", 0.0)
        shared = getattr(report, "shared_s", {})
        self._shared.setdefault(report.nodeid, {}).update({name: seconds for name, (seconds, _) in shared.items()})
        self._first[report.nodeid] += sum(seconds for seconds, first in shared.values() if first)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._workers_cpu_s += getattr(node, "workeroutput", {}).get("cpu_s", 0.0)

    def pytest_sessionfinish(self) -> None:
        cache = getattr(self._config, "cache", None)
        if cache and self._seconds:
            rounded = {test: round(seconds, 2) for test, seconds in self._seconds.items()}
            cache.set(KEPT, known(self._config) | rounded)
            cache.set(ALONE, known(self._config, ALONE) | self._alone())

    def _alone(self) -> dict[str, float]:
        """By test, and by a fixture that takes longer than all tests do that share it: these are drawn together."""
        own = {test: seconds - self._first[test] for test, seconds in self._seconds.items()}
        made, of_those = dict[str, float](), defaultdict[str, float](float)
        for test, shared in self._shared.items():
            made |= shared
            for name in shared:
                of_those[name] += own[test]
        alone = {name: seconds for name, seconds in made.items() if seconds > of_those[name]}
        alone |= {test: seconds + sum(self._shared.get(test, {}).values()) for test, seconds in own.items()}
        return {name: round(seconds, 2) for name, seconds in alone.items()}

    def _list_slow(self) -> str:
        """After a run of everything, and only then: a test that was not run would be missing from the list."""
        if os.environ.get("MGPU_DRAW") != draw.ALL or self._failed:
            return ""
        option, source = self._config.option, self._config.args_source
        some = option.collectonly or option.keyword or option.markexpr or getattr(option, "lf", False)
        if source is not pytest.Config.ArgsSource.TESTPATHS or some:
            return ""
        return draw.list_slow(self._alone())

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if said := self._list_slow():
            terminalreporter.write_line(said)
        files = self._rows(lambda test: test.partition("::")[0])
        if len(files) < 2:
            return  # pytest's last line says it all
        folders = self._rows(lambda test: folder(test.partition("::")[0]))
        left = ["s in tests    CPU  slowest files", *map(_line, files[:SLOWEST])]
        right = ["s in tests    CPU  folders", *map(_line, folders)]
        width = max(map(len, left)) + 4
        terminalreporter.write_line("")
        for row in range(max(len(left), len(right))):
            beside = right[row] if row < len(right) else ""
            terminalreporter.write_line(f"{left[row] if row < len(left) else '':{width}}{beside}".rstrip())
        in_tests = sum(self._cpu.values())
        # workers that have been waited for are in `cpu_s` already
        total = max(self._workers_cpu_s, cpu_s(), in_tests)
        terminalreporter.write_line(
            f"{sum(self._seconds.values()):.0f} s in tests; {total:.0f} s of CPU, {in_tests:.0f} of them in tests"
        )

    def _rows(self, group: Callable[[str], str]) -> list[tuple[float, float, str]]:
        """Seconds, CPU seconds and name, the longest first."""
        sums = defaultdict[str, list[float]](lambda: [0.0, 0.0])
        for test, seconds in self._seconds.items():
            sums[group(test)][0] += seconds
            sums[group(test)][1] += self._cpu[test]
        return sorted(((seconds, cpu, name) for name, (seconds, cpu) in sums.items()), reverse=True)


def _line(row: tuple[float, float, str]) -> str:
    seconds, cpu, name = row
    return f"{seconds:10.1f} {cpu:6.1f}  {name.removeprefix('tests/')}"
