"""Which worker gets which file of tests, so that a run of all tests takes hardly longer than the CPU time it needs.

Most tests wait, for clocks and for other processes, so there are more workers than cores. Whole runs do not: each is
several processes that wait for each other at every step and keep a core busy or more. Only a few of them run at a time,
and they are never put off, because together they take as long as all the rest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import draw
import pytest
from xdist.scheduler import LoadFileScheduling

WHOLE_RUNS = (
    "tests/e2e/",
    "tests/examples/",
    "tests/failure/aws/",
    "tests/failure/crash/",
    "tests/failure/fleet/",
    "tests/newcomers/",
)
WHOLE_RUNS_AT_ONCE = 3 if os.environ.get("MGPU_DRAW") == draw.ALL else 2  # of all tests they take the longest
# Files that share a worker, for they share what takes long to start; see also `shared`.
KUBERNETES = "a Kubernetes"
TOGETHER = {
    "a Docker engine": (
        *("tests/remote/container/", "tests/infra/test_image.py"),
        *("tests/emulated/test_trainer_image.py", "tests/emulated/test_operator_image.py"),
    ),
    KUBERNETES: ("tests/contract/test_kube", "tests/e2e/test_kubernetes.py"),
    "torch": (
        *("tests/train/test_saving.py", "tests/train/test_export.py", "tests/train/test_shards.py"),
        "tests/train/test_trainer",
    ),
}
APART = "tests/gpu/"  # few files of tests that share nothing: each has a process of its own, of many seconds

# Seconds that a slow test takes, until a run on this machine has measured it. The first prefix that fits holds.
QUICK = 0.2
GUESSES = {
    "tests/failure/crash/": 540.0,
    "tests/failure/aws/": 28.0,
    "tests/failure/": 20.0,
    "tests/e2e/": 40.0,
    "tests/examples/": 23.0,
    "tests/newcomers/": 5.0,
    "": 8.0,
}


def shared(nodeid: str) -> str | None:
    """What a test shares with those of other files."""
    if nodeid.startswith("tests/contract/test_provider.py") and nodeid.endswith("[kubernetes]"):
        return KUBERNETES
    return next((what for what, files in TOGETHER.items() if nodeid.startswith(files)), None)


class LongestFirst(LoadFileScheduling):
    """Tests of one file share a worker, and those of TOGETHER do, but none of those that are APART. The longest comes
    first, so that none is begun when all else is done."""

    def __init__(self, config: pytest.Config, log: Any, seconds: Mapping[str, float]) -> None:
        super().__init__(config, log)
        self._seconds, self._slow = seconds, draw.slow_tests()

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(APART) else shared(nodeid) or super()._split_scope(nodeid)

    def _reschedule(self, node: Any) -> None:
        # A worker begins its last test only when it knows what comes next. Told earlier than that, files would wait
        # behind a long test while other workers have nothing to do.
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)

    def _assign_work_unit(self, node: Any) -> None:
        file = self._choice(node)
        if file is None:
            node.shutdown()
        else:
            self.workqueue.move_to_end(file, last=False)
            super()._assign_work_unit(node)

    def _choice(self, node: Any) -> str | None:
        busy = {each for each, work in self.assigned_work.items() if self._has_whole_run(work)}
        may = node in busy or len(busy) < WHOLE_RUNS_AT_ONCE
        files = [file for file in self.workqueue if may or not file.startswith(WHOLE_RUNS)]
        return max(files, key=lambda file: (file.startswith(WHOLE_RUNS), self._expected(file)), default=None)

    def _has_whole_run(self, work: Mapping[str, Mapping[str, bool]]) -> bool:
        return any(file.startswith(WHOLE_RUNS) and not all(tests.values()) for file, tests in work.items())

    def _expected(self, file: str) -> float:
        guess = next(seconds for prefix, seconds in GUESSES.items() if file.startswith(prefix))
        left = [test for test, done in self.workqueue[file].items() if not done]
        return sum(self._seconds.get(test, guess if test in self._slow else QUICK) for test in left)
