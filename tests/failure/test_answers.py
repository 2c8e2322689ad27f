"""The provider's answers are lost, wrong or late while the engine makes a fleet: one gang, and the run succeeds."""

from __future__ import annotations

import json

import pytest

from mgpu.providers.local import control

ANSWERS = {
    "lost (F6)": lambda root: control.next_creates(root, "lost"),
    "error (F7)": lambda root: control.next_creates(root, "error"),
    "fewer, then late (F8, F9)": lambda root: (control.next_creates(root, "fewer"), control.stale(root, 1)),
}


@pytest.mark.drawn("answers of a provider")
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_create_whose_answer_cannot_be_trusted_makes_one_gang(new_world, answer):
    world = new_world()
    root = world.state / "local"
    root.mkdir(parents=True)
    world.write(nodes=2)
    ANSWERS[answer](root)
    done = world.mgpu("launch", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "succeeded"
    assert not json.loads((root / "control.json").read_text()).get("create"), "it did go wrong"
    started = {node.start.instance for node in world.bill().nodes}
    assert len(started) == (3 if "fewer" in answer else 2), "what was made was found again"
    assert world.most_alive() <= 2
    assert world.alive() == 0
