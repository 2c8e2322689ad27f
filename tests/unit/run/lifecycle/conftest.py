"""The world with a run file, and the ways to a run."""

from __future__ import annotations

import json

import pytest
from mgpu_train.agent.status.status import Phase

from mgpu.context import Context
from mgpu.run.lifecycle import launch as runs
from mgpu.run.record import record
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import State
from mgpu.spec.load import load


class Project:
    """A folder with the run file that is the module's RUN_FILE, and stacks that stand in it."""

    def __init__(self, world, run_file):
        self.world, self._run_file = world, run_file
        self.ask, self.watch_s = None, None

    @property
    def context(self):
        return Context(self.world.events.append, self.world.timeouts, self.ask, self.watch_s)

    def spec(self, more="", nodes=1):
        base = self._run_file.replace("checkpoint: none\n", "") if "checkpoint:" in more else self._run_file
        self.world.run_file.write_text(f"{base}nodes: {nodes}\n{more}")
        if nodes != len(self.world.nodes):
            self.world.has_nodes(nodes)
        return load(self.world.run_file)

    def launch(self, more="", *, nodes=1, resume=None):
        return runs.launch(self.world.run_file, self.spec(more, nodes), self.context, resume=resume)

    def run(self, more="", *, nodes=1, stack="dev"):
        return runs.run(self.world.run_file, self.spec(more, nodes), stack, self.context)

    def stands(self, stack="dev"):
        """A stack that `pulumi up` made."""
        handle = self.world.cloud.rent(f"mine-{stack}", len(self.world.nodes))
        self.world.stacks[stack] = self.world.output(handle)
        return handle

    def fleet(self, stack="dev"):
        """Such a one, as a record knows it."""
        self.stands(stack)
        return self.world.stacks[stack].model_dump(mode="json")

    def left_behind(self, run_id="run-1", **more):
        """A run whose supervisor was killed; its program still trains."""
        self.spec()
        found = self.world.record(run_id, **{"state": State.RUNNING, "attempt": 1} | more)
        Folder(run_id).run_file.write_text(self.world.run_file.read_text())
        self.world.nodes[0].says(Phase.TRAINING)
        return found

    def nothing_is_left(self):
        assert self.world.cloud.billed == set()
        assert self.world.stacks == {}
        assert record.load("last").teardown == "confirmed"

    def journal(self):
        return [
            json.loads(line)
            for path in sorted(Folder(record.load("last").run_id).journal.iterdir())
            for line in path.read_text().splitlines()
        ]


@pytest.fixture
def project(world, request):
    (world.folder / "train.py").write_text("pass\n")
    return Project(world, request.module.RUN_FILE)
