"""What of its store a run that is over leaves behind: what somebody may ask for, and nothing else."""

from __future__ import annotations

import time
from unittest.mock import Mock

import pytest
from mgpu_train.agent.status.status import Fault, Phase
from mgpu_train.checkpoint.log import keys
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.store import Unavailable, open_store
from mgpu_train.store.file import FileStore

from mgpu.errors import InputError
from mgpu.events import Note
from mgpu.run.job import operator_store
from mgpu.run.lifecycle.removal import attempts_over, tidy_store
from mgpu.run.record.record import State

RUN_FILE = """
name: it
provider: local
max_hours: 1
max_price_usd_per_hour: 1
command: [train.py]
"""


class Over:
    """A run on two nodes, the second attempt of which has committed step 20, stored half of 30, and written no end."""

    def __init__(self, world, url):
        self.world, self.url, self.store = world, url, open_store(url)
        self.log = CommitLog(self.store, "run-1")
        for attempt in (1, 2):
            self.log.begin_attempt(attempt, f"writer-{attempt}")
        world.commit(url, "run-1", attempt=2, writer="writer-2", step=20)
        self.store.put(keys.pack("run-1", "a002-step-30", 1, 0), b"half of it")
        self.fields = {
            "store": url, "attempt": 2, "writer": "writer-2", "checkpoint_id": "a002-step-20", "checkpoint_step": 20,
        }  # fmt: skip

    def record(self, **more):
        fields = self.fields | {"state": State.FAILED, "teardown": "confirmed"} | more
        return self.world.record("run-1", **fields)

    @property
    def there(self):
        return sorted({keys.checkpoint_of("run-1", each.key) for each in self.store.list(keys.checkpoints("run-1"))})


@pytest.fixture
def over(world, tmp_path):
    return Over(world, f"file://{tmp_path}/store")


BOTH = ["a002-step-20", "a002-step-30"]
LONG_AGO = {"hard_cap_at": 1000.0, "lease_until": 900.0}


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ({}, BOTH[:1]),
        ({"state": State.STOPPED}, BOTH[:1]),
        ({"state": State.RUNNING}, BOTH),
        ({"teardown": "kept"}, BOTH),
        ({"teardown": "kept", "hard_cap_at": time.time() + 60}, BOTH),
        ({"teardown": "kept", **LONG_AGO, "lease_until": time.time() - 60}, BOTH),
        ({"teardown": "not ours", **LONG_AGO}, BOTH[:1]),
        ({"attempt": 1}, BOTH),
        # queued again: its attempt was on a kept fleet, of which nothing is known any more
        ({"writer": ""}, BOTH),
        ({"writer": "", **LONG_AGO}, BOTH),
    ],
)
def test_parts_of_an_attempt_without_an_end_go_once_nothing_can_commit_them(over, how, left):
    tidy_store(over.record(**how), over.world.events.append)
    assert over.there == left
    assert [each.step for each in over.log.checkpoints()] == [20]


def test_nothing_goes_where_the_end_of_the_log_is_gone(over):
    """What is a part by the log was a checkpoint, says the record."""
    record = over.record(checkpoint_id="a002-step-30", checkpoint_step=30)
    assert attempts_over(record, over.log, time.time()) == 0
    tidy_store(record, over.world.events.append)
    assert over.there == BOTH


OUTPUTS = ["0/log.txt", "a001/0/model.pt", "a001/0/only.pt", "a001/1/model.pt", "a002/0/log.txt", "a002/0/model.pt"]
NEWEST = ["a001/0/only.pt", "a001/1/model.pt", "a002/0/log.txt", "a002/0/model.pt"]


@pytest.mark.parametrize(
    ("how", "left"),
    [({"state": State.SUCCEEDED}, NEWEST), ({}, OUTPUTS), ({"state": State.SUCCEEDED, "outputs": None}, OUTPUTS)],
)
def test_of_outputs_a_run_that_succeeds_leaves_the_newest_of_each(over, how, left):
    """An attempt that failed may have left half a file, so of others all are kept."""
    for name in OUTPUTS:
        over.store.put(f"run-1/outputs/{name}", b"x")
    tidy_store(over.record(**{"outputs": {"files": 4}} | how), over.world.events.append)
    assert [each.key.removeprefix("run-1/outputs/") for each in over.store.list("run-1/outputs/")] == left


def test_a_store_that_cannot_be_read_is_told(over, monkeypatch):
    def refuse(*_):
        raise Unavailable("it is away")

    monkeypatch.setattr(FileStore, "list", refuse)
    tidy_store(over.record(), over.world.events.append)
    (told,) = over.world.of(Note)
    assert told.text == f"parts of checkpoints that were not committed stay in {over.url}/run-1: it is away"


def test_a_provider_that_opens_no_store_here_changes_no_end(over, monkeypatch):
    """A candidate whose package this machine does not have: the machines are gone, and the exit code is said."""
    monkeypatch.setattr(
        operator_store, "_opened", Mock(side_effect=InputError("provider x does not work", "no module"))
    )
    tidy_store(over.record(), over.world.events.append)
    (told,) = over.world.of(Note)
    assert "parts of checkpoints that were not committed stay" in told.text
    assert "no module" in told.text


def test_a_launch_that_fails_leaves_no_parts(project):
    def program(node, job):
        project.world.commit(job.checkpoint.to, job.run_id, attempt=1, writer=job.writer, step=10)
        store = open_store(job.checkpoint.to)
        store.put(keys.pack(job.run_id, "a001-step-20", 0, 0), b"half of it")
        node.says(Phase.FAILED, attempt=1, fault=Fault.USER, reason="exit code 3")

    project.world.program = program
    done = project.launch().record
    assert (done.state, done.teardown) == (State.FAILED, "confirmed")
    left = open_store(done.store).list(keys.checkpoints(done.run_id))
    assert {keys.checkpoint_of(done.run_id, each.key) for each in left} == {"a001-step-10"}
