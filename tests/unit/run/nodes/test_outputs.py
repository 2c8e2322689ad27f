"""Outputs come home: from nodes that answer and are not to be trusted, and from the store; and what is told of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.phases.outputs import key
from mgpu_train.config import OutputFile, OutputList
from mgpu_train.store import open_store

from mgpu.events import Note, Warned
from mgpu.run.nodes import outputs
from mgpu.run.record.record import load
from mgpu.run.record.session import Session

LAYOUT = RunLayout("run-1")


@pytest.fixture
def run(world):
    world.record("run-1", attempt=1)
    nodes = world.has_nodes(2)
    world.record("run-1", attempt=1, nodes=2)
    session = Session(load("run-1"), world.events.append, world.timeouts)
    request = SimpleNamespace(spec=SimpleNamespace(outputs=("runs/",), trials=None))
    return SimpleNamespace(
        world=world, nodes=nodes, session=session, home=outputs.home(session.record),
        collect=lambda lost=(): outputs.collect(session, request, nodes, lost),
    )  # fmt: skip


def leaves(node, files, attempt=1, size=None, problems=(), unmatched=()):
    """What the agent has kept."""
    told = [OutputFile(path=path, size=len(text) if size is None else size) for path, text in files.items()]
    listed = OutputList(attempt=attempt, files=tuple(told), problems=problems, unmatched=unmatched)
    node.files[str(LAYOUT.outputs_list)] = listed.model_dump_json().encode()
    node.files.update({str(LAYOUT.outputs / path): text.encode() for path, text in files.items()})


def here(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def warned(run):
    return [event.text for event in run.world.of(Warned)]


def test_those_of_the_first_node_are_where_the_program_wrote_them_others_beside_them(run):
    leaves(run.world.nodes[0], {"runs/log": "a", "model.pt": "weights"})
    leaves(run.world.nodes[1], {"runs/log": "b"})
    run.collect()
    assert here(run.home) == {"runs/log": "a", "model.pt": "weights", "node-1/runs/log": "b"}
    assert run.home == run.world.folder / "mgpu-runs" / "run-1" / "outputs"
    assert f"outputs: 3 files (9 B) in {run.home}" in [event.text for event in run.world.of(Note)]
    assert warned(run) == []
    assert load("run-1").outputs == {"folder": str(run.home), "files": 3, "bytes": 9, "missing": 0}


def test_a_later_attempt_replaces_what_an_earlier_one_brought(run):
    leaves(run.world.nodes[0], {"runs/log": "old", "gone": "x"})
    leaves(run.world.nodes[1], {})
    run.collect()
    leaves(run.world.nodes[0], {"runs/log": "new"}, attempt=2)
    leaves(run.world.nodes[1], {}, attempt=2)
    run.session.record.attempt = 2
    run.collect()
    assert here(run.home) == {"runs/log": "new", "gone": "x"}, "nothing that came home is deleted"


@pytest.mark.parametrize(
    "path", ["../x", "/etc/x", "a/../../x", "a/../../../../../../tmp/x", "..", "runs/../../node-1/x"]
)
def test_a_node_cannot_write_outside_of_the_folder(run, path):
    leaves(run.world.nodes[0], {"good": "x", path: "evil"})
    leaves(run.world.nodes[1], {})
    run.collect()
    assert here(run.home) == {"good": "x"}
    assert any("is no path in the folder of the code" in text for text in warned(run))
    assert [found.name for found in run.home.parent.parent.iterdir()] == ["run-1"]


def test_a_lost_node_that_still_answers_is_asked_and_no_new_connection_is_made_for_it(run):
    leaves(run.world.nodes[0], {"a": "0"})
    leaves(run.world.nodes[1], {"a": "1"})
    run.collect(lost=(1,))
    assert here(run.home) == {"a": "0", "node-1/a": "1"}
    run.world.nodes[1].closed = True
    run.collect(lost=(1,))
    assert "outputs of node 1: the connection was lost" in warned(run)[-1]


def test_what_does_not_come_is_told_with_the_way_to_the_store(run):
    run.session.record.store = "s3://b/p"
    leaves(run.world.nodes[0], {"a": "x", "b": "y", "c": "z"})
    del run.world.nodes[0].files[str(LAYOUT.outputs / "b")]
    run.collect()
    assert here(run.home) == {"a": "x", "c": "z"}, "one that cannot come costs no other"
    first, second = warned(run)
    assert first.startswith("1 output of node 0 did not come home: b: ")
    assert "`mgpu outputs run-1` fetches what is in s3://b/p" in first
    assert "node 1: its agent has kept none" in second
    assert load("run-1").outputs["missing"] == 2


def test_a_file_that_came_short_did_not_come(run):
    leaves(run.world.nodes[0], {"a": "xyz"}, size=9)
    leaves(run.world.nodes[1], {})
    run.collect()
    assert "1 output of node 0 did not come home: a: 3 bytes came of 9" in warned(run)[0]


def test_what_the_agent_could_not_keep_is_told(run):
    leaves(run.world.nodes[0], {"a": "x"}, problems=("b: no room",))
    leaves(run.world.nodes[1], {})
    run.collect()
    assert warned(run) == ["outputs of node 0: b: no room"]


def test_a_pattern_that_no_node_has_a_file_for_is_named(run):
    leaves(run.world.nodes[0], {"a.pt": "x"}, unmatched=("runs/",))
    leaves(run.world.nodes[1], {}, unmatched=("*.pt", "runs/"))
    run.collect()
    assert warned(run) == ["outputs: no file matches `runs/`: paths are relative to the folder of the code"]


def test_of_many_files_that_could_not_be_kept_the_number_is_told(run):
    leaves(run.world.nodes[0], {"a": "x"}, problems=("b: no room", "c: no room", "d: no room"))
    leaves(run.world.nodes[1], {})
    run.collect()
    assert warned(run) == ["outputs of node 0: b: no room, and 2 more"]


def test_a_list_of_an_earlier_attempt_is_not_this_ones(run):
    leaves(run.world.nodes[0], {"a": "x"})
    leaves(run.world.nodes[1], {})
    run.session.record.attempt = 2
    run.collect()
    assert not run.home.exists()
    assert all("kept none of this attempt" in text for text in warned(run))


def test_the_time_is_bounded(run, monkeypatch):
    leaves(run.world.nodes[0], {"a": "x"})
    leaves(run.world.nodes[1], {})
    monkeypatch.setattr(run.session, "timeouts", run.world.timeouts.model_copy(update={"outputs_s": 0.0}))
    run.collect()
    assert "they took more than 0 s (outputs_s)" in warned(run)[0]


def test_the_time_of_one_large_file_is_bounded_and_its_size_told(run, monkeypatch):
    leaves(run.world.nodes[0], {"a": "endless"}, size=40 << 30)
    leaves(run.world.nodes[1], {})
    monkeypatch.setattr(run.session, "timeouts", run.world.timeouts.model_copy(update={"outputs_s": 0.05}))
    run.collect()
    assert "they took more than 0.05 s (outputs_s)" in warned(run)[0]
    assert "node 0: 1 file, 40.0 GiB" in [event.text for event in run.world.events if isinstance(event, Note)]


def test_a_disk_that_cannot_be_written_ends_nothing(run):
    (run.world.folder / "mgpu-runs").write_text("a file")
    leaves(run.world.nodes[0], {"a": "x"})
    leaves(run.world.nodes[1], {})
    run.collect()
    assert "did not come home" in warned(run)[0]


# --- from the store ---------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(world, tmp_path):
    store = open_store(f"file://{tmp_path / 'store'}")
    store.put(key("run-1", 2, 0, "runs/log"), b"a")
    store.put(key("run-1", 2, 1, "runs/log"), b"bb")
    store.put(key("run-10", 1, 0, "other"), b"x")
    return world.record("run-1", store=store.url)


def test_they_come_from_the_store_to_the_same_places(stored, mgpu, world):
    assert mgpu("outputs", "run-1", "--json").json["bytes"] == 3
    assert here(world.folder / "mgpu-runs" / "run-1" / "outputs") == {"runs/log": "a", "node-1/runs/log": "bb"}
    done = mgpu("outputs", "run-1", "--to", "elsewhere")
    assert "2 files (3 B) in elsewhere" in done.out
    assert here(world.folder / "elsewhere") == {"runs/log": "a", "node-1/runs/log": "bb"}


def test_each_comes_from_the_newest_attempt_that_has_it_whoever_was_last(stored, mgpu, world):
    """A node of an older attempt may be cut off, live on, and end last; an older mgpu's attempts share a folder."""
    store = open_store(stored.store)
    store.put(key("run-1", 1, 0, "runs/log"), b"stale")
    store.put(key("run-1", 1, 0, "of-attempt-1"), b"stale")
    store.put("run-1/outputs/0/older", b"older")
    assert mgpu("outputs", "run-1", "--json").json["files"] == 4
    others = {"node-1/runs/log": "bb", "of-attempt-1": "stale", "older": "older"}
    assert here(world.folder / "mgpu-runs" / "run-1" / "outputs") == {"runs/log": "a", **others}
    store.put(key("run-1", 1000, 0, "runs/log"), b"newest")
    assert mgpu("outputs", "run-1", "--to", "new").code == 0
    assert here(world.folder / "new") == {"runs/log": "newest", **others}, "an attempt that left little hides nothing"


def test_what_an_older_mgpu_has_stored_comes(mgpu, world, tmp_path):
    store = open_store(f"file://{tmp_path / 'older'}")
    store.put("run-1/outputs/0/a001/log", b"a")
    store.put("run-1/outputs/12/log", b"b")
    world.record("run-1", store=store.url)
    assert mgpu("outputs", "run-1").code == 0
    assert here(world.folder / "mgpu-runs" / "run-1" / "outputs") == {"a001/log": "a", "node-12/log": "b"}
    store.put("run-1/outputs/notes", b"mine")
    assert "run-1/outputs/notes" in mgpu("outputs", "run-1").err


def test_a_store_without_any_says_so(world, mgpu, tmp_path):
    world.record("run-1", store=f"file://{tmp_path / 'empty'}")
    assert "has no outputs of run run-1" in mgpu("outputs", "run-1").err


def test_a_run_without_a_store_has_none_there(world, mgpu):
    world.record("run-1", store=None)
    refused = mgpu("outputs", "run-1")
    assert (refused.code, "has no store" in refused.err) == (2, True)


def test_a_folder_that_cannot_be_written_is_named(stored, mgpu):
    refused = mgpu("outputs", "run-1", "--to", "/proc/x")
    assert (refused.code, "/proc/x: the folder cannot be made" in refused.err) == (2, True)
