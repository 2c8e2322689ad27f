"""What is asked twice is done once: F38."""

from __future__ import annotations

import threading

import pytest
from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.config import Secrets
from mgpu_train.store import open_store

from mgpu.remote.nodeset import NodeSet
from mgpu.run.job.stack_output import targets
from mgpu.run.nodes import agent_client, python_setup

TIMES_ASKED = 5


@pytest.fixture
def asked(new_line):
    """A node that has been sent its job, and a call that tells its agent to start."""
    line = new_line(nodes=1, steps=15)
    output = line.fleet.rent()
    nodes = NodeSet.connect(targets(output), line.fleet.key, line.deadlines)
    agent_client.send_library(nodes)
    python_setup.equip(nodes, line.request.spec, line.deadlines, lambda _event: None)
    (node,) = nodes.nodes
    nodes.sync(line.request.base, str(RunLayout(line.run_id).work))
    (job,) = line.request.jobs(output, attempt=1, writer="w", ports=(29500, 29501, 29502), resume=None)
    CommitLog(open_store(line.request.checkpoint.to), line.run_id).begin_attempt(1, "w")
    agent_client.send_job(node, job)
    yield line, node, lambda: agent_client.start(node, line.run_id, Secrets(), line.deadlines)
    nodes.close()


def trained_once(line, node) -> None:
    line.wait(lambda: agent_client.status(node, line.run_id, line.deadlines)["phase"] == "done")
    assert len(line.done("start")) == 1
    assert len(line.done("step")) == 15
    log = node.read(str(RunLayout(line.run_id).log)).decode()
    assert log.count("attempt 1: preparing") == 1
    assert log.count("attempt 1 from 0") == 1


def test_a_start_that_is_asked_for_again_at_any_time_starts_nothing(asked):
    line, node, start = asked
    start()
    start()  # at once
    line.wait(lambda: line.done("step", step=5))
    start()  # while it trains
    trained_once(line, node)
    start()  # when all is over
    trained_once(line, node)


def test_starts_that_are_asked_for_at_the_same_moment_start_one_trainer(asked):
    line, node, start = asked
    wrong: list[BaseException] = []

    def ask() -> None:
        try:
            start()
        except BaseException as error:  # noqa: BLE001 - the test's thread tells of it
            wrong.append(error)

    threads = [threading.Thread(target=ask) for _ in range(TIMES_ASKED)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    trained_once(line, node)
