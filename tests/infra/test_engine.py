"""The real engine and provider `local`: what a stack does to machines, judged by the provider's bill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from mgpu_train.timeouts import Timeouts

from mgpu.errors import Interrupted, NoOffer
from mgpu.events import Note
from mgpu.iac.engine import install, stack
from mgpu.iac.engine.stack import Stack


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


def test_a_fleet_of_which_nothing_is_left_is_made_again_until_the_same_hard_cap(project):
    """The first one lives as long as is paid for."""
    stack, began = project.stack, time.time()
    stack.init()
    stack.up(max_usd=0.02)
    first = stack.outputs()
    paid_s = 0.02 / first.price_usd_per_hour * 3600
    assert began + paid_s <= first.hard_cap_at <= time.time() + paid_s
    for pid in project.billed.values():
        os.kill(pid, signal.SIGKILL)
    stack.up(first.hard_cap_at - 600)
    again = stack.outputs()
    assert not {node.id for node in first.nodes} & {node.id for node in again.nodes}
    assert again.hard_cap_at == pytest.approx(first.hard_cap_at - 600, abs=5)
    stack.destroy()
    assert not project.billed


def test_plain_pulumi_from_a_shell_that_read_the_env(project, tmp_path):
    install.set_up(project.folder, print)

    def shell(script):
        command = ["/bin/sh", "-euc", f". .mgpu/env; {script}"]
        done = subprocess.run(command, cwd=project.folder, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    first = shell("pulumi up --yes --skip-preview")
    assert "warning" not in first
    assert len(project.billed) == 2
    assert stack.current_stack(project.folder) == "dev"
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


def test_an_interrupt_undoes_what_is_under_way(project):
    project.stack.init()
    held = project.hold(project.stack.up)
    project.stack.interrupt()
    assert isinstance(held.ended(), Interrupted)
    assert not project.billed
    with pytest.raises(Interrupted):
        project.stack.up()
    project.release()
    project.open().up()  # the lock was released, and the tokens that were undone are not used again
    assert len(project.billed) == 2
    project.stack.destroy()
    assert not project.billed


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
