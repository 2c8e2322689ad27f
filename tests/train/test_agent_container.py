"""What no engine here can show: GPUs, InfiniBand, other engines' answers. `docker` is a program that the test wrote."""

from __future__ import annotations

import ast
import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.clock import Clock
from mgpu_train.agent.host import container, container_init, docker_cli, python_env
from mgpu_train.agent.host.container import Wanted
from mgpu_train.agent.host.docker_cli import DockerCli, Login
from mgpu_train.agent.host.python_env import Problem

DIGEST = "sha256:" + "a" * 64
REFERENCE = f"registry.example:5000/train@{DIGEST}"
INFO = {"DockerRootDir": "/", "Architecture": "x86_64", "Runtimes": {"runc": {}}, "DriverStatus": [["a", "b"]]}
IMAGE = {"Id": "sha256:" + "b" * 64, "Os": "linux", "Architecture": "amd64", "RepoDigests": [f"r/x@{DIGEST}"]}
AGENT = Path(docker_cli.__file__).parent
CAT, SLEEP, STAT = (shutil.which(name) for name in ("cat", "sleep", "stat"))


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """`docker({"command": [(status, out, error), ...]})`: what it answers, the last one for ever; returns its calls."""
    answers, log = tmp_path / "answers", tmp_path / "calls"
    answers.mkdir()
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\nfrom pathlib import Path\n"
        f"with open({str(log)!r}, 'a') as out: print(json.dumps(sys.argv[1:]), file=out)\n"
        f"path = Path({str(answers)!r}) / sys.argv[1]\n"
        "said = json.loads(path.read_text()) if path.exists() else [[0, '', '']]\n"
        "if len(said) > 1: path.write_text(json.dumps(said[1:]))\n"
        "print(said[0][1], end='')\nprint(said[0][2], end='', file=sys.stderr)\nsys.exit(said[0][0])\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))

    def answer(**said):
        for command, rest in said.items():
            (answers / command).write_text(json.dumps(rest))
        return lambda: [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    return answer


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(container, "HOME", tmp_path / "home")
    return tmp_path / "home"


def an_engine(seconds: float = 60) -> DockerCli:
    return DockerCli(time.monotonic() + seconds)


def wanted(**more) -> Wanted:
    return Wanted(**{"owner": "me", "seconds": 60, "stop_s": 5, "run": "r", "reference": REFERENCE, **more})


def kind(call) -> str:
    with pytest.raises(Problem) as caught:
        call()
    return caught.value.kind


# --- the engine


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((0, json.dumps({"ServerErrors": ["Cannot connect to the Docker daemon"]}), ""), "docker"),
        ((1, "", "Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?"), "docker"),
        ((0, "not json", ""), "docker"),
        (
            (1, "", "permission denied while trying to connect to the Docker daemon socket at unix:///x"),
            "permission",
        ),
        ((0, json.dumps({"ServerErrors": ["dial unix /x: connect: permission denied"]}), ""), "permission"),
        ((1, "", "open /root/.docker/config.json: permission denied"), "docker"),
    ],
    ids=["of 20.10", "no daemon", "no json", "socket", "socket of 20.10", "a file"],
)
def test_an_engine_that_is_not_to_be_had_says_why(docker, answer, expected):
    docker(info=[answer])
    assert kind(an_engine().info) == expected


NO_DAEMON = (1, "", "Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?")


def test_an_engine_that_starts_with_its_machine_is_waited_for(docker, monkeypatch):
    docker(info=[NO_DAEMON] * 3 + [(0, json.dumps(INFO), "")])
    monkeypatch.setattr(docker_cli, "time", Clock(time.monotonic()))
    assert an_engine(600).ready(60)["DockerRootDir"] == "/"


@pytest.mark.parametrize(
    ("answer", "boot_s", "expected", "asked"),
    [
        (NO_DAEMON, 5, "docker", 6),
        (NO_DAEMON, 0, "docker", 1),
        ((1, "", "permission denied while trying to connect to the Docker daemon socket"), 5, "permission", 1),
    ],
    ids=["no daemon", "no boot", "permission"],
)
def test_one_that_does_not_start_is_not_waited_for_for_ever(docker, monkeypatch, answer, boot_s, expected, asked):
    calls = docker(info=[answer])
    monkeypatch.setattr(docker_cli, "time", Clock(time.monotonic()))
    assert kind(lambda: an_engine(600).ready(boot_s)) == expected
    assert len(calls()) == asked


def test_a_warning_about_the_users_own_settings_is_no_problem(docker):
    docker(info=[(0, json.dumps(INFO), "WARNING: open config.json: permission denied")])
    assert an_engine().info()["DockerRootDir"] == "/"


def test_an_engine_that_is_silent_is_not_waited_for(docker, tmp_path):
    (tmp_path / "bin" / "docker").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    assert kind(lambda: an_engine().call("info", seconds=1)) == "docker"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("Error response from daemon: manifest for r/x@sha256:1 not found: manifest unknown", "absent"),
        ("unauthorized: authentication required", "denied"),
        ("login attempt to http://127.0.0.1/v2/ failed with status: 401 Unauthorized", "denied"),
        ("pull access denied for x, repository does not exist or may require 'docker login'", "denied"),
        ("denied: Your authorization token has expired. Reauthenticate and try again.", "denied"),
        ("no basic auth credentials", "denied"),
        ("failed to register layer: write /x: no space left on device", "disk"),
        ("no matching manifest for linux/arm64 in the manifest list entries", "platform"),
        ("manifest verification failed for digest sha256:1", "digest"),
        ("filesystem layer verification failed for digest sha256:1", "digest"),
        ("failed to register layer: lchown /x: permission denied", "unpack"),
        ("You have reached your pull rate limit. You may increase the limit by authenticating and upgrading", "limit"),
        # of engines that leave their images to containerd
        ('failed to resolve reference "r/x@sha256:11": r/x@sha256:11: not found', "absent"),
        (
            'failed to resolve reference "docker.io/x/y@sha256:1": pull access denied, repository does not exist or '
            "may require authorization: server message: insufficient_scope: authorization failed",
            "denied",
        ),
        (
            'failed to resolve reference "r/x@sha256:1": pulling from host r failed with status code '
            "[manifests sha256:1]: 403 Forbidden",
            "denied",
        ),
        ("unexpected status from HEAD request to https://r/v2/x/manifests/sha256:1: 401 Unauthorized", "denied"),
        (
            'failed commit on ref "layer-sha256:1": unexpected commit digest sha256:1, expected sha256:2: failed '
            "precondition",
            "digest",
        ),
        ("failed to extract layer sha256:1: mount callback failed: lchown /x: operation not permitted", "unpack"),
        ("no match for platform in manifest sha256:1: not found", "platform"),
        (
            "image with reference r/x@sha256:1 was found but does not provide the specified platform (linux/arm64)",
            "platform",
        ),
        ("error from registry: You have reached your unauthenticated pull rate limit.", "limit"),
    ],
)
def test_a_pull_that_no_other_try_mends_is_given_up_at_once(docker, error, expected):
    calls = docker(image=[(1, "", "")], pull=[(1, "", error)])
    assert kind(lambda: docker_cli.image(an_engine(), INFO, REFERENCE, None, None)) == expected
    assert [call[0] for call in calls()].count("pull") == 1


@pytest.mark.parametrize(
    "error",
    [
        "toomanyrequests: Rate exceeded",
        "received unexpected HTTP status: 503 Service Unavailable",
        "dial tcp 10.0.0.1:443: connect: connection refused",
        "net/http: TLS handshake timeout",
        "unexpected EOF",
        "lookup registry.example: no such host",
        'failed to resolve reference "r/x@sha256:1": failed to do request: dial tcp: lookup r: no such host',
        "open /var/lib/docker/tmp/x: permission denied",
    ],
)
def test_a_pull_is_tried_again(docker, monkeypatch, error):
    pauses: list[float] = []
    monkeypatch.setattr(docker_cli, "time", SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic))
    there = (0, json.dumps([IMAGE]), "")
    docker(image=[(1, "", ""), there], pull=[*[(1, "", error)] * 7, (0, "", "")])
    assert docker_cli.image(an_engine(600), INFO, REFERENCE, None, None) == (IMAGE["Id"], True)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


def test_the_pulls_deadline_is_kept(docker, monkeypatch):
    late = SimpleNamespace(sleep=lambda _: pytest.fail("no time for another try"), monotonic=time.monotonic)
    monkeypatch.setattr(docker_cli, "time", late)
    docker(image=[(1, "", "")], pull=[(1, "", "unexpected EOF")])
    assert kind(lambda: docker_cli.image(an_engine(0.5), INFO, REFERENCE, None, None)) == "pull"


def test_a_pull_that_is_slow_is_no_docker_that_is_silent(docker, tmp_path, monkeypatch):
    docker(image=[(1, "", "")])
    program = tmp_path / "bin" / "docker"
    program.write_text(f"#!/bin/sh\ntest $1 = image && exit 1\nexec {SLEEP} 60\n")
    with pytest.raises(Problem, match="`docker pull` did not end within") as caught:
        docker_cli.image(an_engine(0.5), INFO, REFERENCE, None, None)
    assert caught.value.kind == "pull"


@pytest.mark.parametrize(
    ("error", "expected"),
    [("toomanyrequests: Rate exceeded", "limit"), ("error from registry: Too Many Requests", "limit"), ("EOF", "pull")],
)
def test_a_registry_that_asks_for_patience_all_the_time_is_told_apart(docker, error, expected):
    docker(image=[(1, "", "")], pull=[(1, "", error)])
    assert kind(lambda: docker_cli.image(an_engine(0.5), INFO, REFERENCE, None, None)) == expected


@pytest.mark.parametrize(
    ("registry", "key"),
    [("registry.example:5000", "registry.example:5000"), ("docker.io", "https://index.docker.io/v1/")],
)
def test_a_login_is_written_as_docker_reads_it(docker, tmp_path, monkeypatch, registry, key):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    program = tmp_path / "bin" / "docker"
    docker()
    program.write_text(f"#!/bin/sh\n{CAT} $DOCKER_CONFIG/config.json\n{STAT} -c ' %a' $DOCKER_CONFIG/config.json\n")
    with docker_cli._private_folder() as folder:
        done = docker_cli._try(an_engine(), REFERENCE, Login(registry, "user", "pass:word"), folder)
    said, _, mode = done.out.rpartition(" ")
    assert json.loads(said) == {"auths": {key: {"auth": base64.b64encode(b"user:pass:word").decode()}}}
    assert mode == "600\n"


@pytest.mark.parametrize(
    "found", [{**IMAGE, "RepoDigests": ["r/x@sha256:" + "c" * 64]}, {**IMAGE, "RepoDigests": None}]
)
def test_another_digest_is_never_run(docker, found):
    docker(image=[(0, json.dumps([found]), "")])
    assert kind(lambda: docker_cli.image(an_engine(), INFO, REFERENCE, None, None)) == "digest"


def test_an_image_for_other_machines_is_refused(docker):
    docker(image=[(0, json.dumps([{**IMAGE, "Architecture": "arm64"}]), "")])
    assert kind(lambda: docker_cli.image(an_engine(), INFO, REFERENCE, None, None)) == "platform"


@pytest.mark.parametrize(
    "reference", ["train:1", "train", "train@sha256:abc", f"--help@{DIGEST}", f"a b@{DIGEST}", f"{REFERENCE}x", ""]
)
def test_only_a_digest_is_pulled(docker, reference):
    calls = docker()
    assert kind(lambda: docker_cli.image(an_engine(), INFO, reference, None, None)) == "reference"
    assert calls() == []


def test_room_is_asked_of_all_disks_that_an_image_lies_on(docker, monkeypatch):
    docker(image=[(1, "", "")])
    asked: list[str] = []
    usage = docker_cli.shutil._ntuple_diskusage(0, 0, 10 << 30)
    monkeypatch.setattr(docker_cli.shutil, "disk_usage", lambda path: (asked.append(str(path)), usage)[1])
    info = {**INFO, "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]}
    docker_cli._require_room(info, 2 << 30)
    assert asked == ["/", "/var/lib/containerd"]
    assert kind(lambda: docker_cli.image(an_engine(), info, REFERENCE, 3 << 30, None)) == "disk"


def test_a_hidden_folders_disk_is_that_of_what_can_be_seen(tmp_path):
    assert docker_cli._free(tmp_path / "hidden" / "docker") == pytest.approx(docker_cli._free(tmp_path), abs=1 << 30)


# --- the container


def test_gpus_and_infiniband_are_handed_in(home, tmp_path, monkeypatch):
    monkeypatch.setattr(container, "_INFINIBAND", tmp_path)
    monkeypatch.setattr(container, "AMAZON", tmp_path)
    options = container._options(wanted(gpus=8))
    libraries = f"--mount=type=bind,source={tmp_path},target=/opt/mgpu-efa,readonly"
    assert {"--gpus=all", f"--device={tmp_path}", libraries} <= set(options)
    monkeypatch.setattr(container, "_INFINIBAND", tmp_path / "absent")
    options = container._options(wanted())
    assert not any(option.startswith(("--gpus", "--device")) or option == libraries for option in options)


def test_an_engine_that_knows_gpus_is_known_by_any_of_three_signs(docker, tmp_path, monkeypatch):
    docker()
    monkeypatch.setattr(container, "_CDI", (str(tmp_path / "cdi"),))
    assert kind(lambda: container._require_gpus(INFO)) == "gpu"
    container._require_gpus({**INFO, "Runtimes": {"runc": {}, "nvidia": {}}})
    hook = tmp_path / "bin" / "nvidia-container-runtime-hook"
    hook.touch(0o755)
    container._require_gpus(INFO)
    hook.unlink()
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi" / "nvidia.yaml").touch()
    container._require_gpus(INFO)


@pytest.mark.parametrize(("seen", "enough"), [("8\n", True), ("9\n", True), ("7\n", False), ("", False)])
def test_the_gpus_that_the_container_sees_are_counted(docker, home, seen, enough):
    docker(exec=[(0, seen, "")])
    if enough:
        container._count_gpus(an_engine(), wanted(gpus=8), "c")
    else:
        assert kind(lambda: container._count_gpus(an_engine(), wanted(gpus=8), "c")) == "gpu"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ('could not select device driver "" with capabilities: [[gpu]].', "gpu"),
        ("nvidia-container-cli: initialization error: load library failed: libnvidia-ml.so.1", "gpu"),
        ('exec: "python3": executable file not found in $PATH: unknown', "old"),
        ("[FATAL tini (7)] exec python3 failed: No such file or directory", "old"),
        ("the container name is too odd", "run"),
    ],
)
def test_why_a_container_did_not_start_is_told_apart(docker, home, error, expected):
    calls = docker(run=[(125, "", error)])
    assert kind(lambda: container._run(an_engine(), REFERENCE, "name", [])) == expected
    assert [call[0] for call in calls()] == ["run", "stop", "rm"], "what was made of it does not stay"


def test_an_engine_that_may_not_lift_the_limit_of_locked_memory_leaves_it(docker, home):
    calls = docker(run=[(125, "", "error setting rlimit type 8: operation not permitted"), (0, "", "")])
    assert container._run(an_engine(), REFERENCE, "name", []) is False
    runs = [call for call in calls() if call[0] == "run"]
    assert ["--ulimit=memlock=-1" in call for call in runs] == [True, False]
    docker(run=[(125, "", "error setting rlimit type 9: operation not permitted")])
    assert kind(lambda: container._run(an_engine(), REFERENCE, "name", [])) == "run", "it is another limit"
    docker(run=[(0, "", "")])
    assert container._run(an_engine(), REFERENCE, "name", []) is True


def test_a_limit_of_locked_memory_is_of_interest_only_with_gpus_or_infiniband(home, tmp_path, monkeypatch):
    monkeypatch.setattr(container, "_INFINIBAND", tmp_path / "absent")
    assert container._locks_memory(wanted(gpus=1))
    assert not container._locks_memory(wanted())
    monkeypatch.setattr(container, "_INFINIBAND", tmp_path)
    assert container._locks_memory(wanted())


def test_the_program_starts_the_container_and_passes_arguments_exactly(docker, home, tmp_path):
    calls = docker()
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\n" + container._program(an_engine(), "name", "/image/bin/python") + "\n")
    program.chmod(0o755)
    subprocess.run([program, "-m", "x", "$(id) 'a\" b", ""], check=True)
    start, run = calls()
    assert start == ["start", "name"]
    assert run[:2] == ["exec", "--interactive"]
    assert "--env=PYTHONPATH" in run
    assert run[-6:] == ["name", "/image/bin/python", "-m", "x", "$(id) 'a\" b", ""]
    docker(start=[(1, "", "No such container: name")])
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "No such container: name")


def test_who_is_overtaken_while_its_container_is_made_leaves_the_node_as_the_other_made_it(docker, home, monkeypatch):
    calls = docker(info=[(0, json.dumps(INFO), "")], image=[(0, json.dumps([IMAGE]), "")])

    def overtaken(*_given):
        python_env.claim(home, python_env.Claim("theirs"), time.monotonic() + 60)
        return {"python": "/p"}

    monkeypatch.setattr(container, "_equip", overtaken)
    monkeypatch.setattr(container, "write_program", lambda _line: pytest.fail("it is the other's"))
    assert kind(lambda: container.up(wanted())) == "used"
    assert [call[0] for call in calls()][-3:] == ["run", "stop", "rm"]


def standing(settings: str, paused: bool = False, **more) -> str:
    """What the engine says of a container that was made with these settings."""
    config = {"Labels": {"dev.mgpu.settings": settings}}
    state = {"Running": True, "Paused": paused}
    known = {"Name": "/kept", "Image": IMAGE["Id"], "Config": config, "State": state}
    return json.dumps([{**known, "HostConfig": {"Ulimits": [{"Name": "memlock"}]}, **more}])


def test_a_container_that_stands_is_kept_and_what_else_the_run_has_here_goes(docker, home, monkeypatch):
    monkeypatch.setattr(container, "_INFINIBAND", home / "none")
    written: list[str] = []
    monkeypatch.setattr(container, "write_program", written.append)
    python = (0, '{"python": "/p", "installed": false}', "")
    gpus = {**INFO, "Runtimes": {"nvidia": {}}}
    calls = docker(info=[(0, json.dumps(gpus), "")], image=[(0, json.dumps([IMAGE]), "")], exec=[python, (0, "8", "")])
    made = container.up(wanted(gpus=8))
    assert (made["made"], made["capped"], made["python"], "mgpu-r-" in written[0]) == (True, False, "/p", True)
    label = next(word for word in next(call for call in calls() if call[0] == "run") if "settings=" in word)
    settings, begun = label.partition("settings=")[2], len(calls())
    stand = [(0, standing(settings, paused=True), ""), (0, standing(settings), ""), (0, standing("other"), "")]
    docker(ps=[(0, "paused\nkept\nother\n", "")], container=stand, exec=[python, (0, "8", "")])
    found = container.up(wanted(gpus=8))
    assert (found["container"], found["made"], found["capped"]) == ("kept", False, False)
    done = [call for call in calls()[begun:] if call[0] in ("run", "stop", "rm")]
    assert done == [
        *(["stop", "-t", "5", "paused"], ["rm", "--force", "--volumes", "paused"]),
        *(["stop", "-t", "5", "other"], ["rm", "--force", "--volumes", "other"]),
    ]


def test_a_container_whose_interpreter_gives_no_answer_stays_where_it_stood_before(docker, home, monkeypatch):
    monkeypatch.setattr(container, "_fits", lambda *_given: True)
    dead = (0, "[FATAL tini (7)] exec python3 failed: No such file or directory", "")
    calls = docker(info=[(0, json.dumps(INFO), "")], image=[(0, json.dumps([IMAGE]), "")], logs=[dead])
    docker(ps=[(0, "kept\n", "")], container=[(0, standing("any"), "")], exec=[(126, "", "it is not running")])
    with pytest.raises(Problem, match=r"(?s)exec python3 failed.*it is not running") as caught:
        container.up(wanted())
    assert (caught.value.kind, {call[0] for call in calls()} & {"stop", "rm"}) == ("old", set())
    docker(exec=[(0, '{"problem": "torch", "why": "python3 has no torch"}', "")])
    assert kind(lambda: container.up(wanted(torch=True))) == "torch"


def test_down_ends_what_the_run_has_here_and_nothing_there_is_success(docker, home, monkeypatch):
    calls = docker(ps=[(0, "one two\n", "")], info=[(0, json.dumps(INFO), "")], rm=[(1, "", "No such container: one")])
    assert container.down(wanted()) == {"removed": 2}
    (asked,) = (call for call in calls() if call[0] == "ps")
    assert {"--filter=label=dev.mgpu.run=r", f"--filter=label=dev.mgpu.home={home}"} <= set(asked), "nobody else's"
    docker(rm=[(1, "", "device or resource busy")])
    assert kind(lambda: container.down(wanted())) == "docker"
    docker(ps=[(1, "", "the daemon is going down")])
    assert kind(lambda: container.down(wanted())) == "docker"
    monkeypatch.setenv("PATH", "/none")
    assert container.down(wanted()) == {"removed": 0}


def test_what_is_to_be_seen_inside_can_be_made_or_is_a_problem(home, monkeypatch):
    monkeypatch.setattr(container.pwd, "getpwuid", lambda _uid: {}[0])  # a directory that does not answer
    assert {f"--env=USER={os.getuid()}", f"--user={os.getuid()}:{os.getgid()}"} <= set(container._options(wanted()))
    home.joinpath("runs/r/work/data").touch()
    with pytest.raises(Problem, match=r"work/data is to be seen in the container, and cannot be made") as caught:
        container._options(wanted(writable=("data",)))
    assert caught.value.kind == "mount"


def test_a_path_may_hold_a_comma_or_a_quote():
    assert container._mount(Path('/a, "b"'), "readonly") == (
        '--mount=type=bind,"source=/a, ""b""","target=/a, ""b""",readonly'
    )


# --- what holds it


def test_who_holds_asks_each_once_and_waits_for_all(monkeypatch):
    asked: list[tuple[int, int]] = []

    def kill(*given: int) -> None:
        asked.append(given)
        if given[0] == 5:
            raise ProcessLookupError  # it ends by itself meanwhile

    monkeypatch.setattr(container_init, "os", SimpleNamespace(kill=kill))
    monkeypatch.setattr(container_init, "time", SimpleNamespace(sleep=lambda _: None))
    rounds = iter([{5, 6}, {5, 6}, {6, 7}, set()])
    container_init.stop(lambda: next(rounds))
    assert sorted(asked) == [(5, signal.SIGTERM), (6, signal.SIGTERM), (7, signal.SIGTERM)]
    assert next(rounds, None) is None


def test_agents_are_what_else_its_parent_has():
    child = subprocess.Popen(["/bin/sleep", "60"])
    code = "import container_init; print(*container_init.agents())"
    try:
        said = subprocess.run([sys.executable, "-c", code], cwd=AGENT, capture_output=True, text=True, check=True)
        assert str(child.pid) in said.stdout.split()
        assert str(os.getpid()) not in said.stdout.split()
    finally:
        child.kill()
        child.wait()
    assert container_init._parent(child.pid) == -1
    said = subprocess.run([sys.executable, "-c", code], cwd=AGENT, capture_output=True, text=True, check=True)
    assert str(child.pid) not in said.stdout.split()


@pytest.mark.parametrize("name", ["container.py", "docker_cli.py", "container_init.py", "python_env.py", "layout.py"])
def test_what_the_machines_own_python_runs_is_written_for_an_old_one(name):
    ast.parse((AGENT / name).read_text(), feature_version=(3, 8))
