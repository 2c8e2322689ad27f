"""The engine and the registries that tests stand on: they work, and leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from fakes.engine import Engine, Registry, missing, running_engine

HOLD = """
import sys
sys.path.insert(0, {tests!r})
from fakes.engine import running_engine
with running_engine() as engine:
    engine.image("base:1")
    engine.docker("run", "-d", "--network", "host", "base:1", "sleep", "1000")
    print(engine.folder, flush=True)
    sys.stdin.read()
"""


def test_containers_run_on_the_machines_own_network_and_as_first_process(engine: Engine):
    ran = engine.docker("run", "--rm", "--init", "--network", "host", "base:1", "echo", "hi")
    assert ran.stdout == "hi\n"


def test_a_registry_gives_back_what_was_pushed(engine: Engine, registry: Registry):
    name = f"{registry.address}/fixture:1"
    engine.docker("tag", "base:1", name)
    pushed = engine.docker("push", name).stdout
    assert "digest: sha256:" in pushed
    engine.docker("rmi", name)
    assert "Downloaded newer image" in engine.docker("pull", name).stdout


def test_a_locked_registry_asks_who_is_there(locked_registry: Registry):
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://{locked_registry.address}/v2/", timeout=5)


@pytest.mark.parametrize("signal", ["INT", "KILL"])
def test_nothing_is_left_of_an_engine_however_its_owner_ends(require, signal: str):
    require("docker", not missing(), missing())
    program = HOLD.format(tests=str(Path(__file__).parents[2]))
    owner = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout
    folder = Path(owner.stdout.readline().decode().strip())
    assert _processes_of(folder)
    subprocess.run(["kill", f"-{signal}", str(owner.pid)], check=True)
    owner.wait(60)
    subprocess.run(["timeout", "30", "sh", "-c", f"while test -e {folder}; do sleep 0.05; done"], check=True)
    assert not _processes_of(folder)
    assert str(folder) not in Path("/proc/mounts").read_text()
    assert not [*Path("/sys/fs/cgroup").glob(f"*/{folder.name}*"), *Path("/sys/fs/cgroup").glob(f"{folder.name}*")]


def test_an_engine_may_have_little_room(require):
    require("docker", not missing(), missing())
    with running_engine(data_mib=8) as engine:
        engine.image("base:1")
        with pytest.raises(RuntimeError, match="No space left"):
            engine.docker(
                "run", "--rm", "--network", "none", "base:1", "dd", "if=/dev/zero", "of=/f", "bs=1M", "count=9"
            )


def _processes_of(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            said = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in said:
            found.append(said.decode())
    return found
