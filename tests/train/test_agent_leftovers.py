"""What a run that is over has left on a machine that stays: what goes, and what only this machine may have."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import mgpu_train
import pytest
from mgpu_train.agent.host import leftovers
from mgpu_train.agent.host.layout import FETCHED, RunLayout
from mgpu_train.agent.host.python_env import Problem, ProblemKind, locked
from mgpu_train.agent.phases import data
from mgpu_train.config import DataItem, Job
from mgpu_train.timeouts import Timeouts


class Home:
    """A machine's home with what one run has left: two checkpoints, one of which it went on from, and data."""

    def __init__(self, tmp_path: Path, **job):
        self.folder, self.store = tmp_path / "home", tmp_path / "store"
        self.layout = RunLayout("r", self.folder)
        self.run = Path(self.layout.root)
        for name in ("checkpoints/step-4/model", "checkpoints/step-8/model", "resume/model", "work/own", "log"):
            self.writes(name)
        for name in ("a", "deep/b"):
            (self.store / name).parent.mkdir(parents=True, exist_ok=True)
            (self.store / name).write_text("data")
        self.wants(**job)

    def wants(self, to="data/tokens", **job):
        self.to = to
        said = {
            "run_id": "r", "attempt": 2, "writer": "w", "node_rank": 0, "nodes": 1, "processes_per_node": 1,
            "master_addr": "127.0.0.1", "master_port": 29999, "launcher": "python", "command": ["t.py"],
            "workdir": "runs/r/work", "checkpoint": {"to": "file:///s", "writers": "all"},
            "data": [{"from": f"file://{self.store}", "to": to}],
        }  # fmt: skip
        self.job = Job.model_validate(said | job)
        Path(self.layout.job).write_text(self.job.model_dump_json(by_alias=True))

    def writes(self, name, text="mine"):
        path = self.run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def fetches(self):
        secrets, work = SimpleNamespace(store={}), self.run / "work"
        node = SimpleNamespace(
            job=self.job, secrets=secrets, times=Timeouts(), work=work, layout=self.layout, say=lambda _: None
        )
        data.fetch_data(node, DataItem.model_validate({"from": f"file://{self.store}", "to": self.to}))

    def clear(self, *steps, attempt=2, wait_s=0.0):
        return sorted(
            leftovers.clear(
                self.folder,
                "r",
                attempt,
                [step if isinstance(step, str) else f"{step}:1:4" for step in steps],
                time.monotonic() + wait_s,
            )
        )

    @property
    def left(self):
        every = {path.relative_to(self.run).as_posix() for path in self.run.rglob("*") if path.is_file()}
        return every - {"job.json", "agent.lock"}


OWN = {"work/own", "log"}
SAVED = {"checkpoints/step-4/model", "checkpoints/step-8/model"}
DATA = {"work/data/tokens/a", "work/data/tokens/deep/b"}


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path)


def test_what_the_store_has_goes_and_what_the_program_has_written_stays(home):
    home.fetches()
    assert home.left >= OWN | SAVED | DATA
    gone = home.clear(4, 8, 12)
    assert gone == ["checkpoints/step-4", "checkpoints/step-8", "resume", *sorted(DATA)]
    assert home.left == OWN
    assert not (home.run / "work/data").exists()
    assert [*(home.run / "checkpoints").iterdir()] == []
    assert home.clear(4, 8) == [], "a second supervisor may ask, too"


def test_a_checkpoint_that_is_not_known_to_be_in_the_store_stays(home):
    home.clear(4)
    assert home.left == OWN | {"checkpoints/step-8/model"}


@pytest.mark.parametrize("name", ["model", "later", "deep/later"])
def test_a_checkpoint_that_has_got_more_since_it_was_stored_stays(home, name):
    """Results of an evaluation, say, which no upload was of."""
    home.writes(f"checkpoints/step-8/{name}", "mine, and more")
    home.clear(4, 8)
    assert home.left == OWN | {"checkpoints/step-8/model", f"checkpoints/step-8/{name}"}


def test_a_part_without_files_holds_up_nothing_where_it_is_no_more(home):
    """Of a node that is asked again, say."""
    Path(home.layout.checkpoints, "step-12").mkdir()
    assert "checkpoints/step-12" in home.clear("12:0:0")
    assert home.clear("12:0:0", "4:1:4") == ["checkpoints/step-4"]


def test_once_another_attempt_has_begun_nothing_is_touched(home):
    before = home.left
    assert home.clear(4, 8, attempt=1) == []
    assert home.left == before


def test_beside_an_agent_that_lives_nothing_is_touched(home):
    before = home.left
    with locked(Path(home.layout.lock), time.monotonic()), pytest.raises(Problem) as caught:
        home.clear(4, 8)
    assert caught.value.kind is ProblemKind.BUSY
    assert home.left == before


def test_where_the_run_never_was_nothing_is_made(home):
    shutil.rmtree(home.run)
    assert home.clear() == []
    assert not home.run.exists()


def touched(path):
    path.write_text("mine")


def replaced_by_an_older_one(path):
    """As `tar` and `cp -p` do."""
    path.with_name("new").write_text("mine")
    os.utime(path.with_name("new"), (1e9, 1e9))
    path.with_name("new").replace(path)


@pytest.mark.parametrize("change", [touched, replaced_by_an_older_one])
@pytest.mark.parametrize("again", [False, True], ids=["", "and another file is fetched later"])
def test_a_fetched_file_that_the_program_has_changed_stays(home, change, again):
    home.fetches()
    path = home.run / "work/data/tokens/deep/b"
    fetched_ns = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == fetched_ns:  # files' times go by the kernel's ticks
        change(path)
    home.writes("work/data/tokens/index", "made of it")
    if again:  # another attempt, and the store has grown
        (home.store / "c").write_text("data")
        home.fetches()
    home.clear(4, 8)
    assert home.left == OWN | {"work/data/tokens/deep/b", "work/data/tokens/index"}


def test_what_was_fetched_anew_is_not_taken_for_changed(home):
    home.fetches()
    (home.store / "a").write_text("other data")
    home.fetches()
    home.clear(4, 8)
    assert home.left == OWN


def test_files_of_which_an_older_mgpu_has_written_down_less_stay(home):
    home.writes("work/data/tokens/a", "data")
    home.writes(f"work/data/tokens/{FETCHED}", '["a", "v"]\n')
    home.clear(4, 8)
    assert home.left >= OWN | {"work/data/tokens/a"}


@pytest.mark.parametrize("how", ["an absolute path", "a link to it"])
def test_data_that_others_may_see_stays(home, tmp_path, how):
    shared = tmp_path / "shared"
    shared.mkdir()
    if how == "a link to it":
        (home.run / "work/data").symlink_to(shared)
        home.wants(to="data")
    else:
        home.wants(to=str(shared))
    home.fetches()
    home.clear(4, 8)
    assert sorted(path.name for path in shared.rglob("*")) == [FETCHED, "a", "b", "deep"]


@pytest.mark.parametrize("key", ["../own", "../../log", "link/b", "{}/b"])
def test_a_list_of_what_was_fetched_leads_nowhere_else(home, tmp_path, key):
    """Programs may write it."""
    home.wants(to="data")
    (tmp_path / "b").write_text("theirs")
    home.writes("work/data/x")
    (home.run / "work/data/link").symlink_to(tmp_path)
    home.writes(f"work/data/{FETCHED}", f"{json.dumps([key.format(tmp_path), 'v'])}\n[1\n")
    assert home.clear() == ["resume"]
    assert (tmp_path / "b").exists()
    assert home.left >= OWN | {"work/data/x"}


def test_data_that_was_in_a_container_is_not_looked_for(home):
    home.fetches()
    home.wants(workdir="/app")
    home.clear()
    assert home.left >= DATA


def test_a_resumed_run_fetches_its_data_again(home):
    home.fetches()
    home.clear()
    home.fetches()
    assert home.left >= DATA


def test_a_folder_that_is_a_link_stays_whatever_it_leads_to(home, tmp_path):
    (home.run / "checkpoints/step-8").rename(tmp_path / "elsewhere")
    (home.run / "checkpoints/step-8").symlink_to(tmp_path / "elsewhere")
    home.clear(8)
    assert (tmp_path / "elsewhere/model").exists()


def test_the_machines_own_interpreter_runs_it(home):
    library = home.folder / ".mgpu/lib/0123"
    shutil.copytree(Path(mgpu_train.__file__).parent, library / "mgpu_train", ignore=shutil.ignore_patterns("*.pyc"))
    script = library / "mgpu_train/agent/host/leftovers.py"

    def ask(*steps):
        command = [sys.executable, "-I", "-S", str(script), "r", "2", "1", *steps]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, json.loads(done.stdout)

    assert ask("4:1:4", "12:1:4") == (0, {"removed": ["resume", "checkpoints/step-4"]})
    Path(home.layout.job).write_text("torn")
    status, answer = ask()
    assert (status, answer["problem"]) == (3, "disk")
