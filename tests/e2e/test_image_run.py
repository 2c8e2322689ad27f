"""Runs in an image: a real registry, a real engine, `mgpu launch`; the nodes of provider local share that engine.

The image has no torch, which would be 5 GB of it: what runs in there is a program without.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from fakes import pyimage
from fakes.engine import Engine, Registry, missing, running_registry

from mgpu.paths import state_dir
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import every

TWO_STEPS = """
import json, os, pathlib, sys, time
folder = pathlib.Path(os.environ["MGPU_CHECKPOINT_DIR"])
print("in a container:", os.path.exists("/.dockerenv"), "code at", os.getcwd(), flush=True)
try:
    pathlib.Path("mark").touch()
except OSError:
    print("code is read-only", flush=True)
for step in (1, 2):
    aside = folder / f".tmp-{step}"
    aside.mkdir()
    (aside / f"node-{os.environ['MGPU_NODE_RANK']}.bin").write_bytes(b"weights")
    aside.rename(folder / f"step-{step}")
"""


@dataclass
class Place:
    """A project whose runs use an image of this registry."""

    project: object
    engine: Engine
    registry: Registry
    reference: str  # repository@sha256:...

    @property
    def tag(self) -> str:
        return self.reference.partition("@")[0] + ":1"

    def write(self, image: str, *, nodes: int = 1, more: str = "", command=("train.py",)) -> None:
        (self.project.folder / "train.py").write_text(TWO_STEPS)
        self.project.write(list(command), nodes=nodes, more=f"image: {image}\n{more}")

    def containers(self) -> list[str]:
        return self.engine.docker("ps", "--all", "--quiet", "--filter=label=dev.mgpu.owner").stdout.split()


@pytest.fixture(scope="module")
def python_image(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    pyimage.build(engine, tmp_path_factory.mktemp("image"), "python:base")
    return engine


@pytest.fixture
def own_registry(require) -> Iterator[Registry]:
    """One that a test may end."""
    require("docker", not missing("docker-registry"), missing("docker-registry"))
    with running_registry() as running:
        yield running


@pytest.fixture
def place(project, python_image: Engine, own_registry: Registry) -> Iterator[Place]:
    engine = python_image
    project.env |= engine.env | {"MGPU_TIMEOUTS": json.dumps({"prepare_s": 20})}
    engine.docker("tag", "python:base", "python:1")
    place = Place(project, engine, own_registry, pyimage.push(engine, own_registry, "python:1"))
    yield place
    if left := place.containers():
        engine.docker("rm", "--force", *left)


def test_a_run_trains_in_the_image_by_its_digest_and_leaves_no_container(place):
    place.write(f"{{reference: '{place.tag}'}}", nodes=2)
    done = place.project.mgpu("launch", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    record = place.project.result(done)
    assert record["image"] == place.reference, "the registry's digest, not the tag that was asked for"
    assert record["checkpoint_step"] == 2
    assert {"image", "pulling"} <= set(record["phase_seconds"])
    logs = place.project.mgpu("logs", record["run_id"]).stdout
    assert "in a container: True" in logs
    assert "code is read-only" in logs
    assert place.containers() == []
    assert place.project.billed() == 0
    shown = place.project.mgpu("status", record["run_id"])
    assert place.reference in shown.stdout


def test_a_digest_that_its_registry_has_not_ends_before_anything_is_rented(place):
    place.write(f"{{reference: '{place.reference[:-64]}{'0' * 64}'}}")
    done = place.project.mgpu("launch", "--yes")
    assert done.returncode == 4
    assert "no image" in done.stderr
    assert "Mend image.reference" in done.stderr
    assert every() == []
    assert place.project.billed() == 0


def test_a_pull_that_fails_gives_the_fleet_back_and_says_why(place):
    """F45."""
    place.write(f"{{reference: '{place.tag}'}}", nodes=2)
    going = place.project.start("launch", "--yes")
    place.project.wait(lambda: place.project.billed() == 2)
    os.kill(place.registry.pid, signal.SIGKILL)
    _, said = going.communicate(timeout=600)
    assert going.returncode == 5, said
    assert "the image could not be pulled in time" in said
    assert "Give the nodes a way to the registry" in said
    (record,) = every()
    assert (record.image, record.teardown) == (place.reference, "confirmed")
    assert place.containers() == []
    assert place.project.billed() == 0


def test_a_fleet_that_is_kept_is_left_without_a_container_and_runs_its_stacks_image_again(place):
    place.write(f"{{reference: '{place.tag}'}}", more="teardown: keep\n")
    first = place.project.result(place.project.mgpu("launch", "--yes", "--json"))
    assert (first["state"], first["teardown"], place.containers()) == ("succeeded", "kept", [])
    (saved,) = (state_dir() / "local").rglob("runs/*/checkpoints")
    assert [*saved.iterdir()] == []
    asked = place.project.mgpu("check", "--on-node", first["run_id"], "--json")
    said = {line["subject"]: line for line in json.loads(asked.stdout)["checks"]}
    assert {line["status"] for line in said.values()} == {"ok"}, asked.stdout
    assert "version" in said["node 0: Docker"]["detail"]
    again = place.project.mgpu("run", "--stack", first["stack"], "--json")
    assert again.returncode == 0, again.stderr
    assert " files, 0 sent to each of 1 node" in again.stderr, "the first run's code is there"
    second = place.project.result(again)
    assert (second["image"], second["fleet"]["nodes"]) == (place.reference, first["fleet"]["nodes"])
    assert place.containers() == []
    assert place.project.mgpu("down", "--stack", first["stack"]).returncode == 0


def test_code_in_the_image_is_not_sent(place):
    text = "FROM python:base\nWORKDIR /app\nCOPY train.py /app/\n"
    context = place.project.folder / "image"
    context.mkdir()
    (context / "train.py").write_text(TWO_STEPS)
    (context / "Dockerfile").write_text(text)
    repository = f"{place.registry.address}/coded"
    place.write(f"{{context: image, repository: '{repository}'}}", more="code: {mode: image, workdir: image}\n")
    plan = place.project.mgpu("plan", "--json")
    assert plan.returncode == 0, plan.stderr
    before = json.loads(plan.stdout)["image"]
    assert (before["in_registry"], before["reference"]) == (False, None)
    done = place.project.mgpu("launch", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    record = place.project.result(done)
    assert record["image"].startswith(f"{repository}@sha256:")
    assert not Folder(record["run_id"]).work.exists()
    assert "code at /app" in place.project.mgpu("logs", record["run_id"]).stdout
    after = json.loads(place.project.mgpu("plan", "--json").stdout)["image"]
    assert (after["in_registry"], after["reference"]) == (True, record["image"])
    assert place.containers() == []
