"""Resource Image: what is hashed, built, pushed, found again; over the wire, and under the real Pulumi engine."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path

import grpc
import pytest
from fakes import builders
from fakes import engine as engines
from fakes.engine import Registry
from fakes.registries import Said, scripted
from pulumi.runtime.proto import provider_pb2
from waiting import until

from mgpu.errors import AuthError, ImageError, InputError, Interrupted, MgpuError
from mgpu.events import Event, ImageStep, LayerPushed, Note
from mgpu.iac import tokens
from mgpu.iac.protocol import servicer
from mgpu.iac.protocol.handler import Call, Settings
from mgpu.iac.protocol.wire import UNKNOWN, from_struct
from mgpu.iac.types import image_model
from mgpu.iac.types.image import ImageHandler
from mgpu.image import cancellable, publish
from mgpu.image.registry import registry
from mgpu.image.registry.http import Answer, Api
from mgpu.image.registry.reference import Reference
from mgpu.providers.aws.provider import AwsProvider

DOCKERFILE = "ARG BASE\nFROM ${BASE}\nCOPY code /code\n"
BASE_NAME = "bases/image"
DIGEST = "sha256:" + "a" * 64


@pytest.fixture
def base(engine: engines.Engine, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> str:
    """A base image that the registry has, too: without an engine, its digest can be asked for. The environment leads to
    the tests' engine."""
    for name, value in engine.env.items():
        monkeypatch.setenv(name, value)
    name = f"{registry.address}/{BASE_NAME}:1"
    engine.docker("tag", "base:1", name)
    engine.docker("push", name)
    return name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A context, in the folder of a run file."""
    context = tmp_path / "project" / "docker"
    context.mkdir(parents=True)
    (context / "Dockerfile").write_text(DOCKERFILE)
    (context / "code").write_text("1")
    return context.parent


@pytest.fixture
def wire(serve):
    return serve({tokens.IMAGE: ImageHandler()})


@pytest.fixture
def here(at) -> str:
    return at(tokens.IMAGE)


@pytest.fixture
def asked(folder: Path, base: str, registry: Registry, request: pytest.FixtureRequest) -> dict[str, object]:
    """What a program asks for, in a repository of this test's own."""
    return {
        "folder": str(folder),
        "provider": "local",
        "context": "docker",
        "args": {"BASE": base},
        "repository": f"{registry.address}/{repository_of(request)}",
    }


def repository_of(request: pytest.FixtureRequest) -> str:
    return "of/" + request.node.originalname.replace("_", "-")[:80].rstrip("-")


def no_engine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/none.sock")


def delete(reference: str) -> None:
    """Takes an image out of its registry, as a lifecycle rule would."""
    name = Reference.parse(reference)
    assert Api(name, lambda: None).ask("DELETE", f"manifests/{name.digest}").status == 202


# ---- over the wire


def test_it_is_built_and_pushed_once_and_then_found(wire, here, asked, monkeypatch, folder):
    inputs = wire.inputs(here, asked)
    made = wire.create(here, inputs)
    outputs = from_struct(made.properties)
    assert made.id == asked["repository"]
    assert outputs["reference"] == f"{asked['repository']}@{outputs['digest']}"
    assert outputs["tag"] == f"mgpu-{inputs['hash'][:32]}"
    assert registry.find(f"{asked['repository']}:{outputs['tag']}") == outputs["digest"]
    no_engine(monkeypatch, folder)
    again = from_struct(wire.create(here, inputs).properties)
    assert again["digest"] == outputs["digest"]


def test_an_unchanged_context_differs_in_nothing_wherever_it_lies(wire, here, asked, folder, tmp_path):
    first = wire.inputs(here, asked)
    other = tmp_path / "other"
    folder.rename(other)
    second = wire.inputs(here, asked | {"folder": str(other)}, first)
    assert second["folder"] != first["folder"]
    assert wire.diff(here, first, first, second).changes == provider_pb2.DiffResponse.DIFF_NONE


def test_a_changed_file_is_an_update_and_another_repository_another_image(wire, here, asked, folder):
    first = wire.inputs(here, asked)
    (folder / "docker" / "code").write_text("2")
    changed = wire.inputs(here, asked, first)
    found = wire.diff(here, first, first, changed)
    assert (list(found.diffs), list(found.replaces)) == (["hash"], [])
    moved = wire.diff(here, changed, changed, wire.inputs(here, asked | {"repository": "other/place"}, changed))
    assert (list(moved.replaces), moved.deleteBeforeReplace) == (["repository"], False)


def test_check_asks_no_registry_but_the_bases_and_needs_no_engine(wire, here, asked, monkeypatch, folder):
    no_engine(monkeypatch, folder)
    nowhere = "127.0.0.1:9/nobody/listens"
    assert wire.inputs(here, asked | {"repository": nowhere})["repository"] == nowhere


def test_a_preview_without_an_engine_gives_the_tag_and_builds_nothing(wire, here, asked, monkeypatch, folder):
    no_engine(monkeypatch, folder)
    inputs = wire.inputs(here, asked)
    seen = from_struct(wire.create(here, inputs, preview=True).properties)
    assert seen["tag"] == f"mgpu-{inputs['hash'][:32]}"
    assert {seen[key] for key in ("reference", "digest", "bytes")} == {UNKNOWN}
    assert registry.find(f"{asked['repository']}:{seen['tag']}") is None


def test_a_preview_of_what_is_there_knows_it_whole(wire, here, asked):
    inputs = wire.inputs(here, asked)
    made = from_struct(wire.create(here, inputs).properties)
    assert from_struct(wire.create(here, inputs, preview=True).properties) == made


def test_without_an_engine_a_build_says_so_in_three_lines(wire, here, asked, monkeypatch, folder):
    no_engine(monkeypatch, folder)
    with pytest.raises(grpc.RpcError, match=r"no Docker engine at unix://.*none.sock\n.+\n.+\n\[mgpu:ImageError "):
        wire.create(here, wire.inputs(here, asked))


def test_what_is_known_later_is_checked_later(wire, here, asked):
    inputs = wire.inputs(here, asked | {"repository": UNKNOWN})
    assert inputs["hash"] == UNKNOWN
    assert from_struct(wire.create(here, inputs, preview=True).properties)["reference"] == UNKNOWN


@pytest.mark.parametrize(
    ("change", "property_", "reason"),
    [
        ({"contxt": "x"}, "contxt", "Extra inputs"),
        ({"platform": "windows"}, "platform", "linux/amd64"),
        ({"repository": "UPPER"}, "repository", "pattern"),
        ({"reference": "x:1"}, "reference", "names an image that exists"),
    ],
    ids=["key", "platform", "repository", "both"],
)
def test_check_names_what_is_wrong(wire, here, asked, change, property_, reason):
    (failure,) = wire.check(here, asked | change).failures
    assert failure.property == property_
    assert reason in failure.reason


def test_a_context_that_is_not_there_says_so(wire, here, asked):
    with pytest.raises(grpc.RpcError, match="no folder"):
        wire.check(here, asked | {"context": "nowhere"})


def test_an_image_that_exists_is_resolved_and_a_tag_that_moves_shows(wire, here, asked, engine):
    name = f"{asked['repository']}:mine"
    given = {key: asked[key] for key in ("folder", "provider")} | {"reference": name}
    with pytest.raises(grpc.RpcError, match="no image"):
        wire.check(here, given)
    engine.docker("tag", asked["args"]["BASE"], name)
    engine.docker("push", name)
    first = wire.inputs(here, given)
    made = from_struct(wire.create(here, first).properties)
    assert (made["reference"], made["tag"]) == (f"{asked['repository']}@sha256:{first['hash']}", "mine")
    assert wire.inputs(here, given, first) == first
    engine.image(name, ["true"])
    engine.docker("push", name)
    moved = wire.inputs(here, given, first)
    assert list(wire.diff(here, first, made, moved).diffs) == ["hash"]


def test_read_asks_the_registry_and_gone_is_gone(wire, here, asked):
    inputs = wire.inputs(here, asked)
    made = from_struct(wire.create(here, inputs).properties)
    answer = wire.read(here, "x", made, inputs)
    assert (answer.id, from_struct(answer.properties), from_struct(answer.inputs)) == ("x", made, inputs)
    delete(made["reference"])
    assert wire.read(here, "x", made, inputs).id == ""


def test_a_registry_that_does_not_answer_concludes_nothing_and_holds_up_no_teardown(wire, here, folder):
    with scripted(lambda _: Said(403)) as refusing:
        outputs = of(folder, f"{refusing.address}/x/y")
        assert from_struct(wire.read(here, "x", outputs, {"folder": "f"}).properties) == outputs
        assert refusing.asked
    wire.delete(here, "x", outputs)
    assert not ImageHandler().refresh_before_update, "`destroy` would ask the registry"


def test_provider_local_asks_ecr_with_the_credentials_of_the_environment(wire, here, folder, monkeypatch):
    asked = list[str]()

    def expired(provider, registry):
        asked.append(registry)
        raise AuthError("the credentials are too old")

    monkeypatch.setattr(AwsProvider, "registry_login", expired)
    challenge = Message()
    challenge["WWW-Authenticate"] = 'Basic realm="https://ecr.example/"'
    monkeypatch.setattr(Api, "_once", lambda *_: Answer(401, challenge, b""))
    ecr = "123456789012.dkr.ecr.eu-west-1.amazonaws.com"
    outputs = of(folder, f"{ecr}/x")
    assert from_struct(wire.read(here, "x", outputs, {"folder": "f"}).properties) == outputs
    assert asked == [ecr]


def of(folder: Path, repository: str) -> dict[str, object]:
    outputs = image_model.ImageOutputs(
        folder=str(folder), provider="local", reference=f"{repository}@{DIGEST}", repository=repository, tag="t",
        digest=DIGEST, bytes=1,
    )  # fmt: skip
    return {key: value for key, value in outputs.to_wire().items() if value is not None}  # the wire has no null


def test_delete_leaves_the_image_in_its_registry(wire, here, asked):
    made = from_struct(wire.create(here, wire.inputs(here, asked)).properties)
    wire.delete(here, asked["repository"], made)
    assert registry.find(made["reference"]) == made["digest"]


def test_delete_says_once_that_it_is_kept(folder):
    told = list[Event]()
    call = Call("urn:pulumi:s::p::mgpu:index:Image::image", Settings(folder, "o"), told.append, threading.Event())
    ImageHandler().delete(call, "x", {})
    assert told == [Note("Image image: kept in its registry")]


def test_an_import_is_refused(wire, here):
    with pytest.raises(grpc.RpcError, match="cannot be imported"):
        wire.read(here, "x")


def test_the_image_that_a_run_has_settled_on_stays_whatever_was_changed_since(
    wire, serve, here, asked, folder, monkeypatch
):
    made = from_struct(wire.create(here, wire.inputs(here, asked)).properties)
    of_run = serve({tokens.IMAGE: ImageHandler(made["reference"])})
    before = of_run.inputs(here, asked)
    outputs = from_struct(of_run.create(here, before).properties)
    assert outputs["reference"] == made["reference"]
    (folder / "docker" / "Dockerfile").write_text("FROM nowhere.invalid/none\n")
    no_engine(monkeypatch, folder)
    after = of_run.inputs(here, asked, before)
    assert of_run.diff(here, before, outputs, after).changes == provider_pb2.DiffResponse.DIFF_NONE


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A build that says nothing until the event is set."""
    begun, end = threading.Event(), threading.Event()

    def ensure(_spec: object, _site: object, emit: Callable[[Event], None]) -> None:
        begun.set()
        end.wait(30)
        emit(Note("one more word"))

    monkeypatch.setattr(publish, "ensure", ensure)
    yield begun
    end.set()


def test_a_cancel_waits_for_nothing_that_does_not_end(held, folder, monkeypatch):
    monkeypatch.setattr(cancellable, "END_S", 0.1)
    call = Call("urn:pulumi:s::p::t::n", Settings(folder, "o"), lambda _: None, threading.Event())
    raised = list[BaseException]()

    def create() -> None:
        try:
            ImageHandler().create(call, {"folder": str(folder), "provider": "local", "reference": f"x/y@{DIGEST}"})
        except BaseException as error:  # noqa: BLE001  looked at below
            raised.append(error)

    thread = threading.Thread(target=create, daemon=True)
    thread.start()
    assert held.wait(10)
    call.cancelled.set()
    thread.join(10)
    assert [type(error) for error in raised] == [Interrupted]


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (ImageStep(2, 9, "RUN x"), "step 2 of 9: RUN x"),
        (ImageStep(0, 0, "reading"), "reading"),
        (LayerPushed("abc", "pushing", 3 << 20, 7 << 20), "layer abc: 42 %"),
        (LayerPushed("abc", "pushing", 512, 0), ""),
        (LayerPushed("abc", "pushed", 0, 0), "layer abc: pushed"),
        (LayerPushed("abc", "there", 0, 0), ""),
    ],
)
def test_progress_is_shown_beside_the_resource(event, text):
    assert servicer._text(event) == text


# ---- under the real engine


@pytest.fixture
def project(new_project, base: str, registry: Registry, request: pytest.FixtureRequest):
    """A project whose run file builds an image, and one machine."""
    made = new_project()
    context = made.folder / "docker"
    context.mkdir()
    (context / "Dockerfile").write_text(DOCKERFILE)
    (context / "code").write_text("1")
    image = {"context": "docker", "args": {"BASE": base}, "repository": f"{registry.address}/{repository_of(request)}"}
    made.want(nodes=1, image=image)
    made.stack.init()
    return made


def image_of(project) -> str:
    output = project.stack.outputs()
    assert output is not None
    assert output.image == project.resources["Image"]["outputs"]["reference"]
    return output.image


def writes(registry: Registry) -> list[str]:
    """What the registry was asked to take, not only to show."""
    asked = [json.loads(line) for line in registry.log.splitlines() if line.startswith("{")]
    return [
        f"{line['http.request.method']} {line['http.request.uri']}"
        for line in asked
        if line.get("http.request.method") in ("POST", "PUT", "PATCH") and BASE_NAME not in line["http.request.uri"]
    ]


def test_an_image_of_a_stack_is_built_once_follows_its_files_and_comes_back(project, registry, engine):
    project.stack.up()
    first = image_of(project)
    assert registry_has(first)
    assert "creating Image image" in [event.text for event in project.events if isinstance(event, Note)]

    pushed, built = writes(registry), images(engine)
    assert pushed
    assert project.stack.preview() == ()
    project.stack.up()
    assert image_of(project) == first
    assert writes(registry) == pushed
    assert images(engine) == built, "nothing was built"

    (project.folder / "docker" / "code").write_text("2")
    (change,) = project.stack.preview()
    assert (change.op, change.type) == ("update", tokens.IMAGE)
    project.stack.up()
    second = image_of(project)
    assert second != first
    assert project.started == 1, "no machine was touched"

    delete(second)
    project.stack.refresh()
    assert "Image" not in project.resources
    project.stack.up()
    assert image_of(project) == second, "the same inputs, the same image"
    assert registry_has(second)

    project.stack.destroy()
    assert registry_has(second)
    assert not project.billed


def images(engine) -> list[str]:
    return sorted(engine.docker("image", "ls", "-aq").stdout.split())  # those of one second are in no order


def registry_has(reference: str) -> bool:
    return registry.find(reference) == reference.partition("@")[2]


def test_without_an_engine_a_stack_is_previewed_and_up_rents_nothing(project, monkeypatch):
    no_engine(monkeypatch, project.folder)
    assert {change.name for change in project.stack.preview()} >= {"image", "fleet"}
    with pytest.raises(ImageError, match="no Docker engine") as caught:
        project.stack.up()
    assert caught.value.exit_code == 4
    assert all((caught.value.what, caught.value.why, caught.value.next_step))
    assert project.started == 0


def test_an_image_that_does_not_fit_rents_nothing(project):
    dockerfile = project.folder / "docker" / "Dockerfile"
    dockerfile.write_text(f"{DOCKERFILE}LABEL dev.mgpu.python=3.10\n")
    with pytest.raises(InputError, match=r"the image's Python is 3\.10") as caught:
        project.stack.up()
    assert caught.value.exit_code == 2
    assert "Fleet" not in project.resources
    assert project.started == 0
    dockerfile.write_text(f"{DOCKERFILE}LABEL dev.mgpu.python=3.12\n")
    project.stack.up()
    assert "Fleet" in project.resources
    assert project.started == 1


@pytest.mark.parametrize("builder", builders.BUILDERS)
def test_a_cancelled_up_leaves_no_build_at_work(project, require, monkeypatch, tmp_path, builder):
    builders.choose(builder, require, monkeypatch, tmp_path / builder)
    step, temporary = builders.Endless(), tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    (project.folder / "docker" / "Dockerfile").write_text(f"{DOCKERFILE}{step.line}\n")
    raised = list[MgpuError]()

    def up() -> None:
        try:
            project.stack.up()
        except MgpuError as error:
            raised.append(error)

    thread = threading.Thread(target=up, daemon=True)
    thread.start()
    try:
        until(step.runs)
        project.stack.interrupt()
        thread.join(60)
        assert [type(error) for error in raised] == [Interrupted]
        assert not project.processes("buildx")
        until(lambda: not step.runs())
    finally:
        for process in step.runs():
            process.send(signal.SIGKILL)
    assert not list(temporary.glob("mgpu-*"))
    assert "Image" not in project.resources
    assert project.started == 0


def test_the_run_that_repairs_its_fleet_keeps_its_image(project):
    project.stack.up()
    image = image_of(project)
    (project.folder / "docker" / "Dockerfile").write_text("FROM nowhere.invalid/none\n")
    project.stack.up(image=image)
    assert image_of(project) == image
