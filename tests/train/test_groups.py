"""Groups of ranks that strategies make: who is in them, and who keeps the others waiting."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import ranks

PROGRAM = Path(__file__).with_name("away.py")


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """What four ranks have written."""
    folder = tmp_path_factory.mktemp("away")
    said = folder / "said"
    assert ranks.start(PROGRAM, [folder], said, os.environ).wait(120) == 0, said.read_text()
    return folder


def of_ranks(out: Path, before: str = "") -> list[dict]:
    return [json.loads((out / f"{before}{rank}.json").read_text()) for rank in range(4)]


def test_a_rank_that_stays_away_is_missed_within_the_runs_limit_by_every_group_of_a_strategy(out):
    missed = {name: words for each in of_ranks(out) for name, words in each.items()}
    assert {*missed} == {"fsdp tensor", "fsdp pipeline", "hsdp replicate", "hsdp shard", "ddp context"}
    assert [words for words in missed.values() if "Timed out" not in words] == []


def test_statistics_are_the_mean_of_all_that_have_the_same_part_of_a_model(out):
    """Stages have batch norms of their own; ranks that share a layer have seen the same samples."""
    found = of_ranks(out, "means-")
    assert [each["pipeline"] for each in found] == [0.5, 0.5, 2.5, 2.5]
    assert [each["tensor"] for each in found] == [1, 2, 1, 2]
