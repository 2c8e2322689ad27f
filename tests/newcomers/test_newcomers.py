"""Programs as people bring them, run as their users would: what ends well ends well, what fails is told by its cause,
and what they were to leave comes home. Nothing of mgpu is in the programs or beside them. They share a fleet of one
node; those in which the nodes could differ have one of two.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fakes import command
from waiting import until

from mgpu.iac.engine import install
from mgpu.paths import state_dir
from mgpu.providers.local import bill

HERE = Path(__file__).parent
MGPU = str(Path(sys.executable).with_name("mgpu"))
RUN_FILE = """name: new
provider: local
nodes: {nodes}
max_price_usd_per_hour: 1
max_hours: 0.5
teardown: keep
"""
NONE = "checkpoint: none\n"
NOTHING_SAVED = "nothing that the program writes comes back"
NOT_NAMED = "no file of the code names MGPU_CHECKPOINT_DIR"


@dataclass(frozen=True)
class Case:
    """A program, what its run file says beside the usual, and what the user is told and has in the end."""

    name: str
    more: str = NONE
    args: tuple[str, ...] = ()
    code: int = 0
    says: tuple[str, ...] = ()  # on the screen
    logs: tuple[str, ...] = ()  # of node 0
    home: tuple[str, ...] = ()  # below mgpu-runs/<run>/outputs
    nodes: int = 1
    command: str = ""  # else the program and its arguments


def both(*paths: str) -> tuple[str, ...]:
    """From both nodes of a fleet of two."""
    return (*paths, *(f"node-1/{path}" for path in paths))


CASES = [
    Case("hello", says=(NOTHING_SAVED,), logs=("hello",)),
    Case("save_beside", nodes=2, more=NONE + 'outputs: ["*.pt"]\n', logs=("epoch 2: loss 0.333",),
         home=both("model.pt")),
    Case("rank0_prints", nodes=2, logs=("step 5",)),
    Case("arguments", args=("--epochs", "2", "a b", "$HOME"), logs=("'epochs': 2", "'files': ['a b', '$HOME']")),
    Case("progress_bar", logs=("100/100",)),
    Case("exits_3", code=6, says=("exit code 3", "The cause is the program"), logs=("no data here",)),
    Case("exits_with_words", code=6, says=("The cause is the program",), logs=("the configuration names no dataset",)),
    Case("segfault", nodes=2, code=6, says=("SIGSEGV", "The cause is the program")),
    Case("raises", code=6, says=("ValueError: shapes (3, 4) and (5,) do not fit",)),
    Case("killed", code=6, says=("SIGKILL", "The cause is the program")),
    Case("interrupts_itself", code=6, says=("The cause is the program",)),
    Case("worker_processes", logs=("285",)),
    Case("leaves_a_child", logs=("done", "1 process that the program left running was ended with it")),
    Case("daemon_thread", logs=("done",)),
    Case("fills_the_disk", code=6, says=("No space left on device",)),
    Case("results_then_fails", nodes=2, more=NONE + "outputs: runs/\n", code=6, says=("an illegal memory access",),
         home=both("runs/first/metrics.csv")),
    Case("notebook", code=6, says=("name 'get_ipython' is not defined",)),
    Case("many_lines", logs=("line 0:", "line 19999: loss 0.19999")),
    Case("raw_bytes", logs=("binary",)),
    Case("unicode", logs=("损失 0.5 · Verlust · потеря · 🔥",)),
    Case("errors_only", logs=("INFO:root:epoch 1",)),
    Case("silent"),
    Case("closes_its_output"),
    Case("reads_beside", logs=("config: a: 1", "beside: True")),
    Case("imports_beside", logs=("model tiny",)),
    Case("temporary_files", logs=("home True",)),
    Case("by_rank", nodes=2, more=NONE + "outputs: [out]\n",
         home=("out/rank-0-of-2.txt", "node-1/out/rank-1-of-2.txt")),
    Case("checkpoints", nodes=2, more="checkpoint: {}\n", says=("checkpoint of step 5 committed",)),
    Case("forgets_its_checkpoint", more="checkpoint: {}\n", code=6, says=("left no folder `step-<n>`", "`outputs:`")),
    Case("save_beside", more="", code=6, says=(NOT_NAMED, "`checkpoint: none`")),
    Case("missing_module", code=6, says=("No module named 'a_package_that_nobody_has'",)),
    Case("syntax_error", code=6, says=("SyntaxError",)),
    Case("uses_the_environment", more=NONE + "env: {MODE: fast}\n", logs=("mode fast shell True",)),
    Case("long_line", logs=("end",)),
    Case("changes_folder", more=NONE + "outputs: [out]\n", home=("out/result.txt",)),
    Case("deep_output", more=NONE + 'outputs: [lightning_logs, "wandb/**/x"]\n',
         home=("lightning_logs/version_0/metrics.csv", "lightning_logs/version_0/checkpoints/last.ckpt",
               "wandb/run/x")),
    Case("odd_names", more=NONE + "outputs: [out/]\n", home=("out/two words (1).txt", "out/数据.txt")),
    Case("all_kinds_of_files", more=NONE + "outputs: [out, runs/]\n",
         says=("its name is not UTF-8, and 2 more", "no file matches `runs/`"),
         home=("out/model.pt", "out/sub/log", "out/empty", "out/latest.pt")),
    Case("goes_to_the_background", more=NONE + "outputs: [result.txt]\n",
         says=("no file matches `result.txt`",), logs=("left running was ended with it",)),
    Case("ends_at_once", code=6, says=("exit code 7: loss is nan, giving up The cause is the program",)),
    Case("reports_its_steps", nodes=2, says=("step 9 of 9",)),
    Case("recursion", code=6, says=("RecursionError",)),
    Case("exits_in_a_thread", logs=("in a thread", "the program goes on")),
    Case("warns", logs=("deprecated", "done")),
    Case("wrapper", more=NONE + "launcher: bash\n", args=("it's me",), logs=("hello", "given it's me")),
    Case("line", more=NONE + "launcher: bash\noutputs: [seen.txt]\n", nodes=2,
         command='for n in 1 2; do echo "pass $n of node $NODE_RANK of $NNODES"; done | tee seen.txt',
         logs=("pass 2 of node 0 of 2",), home=both("seen.txt")),
]  # fmt: skip


@dataclass
class Home:
    """A user's folders, and fleets that stand."""

    root: Path
    env: dict[str, str]
    stacks: dict[int, str] = field(default_factory=dict)  # by the number of nodes

    def mgpu(self, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
        return command.mgpu(*args, folder=folder, env=self.env, timeout=600)

    def project(self, case: Case) -> Path:
        """A folder as the user has it: the program, what it needs, and a run file."""
        folder = self.root / f"{case.name}-{abs(hash(case.more)) % 1000}"
        (folder / "helpers").mkdir(parents=True)
        for program in (HERE / "programs").glob(f"{case.name}.*"):
            shutil.copy(program, folder)
        (folder / "helpers" / "model.py").write_text("NAME = 'tiny'\n")
        (folder / "config.yaml").write_text("a: 1\n")
        program = next((path.name for path in folder.glob(f"{case.name}.*")), "")
        command = json.dumps(case.command or [program, *case.args])
        (folder / "mgpu.yaml").write_text(f"{RUN_FILE.format(nodes=case.nodes)}command: {command}\n{case.more}")
        return folder

    def stack(self, nodes: int) -> str:
        """The fleet of so many nodes, which its first run has made."""
        if nodes not in self.stacks:
            first = self.project(Case("hello", more=f"{NONE}# of {nodes}\n", nodes=nodes))
            done = self.mgpu(first, "launch", "--yes", "--json")
            assert done.returncode == 0, done.stderr
            self.stacks[nodes] = json.loads(done.stdout)["run_id"]
        return self.stacks[nodes]

    def records(self) -> dict[str, Any]:
        return {
            path.parent.name: json.loads(path.read_text())
            for path in (self.root / "xdg/state/mgpu/runs").glob("*/record.json")
        }


@pytest.fixture(scope="module")
def home(tmp_path_factory, require):
    require("engine", install.find_engine() is not None, "no Pulumi engine; `make setup` installs one")
    root = tmp_path_factory.mktemp("newcomer")
    ours = {f"XDG_{kind}_HOME": str(root / "xdg" / kind.lower()) for kind in ("STATE", "CONFIG", "DATA")}
    made = Home(root, {name: value for name, value in os.environ.items() if not name.startswith("PULUMI_")} | ours)
    yield made
    for stack in made.stacks.values():
        gone = made.mgpu(root, "down", stack)
        assert gone.returncode == 0, gone.stderr


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_program_ends_as_it_should_and_the_truth_is_told(home, case):
    stack = home.stack(case.nodes)
    folder, before = home.project(case), set(home.records())
    done = home.mgpu(folder, "run", "--stack", stack, "--yes")
    screen = done.stdout + done.stderr
    assert done.returncode == case.code, screen
    (run_id,) = set(home.records()) - before
    record = home.records()[run_id]
    assert record["state"] == ("failed" if case.code else "succeeded")
    assert (record["fault"] == "user") == bool(case.code)
    for words in case.says:
        assert words in " ".join(screen.split()), screen
    log = home.mgpu(folder, "logs", run_id, "--node", "0").stdout
    for words in case.logs:
        assert words in log, log
    assert [line for line in done.stderr.splitlines() if line.startswith("Traceback")] == []
    came = folder / "mgpu-runs" / run_id / "outputs"
    assert {path.relative_to(came).as_posix() for path in came.rglob("*") if path.is_file()} == set(case.home)
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if _of(path, str(home.root), case.name)]
    assert left == [], "nothing of the program goes on living"


def test_one_that_ignores_sigterm_is_ended_and_what_it_has_left_comes_home(home):
    stack, before = home.stack(1), set(home.records())
    folder = home.project(Case("ignores_sigterm", more=NONE + "outputs: runs/\n"))
    env = home.env | {"MGPU_TIMEOUTS": '{"stop_grace_s": 1}'}
    words = [MGPU, "run", "--stack", stack, "--yes"]
    with subprocess.Popen(words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        run_id = until(lambda: set(home.records()) - before).pop()
        until(lambda: "ready" in home.mgpu(folder, "logs", run_id).stdout)
        stopped = home.mgpu(folder, "stop", run_id)
        screen = run.communicate(timeout=600)[0].decode()
    assert run.returncode == 130, screen
    assert stopped.returncode == 0, stopped.stderr
    assert (folder / "mgpu-runs" / run_id / "outputs/runs/metrics.csv").exists(), screen
    assert [path for path in Path("/proc").glob("[0-9]*/cmdline") if _of(path, str(home.root), "ignores_sigterm")] == []


def _of(path: Path, root: str, name: str) -> bool:
    try:
        words = path.read_bytes().decode(errors="replace")
    except OSError:
        return False
    return root in words and f"{name}." in words and "pytest" not in words


REFUSED = [
    (["wrapper.sh"], "is a script for another program"),
    (["bash", "wrapper.sh"], "write `launcher: bash` and `command: [wrapper.sh]`"),
    (["python", "hello.py"], "write `command: [hello.py]`"),
    (["torchrun", "--nproc_per_node", "8", "hello.py"], "write `command: [hello.py]`"),
    (["helo.py"], "hello.py"),
    ("python hello.py", "write `command: [hello.py]`"),
]


@pytest.mark.parametrize(("command", "words"), REFUSED)
def test_what_cannot_start_is_refused_before_anything_is_rented(tmp_path, xdg, command, words):
    for name in ("hello.py", "wrapper.sh"):
        shutil.copy(HERE / "programs" / name, tmp_path)
    (tmp_path / "mgpu.yaml").write_text(f"{RUN_FILE.format(nodes=1)}command: {json.dumps(command)}\n")
    for verb in (["plan"], ["launch", "--yes"]):
        done = subprocess.run([MGPU, *verb], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert not bill.read(state_dir() / "local").alive


def test_every_program_is_run():
    named = {case.name for case in CASES if not case.command} | {"ignores_sigterm"}
    assert {path.stem for path in (HERE / "programs").iterdir() if path.is_file()} == named
