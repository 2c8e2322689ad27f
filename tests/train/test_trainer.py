"""Training on one and two ranks: the same losses whatever the strategy, accumulation, interruption and world size."""

from __future__ import annotations

import json
import platform
import random
from pathlib import Path
from typing import Any

import mgpu_train
import pytest
import ranks
import torch
from mgpu_train.agent.status.tail import Progress
from mgpu_train.tasks.entry import LM

SCENARIOS = Path(__file__).with_name("scenarios.py")
STEPS = 6


def launch(out: Path, count: int) -> None:
    started = ranks.meet(SCENARIOS, count, out, said=out / "said")
    try:
        assert [rank.wait() for rank in started] == [0] * count, started[0].said
    finally:
        for rank in started:
            rank.kill()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All scenarios, trained once: those of one rank, of two, and of one again that go on from those of two."""
    out = tmp_path_factory.mktemp("trainer")
    chance = random.Random(1)
    for number in range(20):
        words = [chance.choice(["def", "return", "self", "import", "lambda", "None"]) for _ in range(60)]
        (out / "text").mkdir(exist_ok=True)
        (out / "text" / f"{number}.txt").write_text(" ".join(words))
    for count in (1, 2, 1):
        launch(out, count)
    return out


def failures(out: Path, name: str) -> list[str]:
    found = [json.loads(path.read_text()).get(name) for path in out.glob("failures-*.json")]
    return [failure for failure in found if failure]


def lines(out: Path, name: str, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    assert failures(out, name) == []
    return lines_of(out, name, kind, rank)


def lines_of(out: Path, name: str, kind: str, rank: int) -> list[dict[str, Any]]:
    """Also of a scenario that failed."""
    text = (out / name / "metrics" / f"rank-{rank}.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


def losses(out: Path, name: str, kind: str = "step") -> list[float]:
    return [line["loss"] for line in lines(out, name, kind)]


def saved(out: Path, name: str) -> list[str]:
    return sorted(path.name for path in (out / name / "checkpoints").iterdir())


def last(out: Path, name: str) -> Path:
    return out / name / "checkpoints" / f"step-{STEPS}"


CLOSE = {"rel": 1e-4}


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_every_strategy_gives_the_losses_of_one_process(out, name):
    assert len(losses(out, name)) == STEPS
    assert losses(out, name) == pytest.approx(losses(out, "single"), **CLOSE)
    assert losses(out, name, "validation") == pytest.approx(losses(out, "single", "validation"), **CLOSE)


@pytest.mark.parametrize("name", ["ddp-micro-1", "ddp-micro-3", "fsdp-micro-1", "fsdp-micro-3"])
def test_accumulation_changes_nothing(out, name):
    assert losses(out, name) == pytest.approx(losses(out, "single"), **CLOSE)
    norms = [line["grad_norm"] for line in lines(out, name, "step")]
    assert norms == pytest.approx([line["grad_norm"] for line in lines(out, "single", "step")], rel=1e-3)


@pytest.mark.parametrize("name", ["ddp-odd", "fsdp-odd", "ddp-odd-micro", "fsdp-odd-micro"])
def test_a_batch_that_ranks_do_not_divide_is_the_same_batch(out, name):
    """Of 7 samples one rank has 3, the other 4: in micro-batches of one its last one is empty."""
    for key, far in (("loss", 1e-4), ("grad_norm", 1e-3)):
        expected = [line[key] for line in lines(out, "single-odd", "step")]
        assert [line[key] for line in lines(out, name, "step")] == pytest.approx(expected, rel=far)
    assert losses(out, name, "validation") == pytest.approx(losses(out, "single-odd", "validation"), **CLOSE)


def test_what_is_read_a_step_late_is_the_same(out, same_bits):
    """As beside a GPU. A signal is heard a step later, on all ranks; a request to save is heard once."""
    assert losses(out, "late") == losses(out, "ddp")
    assert losses(out, "late", "validation") == losses(out, "ddp", "validation")
    assert saved(out, "late") == saved(out, "ddp")
    for step in (3, 6):
        one, other = (out / name / "checkpoints" / f"step-{step}" for name in ("late", "ddp"))
        same_bits(one, other)
        metas = [json.loads((folder / "meta.json").read_text()) for folder in (one, other)]
        assert metas[0] == metas[1]
    for rank in (0, 1):
        assert [line["step"] for line in lines(out, "late-cut", "step", rank)] == [1, 2, 3, 4, 5]
        assert [line["step"] for line in lines(out, "late-cut", "end", rank)] == [5]
        assert [line["step"] for line in lines(out, "late-early", "checkpoint", rank)] == [2, 6]
        assert [line["step"] for line in lines(out, "late-minutes", "checkpoint", rank)] == [2, 4, 6]


@pytest.mark.parametrize("name", ["ddp-bf16", "fsdp-bf16", "ddp-fp16", "fsdp-fp16"])
def test_computing_in_16_bits_is_near_and_not_the_same(out, name):
    assert losses(out, name) == pytest.approx(losses(out, "single"), rel=0.02)
    assert losses(out, name) != pytest.approx(losses(out, "single"), rel=1e-7)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_cut_and_resumed_equals_uninterrupted_bit_for_bit(out, strategy, same_bits):
    assert [line["step"] for line in lines(out, f"{strategy}-resumed", "step")] == [5, 6]
    assert losses(out, f"{strategy}-resumed") == losses(out, strategy)[4:]
    same_bits(last(out, strategy), last(out, f"{strategy}-resumed"))


@pytest.mark.parametrize("name", ["ddp-cut", "fsdp-cut"])
def test_a_signal_to_one_rank_stops_all_at_the_same_step_with_a_checkpoint(out, name):
    for rank in (0, 1):
        (end,) = lines(out, name, "end", rank)
        assert (end["step"], end["reason"]) == (4, "stopped")
    assert saved(out, name) == ["step-4"]


@pytest.mark.parametrize("name", ["ddp", "fsdp", "pipeline"])
def test_a_signal_ends_a_validation_on_all_ranks_and_a_resume_makes_up_for_it(out, name, same_bits):
    """A machine that goes in two minutes has none for the rest of a long one: the checkpoint comes first. So it is with
    the one that a resume owes, which the next one owes then."""
    parts = [f"{name}-left{'-on' * resumes}" for resumes in range(5)]
    ways = [(3, "stopped"), (3, "stopped"), (6, "stopped"), (6, "stopped"), (6, "done")]
    for rank in (0, 1):
        ends = [lines(out, part, "end", rank)[0] for part in parts]
        assert [(end["step"], end["reason"]) for end in ends] == ways
    assert [saved(out, part) for part in parts] == [[f"step-{step}"] for step, _ in ways]
    whole = lines(out, f"{name}-whole", "validation")
    told = [line for part in parts for line in lines(out, part, "validation")]
    assert [line["step"] for line in told] == [line["step"] for line in whole] == [0, 3, 6]
    assert [line["loss"] for line in told] == [line["loss"] for line in whole]
    same_bits(last(out, f"{name}-whole"), last(out, parts[-1]))


def test_a_request_on_one_node_saves_on_all_once_and_training_goes_on(out):
    """F21"""
    assert saved(out, "early") == ["step-1", "step-6"]
    for rank in (0, 1):
        assert [line["step"] for line in lines(out, "early", "checkpoint", rank)] == [1, 6]
    assert losses(out, "early") == losses(out, "ddp")


@pytest.mark.parametrize(
    "name", ["fsdp-from-ddp", "ddp-from-one-rank", "single-from-fsdp", "fsdp-on-one-rank", "fsdp-from-rank0"]
)
def test_resume_at_another_world_size_or_strategy_goes_on_with_the_same_losses(out, name):
    assert losses(out, name) == pytest.approx(losses(out, "single")[3:], **CLOSE)
    (start,) = lines(out, name, "start")
    assert start["resumed_step"] == 3
    assert [line["step"] for line in lines(out, name, "validation")] == [6]


def test_a_run_reports_the_metrics_that_its_task_names(out):
    progress = Progress()
    for kind in ("start", "validation", "step"):
        for line in lines(out, "fsdp", kind):
            progress.take(line)
    first = {f"first_{name}" for name in progress.fields["first_metrics"]}
    not_here = {"mfu", "bytes_per_token"}  # of GPUs, and of tokens
    assert {*progress.fields["metrics"], *first} == set(LM.metrics) - not_here


def test_metrics_tell_the_whole_story_on_every_rank(out):
    for rank in (0, 1):
        (start,) = lines(out, "fsdp", "start", rank)
        assert (start["attempt"], start["steps"], start["world_size"], start["resumed_step"]) == (1, STEPS, 2, None)
        assert 0 < start["bigram_entropy"] < start["unigram_entropy"]
        assert [line["step"] for line in lines(out, "fsdp", "checkpoint", rank)] == [3, 6]
        assert [line["step"] for line in lines(out, "fsdp", "validation", rank)] == [0, 3, 6]
        assert [line["samples"] for line in lines(out, "fsdp", "step", rank)] == [8 * step for step in range(1, 7)]
        assert all(line["tokens_per_s"] > 0 for line in lines(out, "fsdp", "step", rank))
        (end,) = lines(out, "fsdp", "end", rank)
        assert (end["step"], end["reason"]) == (STEPS, "done")
    assert [line["loss"] for line in lines(out, "fsdp", "step", 1)] == losses(out, "fsdp")


def test_training_begins_knowing_nothing_and_learns(out):
    first, *_, last = losses(out, "single", "validation")
    assert first == pytest.approx(5.545, abs=0.001)  # ln 256
    assert last < first - 0.5


def test_a_checkpoint_has_a_part_of_each_rank_and_says_what_it_is(out):
    assert saved(out, "fsdp") == ["step-3", "step-6"]
    folder = out / "fsdp" / "checkpoints" / "step-3"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        ".metadata",
        "meta.json",
        *(f"__{rank}_{part}0.distcp" for rank in (0, 1) for part in ("", "common_")),
    }
    meta = json.loads((folder / "meta.json").read_text())
    data, validation, config = (meta.pop(key) for key in ("data", "validation", "config_sha256"))
    assert len(config) == 64
    assert data != validation
    assert meta.pop("config")["global_batch"] == 8
    assert meta == {
        "step": 3, "samples": 24, "seed": 1, "first_seed": 1, "world_size": 2, "micro_batch": 4, "strategy": "fsdp",
        "mesh": "dp=2",
        "torch": torch.__version__, "python": platform.python_version(), "mgpu_train": mgpu_train.__version__,
        "loss": losses(out, "fsdp")[2], "validation_loss": losses(out, "fsdp", "validation")[1],
        "validation_bits_per_byte": lines(out, "fsdp", "validation")[1]["bits_per_byte"],
    }  # fmt: skip


def test_meta_has_a_validation_loss_of_its_own_step_or_none(out):
    metas = {
        (name, step): json.loads((out / name / "checkpoints" / f"step-{step}" / "meta.json").read_text())
        for name, step in (("fsdp-cut", 4), ("fsdp", 3), ("ddp", 3))
    }
    assert "validation_loss" not in metas["fsdp-cut", 4]
    assert metas["fsdp", 3]["config_sha256"] != metas["ddp", 3]["config_sha256"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_save_that_training_has_left_behind_is_of_its_own_step(out, strategy, same_bits):
    """The state is copied as late as it may be, and written only when training is five steps further."""
    held, long = out / f"{strategy}-held" / "checkpoints", out / f"{strategy}-long" / "checkpoints"
    assert losses(out, f"{strategy}-held") == losses(out, f"{strategy}-long")
    assert saved(out, f"{strategy}-held") == ["step-3", "step-8", "step-9"]
    for step in (3, 9):
        same_bits(held / f"step-{step}", long / f"step-{step}")
    for rank in (0, 1):
        first, *_ = lines(out, f"{strategy}-held", "checkpoint", rank)
        assert 0 < first["stall_s"] < first["save_s"]  # the step waited for the copy, and not for the disk


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_save_that_is_due_while_one_is_under_way_is_skipped_and_one_asked_for_is_made_after_it(out, strategy):
    for rank in (0, 1):
        assert [line["step"] for line in lines(out, f"{strategy}-held", "save_skipped", rank)] == [6]
        assert [line["step"] for line in lines(out, f"{strategy}-held", "checkpoint", rank)] == [3, 8, 9]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_process_that_writes_makes_the_same_checkpoints(out, strategy, same_bits):
    assert saved(out, f"{strategy}-outside") == ["step-3", "step-6"]
    for step in (3, 6):
        one, other = (out / name / "checkpoints" / f"step-{step}" for name in (f"{strategy}-outside", strategy))
        same_bits(one, other)
        assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}


def test_minutes_are_counted_by_the_first_rank_for_all(out):
    assert saved(out, "minutes-of-rank-0") == [f"step-{step}" for step in range(1, STEPS + 1)]
    assert saved(out, "minutes-of-rank-1") == [f"step-{STEPS}"]


def test_without_checkpoint_nothing_is_saved(out):
    assert losses(out, "ddp-micro-1")
    assert not (out / "ddp-micro-1" / "checkpoints").exists()


@pytest.mark.parametrize("name", ["fsdp-rank0", "fsdp-rank0-outside"])
def test_writers_rank0_leaves_all_with_the_first_rank(out, name, same_bits):
    """And no more of it in its memory than a copy: `Gathered` looks."""
    assert failures(out, name) == []
    assert saved(out, name) == ["step-3", "step-6"]
    folder = out / name / "checkpoints" / "step-3"
    assert {path.name for path in folder.iterdir()} == {".metadata", "meta.json", "__0_0.distcp"}
    same_bits(folder, out / "fsdp" / "checkpoints" / "step-3")


def test_a_finished_run_resumed_writes_its_checkpoint_again(out, same_bits):
    assert losses(out, "finished") == []
    assert saved(out, "finished") == ["step-6"]
    assert lines(out, "finished", "end")[0]["reason"] == "done"
    same_bits(last(out, "finished"), last(out, "fsdp"))


def test_what_a_killed_attempt_left_is_never_part_of_a_checkpoint(out, same_bits):
    assert saved(out, "littered") == ["step-3", "step-6"]
    assert not list((out / "littered").rglob("__7_0.distcp"))
    same_bits(last(out, "littered"), last(out, "fsdp"))


def test_a_rank_that_cannot_write_leaves_no_checkpoint_anywhere(out):
    assert len(failures(out, "full-disk")) == 2  # both ranks know
    for failure in failures(out, "full-disk"):
        assert "cannot save" in failure
        assert "rank 1: OSError: [Errno 28] No space left on device" in failure
    assert saved(out, "full-disk") == []
    for rank in (0, 1):  # the first save failed, training went on, and the last one ended it
        assert [line["step"] for line in lines_of(out, "full-disk", "save_failed", rank)] == [3, 6]
        assert [line["step"] for line in lines_of(out, "full-disk", "step", rank)] == list(range(1, STEPS + 1))
        assert not lines_of(out, "full-disk", "end", rank)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other-model", "it is of another model: `embed.weight` is (256, 32) there and (256, 16) here"),
        ("not-single", "`train.strategy`: single is for one process, and 2 are asked for: use ddp or fsdp"),
        ("too-far", "the checkpoint is of step 6, and `train.steps` is 3: there is nothing left to train"),
        ("other-validation", "the nodes hold different data"),
        ("no-memory", "rank 0: a save takes 0.0 GiB of this machine's memory, of which 0.0 GiB are free"),
        ("no-batch", "`train.global_batch`: 1 samples are not one for each of 2 processes"),
        ("diverged", "training has diverged at step"),
    ],
)
def test_what_cannot_work_is_said_in_one_line_by_every_rank(out, name, message):
    assert len(failures(out, name)) == 2
    for failure in failures(out, name):
        assert message in failure
        assert "\n" not in failure


def test_a_diverged_step_is_not_saved(out):
    """Nor what comes after it, which would push good checkpoints out of the store."""
    steps = [int(name.removeprefix("step-")) for name in saved(out, "diverged")]
    (failure, _) = failures(out, "diverged")
    assert f"at step {max(steps, default=0) + 1}:" in failure
    skipped = [line["step"] for line in lines_of(out, "diverged", "step_skipped", 0)]
    assert skipped == [max(steps) + 1, max(steps) + 2, max(steps) + 3]  # two may be, the third one is the end


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "ddp-fp16"])
def test_a_step_that_is_no_number_on_one_rank_changes_nothing_on_any(out, strategy, same_bits):
    name = f"{strategy}-nan"
    for rank in (0, 1):
        assert [line["step"] for line in lines(out, name, "step", rank)] == [1, 2]
        assert [line["step"] for line in lines(out, name, "step_skipped", rank)] == [3]
    before, after = (out / name / "checkpoints" / f"step-{step}" for step in (2, 3))
    assert "loss" not in json.loads((after / "meta.json").read_text())
    same_bits(before, after, but="/progress|/optimizer/param_groups|/scale")
    assert losses(out, f"{name}-on") != losses(out, strategy)[3:]  # it went on from there
    assert [line["step"] for line in lines(out, f"{name}-on", "step")] == [4, 5, 6]
    assert [line["step"] for line in lines(out, name, "validation")] == [0], "it was stopped at a step that validates"
    assert [line["step"] for line in lines(out, f"{name}-on", "validation")] == [3, 6], "which is made up for"


def test_a_validation_that_is_no_number_ends_nothing_and_is_in_no_line(out):
    assert [line["step"] for line in lines(out, "no-validation", "step")] == list(range(1, STEPS + 1))
    for line in lines(out, "no-validation", "validation"):
        assert set(line) == {"kind", "t", "step", "bits_per_byte"}, "what is a number is told"
    assert "validation_loss" not in json.loads((last(out, "no-validation") / "meta.json").read_text())


def test_the_scale_of_fp16_may_take_more_steps_to_fit_than_a_loss_that_is_none_may(out):
    skipped = [line["step"] for line in lines(out, "high-scale", "step_skipped")]
    assert skipped == list(range(1, len(skipped) + 1)), "it fits, and then it stays"
    assert 2 < len(skipped) < 30
    assert lines(out, "high-scale", "end")[0]["reason"] == "done"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_what_is_drawn_follows_from_seed_step_and_replica(out, strategy, same_bits):
    """A model that drops values: cut and resumed it draws the same ones, and its replicas draw others."""
    name = f"{strategy}-dropout"
    assert losses(out, f"{name}-resumed") == losses(out, name)[3:]
    same_bits(last(out, name), last(out, f"{name}-resumed"))
    drawn = [json.loads((out / name / f"drawn-{rank}.json").read_text()) for rank in (0, 1)]
    assert len({*drawn[0], *drawn[1]}) == 2 * STEPS


def test_an_average_that_is_asked_for_later_is_of_what_was_learned_before(out):
    assert failures(out, "average-of-now") == []


def test_the_share_of_time_that_data_took_is_of_training(out):
    assert all(line["data_share"] < 1 for line in lines(out, "slow-validation", "step"))


def test_each_line_says_how_much_of_the_time_nothing_was_computed(out):
    for line in lines(out, "fsdp", "step"):
        assert -0.01 <= line["host_share"] < 1
        assert 0 <= line["data_share"] < 1


def test_a_loader_that_training_waits_for_is_told_of_with_numbers(out):
    assert failures(out, "slow-data") == []
    said = (out / "said").read_text()
    assert said.count("training waits for its data") == 2  # ranks, once each
    assert "`train.loader_threads` is 1" in said
