"""A model's first values: the same shard by shard as whole, and never more of it in memory than that takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ranks

WORLD = 3  # divides hardly anything


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("initials")
    started = ranks.meet(Path(__file__).with_name("initials.py"), WORLD, out, said=out / "said")
    try:
        assert [rank.wait(180) for rank in started] == [0] * WORLD, started[0].said
    finally:
        for rank in started:
            rank.kill()
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(WORLD)]


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
    """256 MiB, of which a rank keeps 85."""
    assert max(rank["peak"] for rank in found) < 85
