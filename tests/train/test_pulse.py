"""A rank says where it is for as long as it lives, and how much it has done."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from mgpu_train.metrics.lines import MetricLines
from mgpu_train.metrics.pulse import EVERY_S, Pulse
from waiting import until


def said(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "rank-3.jsonl").read_text()
    return [{name: value for name, value in json.loads(line).items() if name != "t"} for line in text.splitlines()]


def test_every_word_says_the_phase_the_step_and_what_is_done(tmp_path):
    pulse = Pulse(MetricLines(tmp_path, 3))
    pulse.enter("training")
    pulse.stepped(7)
    pulse.did()
    pulse.did()
    pulse.beat()
    assert said(tmp_path) == [
        {"kind": "phase", "phase": "training"},
        {"kind": "alive", "phase": "training", "step": 7, "done": 2},
    ]


def test_a_rank_that_does_nothing_says_so_until_it_ends(tmp_path):
    assert EVERY_S <= 10
    with Pulse(MetricLines(tmp_path, 3), every_s=0.01) as pulse:
        pulse.enter("building")
        until(lambda: len(said(tmp_path)) > 4, 60)  # one may be of before
    begun = said(tmp_path).index({"kind": "phase", "phase": "building"})
    first, *others = said(tmp_path)[begun + 1 : begun + 4]
    assert first["phase"] == "building"
    assert others == [first, first], "nothing was done meanwhile"
    count = len(said(tmp_path))
    time.sleep(0.1)
    assert len(said(tmp_path)) <= count + 1, "one may have been on its way"


def test_what_begins_is_more_than_what_was(tmp_path):
    """An agent sees by it that a rank goes on, also where a line was lost."""
    pulse = Pulse(MetricLines(tmp_path, 3))
    pulse.beat()
    pulse.enter("validation")
    pulse.beat()
    before, _, after = said(tmp_path)
    assert after["done"] > before["done"]
