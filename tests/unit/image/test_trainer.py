"""The files of mgpu's images: nothing stale, nothing for one builder alone, the same context everywhere."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mgpu_train
import pytest

import mgpu
from mgpu.image import compat
from mgpu.image.build import bases, context, shipped
from mgpu.image.compat_table import FAMILIES, TOOLKITS, WHEELS
from mgpu.providers.aws.instances import drivers
from mgpu.spec.image import ImageSpec

ROOT = Path(__file__).resolve().parents[3]
TRAINER = ROOT / "images" / "trainer"
OPERATOR = ROOT / "images" / "operator"
DOCKERFILE = (TRAINER / "Dockerfile").read_text()
ARGS = dict(re.findall(r"^ARG (\w+)=(.*)$", DOCKERFILE, re.MULTILINE))
LABELS = dict(re.findall(r'(dev\.mgpu\.\S+)="\$\{(\w+)\}"', DOCKERFILE))  # by the name of the ARG that each repeats


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mgpu" / "images"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def modes(folder: Path) -> set[tuple[bool, int]]:
    return {(path.is_dir(), path.stat().st_mode & 0o7777) for path in (folder, *folder.rglob("*"))}


def test_the_lock_files_and_the_dockerfile_are_those_of_the_lock(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()  # set-up keeps uv in the user's own cache
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import write_image_locks

    for path, text in write_image_locks.texts().items():
        assert path.read_text() == text, f"{path.name}: run scripts/write_image_locks.py"


def test_every_locked_package_is_pinned_and_hashed_and_in_one_file_alone():
    names = []
    for name in ("requirements.lock", "torch.lock"):
        packages = re.findall(
            r"^(\S+?)==(?:.*\\\n)(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", text(name), re.MULTILINE
        )
        assert len(packages) == len(re.findall(r"^[a-z]", text(name), re.MULTILINE))
        names += sorted(set(packages))
    assert len(names) == len(set(names))
    assert "torch" not in re.findall(r"^[\w-]+", text("requirements.lock"), re.MULTILINE)


def text(name: str) -> str:
    return (TRAINER / name).read_text()


@pytest.mark.parametrize("lock", sorted(path.name for path in (TRAINER / "extras").glob("*")))
def test_the_lock_of_an_extra_has_what_the_image_lacks_pinned_and_hashed(lock: str):
    locked, there = text(f"extras/{lock}"), text("requirements.lock") + text("torch.lock")
    hashed = re.findall(r"^(\S+?)==(?:.*\\\n)(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", locked, re.MULTILINE)
    assert hashed == re.findall(r"^([a-z0-9][\w.-]*)", locked, re.MULTILINE)
    assert not {*hashed} & {*re.findall(r"^(\S+?)==", there, re.MULTILINE)}


def test_what_the_agent_needs_is_in_the_image():
    with (ROOT / "train" / "pyproject.toml").open("rb") as file:
        needed = [line.partition(">")[0] for line in tomllib.load(file)["project"]["dependencies"]]
    assert set(needed) <= set(re.findall(r"^[\w-]+(?===)", text("requirements.lock"), re.MULTILINE))


def test_the_base_is_pinned_by_its_digest():
    (base,) = bases.read(DOCKERFILE.encode(), {}).images
    assert re.fullmatch(r"nvidia/cuda@sha256:[0-9a-f]{64}", base)
    assert bases.read(DOCKERFILE.encode(), {"BASE": "other:1"}).images == ("other:1",)


@pytest.mark.parametrize("form", [r"--mount", r"<<\w", r"--chmod", r"--link", r"^# *syntax", r"^ADD "])
@pytest.mark.parametrize("folder", [TRAINER, OPERATOR], ids=lambda folder: folder.name)
def test_every_builder_understands_the_dockerfile(folder: Path, form: str):
    lines = (folder / "Dockerfile").read_text().splitlines()
    instructions = [line for line in lines if not line.startswith("#") or "syntax" in line]
    assert not [line for line in instructions if re.search(form, line)]


@pytest.mark.parametrize(("folder", "first"), [(TRAINER, "/opt/torch"), (OPERATOR, "/opt/pulumi")])
def test_what_is_for_the_build_alone_goes_into_a_stage_that_is_thrown_away(folder: Path, first: str):
    stages = re.split(r"^FROM .* AS (\w+)$", (folder / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    by_name = dict(zip(stages[::2], stages[1::2], strict=True))
    assert [name for name, body in by_name.items() if ".buil[d]" in body] == ["packages"]
    assert list(by_name)[-1] == folder.name
    assert re.findall(r"^COPY --from=packages (\S+)", by_name[folder.name], re.MULTILINE) == [first, "/opt/mgpu"]


def test_the_image_says_of_itself_what_the_table_reads():
    assert LABELS == {
        compat.PYTHON: "PYTHON_VERSION", compat.TORCH: "TORCH", compat.CUDA: "CUDA", compat.CUDA_COMPAT: "CUDA_COMPAT",
    }  # fmt: skip
    assert set(LABELS.values()) <= set(ARGS)


def test_the_table_knows_the_default_image():
    torch, cuda, package = (compat.version(ARGS[name]) for name in ("TORCH", "CUDA", "CUDA_COMPAT"))
    assert cuda in WHEELS[torch[:2]]
    assert TOOLKITS[package].compat_on
    assert TOOLKITS[package].driver >= FAMILIES[cuda[0]]


@pytest.mark.parametrize("gpu", ["T4", "A10G", "L4", "L40S", "A100-80GB", "H100-80GB", "H200", "B200", "B300"])
def test_the_default_image_runs_on_what_aws_rents_with_each_driver_of_its_machine_images(gpu: str):
    says = {label: ARGS[name] for label, name in LABELS.items()}
    assert [release for release in drivers.RELEASES if compat.check(says, release.driver, gpu)] == []


def test_the_context_is_whole_and_has_nothing_compiled(cache: Path):
    folder = shipped.trainer_context()
    found = content(folder)
    assert folder.parent == cache
    for name in ("Dockerfile", ".dockerignore", "install.sh", "labels.py", "requirements.lock", "torch.lock"):
        assert found[name] == (TRAINER / name).read_bytes()
    package = Path(mgpu_train.__file__).parent
    for path in [*package.rglob("*.py"), *package.rglob("*.txt"), package / "py.typed"]:
        assert found[f"mgpu_train/{path.relative_to(package)}"] == path.read_bytes()
    assert not [name for name in found if "__pycache__" in name or name.endswith(".pyc")]


def test_the_operators_context_is_mgpu_as_it_is_installed(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    folder = shipped.operator_context()
    found = content(folder)
    assert {name: found[name] for name in content(OPERATOR)} == content(OPERATOR)
    for package in (mgpu, mgpu_train):
        source = Path(package.__file__).parent
        for path in source.rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                assert found[f"site/{package.__name__}/{path.relative_to(source)}"] == path.read_bytes()
    assert found["site/mgpu/_data/infra/base/__main__.py"] == (ROOT / "infra" / "base" / "__main__.py").read_bytes()
    assert b"[mgpu.providers]" in found[f"site/mgpu-{mgpu.__version__}.dist-info/entry_points.txt"]
    assert os.access(folder / "site" / "mgpu" / "iac" / "python.sh", os.X_OK)
    assert not [name for name in found if "__pycache__" in name or name.endswith(".pyc")]
    # what is carried in a wheel lies in the package
    wheel = tmp_path / "wheel" / "mgpu"
    shutil.copytree(folder / "site" / "mgpu", wheel)
    for name, value in {"_OPERATOR": wheel, "_CARRIED": wheel / "_data", "_CHECKOUT": tmp_path / "none"}.items():
        monkeypatch.setattr(shipped, name, value)
    assert shipped.operator_context() == folder


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077], ids=oct)
def test_the_context_is_the_same_whatever_the_umask(umask: int):
    before = os.umask(umask)
    try:
        folder = shipped.trainer_context()
    finally:
        os.umask(before)
    assert modes(folder) == {(True, 0o755), (False, 0o644)}


def test_a_context_that_is_there_is_taken(cache: Path):
    folder = shipped.trainer_context()
    made = folder.stat().st_ino
    assert shipped.trainer_context() == folder
    assert folder.stat().st_ino == made
    assert names(cache) == [folder.name]


@pytest.mark.parametrize("harm", ["changed", "missing", "more"])
def test_a_context_that_was_changed_is_made_anew(cache: Path, harm: str):
    folder = shipped.trainer_context()
    before = content(folder)
    file = folder / ("more" if harm == "more" else "Dockerfile")
    file.unlink() if harm == "missing" else file.write_text("FROM evil\n")
    assert shipped.trainer_context() == folder
    assert content(folder) == before
    assert names(cache) == [folder.name]


def test_another_version_has_another_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    first = shipped.trainer_context()
    monkeypatch.setattr(shipped, "_TRAIN", tmp_path / "train")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "__init__.py").write_text("")
    second = shipped.trainer_context()
    assert second != first
    assert names(second / "mgpu_train") == ["__init__.py"]
    assert first.is_dir()


def test_an_installed_mgpu_takes_the_files_that_its_wheel_carries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    carried = tmp_path / "_data" / "images" / "trainer"
    carried.mkdir(parents=True)
    (carried / "Dockerfile").write_text("FROM scratch\n")
    (carried / "__pycache__").mkdir()
    (carried / "__pycache__" / "labels.pyc").write_bytes(b"compiled")
    monkeypatch.setattr(shipped, "_CARRIED", tmp_path / "_data")
    assert (shipped.trainer_context() / "Dockerfile").read_text() == "FROM scratch\n"
    assert sorted(names(shipped.trainer_context())) == ["Dockerfile", "mgpu_train"]
    with (ROOT / "pyproject.toml").open("rb") as file:
        built = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]
    assert built["wheel"]["force-include"]["images"] == "mgpu/_data/images"
    assert "images" in built["sdist"]["include"]


def test_two_processes_may_make_it_at_once(cache: Path):
    code = "from mgpu.image.build import shipped; print(shipped.trainer_context())"
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate(timeout=60)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    (folder,) = folders
    assert content(Path(folder))["Dockerfile"] == DOCKERFILE.encode()
    assert names(cache) == [Path(folder).name]


def test_threads_of_one_process_may_make_it_at_once(cache: Path):
    with ThreadPoolExecutor(4) as pool:
        (folder,) = set(pool.map(lambda _: shipped.trainer_context(), range(4)))
    assert content(folder)["Dockerfile"] == DOCKERFILE.encode()
    assert names(cache) == [folder.name]


def test_what_the_first_has_made_stays_under_its_feet(cache: Path, monkeypatch: pytest.MonkeyPatch):
    made, put = list[int](), shipped._put

    def faster(aside: Path, folder: Path) -> None:
        shutil.copytree(aside, folder)
        made.append(folder.joinpath("Dockerfile").stat().st_ino)
        put(aside, folder)

    monkeypatch.setattr(shipped, "_put", faster)
    folder = shipped.trainer_context()
    assert [folder.joinpath("Dockerfile").stat().st_ino] == made
    assert names(cache) == [folder.name]


def test_a_full_disk_keeps_nothing_of_a_context(cache: Path, monkeypatch: pytest.MonkeyPatch):
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.name == "install.sh":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        shipped.trainer_context()
    assert names(cache) == []


def test_who_comes_second_takes_what_the_first_has_made(tmp_path: Path):
    for name in ("aside", "folder"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "made-by").write_text(name)
    shipped._put(tmp_path / "aside", tmp_path / "folder")
    assert names(tmp_path) == ["folder"]
    assert (tmp_path / "folder" / "made-by").read_text() == "folder"
    (tmp_path / "aside").mkdir()
    with pytest.raises(OSError, match="No such file"):
        shipped._put(tmp_path / "aside", tmp_path / "nowhere" / "folder")


# ---- the user's own copy


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with its own copy of images/trainer/, as `mgpu init` makes it."""
    folder = tmp_path / "project"
    (folder / "runs").mkdir(parents=True)
    (folder / "Pulumi.yaml").touch()
    assert shipped.copy_to(folder) == folder / "images" / "trainer"
    return folder


def test_a_users_copy_is_all_of_it_and_is_what_is_built_from(project: Path):
    copied = project / "images" / "trainer"
    assert content(copied) == {n: c for n, c in content(TRAINER).items() if "__pycache__" not in n}
    before = content(shipped.trainer_context())
    assert content(shipped.trainer_context(shipped.own(project))) == before
    (copied / "Dockerfile").write_text("FROM mine\n")
    (copied / "start").write_text("#!/bin/sh\n")
    (copied / "start").chmod(0o755)
    built_from = shipped.trainer_context(shipped.own(project / "runs"))
    assert content(built_from) == before | {"Dockerfile": b"FROM mine\n", "start": b"#!/bin/sh\n"}
    assert built_from.joinpath("start").stat().st_mode & 0o777 == 0o755
    assert content(shipped.trainer_context()) == before, "others are built from mgpu's own"


def test_a_program_and_a_file_are_two_contexts(project: Path):
    script = project / "images" / "trainer" / "start"
    script.touch()
    first = shipped.trainer_context(shipped.own(project))
    script.chmod(0o755)
    assert shipped.trainer_context(shipped.own(project)) != first


def test_a_copy_is_looked_for_no_further_than_the_project(project: Path):
    inner = project / "inner"
    inner.mkdir()
    assert shipped.own(inner) == project / "images" / "trainer"
    (inner / "Pulumi.yaml").touch()
    assert shipped.own(inner) is None


def test_the_default_context_is_the_users_copy(project: Path):
    (project / "images" / "trainer" / "Dockerfile").write_text("FROM mine\n")
    assert context.scan(context.folder_of(ImageSpec.model_validate({}), project / "runs")).recipe == b"FROM mine\n"
