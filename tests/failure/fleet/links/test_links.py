"""SSH is lost in every way there is. Of that alone no training stops, and no machine goes."""

from __future__ import annotations

import time

import pytest

from mgpu.errors import ConnectionFailed
from mgpu.events import Warned
from mgpu.providers.local import bill, control

FOR_EVER = 1 << 30


def one_attempt_of(line) -> None:
    assert [entry.attempt for entry in line.attempts()] == [1]
    assert len(bill.read(line.fleet.provider.root).nodes) == line.request.spec.nodes, "no machine was replaced"
    line.judge()


def warned(line, words: str) -> bool:
    return any(isinstance(event, Warned) and words in event.text for event in line.events)


def test_a_half_open_connection_is_noticed_in_time_and_the_run_goes_on_to_its_end(new_line):
    line = new_line(steps=110, pause_s=0.05)
    line.start()
    line.wait(lambda: line.done("step", step=10))
    server = line.fleet.server(line.fleet.ids[1])
    server.send(19)
    frozen_at = time.monotonic()
    line.wait(lambda: warned(line, "node 1"))
    noticed_s = time.monotonic() - frozen_at
    assert noticed_s < 4 * line.deadlines.keepalive_s + 5, "25 s with keep-alives every 5 s"
    seen = len(line.done("step", rank=1))
    line.wait(lambda: len(line.done("step", rank=1)) > seen + 10)
    server.send(18)
    ended = line.end()
    assert ended.succeeded, ended
    assert line.logs_agree(0)
    assert line.logs_agree(1)
    one_attempt_of(line)


@pytest.mark.drawn("faults of links")
@pytest.mark.parametrize("dropped", ["before_banner", "after_login"])
def test_the_first_connections_may_be_dropped(new_line, new_link, dropped):
    line, link = new_line(steps=20, attempts=1), new_link()
    line.fleet.links[1] = link
    line.output = line.fleet.rent()
    if dropped == "after_login":
        link.be_rude(line.fleet.provider.root / "nodes" / line.fleet.ids[1] / "host_key")
    setattr(link, dropped, 3)
    line.start()
    assert line.end().succeeded
    assert link.seen >= 4
    one_attempt_of(line)


@pytest.mark.drawn("faults of links")
@pytest.mark.parametrize("dropped", ["before_banner", "after_login"])
def test_a_node_that_never_lets_anybody_in_ends_the_start_within_its_deadline(new_line, new_link, dropped):
    line, link = new_line(attempts=1, times={"connect_s": 2, "ssh_banner_s": 1}), new_link()
    line.fleet.links[1] = link
    line.output = line.fleet.rent()
    if dropped == "after_login":
        link.be_rude(line.fleet.provider.root / "nodes" / line.fleet.ids[1] / "host_key")
    setattr(link, dropped, FOR_EVER)
    began = time.monotonic()
    line.start()
    with pytest.raises(ConnectionFailed):
        line.end()
    assert time.monotonic() - began < 18, "connect_s is not the default 20"
    assert len(bill.read(line.fleet.provider.root).alive) == 2, "SSH alone ends no machine"


@pytest.mark.drawn("faults of links")
@pytest.mark.parametrize("way", ["cut", "half-open"])
def test_a_node_that_cannot_be_reached_any_more_trains_on_until_it_counts_as_lost(new_line, new_link, way):
    line, link = new_line(steps=100, times={"silence_s": 4, "ssh_banner_s": 1}), new_link()
    line.fleet.links[1] = link
    line.start()
    line.wait(lambda: line.done("step", step=15))
    lost_at = time.time()
    if way == "cut":
        link.before_banner = FOR_EVER
        link.cut()
    else:
        link.stall()
    ended = line.end()
    assert ended.succeeded, ended
    last = max(entry["at"] for entry in line.done("step", attempt=1))
    assert last - lost_at > 2.5, "it was not given up before its time"
    assert last - lost_at < 4 + 4 * line.deadlines.keepalive_s + 5, "nor long after"
    assert [entry.attempt for entry in line.attempts()] == [1, 2]
    line.judge()


def test_a_machine_that_dies_behind_a_half_open_connection_is_replaced_by_its_providers_word(new_line, new_link):
    line, link = new_line(steps=60, times={"keepalive_s": 5}), new_link()
    line.fleet.links[1] = link
    line.start()
    line.wait(lambda: line.committed())
    link.stall()
    died_at = time.time()
    control.kill(line.fleet.instance(1))
    ended = line.end()
    assert ended.succeeded, ended
    assert [entry.attempt for entry in line.attempts()] == [1, 2]
    back_s = min(entry["at"] for entry in line.done("step", attempt=2)) - died_at
    assert back_s < 25 + 20, "however little of the loss the connection tells"
    line.judge()


def test_cuts_again_and_again_cost_neither_the_run_nor_a_byte_of_its_logs(new_line, new_link):
    line, links = new_line(steps=60), [new_link(), new_link()]
    line.fleet.links.update(enumerate(links))
    line.start()
    line.wait(lambda: line.done("step", step=5))
    for link in links:
        link.cut_every(0.5)
    assert line.end().succeeded
    assert line.logs_agree(0)
    assert line.logs_agree(1)
    one_attempt_of(line)
