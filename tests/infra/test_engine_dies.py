"""Engine, plugin and operator are killed at work. The judges are the provider's bill, the state and the system."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from mgpu_train.agent.machine import procs

from mgpu.errors import StackError
from mgpu.events import Note
from mgpu.iac.engine import install, operations

CLI, PLUGIN, HOST = "--event-log", "pulumi-resource-mgpu", "pulumi-language-python"
BOTH = (PLUGIN, CLI)

OPERATOR = """
import sys
from pathlib import Path
from mgpu_train.timeouts import Timeouts
from mgpu.iac.engine.stack import Stack
folder, log_dir, verb = sys.argv[1:]
stack = Stack(Path(folder), "demo-1", Path(folder, "mgpu.yaml"), log_dir=Path(log_dir), emit=print, timeouts=Timeouts())
stack.init()
getattr(stack, verb)()
"""


def operate(project, verb):
    """An operator of its own process."""
    argv = [sys.executable, "-c", OPERATOR, str(project.folder), str(project.log_dir), verb]
    return subprocess.Popen(argv, stdout=subprocess.DEVNULL, start_new_session=True)


def shell(project, script):
    """What plain pulumi says, from a shell that read `.mgpu/env`: its status, its words."""
    command = ["/bin/sh", "-uc", f". .mgpu/env; PULUMI_STACK=demo-1; {script}"]
    done = subprocess.run(command, cwd=project.folder, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("victims", [(CLI,), (PLUGIN,), BOTH], ids=["cli", "plugin", "both"])
def test_killed_in_a_create_the_next_up_adopts_what_runs(project, victims):
    project.stack.init()
    held = project.hold(project.stack.up)
    marked = {p.pid for found in procs.carriers(operations.MARK).values() for p in found}
    assert not marked & set(project.billed.values()), "machines do not belong to the operation that made them"
    project.kill(*victims)
    assert isinstance(held.ended(), StackError)
    running = project.billed
    project.release()
    project.open().up()
    assert project.billed == running, "the same processes: no second copy, none restarted"
    project.assert_in_order()
    project.stack.destroy()
    assert not project.billed
    project.assert_nothing_left_at_work()


def test_killed_between_the_creates_end_and_the_states_save_the_next_up_adopts(project):
    (project.inject / "die-acquired").touch()
    project.stack.init()
    with pytest.raises(StackError, match="was killed"):
        project.stack.up()
    running = project.billed
    assert len(running) == 2
    assert "Fleet" not in project.resources
    project.release("die-acquired")
    project.open().up()
    assert project.billed == running
    project.assert_in_order()


def test_killed_in_a_create_destroy_sweeps_what_state_does_not_know(project):
    project.stack.init()
    held = project.hold(project.stack.up)
    project.kill(*BOTH)
    held.ended()
    assert len(project.billed) == 2
    project.stack.destroy()
    assert not project.billed
    project.assert_nothing_left_at_work()
    project.stack.remove()
    assert not project.stack.exists()


@pytest.mark.parametrize("victims", [(CLI,), (PLUGIN,)], ids=["cli", "plugin"])
def test_killed_in_a_repair_the_next_up_adopts_the_new_machine(project, victims):
    project.stack.init()
    project.stack.up()
    first = project.ids()
    os.kill(project.billed[first[1]], signal.SIGKILL)
    held = project.hold(project.stack.up)
    assert project.started == 3
    project.kill(*victims)
    assert isinstance(held.ended(), StackError)
    running = project.billed
    project.release()
    project.open().up()
    assert project.billed == running, "the machine of the repair that was cut off, and no other"
    assert project.ids()[0] == first[0]
    assert project.started == 3
    project.assert_in_order()


def test_killed_in_a_destroy_the_next_one_ends_it_and_an_up_makes_it_whole(project):
    project.stack.init()
    project.stack.up()
    for again in (lambda: project.open().up(), lambda: project.open().destroy()):
        held = project.hold(project.stack.destroy, "keep")
        project.kill(*BOTH)
        assert isinstance(held.ended(), StackError)
        project.release("keep")
        again()
        project.assert_nothing_left_at_work()
        assert len(project.billed) in (0, 2)
        if project.billed:
            project.assert_in_order()
    assert not project.billed


def test_plain_pulumi_goes_on_where_mgpu_was_killed_and_mgpu_where_plain_pulumi_was(new_project):
    project = new_project(own_config=False)
    install.set_up(project.folder, print)
    project.stack.init()
    held = project.hold(project.stack.up)
    project.kill(CLI)
    held.ended()
    running = project.billed
    project.release()
    status, words = shell(project, "pulumi up --yes --skip-preview")
    assert status != 0
    assert "locked" in words
    status, words = shell(project, "pulumi cancel --yes && pulumi up --yes --skip-preview")
    assert status == 0, words
    assert project.billed == running
    assert project.pending == ["creating"], "Pulumi itself never drops it"
    project.open().up()
    assert project.pending == []

    held = project.hold(lambda: shell(project, "pulumi destroy --yes --skip-preview & echo $! >pid; wait"), "keep")
    os.kill(int((project.folder / "pid").read_text()), signal.SIGKILL)
    held.ended()
    assert project.locks
    project.release("keep")
    status, words = shell(project, "pulumi cancel --yes && pulumi destroy --yes --skip-preview")
    assert status == 0, words
    assert not project.billed


def test_an_operator_is_killed_and_its_engine_is_cancelled_before_the_next_one_begins(project):
    (project.inject / "hold").touch()
    operator = operate(project, "up")
    project.hold(operator.wait)
    operator.kill()
    operator.wait()
    assert project.processes(CLI), "the engine goes on, so that it can save"
    first = project.billed
    project.open().refresh()
    assert any(isinstance(event, Note) and "a process that died left at work" in event.text for event in project.events)
    assert not project.billed, "what it had under way was undone, as a user's Ctrl-C does"
    project.assert_nothing_left_at_work()
    project.release()
    project.open().up()
    assert not first.keys() & project.billed.keys()
    project.assert_in_order()


def test_a_second_operator_is_refused_at_once_and_the_first_one_is_not_disturbed(project):
    project.stack.init()
    held = project.hold(project.stack.up)
    (cli,) = project.processes(CLI)
    for refused_to in (project.open().up, project.open().destroy, project.open().remove):
        began = time.monotonic()
        with pytest.raises(StackError, match=f"locked by process {cli} ") as refused:
            refused_to()
        assert time.monotonic() - began < 10, "not after a time-out"
        assert refused.value.exit_code == 4
    assert len(project.open().preview()) > 0, "a look is not refused"
    project.release()
    assert held.ended() is None
    project.assert_in_order()
