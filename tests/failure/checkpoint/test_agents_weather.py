"""Whole agents on bad ways to their store: every save ends committed, or failed by name, and the next one is tried."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from failure.checkpoint.weather import Weather, always, sometimes
from fakes.nodes import Node

TIMES = {
    "store_connect_s": 2, "store_read_s": 2, "store_retry_s": 6, "store_stall_s": 6, "drain_s": 60, "peers_s": 20,
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


@pytest.mark.parametrize("fate", ["silent", "slow", "slowdown"])
@pytest.mark.parametrize("bad", [[0], [1]], ids=["node 0", "node 1"])
def test_a_way_that_is_blocked_fails_that_save_as_a_whole_by_name_and_the_next_one_is_tried(under_way, fate, bad):
    """F27, and a silent or crawling server: the other node is not kept waiting for ever."""
    nodes, ways = under_way(2)
    begin(nodes, ways, "large(1)\nwait('2')\nlarge(2)\nwait('3')\nlarge(3)\n", peers_s=3)
    nodes[0].until(lambda: checkpoint(nodes[0])["committed_step"] == 1, DEADLINE_S)
    for rank in bad:
        ways[rank].decide = always(fate)
    began = time.monotonic()
    go(nodes, "2")
    nodes[bad[0]].until(lambda: checkpoint(nodes[bad[0]])["problem"], DEADLINE_S)
    assert time.monotonic() - began < 4 * TIMES["store_retry_s"], "named within its deadline"
    assert nodes[0].commits == [1]
    go(nodes, "3")  # a newer save: the one that cannot be uploaded is given up
    nodes[bad[0]].until(lambda: checkpoint(nodes[bad[0]])["failed"] >= 1, DEADLINE_S)
    for way in ways:
        way.clear()
    for node in nodes:
        assert node.ended()["phase"] == "done", node.log
    assert nodes[0].commits == [3, 1]
