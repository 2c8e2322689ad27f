"""Reads all tests, as pytest does, when a server that forks imports it: processes that are forked afterwards have them.

Six workers that each rewrite and import them on a fresh checkout take 54 s of CPU; one, and what is left for six: 18 s.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

import forks
import pytest


class Unread:
    """Forgets what could not be imported to its end: a worker tries again, and tells of it."""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            sys.modules.pop(".".join(Path(report.nodeid).with_suffix("").parts), None)


if forks.SERVER in os.environ:
    with contextlib.chdir(Path(__file__).parents[1]), contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["--collect-only", "-p", "no:cacheprovider", "-p", "no:xdist"], plugins=[Unread()])
