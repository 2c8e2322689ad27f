"""Whole agents on bad ways to their store: every save ends committed, or failed by name, and the next one is tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from failure.checkpoint.weather import Weather, always, sometimes, writes
from fakes.nodes import Node
from mgpu_train.store import NotFound, open_store

TIMES = {
    "store_connect_s": 2, "store_read_s": 2, "store_retry_s": 4, "store_stall_s": 4, "drain_s": 60, "peers_s": 20,
}  # fmt: skip
DEADLINE_S = 60.0
# one file that travels in a pack, one in pieces; it goes on when the test says so
SAVES = """
import os, pathlib, time
from saving import save
folder = pathlib.Path(os.environ["MGPU_CHECKPOINT_DIR"])
def large(step):
    aside = folder / f".tmp-{step}"
    aside.mkdir()
    (aside / "small.json").write_bytes(b"{}")
    (aside / f"large-{os.environ['MGPU_NODE_RANK']}.bin").write_bytes(os.urandom(9 << 20))
    aside.rename(folder / f"step-{step}")
def wait(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.02)
"""


@pytest.fixture
def under_way(gateway: Any, tmp_path: Path):
    """`under_way(2)`: so many nodes, each with a way of its own to one bucket."""
    nodes: list[Node] = []
    ways: list[Weather] = []

    def make(count: int) -> tuple[list[Node], list[Weather]]:
        url = f"s3://{gateway.bucket()}/runs"
        for rank in range(count):
            way = Weather(gateway.env["AWS_ENDPOINT_URL"])
            node = Node(tmp_path / f"home-{rank}", tmp_path, rank, count, url=url, keys=gateway.env)
            ways.append(way)
            nodes.append(node)
        return nodes, ways

    yield make
    for node in nodes:
        node.kill()
    for way in ways:
        way.close()


def begin(nodes: list[Node], ways: list[Weather], program: str, **times: float) -> None:
    for node in nodes:
        node.program(SAVES + program)
        node.job(timeouts={**TIMES, **times})
    for node, way in zip(nodes, ways, strict=True):
        node.start({"store": {**(node.keys or {}), "AWS_ENDPOINT_URL": way.endpoint}})


def go(nodes: list[Node], name: str) -> None:
    for node in nodes:
        (node.run / "work" / name).touch()


def checkpoint(node: Node) -> dict[str, Any]:
    return node.said["checkpoint"]


def test_a_refusal_that_is_cut_off_is_asked_for_again(gateway):
    """Its body is read by botocore outside of what turns urllib3's errors into its own."""
    way = Weather(gateway.env["AWS_ENDPOINT_URL"])
    fates = iter(["fine", "reset"])
    way.decide = lambda _request: next(fates, "fine")
    store = open_store(f"s3://{gateway.bucket()}/x", {**gateway.env, "AWS_ENDPOINT_URL": way.endpoint})
    store.put("there", b"data")
    with pytest.raises(NotFound):
        store.get("absent", 100)
    assert way.met == {"fine": 2, "reset": 1}
    way.close()


@pytest.mark.drawn("nodes x weather on the way to the store")
@pytest.mark.parametrize("fate", ["slowdown", "lost", "reset"])
def test_with_a_third_of_all_requests_failing_every_save_arrives(under_way, fate):
    nodes, ways = under_way(2)
    for seed, way in enumerate(ways):
        way.decide = sometimes(fate, 0.3, seed)
    begin(nodes, ways, "large(1)\nwait('2')\nlarge(2)\n", store_retry_s=30)
    nodes[0].until(lambda: checkpoint(nodes[0])["committed_step"] == 1, DEADLINE_S)
    go(nodes, "2")
    for node in nodes:
        status = node.ended()
        assert (status["phase"], status["checkpoint"]["failed"]) == ("done", 0), node.log
    assert nodes[0].commits == [2, 1]
    assert all(way.met[fate] > 3 for way in ways)


@pytest.mark.drawn("nodes x weather on the way to the store")
@pytest.mark.parametrize(("fate", "rank"), [("silent", 0), ("slow", 1), ("slowdown", 1)])
def test_a_blocked_way_fails_that_save_as_a_whole_by_name_and_the_next_one_is_tried(under_way, fate, rank):
    """F27, and a silent or crawling server: no node is kept waiting for ever."""
    nodes, ways = under_way(2)
    begin(nodes, ways, "large(1)\nwait('2')\nlarge(2)\nwait('3')\nlarge(3)\n")
    nodes[0].until(lambda: checkpoint(nodes[0])["committed_step"] == 1, DEADLINE_S)
    bad, way = nodes[rank], ways[rank]
    way.decide = writes(fate) if fate == "slowdown" else always(fate)
    go(nodes, "2")
    bad.until(lambda: "step-2" in (checkpoint(bad)["problem"] or ""), DEADLINE_S)
    assert "s3://" in checkpoint(bad)["problem"]
    assert nodes[0].commits == [1]
    go(nodes, "3")  # a newer save: what cannot be uploaded is given up
    bad.until(lambda: checkpoint(bad)["failed"] >= 1, DEADLINE_S)
    way.clear()
    for node in nodes:
        assert node.ended()["phase"] == "done", node.log
    assert nodes[0].commits == [3, 1]
    assert way.met[fate] > 0


def test_whatever_is_answered_to_a_commit_it_stands_once(under_way):
    """F30: lost after it was done, refused twice though nobody else is there."""
    nodes, (way,) = under_way(1)
    answers = iter(("lost", "conflict", "refused"))
    way.decide = lambda request: (
        next(answers, "fine") if request.startswith("PUT") and "/commits/" in request else "fine"
    )
    begin(nodes, [way], "large(1)\n")
    assert nodes[0].ended()["phase"] == "done", nodes[0].log
    assert nodes[0].commits == [1]
    assert [way.met[fate] for fate in ("lost", "conflict", "refused")] == [1, 1, 1]


def _commits(request: str) -> bool:
    return request.startswith("PUT") and "/commits/" in request
