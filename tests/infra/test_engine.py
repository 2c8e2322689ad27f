"""The real engine and provider `local`: what a stack does to machines, judged by the provider's bill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from mgpu_train.timeouts import Timeouts

from mgpu.errors import Interrupted, MgpuError, NoOffer, StackError
from mgpu.events import Note
from mgpu.iac import engine, environment, install
from mgpu.iac.engine import Stack, project_files
from mgpu.providers import registry
from mgpu.providers.local import bill

# Inside the plugin alone: nodes never become ready while the file `hold` is there.
HELD = """
import os, sys
if any(arg.endswith("pulumi-resource-mgpu") for arg in sys.orig_argv):
    from mgpu.providers.base import FleetState, NodePhase
    from mgpu.providers.local.provider import LocalProvider
    describe = LocalProvider.describe
    def held(self, handle):
        state = describe(self, handle)
        if not os.path.exists({hold!r}):
            return state
        pending = (n.model_copy(update={{"phase": NodePhase.PENDING}}) for n in state.nodes)
        return FleetState(nodes=tuple(pending))
    LocalProvider.describe = held
"""


class Project:
    """A folder that `mgpu init` made, with one stack of mgpu's own, and all that it emitted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events = []
        project_files(folder)
        self.want()
        self.log_dir = folder.parent / "log"
        self.stack = self.open()

    def open(self) -> Stack:
        return Stack(
            self.folder,
            "demo-1",
            self.folder / "mgpu.yaml",
            log_dir=self.log_dir,
            emit=self.events.append,
            timeouts=Timeouts(),
        )

    def want(self, **changes) -> None:
        spec = {
            "name": "demo",
            "provider": "local",
            "nodes": 2,
            "market": "spot",
            "max_price_usd_per_hour": 0.5,
            "max_hours": 0.5,
            "train": {"task": "lm"},
        }
        (self.folder / "mgpu.yaml").write_text(json.dumps(spec | changes))

    @property
    def billed(self) -> dict[str, int]:
        """Instances that cost money now, and the pids of their keepers."""
        alive = bill.read(registry.get("local").root).alive
        return {node.start.instance: node.start.pid for node in alive}

    def ids(self) -> list[str]:
        output = self.stack.outputs()
        assert output is not None
        return [node.id for node in output.nodes]


@pytest.fixture
def project(require, xdg, tmp_path):
    require("engine", install.find_engine() is not None, "no Pulumi engine; `make setup` installs one")
    project = Project(tmp_path / "project")
    yield project
    for handle in registry.get("local").list_owned(environment.paths.owner()):
        while not registry.get("local").destroy(handle):
            time.sleep(0.05)


def start_up_held(project, tmp_path, monkeypatch):
    """A file that keeps creates from finishing, and a thread in which `up` runs; returns once machines are billed."""
    hold = tmp_path / "hold"
    hold.touch()
    (tmp_path / "inject").mkdir()
    (tmp_path / "inject" / "sitecustomize.py").write_text(HELD.format(hold=str(hold)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "inject"))
    raised = []

    def up():
        try:
            project.stack.up()
        except MgpuError as error:
            raised.append(error)

    project.stack.init()
    thread = threading.Thread(target=up)
    thread.start()
    wait_until(lambda: len(project.billed) == 2)
    return hold, thread, raised


def wait_until(condition, limit_s=30):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes(name: str, under: Path) -> list[int]:
    """Pids of programs of this name whose environment names the test's folder."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            argv, environ = (proc / "cmdline").read_bytes(), (proc / "environ").read_bytes()
        except OSError:
            continue
        if name.encode() in argv and str(under).encode() in environ:
            found.append(int(proc.name))
    return found


def test_the_life_of_a_fleet(project, xdg):
    stack = project.stack
    assert not stack.exists()
    assert stack.outputs() is None
    stack.init()
    stack.up()
    first = project.ids()
    assert set(first) == project.billed.keys()
    assert Note("creating Fleet fleet") in project.events
    assert_no_plain_secret(project, xdg)
    assert stack.preview() == ()

    os.kill(project.billed[first[1]], signal.SIGKILL)
    stack.refresh()
    assert resource(xdg, "Fleet")["inputs"]["nodes"] == 1
    stack.up()
    repaired = stack.outputs()
    assert repaired.nodes[0].id == first[0], "the node that lived was not touched"
    assert {node.id for node in repaired.nodes} == project.billed.keys()
    assert repaired.generation == 2

    project.want(nodes=4)
    (change,) = stack.preview()
    assert (change.op, change.name, change.properties) == ("update", "fleet", ("nodes: 2 => 4",))
    stack.up()
    grown = project.ids()
    assert grown[:2] == [node.id for node in repaired.nodes]
    assert set(grown) == project.billed.keys()
    project.want(nodes=1)
    stack.up()
    assert project.ids() == [*project.billed] == grown[:1]

    stack.destroy()
    assert not project.billed
    assert not (xdg / "state/mgpu/keys").is_dir() or not any((xdg / "state/mgpu/keys").iterdir())
    stack.remove()
    assert not stack.exists()
    assert sorted(path.name for path in project.folder.iterdir()) == ["Pulumi.yaml", "infra", "mgpu.yaml"]
    assert [path.name for path in project.log_dir.iterdir()] == ["pulumi.log"]


def assert_no_plain_secret(project, xdg):
    """The private key stands in its own file and nowhere else: not in state, backups, history, logs or events."""
    key = Path(project.stack.outputs().private_key_file)
    body = key.read_text().splitlines()[2]
    holders = [path for root in (xdg, project.log_dir) for path in root.rglob("*") if path.is_file()]
    assert [path for path in holders if body in path.read_text(errors="replace")] == [key]
    assert not any(body in str(event) for event in project.events)
    assert "ciphertext" in resource(xdg, "SshKey")["outputs"]["privateKey"]


def resource(xdg, kind):
    """The resource of this type, as state has it."""
    (path,) = (xdg / "state/mgpu/pulumi/.pulumi/stacks").glob("*/demo-1.json")
    state = json.loads(path.read_text())
    (found,) = (r for r in state["checkpoint"]["latest"]["resources"] if r["type"] == f"mgpu:index:{kind}")
    return found


def test_plain_pulumi_from_a_shell_that_read_the_env(project, tmp_path):
    install.set_up(project.folder, print)

    def shell(script):
        command = ["/bin/sh", "-euc", f". .mgpu/env; {script}"]
        done = subprocess.run(command, cwd=project.folder, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    first = shell("pulumi up --yes --skip-preview")
    assert "warning" not in first
    assert len(project.billed) == 2
    assert engine.current_stack(project.folder) == "dev"
    assert "5 unchanged" in shell("pulumi up --yes --skip-preview")
    os.kill(next(iter(project.billed.values())), signal.SIGKILL)
    assert "1 updated" in shell("pulumi up --yes --skip-preview"), "a plain `up` sees the lost node and repairs it"
    assert len(project.billed) == 2
    users = Stack(
        project.folder,
        "dev",
        project.folder / "mgpu.yaml",
        log_dir=tmp_path / "dev",
        emit=project.events.append,
        timeouts=Timeouts(),
        own_config=False,
    )
    assert {node.id for node in users.outputs().nodes} == project.billed.keys()
    users.destroy()
    assert not project.billed


def test_a_refusal_of_the_provider_keeps_its_class_and_its_words(project):
    project.want(max_price_usd_per_hour=0.001)
    project.stack.init()
    with pytest.raises(NoOffer) as refused:
        project.stack.up()
    assert "no offer of provider local" in refused.value.what
    assert "max_price_usd_per_hour" in refused.value.next_step
    assert "[mgpu" not in str(refused.value)


def test_an_interrupt_undoes_what_is_under_way(project, tmp_path, monkeypatch):
    hold, thread, raised = start_up_held(project, tmp_path, monkeypatch)
    project.stack.interrupt()
    thread.join(60)
    assert isinstance(raised[0], Interrupted)
    assert not project.billed
    with pytest.raises(Interrupted):
        project.stack.up()
    hold.unlink()
    project.open().up()  # the lock was released, and the tokens that were undone are not used again
    assert len(project.billed) == 2
    project.stack.destroy()
    assert not project.billed


@pytest.fixture
def cut_off(project, tmp_path, monkeypatch):
    """The engine was killed in the middle of a create: machines run, state does not know them, the lock is left."""
    hold, thread, raised = start_up_held(project, tmp_path, monkeypatch)
    (pulumi,) = processes("--event-log", tmp_path)
    os.kill(pulumi, signal.SIGKILL)
    thread.join(60)
    assert isinstance(raised[0], StackError)
    wait_until(lambda: not processes("pulumi-resource-mgpu", tmp_path), 10)  # an orphaned plugin ends itself
    assert len(project.billed) == 2
    hold.unlink()
    for orphan in processes("pulumi-language-python", tmp_path):
        os.kill(orphan, signal.SIGKILL)  # unlike our plugin, Pulumi's language host never ends itself
    for lock in (tmp_path / "xdg/state/mgpu/pulumi/.pulumi/locks").rglob("*.json"):
        lock.unlink()  # what `pulumi cancel` does
    return project


def test_up_after_a_crash_adopts_what_runs(cut_off):
    running = cut_off.billed
    cut_off.open().up()
    assert cut_off.billed == running, "the same processes: no second copy, none restarted"
    assert set(cut_off.ids()) == running.keys()
    cut_off.stack.destroy()
    assert not cut_off.billed


def test_destroy_after_a_crash_sweeps_what_state_does_not_know(cut_off):
    cut_off.stack.destroy()
    assert not cut_off.billed
    cut_off.stack.remove()
    assert not cut_off.stack.exists()


def test_a_program_of_the_users_own_can_be_read(require, xdg, tmp_path):
    require("engine", install.find_engine() is not None, "no Pulumi engine; `make setup` installs one")
    node = {"rank": 0, "id": "i-1", "address": "192.0.2.7", "user": "ubuntu", "host_key": "ssh-ed25519 AAAA"}
    exported = {"version": 1, "fleet": "theirs", "provider": "own", "nodes": [node], "private_key_file": "~/.ssh/id"}
    (tmp_path / "Pulumi.yaml").write_text("name: theirs\nruntime: python\n")
    (tmp_path / "__main__.py").write_text(f"import pulumi\npulumi.export('mgpu', {exported!r})\n")
    stack = Stack(tmp_path, "x", tmp_path / "r", log_dir=tmp_path / "log", emit=print, timeouts=Timeouts())
    stack.init()
    stack.up()
    output = stack.outputs()
    assert output.nodes[0].port == 22
    assert output.owner == "", "not made by mgpu"
