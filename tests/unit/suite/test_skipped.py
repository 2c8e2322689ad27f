"""What the end of a run of the tests says of those that were skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
SOME = """
import pytest

@pytest.mark.parametrize("n", range(3))
def test_lacks_one(require, n):
    require("docker", False, "an engine needs root")

def test_lacks_another(require):
    require("sshd", False, "it does not start:\\n  no room")

def test_skips_by_itself():
    pytest.skip("a folder keeps no checksums")

def test_has_it(require):
    require("docker", True, "")
"""


def lines(folder: Path, *options: str) -> list[str]:
    (folder / "test_some.py").write_text(SOME)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", *options, "."]
    env = {**os.environ, "PYTHONPATH": str(TESTS), "MGPU_REQUIRE": ""}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def test_the_end_of_a_run_has_a_table_of_what_was_skipped_and_why(tmp_path):
    said = lines(tmp_path)
    at = next(i for i, line in enumerate(said) if line.startswith("Skipped for what this machine lacks: 5 tests."))
    assert [line.split(maxsplit=2) for line in said[at + 1 : at + 4]] == [
        ["docker", "3", "an engine needs root"],
        ["sshd", "1", "it does not start: no room"],
        ["-", "1", "a folder keeps no checksums"],
    ]


def test_workers_skips_are_in_it_and_where_nothing_was_skipped_there_is_none(tmp_path):
    assert any(line.split()[:2] == ["docker", "3"] for line in lines(tmp_path, "--numprocesses", "2"))
    assert not any("lacks" in line for line in lines(tmp_path, "-k", "has_it"))
