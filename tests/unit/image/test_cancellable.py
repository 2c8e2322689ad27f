"""A build or push that is cancelled ends, in this process and in the engine; what is over stays as it is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fakes import builders
from fakes.builders import Endless
from fakes.engine import Engine
from fakes.registries import Asked, Said, scripted
from waiting import until

from mgpu.errors import ImageError, Interrupted
from mgpu.events import Event, Note, ignore
from mgpu.image import cancellable, publish
from mgpu.image.build import cancel, context
from mgpu.image.build.docker_engine import DockerEngine
from mgpu.image.build.recipe import Recipe
from mgpu.image.publish import Site
from mgpu.spec.image import ImageSpec

SPEC = ImageSpec.model_validate({"context": ".", "repository": "here/cancelled"})


@pytest.fixture
def here(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment leads to the tests' engine."""
    for name, value in engine.env.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def step() -> Iterator[Endless]:
    """A step that is ended after the test."""
    made = Endless()
    yield made
    for process in made.runs():
        process.send(signal.SIGKILL)


def cancel_when(what, cancelled: threading.Event) -> None:
    """Cancels, from elsewhere, once something is so."""

    def wait() -> None:
        until(what)
        cancelled.set()

    threading.Thread(target=wait, daemon=True).start()


def at_work() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("mgpu-image", "mgpu-cancel")]


@pytest.mark.parametrize("builder", builders.BUILDERS)
def test_a_build_ends_with_all_that_it_has_begun(here, require, monkeypatch, tmp_path, engine, step, builder):
    builders.choose(builder, require, monkeypatch, tmp_path / "config")
    (tmp_path / "Dockerfile").write_text(f"FROM base:1\n{step.line}\n")
    (tmp_path / ".dockerignore").write_text("config\n")
    cancelled = threading.Event()
    cancel_when(step.runs, cancelled)
    with pytest.raises(Interrupted):
        cancellable.build(SPEC, Site(tmp_path, None, {}), ignore, cancelled)
    until(lambda: at_work() == [])
    until(lambda: not step.runs())
    assert "cancelled" not in engine.docker("image", "ls").stdout


def test_a_push_to_a_registry_that_is_silent_ends(here, engine):
    gate, cancelled = threading.Event(), threading.Event()

    def silent(_: Asked) -> Said:
        gate.wait(60)
        return Said(500)

    with scripted(silent) as server:
        name = f"{server.address}/a:1"
        engine.docker("tag", "base:1", name)
        cancel_when(lambda: server.asked, cancelled)
        try:
            with pytest.raises(Interrupted):
                DockerEngine(cancelled=cancelled).push(name)
            assert not gate.is_set()
        finally:
            gate.set()
            engine.docker("rmi", name)


def test_an_engine_is_asked_nothing_after_a_cancel(here):
    cancelled = threading.Event()
    engine = DockerEngine(cancelled=cancelled)
    assert engine.inspect("base:1") is not None
    cancelled.set()
    with pytest.raises(Interrupted):
        engine.tag("base:1", "here/cancelled:1")
    assert DockerEngine().inspect("here/cancelled:1") is None


def test_a_cancel_before_the_engine_has_answered_ends_the_build(here, require, monkeypatch, tmp_path, step):
    builders.choose("classic", require, monkeypatch, tmp_path / "config")
    (tmp_path / "Dockerfile").write_text(f"FROM base:1\n{step.line}\n")
    recipe, cancelled = Recipe(context.scan(tmp_path)), threading.Event()
    engine = DockerEngine(cancelled=cancelled)

    @contextmanager
    def early(*_: object) -> Iterator[None]:
        cancelled.set()  # while the context is sent, there is nothing to hang up
        yield

    monkeypatch.setattr(cancel, "ending", early)
    with pytest.raises(Interrupted):
        engine.build(recipe)
    until(lambda: not step.runs())


def test_without_a_cancel_it_is_what_publish_does(monkeypatch, tmp_path):
    told, cancelled = list[Event](), threading.Event()

    def ensure(spec: ImageSpec, site: Site, emit) -> str:
        assert (spec, site.folder) == (SPEC, tmp_path)
        emit(Note("working"))
        return "made"

    monkeypatch.setattr(publish, "ensure", ensure)
    assert cancellable.ensure(SPEC, Site(tmp_path, None, {}), told.append, cancelled) == "made"
    assert told == [Note("working")]

    def fails(*_: object) -> None:
        raise ImageError("it does not build")

    monkeypatch.setattr(publish, "build", fails)
    with pytest.raises(ImageError, match="does not build"):
        cancellable.build(SPEC, Site(tmp_path, None, {}), told.append, cancelled)


def test_a_cancel_at_the_last_moment_counts_and_nobody_is_told_any_more(monkeypatch, tmp_path):
    told, cancelled = list[Event](), threading.Event()

    def ensure(_spec: ImageSpec, _site: Site, emit) -> str:
        cancelled.set()
        with pytest.raises(Interrupted):
            emit(Note("too late"))
        return "made"

    monkeypatch.setattr(publish, "ensure", ensure)
    with pytest.raises(Interrupted):
        cancellable.ensure(SPEC, Site(tmp_path, None, {}), told.append, cancelled)
    assert told == []
