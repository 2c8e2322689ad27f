"""Whole worlds for the fault tests: a user's folders, a project, the real command in it, and judges that ask no record.

A world is known by its folder alone: every process that belongs to it has that folder in its environment.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes import command
from waiting import until

from mgpu.iac.engine import install
from mgpu.providers.local import bill
from mgpu.providers.local.provider import LocalProvider

MGPU = str(Path(sys.executable).with_name("mgpu"))
PROGRAMS = Path(__file__).parents[1] / "programs"
_AMBIENT = ("PULUMI_", "AWS_", "MGPU_")
_GONE_S = 30.0


@dataclass(frozen=True)
class World:
    """One user on one machine. Nothing of it is in this process's environment, so many can live at once."""

    root: Path
    env: dict[str, str]

    @property
    def project(self) -> Path:
        """The user's folder, made by `mgpu init`, with the counting program as train.py."""
        return self.root / "mine"

    @property
    def state(self) -> Path:
        return self.root / "state" / "mgpu"

    def write(self, **run_file: Any) -> None:
        """The run file: one quick spot node without torch, but for what is given."""
        keys = {
            "name": "w",
            "provider": "local",
            "nodes": 1,
            "market": "spot",
            "max_price_usd_per_hour": 1,
            "max_hours": 2,  # longer than any story takes on a busy machine
            "launcher": "python",
            "command": ["train.py", "20", "0.05"],
            **run_file,
        }
        (self.project / "mgpu.yaml").write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in keys.items()))

    def start(self, *argv: str, cwd: Path | None = None, stdin: Any = subprocess.DEVNULL) -> subprocess.Popen[str]:
        """A command of this world; `mgpu` stands for the installed one."""
        program = [MGPU, *argv[1:]] if argv[0] == "mgpu" else list(argv)
        return subprocess.Popen(
            program, cwd=cwd or self.project, env=self.env, stdin=stdin, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    @contextmanager
    def told(self, process: subprocess.Popen[str]) -> Iterator[list[str]]:
        """What a process says on standard error, line by line as it comes; all of it when the block ends."""
        lines: list[str] = []
        reader = threading.Thread(target=lambda: [lines.append(line) for line in process.stderr or ()], daemon=True)
        reader.start()
        yield lines
        reader.join(60)

    def mgpu(self, *args: str, timeout: float = 600, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """`mgpu` with these arguments, to its end."""
        return command.mgpu(*args, folder=cwd or self.project, env=self.env, timeout=timeout)

    # --- judges

    def bill(self) -> bill.Bill:
        return bill.read(self.state / "local")

    def alive(self) -> int:
        return len(self.bill().alive)

    def owned(self) -> tuple[Any, ...]:
        """What the provider lists for this world's user: what `mgpu gc` goes by."""
        owner = self.state / "owner"
        return LocalProvider(root=self.state / "local").list_owned(owner.read_text().strip()) if owner.exists() else ()

    def most_alive(self) -> int:
        """How many machines ran at one time, at most."""
        turns = [(node.start.at, 1) for node in self.bill().nodes] + [(node.end_at, -1) for node in self.bill().nodes]
        most = now = 0
        for _, turn in sorted(turns):
            now += turn
            most = max(most, now)
        return most

    def commits(self, run_id: str) -> list[dict[str, Any]]:
        """The entries of a run's commit log, in order."""
        paths = self.root.glob(f"data/mgpu/checkpoints/{run_id}/commits/*.json")
        return [json.loads(path.read_text()) for path in sorted(paths)]

    def steps(self, run_id: str) -> list[int]:
        """The committed steps, in the order of their commits."""
        return [entry["manifest"]["step"] for entry in self.commits(run_id) if entry["kind"] == "checkpoint"]

    def stacks(self) -> list[str]:
        """What the engine keeps of stacks and of locks on them."""
        backend = self.state / "pulumi" / ".pulumi"
        return [path.name for kind in ("stacks/*/*.json*", "locks/**/*.json") for path in backend.glob(kind)]

    def processes(self) -> dict[int, str]:
        """Every living process that belongs to this world: node processes, agents, engines, plug-ins, commands."""
        found = {}
        for pid in (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()):
            with suppress(OSError):
                if os.fsencode(str(self.root)) in Path(f"/proc/{pid}/environ").read_bytes():
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return {pid: line for pid, line in found.items() if line}

    # --- what our own records say

    def runs(self) -> list[dict[str, Any]]:
        """All records, oldest first."""
        paths = (self.state / "runs").glob("[!.]*/record.json")
        return sorted((json.loads(path.read_text()) for path in paths), key=lambda run: run["created_at"])

    def run(self) -> dict[str, Any]:
        """The newest record; empty: there is none."""
        runs = self.runs()
        return runs[-1] if runs else {}

    def wait(self, what: Callable[[], Any], seconds: float = 60, why: str = "it did not happen in time") -> None:
        until(what, seconds, why)

    def clear(self) -> None:
        """Ends whatever is left; a test that has proved its point leaves nothing to end."""
        provider = LocalProvider(root=self.state / "local")
        for handle in self.owned():
            self.wait(lambda handle=handle: provider.destroy(handle), _GONE_S)
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def _template(tmp_path_factory: pytest.TempPathFactory, require) -> Path:
    require("engine", install.find_engine() is not None, "no Pulumi engine; `make setup` installs one")
    root = tmp_path_factory.mktemp("template")
    world = World(root, _environment(root))
    world.project.mkdir()
    done = world.mgpu("init")
    assert done.returncode == 0, done.stderr
    shutil.rmtree(world.project / ".mgpu")
    shutil.copy(PROGRAMS / "count.py", world.project / "train.py")
    return world.project


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder of the programs that users of these tests run."""
    return PROGRAMS


@pytest.fixture
def new_world(tmp_path: Path, _template: Path) -> Iterator[Callable[..., World]]:
    """`new_world("name", VARIABLE="value")`: a world of its own under tmp_path, ended with the test."""
    with _worlds(tmp_path, _template) as make:
        yield make


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory, _template: Path) -> Iterator[Callable[..., World]]:
    """As `new_world`, for stories that several tests of a module tell at once."""
    with _worlds(tmp_path_factory.mktemp("worlds"), _template) as make:
        yield make


@contextmanager
def _worlds(folder: Path, template: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(name: str = "world", **variables: str) -> World:
        root = folder / name
        root.mkdir()
        (root / "tmp").mkdir()
        shutil.copytree(template, root / "mine")
        made.append(World(root, _environment(root) | variables))
        return made[-1]

    try:
        yield make
    finally:
        for world in made:
            world.clear()


def _environment(root: Path) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(_AMBIENT)}
    folders = {f"XDG_{kind.upper()}_HOME": str(root / kind) for kind in ("state", "config", "data")}
    return ours | folders | {"TMPDIR": str(root / "tmp")}
