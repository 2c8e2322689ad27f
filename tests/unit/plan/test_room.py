"""What checkpoints take of a machine: the figures of notes that were worked out by hand, and who is refused."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from mgpu_train.config import LmOptions

from mgpu.plan import room
from mgpu.plan.model import CheckpointRoom
from mgpu.spec.load import loads
from mgpu.spec.model import RunSpec

LLAMA_8B = LmOptions.model_validate({"tokens": "/t", "model": {"preset": "llama-8b"}}).model.parameters


def spec(**changes: Any) -> RunSpec:
    """Llama 8B on eight GPUs of one machine at AWS."""
    given = changes.pop("train", {})
    model = {} if "task" in given else {"tokens": "/t", "model": {"preset": "llama-8b"}}
    train = {**model, "strategy": "fsdp", "steps": 1000, "global_batch": 64, **given}
    base = {
        "name": "x", "provider": "aws", "max_price_usd_per_hour": 100, "max_hours": 9, "gpus_per_node": 8,
        "disk_gib": 1000, "train": train, "recovery": {"attempts": 3},
    }  # fmt: skip
    if changes.get("checkpoint") != "none":
        changes["checkpoint"] = {"to": "s3://bucket/runs", **changes.get("checkpoint", {})}
    return loads(yaml.safe_dump({**base, **changes}), "f")


def found(**changes: Any) -> CheckpointRoom:
    known = room.of(spec(**changes))
    assert known is not None
    return known


def test_a_save_takes_twelve_bytes_of_each_parameter():
    """Weights and two moments; a moving average takes four more."""
    assert found().save_gib * 2**30 == pytest.approx(12 * LLAMA_8B, rel=1e-3)
    assert found(nodes=4).save_gib == pytest.approx(found().save_gib / 4, rel=0.01), "nodes share it"
    assert room.save_gib(spec(train={"ema": 0.999})) == pytest.approx(room.save_gib(spec()) * 16 / 12)
    with_muon = room.save_gib(spec(train={"optimizer": "muon"}))
    assert 8 < with_muon * 2**30 / LLAMA_8B < 9, "one moment of the blocks' matrices, two of embedding and head"
    eight_bit = room.save_gib(spec(train={"optimizer": "adamw8bit"}))
    assert eight_bit * 2**30 == pytest.approx((4 + 2 * (1 + 4 / 256)) * LLAMA_8B, rel=1e-3), "two moments of a byte"


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 3),  # two that are finished, one that is written
        ({"nodes": 2}, 5),
        ({"nodes": 2, "train": {"strategy": "ddp"}, "checkpoint": {"writers": "rank0"}}, 3),
        ({"train": {"steps": 150}}, 2),  # every 100 steps, and the last
        ({"checkpoint": {"every_minutes": 10}, "train": {"steps": 150}}, 3),  # how many that makes is not known
        ({"checkpoint": {"every_minutes": 10, "every_steps": 500}, "train": {"steps": 500}}, 3),
        ({"checkpoint": {"every_minutes": 10}, "train": {"steps": 2}}, 2),  # no step has two
    ],
)
def test_as_many_lie_on_a_disk_as_the_agent_keeps_and_one_that_is_written(changes, count):
    assert found(**changes).count == count


def test_what_is_resumed_from_is_a_nodes_share_where_that_is_known_beforehand():
    whole = found().save_gib
    assert found(nodes=4).resumed_gib == found(nodes=4).save_gib
    assert found(nodes=4, train={"strategy": "ddp"}).resumed_gib == pytest.approx(whole, rel=0.01), "all of it"
    assert found(nodes=4, recovery={"attempts": 1}).resumed_gib == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"provider": "local", "gpus_per_node": 0},
        {"checkpoint": "none"},
        {"train": {"task": "x.y:Z"}},
    ],
    ids=["this machine's disk", "no checkpoints", "a model that is not known"],
)
def test_where_it_is_not_known_nothing_is_claimed(changes):
    given = spec(**changes)
    assert room.of(given) is None
    assert room.too_small(given) is None


def test_a_disk_that_is_too_small_is_refused_with_what_to_write():
    least = int(found().kept_gib) + 1
    assert room.too_small(spec(disk_gib=least)) is None
    error = room.too_small(spec(disk_gib=least - 1))
    assert error is not None
    assert error.what == f"disk_gib: {least - 1} GiB do not hold the checkpoints, {found().kept_gib:.4g} GiB"
    assert "8.03e+09 parameters" in error.why
    assert f"a checkpoint {found().save_gib:g} GiB; 3 of them" in error.why
    proposed = int(error.next_step.partition("disk_gib: ")[2].partition("`")[0])
    assert room.doubt(found(disk_gib=proposed)) == "", "what is proposed has room for what is resumed from, too"


def test_what_a_restart_may_lack_is_a_warning():
    short, enough = found(disk_gib=300), found(disk_gib=400)
    assert "raise `disk_gib` (300)" in room.doubt(short)
    assert room.doubt(enough) == ""


def test_it_is_said_beside_the_price_where_it_matters():
    said = room.words(found())
    assert said == (
        f"checkpoints take up to {found().kept_gib:.4g} of the 1000 GiB of a machine's disk, {found().resumed_gib:g} "
        f"GiB more after a restart; each save {found().save_gib:g} GiB of its memory"
    )
    assert room.words(CheckpointRoom(save_gib=0.1, count=5, resumed_gib=0.1, disk_gib=100)) == ""
