"""The training image on machines of the fake AWS: built, pushed to ECR, pulled by its digest, and trained in.

It is the trainer's own Dockerfile. Torch comes into the container by a read-only mount, as the machines' container
toolkit makes it (tests/fakes/aws/inside/toolkit.py). What stands for ECR is Debian's docker-registry, by TLS, under the
name and with the token that AWS gives.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes import trainer
from fakes.aws import ecr, world
from fakes.aws.operator import BUCKET, Operator, left_behind, operator
from fakes.engine import missing, running_engine
from waiting import until

from mgpu.iac.engine import install
from mgpu.providers.aws import names

ROOM_GIB = 40
DATA_MIB = 4096
BUILT_S = 600.0  # for a run whose image has to be built first
PROGRAMS = ("dockerd", "docker", "containerd", "runc", "docker-registry")
# the operator's engine: its builds reach the fake's network, and nothing else
BRIDGE = ("--bip=192.168.77.1/24", "--iptables=false", "--ip6tables=false", "--ip-masq=false")
INDEX_PORT = 8099
INDEX = {
    "PIP_NO_INDEX": "1",
    "PIP_FIND_LINKS": f"http://{world.GATEWAY}:{INDEX_PORT}/",
    "PIP_TRUSTED_HOST": world.GATEWAY,
}
IMAGE = {"args": trainer.ARGS, "secrets": [*INDEX]}
REPOSITORY = f"{ecr.HOST}/{names.REPOSITORY}"


@pytest.fixture(scope="module")
def user(namespaces: None, require: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """One with an engine of their own. The machines have Docker, as AWS's machine images do."""
    require("engine", install.find_engine() is not None, "no Pulumi engine; `make setup` installs one")
    require("docker", not missing(*PROGRAMS), missing(*PROGRAMS))
    require("docker", sys.version_info[:2] == (3, 11), "the tests' torch is not for the Python 3.11 of the base")
    free = shutil.disk_usage("/").free / 2**30
    require("docker", free >= ROOM_GIB, f"/ has {free:.0f} GiB free, and {ROOM_GIB} are wanted")
    base, wheels = trainer.base(require), trainer.wheels(require)
    with ExitStack() as stack:
        user = stack.enter_context(operator(tmp_path_factory.mktemp("image"), engines=True, **INDEX))
        trust = ["env", f"SSL_CERT_FILE={user.aws.env['SSL_CERT_FILE']}"]
        engine = stack.enter_context(running_engine(DATA_MIB, prefix=[*user.aws.prefix, *trust], network=BRIDGE))
        engine.docker("import", str(base), trainer.BASE)
        stack.enter_context(serving(user, wheels))
        user.env |= engine.env
        yield user


@contextmanager
def serving(user: Operator, folder: Path) -> Iterator[None]:
    """Files, in the network of the fake."""
    command = ["-m", "http.server", "--bind", world.GATEWAY, "--directory", str(folder), str(INDEX_PORT)]
    process = subprocess.Popen(
        [*user.aws.prefix, sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def buildkit(user: Operator, require: Any) -> Iterator[None]:
    """The operator's Docker has buildx."""
    program = trainer.buildx(require)
    plugin = Path(user.env["DOCKER_CONFIG"]) / "cli-plugins" / "docker-buildx"
    plugin.parent.mkdir(exist_ok=True)
    shutil.copy(program, plugin)
    yield
    plugin.unlink()


def in_registry(user: Operator) -> dict[str, str]:
    """The digest of each tag, by the registry's own word."""
    tags = ecr.data(user.aws.folder) / "docker/registry/v2/repositories" / names.REPOSITORY / "_manifests/tags"
    return {tag.name: (tag / "current" / "link").read_text() for tag in tags.iterdir()}


def pulled(user: Operator, digest: str) -> set[str]:
    """The addresses of machines that were given the manifest of this digest."""
    seen = set()
    for line in ecr.log(user.aws.folder).read_text().splitlines():
        if f"/manifests/{digest}" in line and line.startswith("{"):
            told = json.loads(line)
            if told.get("http.response.status") == 200 and told["http.request.method"] == "GET":
                seen.add(told["http.request.remoteaddr"].partition(":")[0])
    return seen - {world.GATEWAY}


def test_a_run_trains_in_the_image_that_it_has_built_and_every_machine_has_pulled(user: Operator):
    train = {"task": "lm", "strategy": "ddp", "steps": 2, "global_batch": 4, "seq_len": 32}
    often = {"to": f"s3://{BUCKET}/runs", "every_steps": 1}
    user.write(image=IMAGE, train=train, checkpoint=often, launcher=None, command=None)
    done = user.mgpu("launch", "--yes", "--json", seconds=BUILT_S)
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    assert (run["state"], run["teardown"]) == ("succeeded", "confirmed")
    assert run["step"] == run["checkpoint_step"] == 2
    assert run["metrics"]["validation_loss"] > 0
    ((tag, digest),) = in_registry(user).items()
    assert run["image"] == f"{REPOSITORY}@{digest}", "the registry's digest"
    assert pulled(user, digest) == {node["private_address"] for node in run["fleet"]["nodes"]}
    assert not any(left_behind(user.aws).values())

    plan = json.loads(user.mgpu("plan", "--json").stdout)["image"]
    assert (plan["in_registry"], plan["reference"]) == (True, run["image"])
    assert plan["name"].endswith(f":{tag}")


def test_a_machine_in_the_place_of_a_lost_one_pulls_the_same_image(user: Operator):
    user.write(image=IMAGE, command=["count.py", "100000", "0.1"], recovery={"attempts": 3})
    launch = user.start("launch", "--yes")
    try:
        until(user.trains, BUILT_S)
        before, image = user.ids, user.run()["image"]
        user.aws.kill(before[1])
        until(lambda: len(user.run()["interruptions"]) == 1 and user.trains() and user.ids[1] != before[1], 120)
        addresses = {node["private_address"] for node in user.run()["fleet"]["nodes"]}
        assert user.run()["image"] == image
        assert addresses <= pulled(user, image.partition("@")[2])
        assert user.mgpu("stop", user.run()["run_id"]).returncode == 0
    finally:
        launch.kill()
        launch.communicate()
    assert not any(left_behind(user.aws).values())


def test_buildkit_builds_the_same_image_and_keeps_nothing_of_the_build_in_it(user: Operator, buildkit: None):
    user.write(image=IMAGE)
    done = user.mgpu("image", "build", "--json", seconds=BUILT_S)
    assert done.returncode == 0, done.stderr
    assert "1/2 FROM" in done.stderr, "BuildKit counts the steps of each stage, the classic builder those of all"
    image = json.loads(done.stdout)["id"]
    docker = ("docker",)
    ran = user.mgpu("run", "--rm", "--network=none", image, "free-ports", "1", program=docker)
    assert json.loads(ran.stdout)["ports"][0] > 0, ran.stderr
    looked = json.loads(user.mgpu("inspect", image, program=docker).stdout)[0]
    assert looked["Config"]["Labels"]["dev.mgpu.python"] == "3.11"
    saved = ("sh", "-c", f"docker save {image} | grep -c {world.GATEWAY}:{INDEX_PORT}")
    assert user.mgpu(program=saved).stdout == "0\n"
