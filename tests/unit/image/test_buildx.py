"""BuildKit: how docker's program is called, wherever the tests run; and what it builds, where its plugin is."""

from __future__ import annotations

import base64
import errno
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from fakes import trainer
from fakes.engine import Engine
from fakes.registries import Asked, Said, scripted
from waiting import until

from mgpu.errors import ImageError, Interrupted
from mgpu.events import Event, ImageStep
from mgpu.image.build import buildx, context
from mgpu.image.build.docker_engine import DockerEngine
from mgpu.image.build.progress import Words
from mgpu.image.build.recipe import Limits, Recipe

SECRET = "canary-secret-19c4"
STEP = {"digest": "d", "name": "[1/1] RUN x", "started": "t"}
CONFIG, MANIFEST = "sha256:" + "c" * 64, "sha256:" + "d" * 64
MADE = {"containerimage.config.digest": CONFIG, "containerimage.digest": MANIFEST, "containerimage.descriptor": {}}
LOG = {"vertex": "d", "data": base64.b64encode(f"token {SECRET}\n".encode()).decode()}


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a program `docker` that notes how it is called, and then does what the file `act` says."""
    (tmp_path / "context").mkdir()
    (tmp_path / "context/Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    program = tmp_path / "docker"
    program.write_text(
        f"#!/bin/sh\ncd {tmp_path}\n"
        'if [ "$2" = version ]; then cat version; exit; fi\n'
        'printf "%s\\n" "$@" > argv; env > env; cat > input\n'
        'for each; do case "$each" in --metadata-file=*) cat made > "${each#*=}";; esac; done\n. ./act\n'
    )
    program.chmod(0o755)
    (tmp_path / "version").write_text("github.com/docker/buildx v0.13.0 abc\n")
    (tmp_path / "act").write_text("")
    (tmp_path / "made").write_text(json.dumps(MADE))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def build(
    docker: Path, limits: Limits | None = None, cancelled: threading.Event | None = None, **recipe: object
) -> tuple[tuple[str, ...], list[Event]]:
    told = list[Event]()
    wanted = Recipe(context.scan(docker / "context"), **{"secrets": {"TOKEN": SECRET}, **recipe})  # type: ignore[arg-type]
    with (docker / "archive").open("w+b") as packed:
        packed.write(b"archive")
        packed.seek(0)
        words = Words(wanted.secrets.values())
        cancelled = cancelled or threading.Event()
        return buildx.build(wanted, packed, os.environ, limits or Limits(), told.append, words, cancelled), told


def says(docker: Path, *lines: object, then: str = "") -> None:
    (docker / "said").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (docker / "act").write_text(f"cat said >&2\n{then}\n")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("github.com/docker/buildx v0.13.0 abc", "v0.13.0"),
        ("github.com/docker/buildx 0.19.3 abc", "0.19.3"),
        ("github.com/docker/buildx v1.0.0-rc1 abc", "v1.0.0-rc1"),
        ("github.com/docker/buildx v0.12.5 abc", ""),
        ("something else", ""),
    ],
)
def test_a_buildx_that_says_what_it_does_in_json_is_taken(docker: Path, said: str, expected: str):
    (docker / "version").write_text(said)
    assert buildx.version(os.environ) == expected


def test_without_docker_there_is_no_buildx(tmp_path: Path):
    assert buildx.version({"PATH": str(tmp_path)}) == ""


def test_a_path_with_a_comma_is_one_field(docker: Path):
    build(docker, ca_file=Path("/a,b/ca.pem"))
    assert '--secret=id=mgpu_ca,"src=/a,b/ca.pem"' in (docker / "argv").read_text().splitlines()


def test_it_is_called_with_everything_that_counts_and_no_secret(docker: Path):
    says(docker, {"vertexes": [STEP]})
    image, told = build(docker, args={"A": "b c"}, target="t", ca_file=Path("/ca.pem"), network="host")
    assert (image, told) == ((CONFIG, MANIFEST), [ImageStep(1, 1, "RUN x")])
    argv = (docker / "argv").read_text().splitlines()
    assert argv[:3] == ["buildx", "build", "--load"]
    assert argv[-1] == "-"
    wanted = ["--platform=linux/amd64", "--file=Dockerfile", "--target=t", "--network=host", "--build-arg=A=b c"]
    assert {*wanted, "--progress=rawjson", "--provenance=false", "--secret=id=mgpu_ca,src=/ca.pem"} <= {*argv}
    assert SECRET not in "".join(argv)
    name = next(each for each in argv if each.startswith("--secret=id=TOKEN,env=")).rpartition("=")[2]
    assert f"{name}={SECRET}" in (docker / "env").read_text().splitlines()
    assert (docker / "input").read_bytes() == b"archive"


@contextmanager
def an_engine_with(image: str) -> Iterator[str]:
    """The address of one that has this image and no other."""

    def script(asked: Asked) -> Said:
        says: dict[str, object] = {"message": "No such image"}
        if asked.path.endswith("/version"):
            says = {"ApiVersion": "1.52", "Os": "linux", "Arch": "amd64"}
        elif asked.path.endswith(f"/images/{image}/json"):
            says = {"Id": image, "Os": "linux", "Architecture": "amd64"}
        return Said(404 if "message" in says else 200, {"Content-Type": "application/json"}, json.dumps(says).encode())

    with scripted(script) as server:
        yield f"tcp://{server.address}"


@pytest.mark.parametrize("known", [CONFIG, MANIFEST], ids=["own", "containerd"])
def test_what_was_built_is_named_as_the_engine_knows_it(docker: Path, monkeypatch: pytest.MonkeyPatch, known: str):
    with an_engine_with(known) as host:
        monkeypatch.setenv("DOCKER_HOST", host)
        assert DockerEngine().build(Recipe(context.scan(docker / "context"))) == known


def test_an_image_that_the_engine_has_by_no_name_is_an_error(docker: Path, monkeypatch: pytest.MonkeyPatch):
    with an_engine_with("sha256:other") as host:
        monkeypatch.setenv("DOCKER_HOST", host)
        with pytest.raises(ImageError, match="the engine does not have it"):
            DockerEngine().build(Recipe(context.scan(docker / "context")))


def test_a_step_that_fails_is_shown_without_the_secret(docker: Path):
    says(docker, {"vertexes": [STEP]}, {"logs": [LOG]}, {"vertexes": [{**STEP, "error": "exit 2"}]}, then="exit 1")
    with pytest.raises(ImageError, match=r"failed at 'RUN x' \(step 1 of 1\)") as caught:
        build(docker)
    assert caught.value.why == "token ***\nexit 2"


def test_a_dockerfile_that_cannot_be_read_is_told_by_its_line(docker: Path):
    said = "ERROR: failed to solve: dockerfile parse error on line 2: unknown instruction: RUNN (did you mean RUN?)"
    (docker / "act").write_text(f"echo 'Dockerfile:2' >&2; echo '{said}' >&2; exit 1\n")
    with pytest.raises(ImageError) as caught:
        build(docker)
    expected = "the Dockerfile cannot be read: line 2: unknown instruction: RUNN (did you mean RUN?)"
    assert (caught.value.what, caught.value.why) == (expected, "")


def test_a_full_temporary_folder_is_told_as_that(docker: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(ImageError, match=f"no room in {tempfile.gettempdir()}") as caught:
        build(docker)
    assert "TMPDIR" in caught.value.next_step


def test_a_build_ends_at_its_deadline_with_all_it_has_started(docker: Path):
    says(docker, then="sleep 1000 & echo $! > child; wait")
    with pytest.raises(ImageError, match="within 2 s"):
        build(docker, Limits(build_s=2))
    until(lambda: ended(docker / "child"))


def ended(named: Path) -> bool:
    """Whether the process whose id is in a file is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return not Path("/proc", named.read_text().strip(), "cmdline").read_bytes()  # a zombie
    return True


@pytest.mark.parametrize(
    ("on_term", "heard"),
    [("echo asked > term; kill $!; exit 1", "asked\n"), ("echo deaf >> term", "deaf\n")],
    ids=["obeys", "deaf"],
)
def test_a_cancelled_build_is_asked_to_end_and_ended(docker: Path, monkeypatch: pytest.MonkeyPatch, on_term, heard):
    monkeypatch.setattr(buildx, "GRACE_S", 0.2 if "deaf" in heard else 60.0)
    monkeypatch.setenv("TMPDIR", str(docker))
    monkeypatch.setattr(tempfile, "tempdir", None)
    cancelled = threading.Event()
    os.mkfifo(docker / "begun")
    says(docker, then=f"trap '{on_term}' TERM; sleep 1000 & echo $! > child; echo > begun; while :; do wait $!; done")

    def cancel() -> None:
        (docker / "begun").read_text()
        cancelled.set()

    threading.Thread(target=cancel, daemon=True).start()
    with pytest.raises(Interrupted):
        build(docker, cancelled=cancelled)
    assert (docker / "term").read_text().startswith(heard)
    until(lambda: ended(docker / "child"))
    assert not list(docker.glob("mgpu-build-*"))


def test_what_buildkit_builds(require, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = trainer.buildx(require)
    plugins = tmp_path / "config/cli-plugins"
    plugins.mkdir(parents=True)
    shutil.copy(program, plugins / "docker-buildx")
    for name, value in {**engine.env, "DOCKER_CONFIG": str(tmp_path / "config")}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "Dockerfile").write_text(
        "FROM base:1\nRUN --mount=type=secret,id=TOKEN --mount=type=secret,id=mgpu_ca"
        " cat /run/secrets/mgpu_ca /run/secrets/TOKEN > /all && head -c 3 /all > /seen && rm /all\n"
    )
    (tmp_path / "ca.pem").write_text("ca:canary-ca")
    recipe = Recipe(context.scan(tmp_path), ca_file=tmp_path / "ca.pem", secrets={"TOKEN": SECRET}, network="host")
    told = list[Event]()
    image = DockerEngine().build(recipe, told.append)
    assert [each.step for each in told if isinstance(each, ImageStep)] == [1, 2]
    seen = engine.docker("run", "--rm", "--network", "host", image, "cat", "/seen").stdout
    assert seen == "ca:"
    whole = subprocess.run(["docker", "save", image], capture_output=True, check=True, timeout=60).stdout
    whole += engine.docker("history", "--no-trunc", image).stdout.encode()
    assert SECRET.encode() not in whole
    (tmp_path / "Dockerfile").write_text("FROM base:1\nRUN echo before && exit 7\n")
    with pytest.raises(ImageError, match=r"\(step 2 of 2\)") as caught:
        DockerEngine().build(Recipe(context.scan(tmp_path), network="host"))
    assert caught.value.why.startswith("before\n")
