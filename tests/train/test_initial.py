"""A model's first values: the same shard by shard as whole, and never more of it in memory than that takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ranks
from mgpu_train.health import hardware

WORLD = 3  # divides hardly anything


def run(out: Path, world: int, *preset: str) -> list[Any]:
    started = ranks.meet(Path(__file__).with_name("initials.py"), world, out, *preset, said=out / "said")
    try:
        assert [rank.wait() for rank in started] == [0] * world, started[0].said
    finally:
        for rank in started:
            rank.kill()
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("initials"), WORLD)


@pytest.mark.parametrize("name", ["lm", "uneven", "chunks", "drawn", "tied", "scaled"])
def test_shards_get_the_values_that_they_would_have_of_the_whole(found, name):
    for rank in found:
        assert rank[name]["sharded"]
        assert (rank[name]["differ"], rank[name]["random"], rank[name]["told"]) == ([], True, [])


def test_what_cannot_be_done_by_shards_is_done_whole_and_said(found):
    """A row of a shard is a copy: a value that it is given would be lost without a word."""
    for rank in found:
        assert rank["padded"]["differ"] == []
        (told,) = rank["padded"]["told"]
        assert "the whole model" in told
        assert rank["orthogonal"]["differ"] == []


def test_a_parameter_that_is_given_no_value_is_named(found):
    assert {rank["half"]["failed"] for rank in found} == {"`initialise` of Half gives `1.weight` no value"}


def test_no_rank_needs_the_memory_of_the_whole_model(found):
    """256 MiB, of which a rank keeps 85: hardly more than what is loaded once, and is no model's."""
    for kept, most in (rank["memory"] for rank in found):
        assert most < 2 * kept


def test_a_model_of_a_billion_takes_hardly_more_than_a_ranks_shard(tmp_path, require):
    """4.6 GiB in fp32, half of it a rank's. The largest layer alone, the embedding, has 1 GiB."""
    require("memory", hardware.free_bytes() > 8 << 30, "8 GiB are not free")
    for kept, most in run(tmp_path, 2, "llama-1b"):
        assert 2.2 < kept / (1 << 30) < 2.4
        assert most < 1.2 * kept
