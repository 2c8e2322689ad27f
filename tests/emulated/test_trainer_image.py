"""The trainer's image, built by a real engine's classic builder, on Debian's own base, from an index on loopback.

Torch is not built in: this is the variant that has it mounted, read-only, from the environment of the tests.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import trainer
from fakes.engine import Engine
from fakes.trainer import ARGS, BUILD_S, Index, build
from mgpu_train.agent.machine import facts as module

from mgpu.image import compat
from mgpu.image.build import shipped

ROOT = Path(__file__).resolve().parents[2]
CANARY = "canary-5ecret-of-the-build"
CERTIFICATE = "canary-certificate"
INSTALLED = ("install.sh", "labels.py", "requirements.lock", "torch.lock", "ca.pem")


@pytest.fixture(scope="module")
def index(require) -> Iterator[Index]:
    with trainer.serving(trainer.wheels(require)) as served:
        yield served


@pytest.fixture(scope="module")
def builder(engine: Engine, require) -> Engine:
    base = trainer.base(require)
    engine.docker("import", str(base), ARGS["BASE"])
    return engine


@pytest.fixture(scope="module")
def image(builder: Engine, index: Index, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = context(tmp_path_factory.mktemp("image"), index)
    done = build(builder, folder, "trainer:1")
    assert done.returncode == 0, done.stdout + done.stderr
    return "trainer:1"


def context(folder: Path, index: Index) -> Path:
    more = {"PRIVATE_TOKEN": CANARY}
    return trainer.context(shipped.trainer_context(), folder, index, more, certificate=CERTIFICATE)


def files(engine: Engine, image: str) -> Iterator[tuple[str, bytes]]:
    """Every file of every layer, and the image's own description."""
    environment = {**os.environ, **engine.env}
    saved = subprocess.run(["docker", "save", image], env=environment, capture_output=True, timeout=BUILD_S, check=True)
    with tarfile.open(fileobj=io.BytesIO(saved.stdout)) as outer:
        for part in outer:
            if not part.isfile():
                continue
            data = outer.extractfile(part).read()
            yield part.name, b"" if part.name.endswith("layer.tar") else data
            if part.name.endswith("layer.tar"):
                with tarfile.open(fileobj=io.BytesIO(data)) as layer:
                    yield from ((one.name, layer.extractfile(one).read()) for one in layer if one.isfile())


def run(engine: Engine, image: str, *command: str, options: tuple[str, ...] = ()) -> str:
    begun = ("run", "--rm", "--network", "none", *options)
    return engine.docker(*begun, image, *command, timeout=BUILD_S).stdout.strip()


def test_the_agent_is_what_it_runs_as_nobody_in_particular(builder: Engine, image: str):
    assert 1024 <= json.loads(run(builder, image, "free-ports", "1"))["ports"][0] <= 65535
    python = ("--entrypoint", "python")
    who = (
        "import os, getpass; print(os.getuid(), getpass.getuser(), os.access('.', os.W_OK), os.access('/opt', os.W_OK))"
    )
    assert run(builder, image, "-c", who, options=python) == "10001 mgpu True False"
    assert run(builder, image, "-c", who, options=(*python, "--user", "4321:4321")) == "4321 mgpu True False"


def test_it_can_be_a_whole_machine_and_has_no_host_key_that_others_have_too(builder: Engine, image: str):
    script = (
        "PATH=$PATH:/usr/sbin; command -v sshd; command -v ssh-keygen; ls /usr/lib/openssh/sftp-server /etc/ssh; id -un"
    )
    found = run(builder, image, "-c", script, options=("--entrypoint", "sh")).splitlines()
    assert found[:3] == ["/usr/sbin/sshd", "/usr/bin/ssh-keygen", "/usr/lib/openssh/sftp-server"]
    assert not [name for name in found if name.startswith("ssh_host_")]
    assert found[-1] == "mgpu", "a user whom sshd finds"


def test_its_labels_are_what_is_in_it(builder: Engine, image: str):
    labels = json.loads(builder.docker("inspect", "--format", "{{json .Config.Labels}}", image).stdout)
    assert labels[compat.PYTHON] == "3.11"
    assert labels["org.opencontainers.image.base.name"] == ARGS["BASE"]
    assert compat.check(labels, "580.105.08", "H100-80GB") == []
    facts = json.loads(run(builder, image, "facts"))
    assert facts["python"].startswith("3.11.")
    assert (facts["torch"], facts["cuda"]) == (None, None)


@pytest.fixture
def mounted() -> tuple[str, ...]:
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the base has Python 3.11: the tests' torch is for another one")
    return ("--volume", f"{sysconfig.get_path('purelib')}:/opt/torch:ro")


def test_torch_may_be_mounted_instead_of_built_in(builder: Engine, image: str, mounted: tuple[str, ...]):
    facts = json.loads(run(builder, image, "facts", options=mounted))
    here = module._torch()
    assert (facts["torch"], facts["cuda"]) == (here["torch"], here["cuda"])
    code = "import torch, mgpu_train.loop, pydantic; print(torch.ones(3).sum().item(), pydantic.__file__)"
    assert run(builder, image, "-c", code, options=(*mounted, "--entrypoint", "python")).startswith(
        "3.0 /opt/mgpu/lib/"
    )


def test_torch_compiles_in_it_and_nccl_finds_what_it_opens(builder: Engine, image: str, mounted: tuple[str, ...]):
    code = (
        "import ctypes, sysconfig, torch\n"
        "for name in ('libibverbs.so.1', 'libefa.so.1', 'librdmacm.so.1', 'libhwloc.so.15'): ctypes.CDLL(name)\n"
        "open(sysconfig.get_path('include') + '/Python.h')\n"  # triton's launchers include it
        "print(torch.compile(lambda x: (x * x).sum() + 1)(torch.ones(3)).item())"
    )
    # else eight processes import torch, and headers are compiled for later
    one = ("--env", "TORCHINDUCTOR_COMPILE_THREADS=1", "--env", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS=0")
    assert run(builder, image, "-c", code, options=(*mounted, *one, "--entrypoint", "python")) == "4.0"


def test_nothing_of_what_is_for_the_build_alone_is_in_the_image(builder: Engine, image: str, index: Index):
    secret = [CANARY.encode(), CERTIFICATE.encode(), index.url.encode()]
    seen = 0
    for name, data in files(builder, image):
        seen += 1
        assert not [one for one in secret if one in data], name
        assert not name.startswith(("build/", "tmp/")) or Path(name).name not in INSTALLED, name
    assert seen > 1000
    history = builder.docker("history", "--no-trunc", image).stdout
    assert not [one for one in secret if one.decode() in history]


def test_it_was_built_from_the_lock_alone(image: str, index: Index):
    fetched = {request.split()[1].rpartition("/")[2] for request in index.asked if ".whl" in request}
    locked = (ROOT / "images" / "trainer" / "requirements.lock").read_text()
    assert {name.split("-")[0].replace("_", "-") for name in fetched} == {
        line.split("==")[0] for line in locked.splitlines() if "==" in line
    }


def test_changed_sources_of_mgpu_train_move_their_own_layer_alone(
    builder: Engine, image: str, index: Index, tmp_path: Path
):
    folder = context(tmp_path / "changed", index)
    (folder / "mgpu_train" / "errors.py").write_text("# changed\n")
    asked = len(index.asked)
    assert build(builder, folder, "trainer:changed").returncode == 0
    assert len(index.asked) == asked  # no package was fetched again
    before, after = (layers(builder, one) for one in (image, "trainer:changed"))
    moved = [number for number, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
    assert moved == [len(before) - 1]


def layers(engine: Engine, image: str) -> list[str]:
    return json.loads(engine.docker("inspect", "--format", "{{json .RootFS.Layers}}", image).stdout)


def test_an_extra_is_in_an_image_that_is_built_with_it(builder: Engine, image: str, index: Index, tmp_path: Path):
    places = {"PIP_FIND_LINKS": f"{index.url} /build/extras"}
    folder = trainer.context(shipped.trainer_context(), tmp_path / "context", index, places, CERTIFICATE)
    wheel = folder / "extras" / "tiny-1.0-py3-none-any.whl"
    about = "tiny-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("tiny.py", "said = 'here'\n")
        packed.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        packed.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(f"{about}/RECORD", f"tiny.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (folder / "extras" / "tiny.lock").write_text(f"tiny==1.0 --hash=sha256:{digest}\n")
    done = build(builder, folder, "trainer:extra", EXTRAS="tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    code = "import tiny, pydantic; print(tiny.said)"
    assert run(builder, "trainer:extra", "-c", code, options=("--entrypoint", "python")) == "here"
    refused = build(builder, folder, "trainer:none", EXTRAS="tiny nothing")
    assert refused.returncode
    assert "extras/nothing.lock" in refused.stdout + refused.stderr


def test_an_image_that_is_not_what_its_labels_say_is_refused(builder: Engine, image: str, index: Index, tmp_path: Path):
    lies = {"PYTHON_VERSION": "3.12", "TORCH": "", "CUDA": "13.2", "CUDA_COMPAT": "13.0"}
    done = build(builder, context(tmp_path / "context", index), "trainer:lies", **lies)
    assert done.returncode
    for told in ("PYTHON_VERSION=3.11", "CUDA is '13.2', but the image has ''", "CUDA_COMPAT is '13.0', but the image"):
        assert told in done.stdout + done.stderr
    assert "TORCH is" not in done.stdout + done.stderr


def test_a_package_that_is_not_the_locked_one_is_refused(builder: Engine, image: str, index: Index, tmp_path: Path):
    folder = context(tmp_path / "context", index)
    lock = folder / "requirements.lock"
    lock.write_text("six==1.17.0 --hash=sha256:" + "0" * 64 + "\n")
    done = build(builder, folder, "trainer:forged")
    assert done.returncode
    assert "DO NOT MATCH THE HASHES" in done.stdout + done.stderr
