"""Ranks that somebody keeps waiting are told within the run's limit, whatever group they wait in."""

from __future__ import annotations

import json
import os
from pathlib import Path

import ranks

PROGRAM = Path(__file__).with_name("away.py")


def test_a_rank_that_stays_away_is_missed_within_the_runs_limit_by_every_group_of_a_strategy(tmp_path):
    said = tmp_path / "said"
    assert ranks.start(PROGRAM, [tmp_path], said, os.environ).wait(120) == 0, said.read_text()
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    missed = {name: words for each in told for name, words in each.items()}
    assert {*missed} == {"fsdp tensor", "fsdp pipeline", "hsdp replicate", "hsdp shard", "ddp context"}
    assert [words for words in missed.values() if "Timed out" not in words] == []
