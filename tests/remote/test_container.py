"""Containers on nodes: a real engine, real registries, SSH, and the real agent in an image that has what it needs.

The nodes are processes of this machine; their commands speak to the engine of the tests.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from socket import create_connection
from time import monotonic, sleep
from types import SimpleNamespace

import pytest
from fakes import pyimage
from fakes.engine import free_port, running_engine, running_registry
from mgpu_train.agent.layout import LEASE, RunLayout
from mgpu_train.agent.status import Fault, Phase
from mgpu_train.config import Job, Secrets

from mgpu.errors import MgpuError, RemoteError
from mgpu.events import Note, Warned
from mgpu.iac.outputs import NodeOutput, StackOutput
from mgpu.image import auth
from mgpu.remote.nodeset import NodeSet
from mgpu.run import agents, containers
from mgpu.run.containers import ImageToRun
from mgpu.spec.model import RunSpec

RUN, OWNER = "run-1", "me-1"
SLEEPS = "import time\nprint('it runs', flush=True)\ntime.sleep(600)\n"


@dataclass
class Machine:
    """A node with an engine, and what a run does to it."""

    engine: object
    server: object
    node: object
    timeouts: object
    log: Path  # a line for each call of `docker`
    events: list = field(default_factory=list)

    @property
    def nodes(self) -> NodeSet:
        return NodeSet([self.node])

    @property
    def home(self) -> Path:
        return self.server.home

    @property
    def work(self) -> Path:
        return self.home / RunLayout(RUN).work

    def fleet(self, owner: str = OWNER) -> StackOutput:
        target = self.node.target
        node = NodeOutput(rank=0, id="i", address="127.0.0.1", user="trainer", host_key=target.host_key)
        return StackOutput(
            version=1, fleet="f-1", owner=owner, provider="aws", private_key_file="/k", nodes=(node,)
        )  # fmt: skip

    def up(self, image: ImageToRun | str, run: str = RUN, *, owner: str = OWNER, times=None, send=True, **spec) -> None:
        if send:
            agents.send_library(self.nodes)
        base = {"name": "a", "provider": "aws", "max_hours": 1, "max_price_usd_per_hour": 1, "launcher": "python"}
        if "train" not in spec:
            base["command"] = ["prog.py"]
        made = RunSpec.model_validate(base | spec)
        image = ImageToRun(image) if isinstance(image, str) else image
        times = self.timeouts.model_copy(update=times or {})
        containers.up(self.nodes, image, made, self.fleet(owner), run, times, self.events.append)

    def refused(self, image: ImageToRun | str, what: str, **more) -> RemoteError:
        with pytest.raises(RemoteError, match=what) as caught:
            self.up(image, **more)
        assert caught.value.next_step
        return caught.value

    def down(self, **times) -> int:
        return containers.down(self.nodes, self.fleet(), self.timeouts.model_copy(update=times))

    def ids(self, owner: str = OWNER) -> list[str]:
        filters = [f"--filter=label=dev.mgpu.{key}={value}" for key, value in (("owner", owner), ("home", self.home))]
        return self.engine.docker("ps", "--all", "--quiet", "--no-trunc", *filters).stdout.split()

    @property
    def container(self):
        (one,) = self.ids()
        return json.loads(self.engine.docker("inspect", one).stdout)[0]

    def inside(self, *argv: str, check: bool = True):
        return self.engine.docker("exec", self.container["Id"], *argv, check=check)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def noted(self) -> str:
        return "\n".join(event.text for event in self.events if isinstance(event, Note))

    # --- the agent

    def start(self, program: str, **changes) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        (self.work / "prog.py").write_text(program)
        job = Job.model_validate(
            {
                "run_id": RUN, "attempt": 1, "writer": "w", "node_rank": 0, "nodes": 1, "processes_per_node": 1,
                "master_addr": "127.0.0.1", "master_port": 29999, "launcher": "python", "command": ["prog.py"],
                "workdir": str(RunLayout(RUN).work), "lease_file": str(LEASE), "timeouts": self.timeouts,
            } | changes
        )  # fmt: skip
        agents.send_job(self.node, job)
        agents.start(self.node, RUN, Secrets(env={"TOKEN": "canary"}), self.timeouts)

    @property
    def status(self) -> dict:
        return agents.status(self.node, RUN, self.timeouts)

    @property
    def said(self) -> str:
        return self.node.read(str(RunLayout(RUN).log)).decode()


@pytest.fixture(scope="session")
def images(engine, registry, locked_registry, tmp_path_factory) -> SimpleNamespace:
    """References by digest: images that run the agent, one of them in a registry with a lock; one without Python."""
    folder = tmp_path_factory.mktemp("image")
    pyimage.build(engine, folder)
    for number in (2, 3):
        pyimage.dockerfile(engine, folder, f"python:{number}", f"FROM python:1\nLABEL number={number}\n")
    pyimage.dockerfile(engine, folder, "bare:1", "FROM base:1\nLABEL bare=1\n")
    return SimpleNamespace(
        locked=pyimage.push(engine, locked_registry, "python:3"),
        second=pyimage.push(engine, registry, "python:2"),
        first=pyimage.push(engine, registry, "python:1"),
        bare=pyimage.push(engine, registry, "bare:1"),
    )


@pytest.fixture
def programs(tmp_path, engine) -> Path:
    """A folder before all others on PATH: its `docker` writes down how it was called, and calls the real one."""
    folder, log = tmp_path / "programs", tmp_path / "calls"
    folder.mkdir()
    real = shutil.which("docker", path=engine.env["PATH"])
    (folder / "docker").write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$*" >> {log}\n'
        f'test -z "$DOCKER_CONFIG" || stat --format "config %a %n" "$DOCKER_CONFIG" >> {log}\nexec {real} "$@"\n'
    )
    (folder / "docker").chmod(0o755)
    return folder


@pytest.fixture
def new_machine(tmp_path, engine, programs, timeouts, new_server, open_node, monkeypatch):
    """`new_machine()`: a node whose commands speak to the engine; `environment` lies over theirs."""
    made = []

    def make(on=engine, **environment: str) -> Machine:
        given = {"DOCKER_HOST": on.host, "PATH": f"{programs}:{on.env['PATH']}", **environment}
        with monkeypatch.context() as patch:
            patch.delenv("DOCKER_CONFIG", raising=False)
            for name, value in given.items():
                patch.setenv(name, value)
            server = new_server()
        times = timeouts.model_copy(update={"prepare_s": 120, "stop_grace_s": 10, "kill_s": 10})
        made.append(Machine(on, server, open_node(server), times, tmp_path / "calls"))
        return made[-1]

    yield make
    for machine in made:
        for owner in (OWNER, "other") if (machine.engine.folder / "sock").exists() else ():
            if ids := machine.ids(owner):
                machine.engine.docker("rm", "--force", "--volumes", *ids)


@pytest.fixture
def machine(new_machine) -> Machine:
    return new_machine()


# --- one container, and no other ----------------------------------------------------------------------------------


def test_it_is_made_once_and_kept(machine, images, engine):
    engine.docker("rmi", "--force", images.first, check=False)
    machine.up(images.first)
    first = machine.container
    machine.up(images.first)
    assert machine.container["Id"] == first["Id"]
    assert "pulled on 1 of 1 node," in machine.noted
    assert "already on 1 of 1 node," in machine.noted
    assert sum(call.startswith("pull") for call in machine.calls) == 1


def test_two_operators_at_once_make_one(machine, images):
    wrong: list[BaseException] = []
    agents.send_library(machine.nodes)

    def up() -> None:
        try:
            machine.up(images.first, send=False)
        except MgpuError as error:
            wrong.append(error)

    threads = [threading.Thread(target=up) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(machine.ids()) == 1


def test_another_digest_of_the_same_run_takes_its_place(machine, images):
    machine.up(images.first)
    old = machine.container
    machine.up(images.second)
    assert machine.container["Id"] != old["Id"]
    assert machine.container["Config"]["Labels"]["number"] == "2"


def test_another_run_takes_its_place(machine, images):
    machine.up(images.first, "older-run")
    machine.up(images.first)
    assert machine.container["Config"]["Labels"]["dev.mgpu.run"] == RUN
    assert machine.container["Name"].startswith(f"/mgpu-{RUN}-")


def test_what_was_killed_is_made_anew(machine, images):
    """F44."""
    machine.up(images.first)
    old = machine.container["Id"]
    machine.engine.docker("kill", old)
    machine.up(images.first)
    assert machine.container["Id"] != old
    assert machine.container["State"]["Running"]


def test_what_is_paused_is_made_anew(machine, images):
    machine.up(images.first)
    old = machine.container["Id"]
    machine.engine.docker("pause", old)
    machine.up(images.first)
    assert machine.container["Id"] != old


def test_nobody_elses_container_is_touched(new_machine, images):
    """F44."""
    machine, neighbour = new_machine(), new_machine()
    neighbour.up(images.first)
    machine.up(images.first, owner="other")
    run = ["run", "--detach", "--network=host", "--init"]
    named = machine.engine.docker(*run, "--name", f"mgpu-{RUN}", "base:1", "sleep", "600").stdout.strip()
    try:
        machine.up(images.first)
        assert machine.down() == 1
        assert machine.ids() == []
        running = machine.engine.docker("ps", "--quiet", "--no-trunc").stdout.split()
        assert {named, *machine.ids("other"), *neighbour.ids()} <= set(running)
        assert len(machine.ids("other")) == len(neighbour.ids()) == 1
    finally:
        machine.engine.docker("rm", "--force", named)


# --- what it is made of -------------------------------------------------------------------------------------------


def test_it_is_made_as_a_machine_for_training_is(machine, images):
    machine.up(images.first)
    made = machine.container
    host, config = made["HostConfig"], made["Config"]
    labels = {key: value for key, value in config["Labels"].items() if key.startswith("dev.mgpu.")}
    assert len(labels.pop("dev.mgpu.settings")) == 32
    assert labels == {f"dev.mgpu.{key}": value for key, value in
                      {"owner": OWNER, "fleet": "f-1", "run": RUN, "home": str(machine.home)}.items()}  # fmt: skip
    assert (host["NetworkMode"], host["IpcMode"], host["Init"]) == ("host", "private", True)
    assert host["RestartPolicy"]["Name"] == "no"
    assert host["LogConfig"] == {"Type": "json-file", "Config": {"max-size": "10m", "max-file": "3"}}
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host["ShmSize"] == memory // 2
    limits = {limit["Name"]: limit["Hard"] for limit in host["Ulimits"]}
    assert limits["stack"] == 64 << 20
    # an engine without the right to lift the limit leaves it, and that is said where it matters
    warned = any(isinstance(event, Warned) and "locked memory" in event.text for event in machine.events)
    assert warned == ("memlock" not in limits and Path("/dev/infiniband").exists())
    assert limits.get("memlock", -1) == -1
    assert config["StopTimeout"] == 10
    assert config["User"] == f"{os.getuid()}:{os.getgid()}"
    assert config["Image"] == images.first


def test_code_can_be_read_and_is_seen_as_the_operator_sends_it(machine, images):
    machine.up(images.first)
    (machine.work / "late.txt").write_text("sent later")
    path = machine.work / "late.txt"
    assert machine.inside("cat", str(path)).stdout == "sent later"
    refused = machine.inside("sh", "-c", f"echo changed > {path}", check=False)
    assert "Read-only file system" in refused.stderr
    assert path.read_text() == "sent later"


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


def test_data_can_be_written_beside_the_code_and_in_it(machine, images, tmp_path):
    beside = tmp_path / "disk, fast"
    data = [{"from": "s3://data/a", "to": "tokens"}, {"from": "s3://data/c", "to": str(beside)}]
    machine.up(images.first, data=data)
    for folder in (machine.work / "tokens", beside):
        machine.inside("sh", "-c", f"echo written > '{folder}/file'")
        assert (folder / "file").read_text() == "written\n"


def test_a_folder_that_cannot_be_made_is_named(machine, images, tmp_path):
    (tmp_path / "file").write_text("")
    error = machine.refused(images.first, "cannot be made", data=[{"from": "s3://data/c", "to": f"{tmp_path}/file/x"}])
    assert f"{tmp_path}/file/x" in error.why
    assert machine.ids() == []


# --- the agent in it ----------------------------------------------------------------------------------------------


def test_the_agent_is_spoken_to_as_ever(machine, images):
    machine.up(images.first)
    assert 1024 < agents.free_port(machine.node, machine.timeouts) < 65536
    program = "import os, sys\nprint('token', os.environ['TOKEN'], os.getcwd(), sys.executable, flush=True)\n" + SLEEPS
    machine.start(program, secrets=["TOKEN"])
    _until(lambda: "it runs" in machine.said)
    assert f"token canary {machine.work}" in machine.said
    assert machine.status["alive"] is True
    agents.stop(machine.node, RUN, machine.timeouts)
    _until(lambda: not machine.status["alive"])
    assert (machine.status["phase"], machine.status["fault"]) == (Phase.FAILED, Fault.STOPPED)
    pids = machine.inside("sh", "-c", "cat /proc/[0-9]*/comm").stdout.split()
    assert pids.count("python3") + pids.count(Path(sys.executable).resolve().name) <= 2, "only what holds it is left"
    assert "canary" not in machine.engine.docker("inspect", machine.container["Id"]).stdout


def test_an_agent_whose_container_was_killed_is_seen_dead(machine, images):
    machine.up(images.first)
    machine.start(SLEEPS)
    _until(lambda: "it runs" in machine.said)
    machine.engine.docker("kill", machine.container["Id"])
    status = machine.status
    assert status["alive"] is False
    assert status["phase"] == Phase.TRAINING or status["phase"] == Phase.LAUNCHING


@pytest.mark.parametrize("how", ["down", "docker stop"])
def test_an_agent_whose_container_is_stopped_ends_in_order(machine, images, how):
    machine.up(images.first)
    machine.start(SLEEPS)
    _until(lambda: "it runs" in machine.said)
    if how == "down":
        assert machine.down() == 1
    else:
        machine.engine.docker("stop", machine.container["Id"])
    said = json.loads(machine.node.read(str(RunLayout(RUN).status)))
    assert (said["phase"], said["fault"]) == (Phase.FAILED, Fault.STOPPED)


def test_what_ignores_the_request_is_killed_after_the_grace(machine, images):
    """F44."""
    machine.up(images.first)
    machine.inside("sh", "-c", "(trap '' TERM; exec sleep 600) > /dev/null 2>&1 &")
    assert machine.down(stop_grace_s=1) == 1
    assert machine.ids() == []


def test_down_is_content_with_nothing(machine, images):
    agents.send_library(machine.nodes)
    assert machine.down() == 0
    machine.up(images.first)
    assert (machine.down(), machine.down()) == (1, 0)


# --- the pull -----------------------------------------------------------------------------------------------------


def test_a_registrys_password_is_left_nowhere(machine, images, locked_registry, engine, monkeypatch):
    engine.docker("rmi", "--force", images.locked, check=False)
    given: list[list[str]] = []
    run = machine.node.run
    monkeypatch.setattr(machine.node, "run", lambda argv, **more: (given.append(argv), run(argv, **more))[1])
    login = auth.password(locked_registry.user, locked_registry.password)
    machine.up(ImageToRun(images.locked, 1000, login))
    assert "pulled on 1 of 1 node," in machine.noted
    folders = {call.split()[-1] for call in machine.calls if call.startswith("config ")}
    assert all(call.startswith("config 700 ") for call in machine.calls if call.startswith("config "))
    assert len(folders) == 1
    assert not Path(*folders).exists()
    assert locked_registry.password not in "\n".join([*machine.calls, *(" ".join(argv) for argv in given)])
    for file in (path for path in machine.home.rglob("*") if path.is_file()):
        assert locked_registry.password.encode() not in file.read_bytes()
    assert locked_registry.password not in json.dumps(machine.container)


def test_a_wrong_password_is_told_apart(machine, images, locked_registry, engine):
    engine.docker("rmi", "--force", images.locked, check=False)
    login = auth.password(locked_registry.user, "wr0ng-canary")
    error = machine.refused(ImageToRun(images.locked, None, login), "the registry refuses")
    assert "wr0ng-canary" not in str(error)
    assert machine.ids() == []


def test_a_digest_that_is_not_there_is_told_at_once(machine, images):
    machine.refused(images.first[:-8] + "0" * 8, "not in its registry")
    assert sum(call.startswith("pull") for call in machine.calls) == 1


def test_a_tag_is_refused(machine, images):
    machine.refused(images.first.partition("@")[0] + ":1", "not named by its digest")
    assert not any(call.startswith("pull") for call in machine.calls)


def test_a_registry_that_is_away_for_a_while_is_waited_for(machine, images, registry, engine):
    """F45."""
    port = free_port()
    reference = f"127.0.0.1:{port}/{images.second.partition('/')[2]}"
    engine.docker("rmi", "--force", images.second, check=False)
    wrong: list[BaseException] = []

    def up() -> None:
        try:
            machine.up(reference)
        except MgpuError as error:
            wrong.append(error)

    thread = threading.Thread(target=up)
    thread.start()
    _until(lambda: sum(call.startswith("pull") for call in machine.calls) > 1)  # the first has failed
    with forwarding(port, registry.address):
        thread.join()
    assert wrong == []
    assert machine.container["Config"]["Image"] == reference


def test_a_registry_that_stays_away_is_named_when_time_is_over(machine, images):
    """F45."""
    reference = f"127.0.0.1:{free_port()}/{images.first.partition('/')[2]}"
    error = machine.refused(reference, "could not be pulled in time", times={"prepare_s": 4})
    assert "refused" in error.why


def test_no_room_is_known_before_the_pull(machine, images, engine):
    """F45."""
    engine.docker("rmi", "--force", images.bare, check=False)
    error = machine.refused(ImageToRun(images.bare, 1 << 50), "no room for the image")
    assert "GiB free" in error.why
    assert not any(call.startswith("pull") for call in machine.calls)


def test_no_room_during_the_pull_is_not_tried_again(new_machine, images):
    """F45."""
    with running_engine(48) as small:
        machine = new_machine(small)
        machine.refused(images.first, "no room for the image")
        assert sum(call.startswith("pull") for call in machine.calls) == 1


def test_a_registry_that_gives_other_bytes_than_were_named_is_not_believed(machine, engine, tmp_path):
    """F45."""
    with running_registry() as registry:
        pyimage.dockerfile(engine, tmp_path, "small:1", "FROM base:1\nLABEL small=1\n")
        reference = pyimage.push(engine, registry, "small:1")
        (manifest,) = registry.folder.rglob(f"blobs/sha256/*/{reference[-64:]}/data")
        manifest.write_bytes(manifest.read_bytes().replace(b"\n", b" "))
        error = machine.refused(reference, "another image came")
        assert "verification failed" in error.why
        assert machine.ids() == []


def test_a_pull_that_is_ended_leaves_no_password(machine, images, locked_registry, engine, programs):
    engine.docker("rmi", "--force", images.locked, check=False)
    agents.send_library(machine.nodes)
    wanted = {"owner": OWNER, "seconds": 60, "stop_s": 1, "run": RUN, "reference": images.locked}
    login = {"username": locked_registry.user, "password": locked_registry.password}
    os.kill(locked_registry.pid, signal.SIGSTOP)
    try:
        process = _up_here(machine, programs, {**wanted, "login": {**login, "registry": locked_registry.address}})
        _until(lambda: any(call.startswith("config ") for call in machine.calls))
        (folder,) = {Path(call.split()[-1]) for call in machine.calls if call.startswith("config ")}
        assert folder.exists()
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
        assert not folder.exists()
    finally:
        os.kill(locked_registry.pid, signal.SIGCONT)


# --- machines and images that cannot ------------------------------------------------------------------------------


def test_no_docker_is_named(new_machine, images, tmp_path):
    folder = tmp_path / "without"
    folder.mkdir()
    for name in ("sh", "env", "cat", "mkdir"):
        (folder / name).symlink_to(shutil.which(name))
    (folder / "python3").symlink_to(sys.executable)
    machine = new_machine(PATH=str(folder))
    error = machine.refused(images.first, "Docker does not answer")
    assert str(folder) in error.why
    assert machine.down() == 0


def test_an_engine_that_does_not_run_is_named(new_machine, images, tmp_path):
    machine = new_machine(DOCKER_HOST=f"unix://{tmp_path}/nobody")
    error = machine.refused(images.first, "Docker does not answer", times={"prepare_s": 3})
    assert "nobody" in error.why


def test_a_user_whom_the_socket_refuses_is_told_what_to_do(machine, images, engine, programs, monkeypatch):
    with stranger(machine) as home:
        answer = _as_stranger(home, engine, {"owner": OWNER, "seconds": 60, "stop_s": 1, "reference": images.first})
    assert answer["problem"] == "permission"


def test_what_another_user_writes_in_there_is_that_users(machine, images, engine):
    group = (engine.folder / "sock").stat().st_gid
    wanted = {"owner": OWNER, "seconds": 60, "stop_s": 1, "run": RUN, "reference": images.first}
    with stranger(machine) as home:
        engine.folder.chmod(0o711)  # the way to its socket
        (engine.folder / "sock").chmod(0o660)
        answer = _as_stranger(home, engine, wanted, groups=[group])
        assert "problem" not in answer, answer
        try:
            lease = home / LEASE
            engine.docker("exec", answer["container"], "sh", "-c", f"echo 1 > {lease}; id -u")
            assert lease.stat().st_uid == STRANGER
        finally:
            engine.docker("rm", "--force", answer["container"])


def test_gpus_are_asked_for_before_the_pull(machine, images, engine):
    engine.docker("rmi", "--force", images.bare, check=False)
    machine.refused(images.bare, "Docker has no GPUs", gpus_per_node=1)
    assert not any(call.startswith("pull") for call in machine.calls)


def test_an_image_without_python_is_named(machine, images):
    machine.refused(images.bare, "needs Python 3.11 or newer")
    assert machine.ids() == [], "what cannot be used does not stay"


def test_an_image_without_torch_is_named(machine, images):
    machine.refused(images.first, "needs PyTorch", train={}, launcher="torchrun")
    assert machine.ids() == []


# ------------------------------------------------------------------------------------------------------------------

STRANGER = 54321  # a user id that nobody has here


@contextmanager
def stranger(machine: Machine) -> Iterator[Path]:
    """The home of another user, with the library in it."""
    agents.send_library(machine.nodes)
    folder = Path(tempfile.mkdtemp())
    try:
        shutil.copytree(machine.home, folder, dirs_exist_ok=True)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, STRANGER, STRANGER)
        yield folder
    finally:
        shutil.rmtree(folder)


def _script(home: Path) -> Path:
    return home / agents.library()[1] / "mgpu_train" / "agent" / "container.py"


def _as_stranger(home: Path, engine, wanted, groups=()) -> dict:
    command = ["/usr/bin/python3", "-I", _script(home), "up"]
    env = {"DOCKER_HOST": engine.host, "PATH": engine.env["PATH"], "HOME": str(home)}
    done = subprocess.run(
        command, input=json.dumps(wanted), capture_output=True, text=True, env=env,
        user=STRANGER, group=STRANGER, extra_groups=list(groups), cwd=home,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def _up_here(machine: Machine, programs: Path, wanted) -> subprocess.Popen:
    environment = {**os.environ, **machine.engine.env, "PATH": f"{programs}:{machine.engine.env['PATH']}"}
    environment.pop("DOCKER_CONFIG")
    command = [sys.executable, "-I", _script(machine.home), "up"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    process.stdin.write(json.dumps(wanted).encode())
    process.stdin.close()
    return process


@contextmanager
def forwarding(port: int, address: str) -> Iterator[None]:
    """A registry's second address, while the block runs."""

    class Forward(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            host, _, number = address.partition(":")
            with closing(create_connection((host, int(number)), 10)) as there:
                back = threading.Thread(target=_pour, args=(there, self.request), daemon=True)
                back.start()
                _pour(self.request, there)
                back.join()

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = daemon_threads = True

    with Server(("127.0.0.1", port), Forward) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield
        server.shutdown()


def _pour(source, sink) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(1)


def _until(ready, seconds: float = 60) -> None:
    end = monotonic() + seconds
    while True:
        with suppress(FileNotFoundError):
            if ready():
                return
        assert monotonic() < end, f"nothing within {seconds} s"
        sleep(0.05)
