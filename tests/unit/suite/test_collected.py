"""What workers find imported when they are forked."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Literal

import collected
import pytest


@pytest.mark.parametrize(("outcome", "stays"), [("passed", True), ("failed", False), ("skipped", False)])
def test_a_module_that_was_not_imported_to_its_end_is_imported_again(
    outcome: Literal["passed", "failed", "skipped"], stays: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "tests.unit.test_half", ModuleType("half"))
    report = pytest.CollectReport("tests/unit/test_half.py", outcome, None, [])
    collected.Unread().pytest_collectreport(report)
    assert ("tests.unit.test_half" in sys.modules) is stays
