"""Outputs: what the run file names is kept however an attempt ends, listed for the operator, and in the store."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from mgpu_train.agent.phases.outputs import found, why_not

WRITES = """
import os, pathlib
from saving import save
def write(path, text):
    at = pathlib.Path(path)
    at.parent.mkdir(parents=True, exist_ok=True)
    at.write_text(text)
"""
LINES = "write('runs/a/events', 'tb')\nwrite('model.pt', 'weights')\nwrite('other.txt', 'x')\n"
OUTPUTS = ["runs/", "*.pt"]
WAITS = "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.1)\n"


def kept(node: Any) -> dict[str, str]:
    """Path and contents, as the operator would fetch them."""
    told = json.loads((node.run / "outputs.json").read_text())
    files = {each["path"]: (node.run / "outputs" / each["path"]).read_text() for each in told["files"]}
    assert {each["path"]: each["size"] for each in told["files"]} == {path: len(text) for path, text in files.items()}
    return files


def stored(node: Any) -> set[str]:
    """Paths in the store."""
    prefix = f"r/outputs/a001/{node.rank}/"
    return {each.key.removeprefix(prefix) for each in node.opened.list("r/outputs/")}


FILES = {"runs/a/events": "tb", "model.pt": "weights"}


@pytest.mark.parametrize(
    ("end", "phase"),
    [("save(1)\n", "done"), ("raise SystemExit(3)\n", "failed"), ("import os; os.abort()\n", "failed")],
)
def test_they_are_kept_and_stored_however_the_program_ends(node, end, phase):
    node.program(WRITES + LINES + end)
    node.job(outputs=OUTPUTS)
    node.start()
    assert node.ended()["phase"] == phase
    assert kept(node) == FILES
    assert stored(node) == set(FILES)
    assert f"outputs: 2 files, 9 bytes; 2 of them in {node.url}\n" in node.log


def test_without_a_store_they_are_kept_for_the_operator(node):
    node.program(WRITES + LINES)
    node.job(outputs=OUTPUTS, checkpoint=None)
    node.start()
    assert node.ended()["phase"] == "done"
    assert kept(node) == FILES
    assert "outputs: 2 files, 9 bytes\n" in node.log


@pytest.mark.parametrize("how", ["stop", "notice"])
def test_a_run_that_is_stopped_and_a_machine_that_goes_keep_theirs(node, how):
    node.program(WRITES + LINES + WAITS)
    node.job(outputs=OUTPUTS, timeouts={"stop_grace_s": 1})
    node.start()
    node.until(lambda: "ready" in node.log)
    node.stop() if how == "stop" else node.notice(30)
    assert node.ended()["fault"] == ("stopped" if how == "stop" else "provider")
    assert kept(node) == FILES
    assert stored(node) == set(FILES)


def test_each_attempt_lists_what_is_there_then(node):
    node.program(WRITES + LINES + "raise SystemExit(1)\n")
    node.job(outputs=OUTPUTS)
    node.start()
    node.ended()
    node.program(WRITES + "import os\nos.remove('model.pt')\nwrite('runs/a/events', 'more')\nsave(1)\n")
    node.job(outputs=OUTPUTS, attempt=2, writer="writer-2")
    node.start()
    node.ended()
    assert kept(node) == {"runs/a/events": "more"}
    assert json.loads((node.run / "outputs.json").read_text())["attempt"] == 2


def test_a_store_that_refuses_changes_no_end(node):
    node.job(outputs=OUTPUTS)
    (node.store / "r" / "outputs").write_text("a file where a folder has to be")
    node.program(WRITES + LINES + "save(1)\n")
    node.start()
    assert node.ended()["phase"] == "done"
    assert kept(node) == FILES
    assert "is not in the store" in node.log


@pytest.mark.parametrize("store", [True, False])
def test_a_disk_that_keeps_none_changes_no_end_and_the_store_has_them(node, store):
    node.job(outputs=OUTPUTS, **({} if store else {"checkpoint": None}))
    (node.run / ".outputs").write_text("a file where a folder has to be")
    node.program(WRITES + LINES + "save(1)\n")
    node.start()
    assert node.ended()["phase"] == "done"
    assert "outputs could not be kept" in node.log
    assert stored(node) == (set(FILES) if store else set())


def test_a_run_without_outputs_has_none(node):
    node.program(WRITES + LINES + "save(1)\n")
    node.job()
    node.start()
    node.ended()
    assert not (node.run / "outputs.json").exists()


# --- what the patterns mean -------------------------------------------------------------------------------------------


@pytest.fixture
def work(tmp_path: Path) -> Path:
    for name in ("a.pt", "b.txt", "runs/1/log", "runs/2/deep/log", "runs/2/c.pt", ".hidden/d.pt", "odd [1].pt"):
        (tmp_path / "work" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "work" / name).write_text(name)
    return tmp_path / "work"


def everything(named: dict[str, list[str]]) -> list[str]:
    return sorted({path for paths in named.values() for path in paths})


@pytest.mark.parametrize(
    ("patterns", "files"),
    [
        (["*.pt"], ["a.pt", "odd [1].pt"]),
        (["**/*.pt"], [".hidden/d.pt", "a.pt", "odd [1].pt", "runs/2/c.pt"]),
        (["runs/"], ["runs/1/log", "runs/2/c.pt", "runs/2/deep/log"]),
        (["runs"], ["runs/1/log", "runs/2/c.pt", "runs/2/deep/log"]),
        (["runs/*/log"], ["runs/1/log"]),
        (["runs/2", "runs/2/c.pt"], ["runs/2/c.pt", "runs/2/deep/log"]),
        (["b.txt", "nothing", "no/*"], ["b.txt"]),
        (["./b.txt"], ["b.txt"]),
        (["."], [".hidden/d.pt", "a.pt", "b.txt", "odd [1].pt", "runs/1/log", "runs/2/c.pt", "runs/2/deep/log"]),
    ],
)
def test_globs_are_relative_to_the_work_folder_and_a_folder_is_all_of_it(work, patterns, files):
    assert everything(found(work, patterns)) == files


def test_pipes_and_rings_are_left_out_and_links_that_leave_the_folder_are_named(work, tmp_path):
    (tmp_path / "secret").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").write_text("")
    (work / "leak").symlink_to(tmp_path / "secret")
    (work / "leaks").symlink_to(tmp_path / "folder")
    (work / "inside").symlink_to("a.pt")
    (work / "ring").symlink_to(".")
    (work / "dead").symlink_to("nowhere")
    os.mkfifo(work / "pipe")
    named = everything(found(work, ["leak", "leaks/x", "leaks", "inside", "dead", "pipe", "ring"]))
    assert named == ["inside", "leak", "leaks/x"]
    assert {path: why_not(work, path) for path in named} == {
        "inside": None,
        "leak": "a link that leaves the folder of the code",
        "leaks/x": "a link that leaves the folder of the code",
    }


def test_one_file_that_cannot_come_costs_no_other(node):
    """Names are bytes, and links lead anywhere: what is lost is named, all else comes."""
    more = "for name in (b'runs/caf\\xe9.txt', 'runs/a\\nb'): open(name, 'w').write('x')\n"
    more += "os.symlink('/etc/hostname', 'runs/host')\n"
    node.program(WRITES + LINES + more + "save(1)\n")
    node.job(outputs=[*OUTPUTS, "*.onnx"])
    node.start()
    assert node.ended()["phase"] == "done"
    assert kept(node) == FILES
    told = json.loads((node.run / "outputs.json").read_text())
    assert told["problems"] == [
        "runs/a b: its name has control characters",
        "runs/caf\ufffd.txt: its name is not UTF-8",
        "runs/host: a link that leaves the folder of the code",
    ]
    assert told["unmatched"] == ["*.onnx"]
