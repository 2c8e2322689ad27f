"""The scheduler of the tests' own, on workers whose clock is a number."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import draw
import pytest
from scheduling import APART, KUBERNETES, TOGETHER, WHOLE_RUNS, WHOLE_RUNS_AT_ONCE, LongestFirst, shared

RUNS = {f"{folder}test_{n}.py": [40.0, 2.0, 30.0] for n, folder in enumerate(WHOLE_RUNS)}
WAITING = {f"tests/unit/test_{n}.py": [0.5] * n + [5.0] for n in range(30)}
LONG = {"tests/infra/test_long.py": [120.0]}


@dataclass(eq=False)
class Worker:
    """As xdist's: it begins a test when it knows the next one, or that there is none."""

    told: list[int] = field(default_factory=list)
    shutting_down: bool = False
    free_at: float = 0.0
    running: str = ""
    gateway: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(id="worker"))

    def send_runtest_some(self, indices: list[int]) -> None:
        self.told += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def ready(self) -> bool:
        return not self.running and len(self.told) >= (1 if self.shutting_down else 2)


@dataclass
class Run:
    """All that happened: which test was begun when, and which ran beside it."""

    order: list[str] = field(default_factory=list)
    beside: list[list[str]] = field(default_factory=list)
    by: dict[str, int] = field(default_factory=dict)  # test -> number of the worker
    ended_at: float = 0.0


def play(
    config: pytest.Config, files: dict[str, list[float]], workers: int = 4, known: bool = True, dies_after: int = 0
) -> Run:
    took = {f"{file}::test_{n}": seconds for file, tests in files.items() for n, seconds in enumerate(tests)}
    tests = list(took)
    scheduler = LongestFirst(config, None, took if known else {})
    scheduler.numnodes = workers
    crew = [Worker() for _ in range(workers)]
    for worker in crew:
        scheduler.add_node(worker)
    for worker in crew:
        scheduler.add_node_collection(worker, tests)
    scheduler.schedule()
    run = Run()
    while True:
        for worker in crew:
            if worker.ready:
                worker.running = tests[worker.told[0]]
                worker.free_at = run.ended_at + took[worker.running]
                run.order.append(worker.running)
                run.by[worker.running] = crew.index(worker)
                run.beside.append([each.running for each in crew if each.running])
        busy = [worker for worker in crew if worker.running]
        if not busy:
            break
        first = min(busy, key=lambda worker: worker.free_at)
        run.ended_at, first.running = first.free_at, ""
        scheduler.mark_test_complete(first, first.told.pop(0))
        if len(run.order) == dies_after and len(crew) > 1:
            crew.remove(first)
            scheduler.remove_node(first)
    assert not scheduler.has_pending, "workers wait for each other"
    return run


@pytest.fixture
def config(request, monkeypatch) -> pytest.Config:
    monkeypatch.setattr(request.config.option, "tx", ["popen"], raising=False)
    monkeypatch.setattr(request.config.option, "loadscopereorder", False, raising=False)
    return request.config


@pytest.mark.parametrize("workers", [1, 2, 4, 9])
@pytest.mark.parametrize("files", [{**WAITING, **RUNS, **LONG}, RUNS, LONG, dict(list(RUNS.items())[:1])])
def test_every_test_runs_once_however_many_workers_there_are(config, files, workers):
    order = play(config, files, workers).order
    assert sorted(order) == sorted(f"{file}::test_{n}" for file, tests in files.items() for n in range(len(tests)))


def test_what_a_dead_worker_has_left_is_done_by_the_others(config):
    files = {**WAITING, **LONG}
    for dies_after in range(1, 40):
        order = play(config, files, workers=2, dies_after=dies_after).order
        assert set(order) == {f"{file}::test_{n}" for file, tests in files.items() for n in range(len(tests))}


def test_only_so_many_whole_runs_are_under_way_and_they_are_not_put_off(config):
    run = play(
        config, {**WAITING, **RUNS, **LONG, "tests/infra/test_other.py": [90.0], "tests/remote/test_a.py": [80.0]}
    )
    counts = [sum(test.startswith(WHOLE_RUNS) for test in tests) for tests in run.beside]
    assert max(counts) == WHOLE_RUNS_AT_ONCE
    assert sum(test.startswith(WHOLE_RUNS) for test in run.order[:4]) == WHOLE_RUNS_AT_ONCE
    assert {test.partition("::")[0] for test in run.order[:4]} >= set(LONG), "the longest of the rest is begun at once"


def test_the_last_worker_ends_soon_after_the_others_could_have(config):
    files = {**WAITING, **RUNS, **LONG}
    chain = sum(map(sum, RUNS.values())) / WHOLE_RUNS_AT_ONCE
    longest = max(map(sum, RUNS.values()))
    assert play(config, files).ended_at <= max(chain, sum(map(sum, files.values())) / 4) + longest
    assert play(config, WAITING).ended_at <= sum(map(sum, WAITING.values())) / 4 * 1.25


def test_no_file_waits_behind_a_long_test_while_another_worker_is_idle(config):
    files = {
        "tests/unit/test_a.py": [100.0, 1.0],
        "tests/unit/test_b.py": [60.0, 1.0],
        "tests/unit/test_c.py": [35.0, 1.0],
    }
    assert play(config, files, workers=2).ended_at == 101


def test_files_that_share_what_takes_long_to_start_share_a_worker(config):
    groups = [[file if file.endswith(".py") else f"{file}test_it.py" for file in files] for files in TOGETHER.values()]
    run = play(config, {**WAITING, **RUNS, **{file: [30.0, 1.0] for group in groups for file in group}})
    for group in groups:
        assert len({run.by[f"{file}::test_{n}"] for file in group for n in (0, 1)}) == 1


def test_a_file_of_tests_that_share_nothing_is_spread_over_all_workers(config):
    assert play(config, {f"{APART}test_it.py": [10.0] * 16}).ended_at == 40


def test_cases_of_the_contract_on_kubernetes_are_with_its_other_tests():
    assert shared("tests/contract/test_provider.py::test_it[kubernetes]") == KUBERNETES
    assert shared("tests/contract/test_provider.py::test_it[local]") is None


def test_a_machine_that_has_measured_nothing_goes_by_its_guesses(config, monkeypatch):
    monkeypatch.setattr(draw, "slow_tests", lambda: {f"{file}::test_0" for file in LONG})
    run = play(config, {**WAITING, **LONG}, known=False)
    assert any(test.startswith(tuple(LONG)) for test in run.order[:4])


def test_every_kind_of_whole_run_is_a_folder_that_exists(request):
    assert [folder for folder in WHOLE_RUNS if not (request.config.rootpath / folder).is_dir()] == []
    shared = [file for files in TOGETHER.values() for file in files]
    assert [file for file in shared if not list(request.config.rootpath.glob(f"{file}*"))] == []
