"""`python -m bench` runs what it was asked for, or says why not."""

from __future__ import annotations

import sys

import pytest

from bench import __main__ as bench


@pytest.mark.parametrize("names", [["train", "startup"], []])
def test_a_part_of_a_bench_that_has_none_runs_nothing(names, monkeypatch, capsys):
    ran = []
    for table in (bench.BENCHES, bench.LONG):
        for name in table:
            monkeypatch.setitem(table, name, lambda *_, name=name: ran.append(name))
    monkeypatch.setattr(sys, "argv", ["bench", *names, "--only", "speed"])
    assert (bench.main(), ran) == (2, [])
    assert "no parts in startup" in capsys.readouterr().err
