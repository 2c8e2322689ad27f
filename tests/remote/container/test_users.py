"""Whose files a container writes, and who may use the engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fakes.containers import WANTED, Machine, script
from mgpu_train.agent.host.layout import LEASE

from mgpu.run.nodes import agent_client

STRANGER = 54321  # a user id that nobody has here


def test_home_is_seen_at_its_own_path_and_what_is_written_is_the_users(machine, images):
    machine.up(images.first)
    lease = machine.home / LEASE
    machine.inside("sh", "-c", f"echo 1234 > {LEASE}.new")
    machine.inside("python3", "-c", f"import os; os.rename('{LEASE}.new', '{LEASE}')")
    assert lease.read_text() == "1234\n"
    assert (lease.stat().st_uid, lease.stat().st_gid) == (os.getuid(), os.getgid())
    environment = machine.inside("env").stdout.splitlines()
    assert f"HOME={machine.home}" in environment
    assert any(line.startswith("USER=") and len(line) > 5 for line in environment)


def test_what_another_user_writes_in_there_is_that_users(machine, images, engine):
    group = (engine.folder / "sock").stat().st_gid
    with stranger(machine) as home:
        answer = _as_stranger(home, engine, images.first, groups=[group])
        assert "problem" not in answer, answer
        try:
            lease = home / LEASE
            engine.docker("exec", answer["container"], "sh", "-c", f"echo 1 > {lease}; id -u")
            assert lease.stat().st_uid == STRANGER
        finally:
            engine.docker("rm", "--force", answer["container"])


def test_a_user_whom_the_socket_refuses_is_told_apart(machine, images, engine):
    with stranger(machine) as home:
        answer = _as_stranger(home, engine, images.first)
    assert answer["problem"] == "permission"


@contextmanager
def stranger(machine: Machine) -> Iterator[Path]:
    """The home of another user, with the library in it, and the way to the engine's socket."""
    agent_client.send_library(machine.nodes)
    folder, engine = Path(tempfile.mkdtemp()), machine.engine.folder
    closed = engine.stat().st_mode
    engine.chmod(0o711)
    try:
        shutil.copytree(machine.home, folder, dirs_exist_ok=True)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, STRANGER, STRANGER)
        yield folder
    finally:
        engine.chmod(closed)
        shutil.rmtree(folder)


def _as_stranger(home: Path, engine, reference, groups=()) -> dict:
    command = ["/usr/bin/python3", "-I", script(home), "up"]
    env = {"DOCKER_HOST": engine.host, "PATH": engine.env["PATH"], "HOME": str(home)}
    done = subprocess.run(
        command, input=json.dumps(WANTED | {"reference": reference}), capture_output=True, text=True, env=env,
        user=STRANGER, group=STRANGER, extra_groups=list(groups), cwd=home,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return json.loads(done.stdout)
