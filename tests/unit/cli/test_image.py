"""`mgpu image`: what each command shows and does, on a real engine and a real registry; Ctrl-C; no engine."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
from fakes import builders
from fakes import engine as engines
from fakes.engine import Registry
from fakes.registries import Asked, Said, scripted
from mgpu_train.agent.machine import procs
from waiting import until

from mgpu.bars import Layers
from mgpu.cli import image as cli_image
from mgpu.console import Console
from mgpu.events import ImageStep, LayerPushed
from mgpu.image import compat, place, publish
from mgpu.image.build import shipped
from mgpu.image.compat_table import FAMILIES
from mgpu.image.registry import registry
from mgpu.run.job import images
from mgpu.spec.image import ImageSpec

DOCKERFILE = 'FROM scratch\nCOPY code /code\nLABEL dev.mgpu.torch="2.15.0" dev.mgpu.cuda="13.2" other="mine"\n'
CODE = 300_000  # bytes that cannot be compressed
BROKEN = "FROM base:1\nRUN echo the last words; false\n"


@pytest.fixture
def at(engine: engines.Engine, world, registry: Registry, monkeypatch, request) -> Path:
    """A project whose run file has an `image:`, in an environment that leads to the tests' engine."""
    for name, value in engine.env.items():
        monkeypatch.setenv(name, value)
    context = world.folder / "docker"
    context.mkdir(parents=True)
    (context / "Dockerfile").write_text(DOCKERFILE)
    (context / "code").write_bytes(os.urandom(CODE))
    name = request.node.originalname.replace("_", "-")[:80].rstrip("-")
    want(world.folder, context="docker", repository=f"{registry.address}/cli/{name}")
    return world.folder


def want(folder: Path, **image: object) -> None:
    usual = {"name": "a", "provider": "local", "max_hours": 1, "max_price_usd_per_hour": 1, "train": {"steps": 2}}
    (folder / "mgpu.yaml").write_text(json.dumps(usual | ({"image": image} if image else {})))


def no_engine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/none.sock")


def repository(folder: Path) -> str:
    return json.loads((folder / "mgpu.yaml").read_text())["image"]["repository"]


def test_build_names_what_it_built_and_pushes_nothing(mgpu, at, engine):
    done = mgpu("image", "build", "--json")
    assert done.code == 0, done.err
    built = done.json
    assert built["tag"] == f"mgpu-{built['inputs_hash'][:32]}"
    assert built["name"] == f"{repository(at)}:{built['tag']}"
    assert engine.docker("image", "inspect", "--format", "{{.Id}}", built["name"]).stdout.strip() == built["id"]
    assert registry.find(built["name"]) is None
    again = mgpu("image", "build")
    assert built["id"] in again.out
    assert again.err.splitlines()[0] == f"  building {built['name']}"
    assert "2/3 COPY code /code" in again.err
    assert "mgpu image push" in again.err


def test_inspect_of_an_image_that_should_exist_names_no_build(mgpu, world, monkeypatch):
    no_engine(monkeypatch, world.folder)
    with scripted(lambda _: Said(404)) as server:
        want(world.folder, reference=f"{server.address}/none:1")
        done = mgpu("image", "inspect")
    assert done.code == 4
    assert "Mend image.reference, or push the image first." in done.err
    assert "mgpu image push" not in done.err


def test_build_asks_no_provider_where_images_go(mgpu, at, world):
    settings = json.loads((at / "mgpu.yaml").read_text())
    del settings["image"]["repository"]
    (at / "mgpu.yaml").write_text(json.dumps(settings | {"provider": "aws", "checkpoint": "none"}))
    done = mgpu("image", "build", "--json")
    assert done.code == 0, done.err
    assert done.json["name"] == f"docker.io/mgpu/image:{done.json['tag']}"


def test_push_pushes_once_and_says_how_much_went(mgpu, at, monkeypatch):
    first = mgpu("image", "push", "--json")
    assert first.code == 0, first.err
    published = first.json
    assert (published["built"], published["pushed"]) == (True, True)
    assert CODE <= published["bytes_pushed"] <= published["image_bytes"]
    no_engine(monkeypatch, at)
    again = mgpu("image", "push")
    assert again.out == f"{published['reference']}\n"
    assert "found in its registry" in again.err
    assert "nothing was built or pushed" in again.err


def test_push_after_a_change_moves_the_last_layer_alone(mgpu, at):
    mgpu("image", "push")
    (at / "docker" / "code").write_bytes(os.urandom(1000))
    done = mgpu("image", "push")
    assert "built and pushed: 1." in done.err
    assert " KiB of " in done.err
    assert done.out.startswith(f"{repository(at)}@sha256:")


def test_the_image_with_mgpu_itself_is_pushed_once_and_needs_no_run_file(mgpu, at, monkeypatch):
    context, where = at / "docker", f"{repository(at)}/operator"
    monkeypatch.setattr(shipped, "operator_context", lambda: context)
    (at / "mgpu.yaml").unlink()
    first = mgpu("image", "operator", where, "--json")
    assert (first.code, first.json["pushed"]) == (0, True), first.err
    assert first.json["reference"].startswith(f"{where}@sha256:")
    no_engine(monkeypatch, at)
    assert mgpu("image", "operator", where).out == f"{first.json['reference']}\n"
    for wrong, told in (((f"{where}:1",), "without tag"), ((where, "--secret", "a b"), "secrets a b")):
        done = mgpu("image", "operator", *wrong)
        assert (done.code, told in done.err) == (2, True), done.err


def test_a_build_that_fails_shows_the_step_and_its_last_lines(mgpu, at):
    (at / "docker" / "Dockerfile").write_text(BROKEN)
    for command in ("build", "push"):
        done = mgpu("image", command)
        assert (done.code, done.out) == (4, "")
        assert "RUN echo the last words; false" in done.err
        assert "\n  the last words\n" in done.err


@pytest.mark.parametrize("command", ["build", "push"])
def test_without_an_engine_three_lines_and_exit_code_4(mgpu, at, monkeypatch, command):
    no_engine(monkeypatch, at)
    done = mgpu("image", command)
    assert (done.code, done.out) == (4, "")
    what, why, cure = done.err.splitlines()[-3:]
    assert what.startswith("error: no Docker engine at unix://")
    assert why.startswith("  ")
    assert "DOCKER_HOST" in cure


def test_a_full_temporary_folder_is_told_as_that(mgpu, at, monkeypatch):
    full = lambda **_: open("/dev/full", "w+b")  # noqa: E731, PTH123, SIM115
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    done = mgpu("image", "build")
    assert (done.code, done.out) == (4, "")
    what, why, cure = done.err.splitlines()[-3:]
    assert what.startswith(f"error: no room in {tempfile.gettempdir()}")
    assert "No space left on device" in why
    assert "TMPDIR" in cure


@pytest.mark.parametrize("command", ["build", "push", "inspect"])
def test_a_run_file_without_an_image_is_bad_input(mgpu, at, command):
    want(at)
    done = mgpu("image", command)
    assert done.code == 2
    assert "mgpu.yaml has no `image:`" in done.err


def test_an_image_that_exists_is_pushed_by_nobody_and_not_built(mgpu, at):
    reference = mgpu("image", "push").out.strip()
    want(at, reference=reference)
    assert mgpu("image", "push").out.strip() == reference
    done = mgpu("image", "build")
    assert (done.code, "is not built" in done.err) == (2, True)


def test_inspect_asks_the_registry_alone(mgpu, at, monkeypatch):
    published = mgpu("image", "push", "--json").json
    no_engine(monkeypatch, at)
    done = mgpu("image", "inspect", "--json")
    assert done.code == 0, done.err
    shown = done.json
    assert shown["reference"] == published["reference"]
    assert shown["digest"] == published["reference"].partition("@")[2]
    assert shown["labels"]["other"] == "mine"
    assert sum(layer["bytes"] for layer in shown["layers"]) < shown["bytes"] == published["image_bytes"]
    assert mgpu("image", "inspect", "--json", f"{repository(at)}:{published['tag']}").json == shown
    table = mgpu("image", "inspect").out
    for said in ("580.65.06 or newer", "7.5, 8.0, 8.6, 9.0, 10.0, 12.0", "H100-80GB", shown["layers"][-1]["digest"]):
        assert said in table
    assert "V100" not in table, "CUDA 13 has no code for it"


def test_inspect_of_what_was_only_built_asks_the_engine(mgpu, at, monkeypatch):
    built = mgpu("image", "build", "--json").json
    shown = mgpu("image", "inspect", "--json", built["name"]).json
    assert (shown["digest"], shown["bytes"]) == (built["id"], None)
    assert (shown["pushed"], shown["layers"][0]["bytes"]) == (False, None)
    table = mgpu("image", "inspect", built["name"]).out
    assert "this machine's engine; not pushed yet" in table
    assert "\n\nlayer\n" in table, "no sizes, no column for them"
    assert mgpu("image", "inspect", "--json").json == shown, "and so it is by the run file"
    no_engine(monkeypatch, at)
    missing = mgpu("image", "inspect")
    assert (missing.code, "does not have it" in missing.err) == (4, True)
    assert "mgpu image push" in missing.err


def test_inspect_of_what_was_built_before_a_repository_was_known(mgpu, at, engine):
    engine.docker("tag", mgpu("image", "build", "--json").json["id"], f"mgpu/image:{tag_of(mgpu)}")
    engine.docker("rmi", f"{repository(at)}:{tag_of(mgpu)}")
    assert mgpu("image", "inspect", "--json").json["reference"] == f"mgpu/image:{tag_of(mgpu)}"


def tag_of(mgpu) -> str:
    return mgpu("image", "inspect", "--json").json["reference"].rpartition(":")[2]


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({compat.CUDA: "cpu"}, "none is needed: its PyTorch has no CUDA"),
        ({}, "not known: no label dev.mgpu.cuda says which CUDA it has"),
    ],
    ids=["cpu", "none"],
)
def test_what_is_said_of_drivers_where_there_is_no_cuda(labels, said):
    shown = cli_image._as_data("a:1", None, "sha256:1", "linux/amd64", None, labels, [])
    assert cli_image._rows(shown)[-1] == ("NVIDIA driver", said)
    assert ("where", "this machine's engine") in cli_image._rows(shown), "of one whose registry is away nothing is said"


def test_inspect_of_nothing_says_what_the_registry_said(mgpu, at, monkeypatch):
    no_engine(monkeypatch, at)
    done = mgpu("image", "inspect", f"{repository(at)}:none")
    assert done.code == 4
    assert f"no image {repository(at)}:none for linux/amd64" in done.err
    assert mgpu("image", "inspect", "x:1", "--platform", "windows").code == 2


@pytest.mark.drawn("signals at a build", "mgpu/image", "mgpu/cli/image.py")
@pytest.mark.parametrize("builder", builders.BUILDERS)
@pytest.mark.parametrize(
    ("command", "number"),
    [
        (("image", "build"), signal.SIGTERM),
        (("image", "push"), signal.SIGINT),
        (("image", "push"), signal.SIGTERM),
        (("image", "push"), signal.SIGHUP),
        (("launch", "--yes"), signal.SIGTERM),
    ],
    ids=["build, SIGTERM", "push, SIGINT", "push, SIGTERM", "push, SIGHUP", "launch, SIGTERM"],
)
def test_a_signal_ends_a_build_and_all_that_it_has_begun(
    at, engine, require, tmp_path, monkeypatch, builder, command, number
):
    builders.choose(builder, require, monkeypatch, tmp_path / builder)
    step = builders.Endless()
    (at / "docker" / "Dockerfile").write_text(f"FROM base:1\nCOPY code /code\n{step.line}\n")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    before, mark = tags(engine), f"MGPU_TEST_OPERATOR={uuid.uuid4().hex}"
    process = subprocess.Popen(
        [sys.executable, "-m", "mgpu", *command],
        cwd=at,
        env=dict([*os.environ.items(), mark.split("=")]),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: step.runs() or process.poll() is not None)
        assert step.runs(), process.communicate()
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (130, "")
        assert "Traceback" not in err
        assert not procs.carrying(mark), "what builds is gone before the command is"
        until(lambda: not step.runs())
    finally:
        for each in (*procs.carrying(mark), *step.runs()):
            each.send(signal.SIGKILL)
        process.communicate()
    assert not list(temporary.iterdir())
    assert tags(engine) == before


def test_a_second_signal_waits_for_nothing(monkeypatch):
    monkeypatch.setattr("mgpu.run.record.signals.ECHO_S", 0.0)
    with images.cancelling() as cancelled:
        signal.raise_signal(signal.SIGTERM)
        assert cancelled.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def tags(engine: engines.Engine) -> set[str]:
    """All names of images; what was built so far may stay as a cache, without one."""
    return set(engine.docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()) - {"<none>:<none>"}


# ---- what needs no engine


def test_the_fit_of_labels():
    fit = compat.fit({compat.TORCH: "2.15.0", compat.CUDA: "13.2", compat.CUDA_COMPAT: "13.0"})
    assert fit is not None
    assert fit.driver == "580.65.06"
    assert 535 in fit.compat_branches
    assert {"H100-80GB", "B200"} <= set(fit.gpus)
    assert "V100-16GB" not in fit.gpus
    for labels in ({}, {compat.CUDA: "cpu"}, {compat.CUDA: "new"}):
        assert compat.fit(labels) is None
    old = compat.fit({compat.CUDA: "12.4"})
    assert old is not None
    assert (old.driver, old.compat_branches) == ("525.60.13", ())
    assert FAMILIES[12] == (525, 60, 13)


@pytest.mark.parametrize("gpu", ["H100-80GB", "V100-16GB", "T4", "B200"])
def test_the_fit_says_what_the_check_says(gpu):
    labels = {compat.TORCH: "2.15.0", compat.CUDA: "13.2"}
    fit = compat.fit(labels)
    assert fit is not None
    assert (gpu in fit.gpus) == (not compat.check(labels, fit.driver, gpu))


class Owner:
    """A provider that counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def image_repository(self, regions):
        self.asked.append(tuple(regions))
        return "registry.example/base"

    def pulled_by_role(self, registry):
        return {}

    def registry_login(self, registry):
        self.asked.append(registry)


def test_of_a_sweep_whose_images_differ_all_are_built_and_shown(mgpu, at, engine):
    alone = json.loads((at / "mgpu.yaml").read_text())
    (at / "docker" / "Dockerfile").write_text(f"ARG FLAVOUR\n{DOCKERFILE}ARG FLAVOUR\nLABEL flavour=$FLAVOUR\n")
    two = {"matrix": {"image.args.FLAVOUR": ["hf", "timm"], "train.seed": [1, 2]}}
    (at / "mgpu.yaml").write_text(json.dumps(alone | two))
    done = mgpu("image", "build", "--json")
    assert done.code == 0, done.err
    names = [each["name"] for each in done.json["images"]]
    flavours = [engine.docker("inspect", "--format", "{{.Config.Labels.flavour}}", name).stdout for name in names]
    assert [each.strip() for each in flavours] == ["hf", "timm"]
    assert [name for name in names if name in mgpu("image", "build").out] == names
    shown = mgpu("image", "inspect", "--json").json["images"]
    assert [(each["reference"], each["pushed"]) for each in shown] == [(name, False) for name in names]
    table = mgpu("image", "inspect").out
    assert [name for name in names if name in table] == names


def test_of_a_sweep_whose_image_is_one_it_is_built_once(mgpu, at):
    alone = json.loads((at / "mgpu.yaml").read_text())
    (at / "mgpu.yaml").write_text(json.dumps(alone | {"matrix": {"train.seed": [1, 2]}}))
    assert mgpu("image", "build", "--json").json["name"].startswith(repository(at))


def test_push_and_inspect_of_a_sweep_take_each_place_of_its_runs_once(mgpu, at, monkeypatch):
    named = json.loads((at / "mgpu.yaml").read_text())
    home = named["image"].pop("repository")
    sweep = {"matrix": {"regions": ["r1", "r2"], "train.seed": [1, 2]}}
    (at / "mgpu.yaml").write_text(json.dumps(named | sweep | {"provider": "aws", "checkpoint": "none"}))

    def site(image, folder, provider, regions, environ):
        return publish.Site(folder, f"{home}/{regions[0]}", environ)

    monkeypatch.setattr(place, "site", site)
    first = mgpu("image", "push", "--json")
    assert first.code == 0, first.err
    there = [each["reference"] for each in first.json["images"]]
    assert [name.partition("@")[0] for name in there] == [f"{home}/r1", f"{home}/r2"]
    no_engine(monkeypatch, at)
    shown = mgpu("image", "inspect", "--json")
    assert [each["reference"] for each in shown.json["images"]] == there, shown.err
    assert mgpu("image", "push").out.splitlines() == there


def test_inspect_of_a_sweep_shows_the_others_where_one_image_is_missing(mgpu, world, monkeypatch):
    no_engine(monkeypatch, world.folder)
    blob = json.dumps({"architecture": "amd64", "os": "linux", "config": {"Labels": {"other": "mine"}}}).encode()
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = {"schemaVersion": 2, "mediaType": kind, "config": {"digest": digest_of(blob), "size": len(blob)}}
    known = json.dumps(manifest | {"layers": []}).encode()

    def answer(asked: Asked) -> Said:
        body = blob if "/blobs/" in asked.path else b"" if "/none/" in asked.path else known
        headers = {"Content-Type": kind, "Docker-Content-Digest": digest_of(body)}
        return Said(200, headers, body) if body and asked.path != "/v2/" else Said(404)

    with scripted(answer) as server:
        want(world.folder, reference=f"{server.address}/there:1")
        alone = json.loads((world.folder / "mgpu.yaml").read_text())
        images = [f"{server.address}/{name}:1" for name in ("none", "there", "none/too")]
        (world.folder / "mgpu.yaml").write_text(json.dumps(alone | {"matrix": {"image.reference": images}}))
        shown = mgpu("image", "inspect")
        data = mgpu("image", "inspect", "--json")
    there = f"{server.address}/there@{digest_of(known)}"
    assert (shown.code, data.code) == (4, 4)
    assert there in shown.out
    assert [f"error: no image {images[at]}" in shown.err for at in range(3)] == [True, False, True], shown.err
    assert [each["reference"] for each in data.json["images"]] == [there]
    assert [each["what"] for each in data.json["failures"]] == [f"no image {images[at]}" for at in (0, 2)]


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_the_provider_is_asked_for_a_repository_only_where_none_is_named(tmp_path):
    owner = Owner()
    for given in ({"repository": "a.example/b"}, {"reference": "a:1"}):
        assert place.site(ImageSpec.model_validate(given), tmp_path, owner, ("r1",), {}).repository is None
    assert owner.asked == []
    site = place.site(ImageSpec.model_validate({}), tmp_path, owner, ("r1", "r2"), {})
    assert (site.repository, owner.asked) == ("registry.example/base", [("r1", "r2")])


def test_layers_are_lines_where_there_is_no_terminal(capsys):
    console = Console()
    console.emit(ImageStep(2, 5, "RUN  a \\\n  b " + "x" * 200))
    console.emit(LayerPushed("abc", "pushing", 1 << 20, 3 << 20))
    console.emit(LayerPushed("there", "there", 0, 0))
    console.emit(LayerPushed("abc", "pushed", 0, 0))
    console.done()
    step, layer = capsys.readouterr().err.splitlines()
    assert step.startswith("  2/5 RUN a \\ b xxx")
    assert len(step) < 120
    assert layer == "  layer abc pushed", "a size before compression would be of another kind than all others"


def test_on_a_terminal_all_layers_are_one_bar(monkeypatch):
    seen = list[tuple[int, int]]()

    class Shown:
        def __init__(self, *_: object, sizes: bool) -> None:
            assert not sizes

        def reach(self, done: int, total: int) -> None:
            seen.append((done, total))

        def stop(self) -> None:
            seen.append((-1, -1))

    monkeypatch.setattr("mgpu.bars.Bar", Shown)
    layers = Layers(print, object())  # type: ignore[arg-type]
    for said in (("a", "pushing", 5, 10), ("b", "pushing", 1, 2), ("c", "there", 9, 9), ("a", "pushed", 10, 10)):
        layers.take(*said)
    layers.stop()
    assert seen == [(5, 10), (6, 12), (11, 12), (-1, -1)]


def test_init_where_nothing_can_be_written_is_bad_input(mgpu, world):
    done = mgpu("init", "/proc/x")
    assert done.code == 2
    assert "/proc/x: the folder cannot be made" in done.err


def test_init_gives_a_project_its_own_copy_of_the_images_and_keeps_one_that_is_there(mgpu, world, monkeypatch):
    monkeypatch.setattr("mgpu.iac.engine.install.set_up", lambda *_: None)
    done = mgpu("init", "p")
    assert done.code == 0, done.err
    copied = world.folder / "p" / "images" / "trainer"
    assert shipped.own(world.folder / "p") == copied
    assert f"wrote {Path('p') / 'images' / 'trainer'}" in done.err
    (copied / "Dockerfile").write_text("FROM mine\n")
    again = mgpu("init", "p")
    assert f"kept what was there: {Path('p') / 'mgpu.yaml'}, " in again.err
    assert f"{Path('p') / 'images'}, " in again.err
    assert (copied / "Dockerfile").read_text() == "FROM mine\n"
