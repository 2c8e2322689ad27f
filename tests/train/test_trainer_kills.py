"""50 kills of a trainer, each at another point of a step: it goes on from what both nodes have, bit for bit."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks

PROGRAM = Path(__file__).with_name("kills.py")
PHASES = ("forward", "backward", "exchange", "optimizer", "validation", "capture", "write", "rename")
STEPS, VALIDATIONS, KILLS = 4, 3, 50
KEYS = ("kind", "step", "loss", "grad_norm", "lr", "samples")


def points(seed: str) -> Iterator[tuple[str, ...]]:
    """Strategy, phase, before or after it, which time, and the rank: as many of each phase."""
    drawn = random.Random(seed)
    for number, phase in enumerate(PHASES):
        times = map(str, range(1, 1 + (VALIDATIONS if phase == "validation" else STEPS)))
        every = list(itertools.product(("ddp", "fsdp"), (phase,), ("before", "after"), times, ("0", "1")))
        yield from drawn.sample(every, len(range(number, KILLS, len(PHASES))))


POINTS = list(points(os.environ.get("MGPU_KILL_SEED", "7")))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`told("ddp")` trains to the end, `told("ddp", *point)` is killed and resumed; the folder of what came of it."""
    out = tmp_path_factory.mktemp("kills")
    for number in range(20):
        (out / "text").mkdir(exist_ok=True)
        (out / "text" / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog " * 8)

    def tell(*point: str) -> Path:
        home = out / "-".join(point)
        if not home.exists():
            teller = ranks.start(PROGRAM, [out, *point], out / f"{home.name}.said", os.environ)
            assert teller.wait() == 0, teller.said
        return home

    return tell


def lines(home: Path, attempt: str, *kinds: str) -> list[list[dict[str, Any]]]:
    """Of both ranks."""
    files = [home / attempt / f"rank-{rank}.jsonl" for rank in (0, 1)]
    read = [map(json.loads, path.read_text().splitlines()) for path in files]
    return [[line for line in each if line["kind"] in kinds] for each in read]


def numbers(home: Path, attempt: str) -> list[list[dict[str, Any]]]:
    """What each rank says of steps and validations."""
    return [
        [{key: line.get(key) for key in KEYS} for line in each] for each in lines(home, attempt, "step", "validation")
    ]


@pytest.mark.drawn(
    "kills of a trainer",
    *(
        "tests/train/kills.py",
        "train/mgpu_train/loop.py",
        "train/mgpu_train/step.py",
        "train/mgpu_train/checkpoint/state.py",
    ),
    *(f"train/mgpu_train/{folder}" for folder in ("checkpoint/distributed", "engines", "optim", "strategies")),
)
@pytest.mark.parametrize("point", POINTS, ids="-".join)
def test_a_trainer_that_is_killed_goes_on_as_if_it_had_never_been(told, point):
    strategy, phase, _, time, rank = point
    whole, cut = told(strategy), told(*point)
    story = json.loads((cut / "story.json").read_text())
    assert story["begun"][int(rank)] == -signal.SIGKILL, "the point was never met"
    assert story["begun"][1 - int(rank)] == 1, "who is left ends by itself"
    assert story["resumed"] == [0, 0]
    for all_files, files in zip(json.loads((whole / "story.json").read_text())["whole"], story["whole"], strict=True):
        assert files == {step: all_files[step] for step in files}, "what has the name is whole, whoever else has it"

    uninterrupted = numbers(whole, "begun")
    assert [len(each) for each in uninterrupted] == [STEPS + VALIDATIONS] * 2
    before = numbers(cut, "begun")
    assert before == [expected[: len(each)] for each, expected in zip(before, uninterrupted, strict=True)]
    (resumed,) = {each[0]["resumed_step"] for each in lines(cut, "resumed", "start")}
    killed_in = 2 * (int(time) - 1) if phase == "validation" else int(time)
    assert killed_in - 2 <= (resumed or 0) <= killed_in
    after = [[line for line in each if resumed is None or line["step"] > resumed] for each in uninterrupted]
    assert numbers(cut, "resumed") == after
