"""Images on a real engine, pushed to a real registry: built once, pushed once, known by their digest."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import builders, pyimage
from fakes import engine as engines
from fakes.engine import PASSWORD, USER, Registry, free_port, missing, running_engine, running_registry
from fakes.registries import Asked, Said, certificate, forwarded, scripted, wire
from waiting import until

from mgpu.errors import ImageError, InputError
from mgpu.events import Event, ImageStep, LayerPushed, Note, Warned
from mgpu.image import publish
from mgpu.image.build import context
from mgpu.image.build.bases import BaseImage
from mgpu.image.build.docker_engine import DockerEngine, Inspected, Pushed
from mgpu.image.build.recipe import Limits, Recipe
from mgpu.image.publish import Published, Site
from mgpu.image.registry import auth
from mgpu.image.registry.http import RetryPolicy
from mgpu.spec.image import ImageSpec

LIBRARY, CODE = 700_000, 9_000  # bytes that cannot be compressed
DOCKERFILE = """\
FROM base:1
COPY lib /lib1
RUN echo built > /built
COPY code /code
"""
QUICK = RetryPolicy(total_s=2.0, request_s=1.0, pause_s=0.1)


@pytest.fixture
def at(engine: engines.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run file's folder with a context, in an environment that leads to the tests' engine."""
    use(engine, monkeypatch)
    context = tmp_path / "context"
    context.mkdir()
    (context / "Dockerfile").write_text(DOCKERFILE)
    (context / "lib").write_bytes(os.urandom(LIBRARY))
    (context / "code").write_bytes(os.urandom(CODE))
    return tmp_path


def use(engine: engines.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in engine.env.items():
        monkeypatch.setenv(name, value)


def spec(address: str, name: str = "train", **more: object) -> ImageSpec:
    return ImageSpec.model_validate({"context": "context", "repository": f"{address}/{name}", **more})


def site(at: Path, **more: object) -> Site:
    # the tests' engine has no network of its own, which BuildKit would ask for
    usual = {"environ": {}, "login": lambda _: auth.nobody, "retry": QUICK, "network": "host"}
    return Site(at, None, **{**usual, **more})  # type: ignore[arg-type]


def ensure(at: Path, address: str, name: str = "train", emit: Callable[[Event], None] = lambda _: None) -> Published:
    return publish.ensure(spec(address, name), site(at), emit)


def no_engine() -> DockerEngine:
    raise AssertionError("no engine is needed")


def test_an_image_is_built_and_pushed_once(at: Path, registry: Registry):
    first = ensure(at, registry.address, "once")
    assert (first.built, first.pushed) == (True, True)
    assert first.reference == f"{registry.address}/once@{digest_of(registry, 'once', first.tag)}"
    assert first.image_bytes > first.bytes_pushed > LIBRARY
    again = publish.ensure(spec(registry.address, "once"), site(at))
    assert again == replace(first, built=False, pushed=False, bytes_pushed=0)


def test_what_is_in_the_registry_needs_no_engine(at: Path, registry: Registry):
    pinned = spec(registry.address, "pinned")
    (at / "context/Dockerfile").write_text("FROM scratch\nCOPY code /\n")
    built = publish.ensure(pinned, site(at))
    assert publish.ensure(pinned, site(at, engine=no_engine)).reference == built.reference


def test_changed_code_moves_the_last_layer_alone(at: Path, registry: Registry):
    with wire(registry.address) as first:
        ensure(at, first.address, "layers")
    (at / "context/code").write_bytes(os.urandom(CODE))
    told = list[Event]()
    with wire(registry.address) as second:
        image = spec(second.address, "layers")
        # as the same repository under another port: what is there is asked of the registry, not of a memory
        published = publish.ensure(image, site(at), told.append)
    assert first.sent > LIBRARY
    assert CODE < published.bytes_pushed < CODE + 1000
    assert published.bytes_pushed < second.sent < CODE + 60_000  # manifests, headers, the image's configuration
    states = [each.state for each in told if isinstance(each, LayerPushed) and each.state != "pushing"]
    assert sorted(states) == ["pushed", "there", "there", "there"]


def test_every_step_and_layer_is_an_event(at: Path, registry: Registry):
    told = list[Event]()
    ensure(at, registry.address, "events", told.append)
    steps = [each for each in told if isinstance(each, ImageStep)]
    assert [each.step for each in steps] == [1, 2, 3, 4]
    assert steps[2].text == "RUN echo built > /built"
    assert len([each for each in told if isinstance(each, LayerPushed) and each.state != "pushing"]) == 4


def test_the_failing_step_is_shown_and_nothing_is_pushed(at: Path, registry: Registry):
    (at / "context/Dockerfile").write_text("FROM base:1\nRUN echo one && echo two >&2 && exit 7\n")
    with pytest.raises(ImageError, match=r"failed at 'RUN echo one .* \(step 2 of 2\)") as caught:
        ensure(at, registry.address, "failing")
    assert caught.value.exit_code == 4
    assert sorted(caught.value.why.splitlines()[:2]) == ["one", "two"]  # two streams, in any order
    assert "7" in caught.value.why
    assert not tags(registry, "failing")


def test_a_dockerfile_that_is_none_is_said(at: Path, registry: Registry):
    (at / "context/Dockerfile").write_text("FROM base:1\nRUNE x\n")
    with pytest.raises(ImageError, match=r"cannot be read: line 2: unknown instruction: RUNE"):
        ensure(at, registry.address, "none")


def test_a_dockerfile_without_the_stage_is_said_before_anybody_is_asked(at: Path):
    image = spec("127.0.0.1:1", target="none")
    for asked in (publish.wanted, publish.find, publish.ensure, publish.build):
        with pytest.raises(InputError, match="has no stage `none`"):
            asked(image, site(at, engine=no_engine))


def test_an_argument_that_no_arg_takes_is_told(at: Path):
    told = list[Event]()
    publish.build(spec("127.0.0.1:1", args={"NOARG": "1", "HTTP_PROXY": "x"}), site(at), told.append)
    (warning,) = [each.text for each in told if isinstance(each, Warned)]
    assert "no ARG NOARG" in warning


def test_a_base_that_only_the_engine_has_and_no_engine(at: Path, monkeypatch: pytest.MonkeyPatch):
    base = f"127.0.0.1:{free_port()}/base:1"
    (at / "context/Dockerfile").write_text(f"FROM {base}\n")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{at}/none.sock")
    with pytest.raises(ImageError) as caught:
        publish.wanted(spec("127.0.0.1:1"), site(at))
    registry = base.partition("/")[0]
    assert caught.value.what == (
        f"no base image {base}: no Docker engine at unix://{at}/none.sock, and {registry} cannot be reached"
    )


def test_arguments_targets_and_other_names_of_the_dockerfile(at: Path, registry: Registry):
    text = "ARG BASE\nFROM $BASE AS one\nARG WORD\nRUN echo $WORD > /word\nFROM one AS two\nRUN exit 1\n"
    (at / "context/Other").write_text(text)
    image = spec(
        registry.address, "args", dockerfile="Other", args={"BASE": "base:1", "WORD": "canary-word"}, target="one"
    )
    found = publish.ensure(image, site(at))
    assert b"canary-word\n" in contents(DockerEngine(), found.reference)["word"]


@pytest.mark.parametrize("ask", ["docker-config", "password"])
def test_a_locked_registry_takes_the_image_of_who_may_push(
    at: Path, locked_registry: Registry, engine: engines.Engine, ask: str
):
    login: Callable[[str], auth.Auth] = lambda _: auth.password(USER, PASSWORD)  # noqa: E731
    if ask == "docker-config":
        engine.docker("login", "-u", USER, "--password-stdin", locked_registry.address, input=PASSWORD)
        login = auth.of
    try:
        found = publish.ensure(spec(locked_registry.address, f"locked-{ask}"), site(at, login=login))
    finally:
        engine.docker("logout", locked_registry.address)
    assert found.pushed


def test_who_may_not_push_is_told_before_anything_is_built(at: Path, locked_registry: Registry):
    (at / "context/Dockerfile").write_text("FROM scratch\nCOPY code /\n")
    with pytest.raises(ImageError, match="wants a login"):
        publish.ensure(spec(locked_registry.address), site(at, engine=no_engine))
    wrong = site(at, login=lambda _: auth.password(USER, "no"), engine=no_engine)
    with pytest.raises(ImageError, match="does not accept the login"):
        publish.ensure(spec(locked_registry.address), wrong)


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for asked in (publish.find, publish.ensure):
        with pytest.raises(ImageError, match="cannot be put together") as caught:
            asked(ImageSpec.model_validate({"repository": "127.0.0.1:1/x"}), site(tmp_path, engine=no_engine))
    assert "XDG_CACHE_HOME" in caught.value.next_step
    assert str(tmp_path / "file") in caught.value.why


def test_a_repository_that_the_first_push_makes_is_pushed_to(tmp_path: Path):
    """Docker Hub says 401 of it until then, and to a good login, too."""
    pushed = list[str]()
    (tmp_path / "context").mkdir()
    (tmp_path / "context/Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")

    class Pushing(DockerEngine):
        def __init__(self) -> None: ...

        def build(self, *_: object) -> str:
            return "sha256:built"

        def tag(self, *_: object) -> None: ...

        def push(self, reference: str, *_: object) -> Pushed:
            pushed.append(reference)
            raise ImageError("so far", "", "")

    def script(asked: Asked) -> Said:
        if asked.path.startswith("/token"):
            return Said(200, body=b'{"token": "tok"}')
        return Said(401, {"WWW-Authenticate": f'Bearer realm="http://{server.address}/token"'})

    login = auth.password(USER, PASSWORD)
    with scripted(script) as server:
        image, here = spec(server.address, "new"), site(tmp_path, login=lambda _: login, engine=Pushing)
        assert publish.find(image, here) is None
        with pytest.raises(ImageError, match="so far"):
            publish.ensure(image, here)
        assert pushed == [str(publish.wanted(image, here).name)]
        with pytest.raises(ImageError, match="shows this login no new"):
            publish.ensure(ImageSpec(reference=f"{server.address}/new:1"), here)


@pytest.mark.parametrize(("engines_id", "built_on"), [("d", "d"), ("c", "e")], ids=["containerd", "own"])
def test_an_engine_with_containerds_store_keeps_a_base_that_it_has_built(
    tmp_path: Path, engines_id: str, built_on: str
):
    """It knows what was never pushed by a digest, too, which it has for an id."""
    (tmp_path / "context").mkdir()

    def digest(letter: str) -> str:
        return f"sha256:{letter * 64}"

    class Having(DockerEngine):
        def __init__(self) -> None: ...

        def inspect(self, reference: str) -> Inspected:
            known = f"{reference.removesuffix(':1')}@{digest('d')}"
            return Inspected(digest(engines_id), "linux/amd64", (known,), (), {})

    def script(asked: Asked) -> Said:
        there = asked.path.endswith("/manifests/1")
        return Said(200, {"Docker-Content-Digest": digest("e")}) if there else Said(404)

    with scripted(script) as server:
        (tmp_path / "context/Dockerfile").write_text(f"FROM {server.address}/base:1\n")
        meant = publish._Publishing(spec(server.address), site(tmp_path, engine=Having), lambda _: None).wanted()[1]
        assert meant is not None
        assert meant.bases == {f"{server.address}/base:1": BaseImage(digest(built_on), pinned=built_on == "e")}


def test_an_image_that_exists_is_taken_by_its_digest(at: Path, registry: Registry):
    made = ensure(at, registry.address, "existing")
    name = f"{registry.address}/existing"
    by_tag = publish.ensure(ImageSpec(reference=f"{name}:{made.tag}"), site(at, engine=no_engine))
    by_digest = publish.ensure(ImageSpec(reference=made.reference), site(at, engine=no_engine))
    assert by_tag.reference == by_digest.reference == made.reference
    assert (by_tag.built, by_tag.pushed, by_tag.bytes_pushed, by_tag.tag) == (False, False, 0, made.tag)
    with pytest.raises(ImageError, match=r"no image .*:other"):
        publish.ensure(ImageSpec(reference=f"{name}:other"), site(at))
    with pytest.raises(ImageError, match="no image for linux/arm64"):
        publish.ensure(ImageSpec(reference=f"{name}:{made.tag}", platform="linux/arm64"), site(at))


def test_a_build_without_a_repository_is_refused(at: Path):
    with pytest.raises(InputError, match=r"image\.repository"):
        publish.ensure(ImageSpec(context="context"), site(at))


def test_the_sites_repository_is_the_default(at: Path, registry: Registry):
    there = replace(site(at), repository=f"{registry.address}/default")
    assert publish.ensure(ImageSpec(context="context"), there).reference.startswith(f"{registry.address}/default@")


# --- what is built on ------------------------------------------------------------------------------------------------


@pytest.fixture
def buildkit(require, at: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker's program has its plugin."""
    builders.choose("buildkit", require, monkeypatch, tmp_path / "config")


@pytest.fixture(params=builders.BUILDERS)
def builder(
    request: pytest.FixtureRequest, at: Path, require: Callable[[str, bool, str], None], monkeypatch: pytest.MonkeyPatch
) -> str:
    """Both builders: what is built on must not depend on which one is there."""
    builders.choose(request.param, require, monkeypatch, at / "config")
    return request.param


def push_base(engine: engines.Engine, name: str, word: str, *, pull: bool = False) -> None:
    """Makes the file /which of an image say `word`; the engine itself has it only with `pull`."""
    folder = engine.folder / "bases" / word
    folder.mkdir(parents=True, exist_ok=True)
    pyimage.dockerfile(engine, folder, name, f"FROM base:1\nRUN echo {word} > /which\n")
    engine.docker("push", name)
    if not pull:
        engine.docker("image", "rm", name)


def read_which(engine: engines.Engine, reference: str, path: str = "/which") -> str:
    return engine.docker("run", "--rm", "--network=none", reference, "cat", path).stdout.strip()


def test_what_was_hashed_is_what_is_built_on(at: Path, engine: engines.Engine, registry: Registry, builder: str):
    base, other = f"{registry.address}/moving-{builder}:1", f"{registry.address}/other-{builder}:1"
    push_base(engine, base, "old")
    push_base(engine, other, "other-old")
    (at / "context/Dockerfile").write_text(
        f"ARG V=1\nFROM \\\n  {base.removesuffix('1')}${{V}} AS x\nCOPY --from={other} /which /other\n"
    )

    class Moving(DockerEngine):
        def build(self, *args, **options) -> str:
            push_base(engine, base, "new", pull=True)
            push_base(engine, other, "other-new")
            return super().build(*args, **options)

    named = publish.wanted(spec(registry.address), site(at)).name
    published = publish.ensure(spec(registry.address), site(at, engine=Moving))
    assert published.tag == named.tag
    assert read_which(engine, published.reference) == "old"
    assert read_which(engine, published.reference, "/other") == "other-old"
    assert publish.wanted(spec(registry.address), site(at)).name.tag != named.tag


def test_a_base_that_only_a_provider_has_a_login_for_is_built_on(
    at: Path, engine: engines.Engine, locked_registry: Registry, builder: str, monkeypatch: pytest.MonkeyPatch
):
    """ECR's, of which docker's configuration knows nothing."""
    base, password = f"{locked_registry.address}/private-{builder}:1", auth.password(USER, PASSWORD)
    engine.docker("tag", "base:1", base)
    DockerEngine().push(base, password)
    engine.docker("image", "rm", base)
    monkeypatch.setattr(auth, "is_dockers", lambda _: False)
    (at / "context/Dockerfile").write_text(f"FROM {base}\nCOPY code /code\n")
    told = list[Event]()
    publish.build(spec("127.0.0.1:1"), site(at, login=lambda _: password), told.append)
    publish.build(spec("127.0.0.1:1"), site(at, login=lambda _: password), told.append)
    assert len([each for each in told if isinstance(each, Note) and each.text.startswith("pulling the base")]) == 1


@pytest.mark.usefixtures("buildkit")
def test_the_image_of_a_mount_is_pinned_too(at: Path, engine: engines.Engine, registry: Registry):
    tool = f"{registry.address}/tool:1"
    push_base(engine, tool, "old")
    (at / "context/Dockerfile").write_text(
        f"FROM base:1\nRUN --mount=from={tool},source=/,target=/tool cat /tool/which > /seen\n"
    )

    class Moving(DockerEngine):
        def build(self, *args, **options) -> str:
            push_base(engine, tool, "new")
            return super().build(*args, **options)

    published = publish.ensure(spec(registry.address, "mount"), site(at, engine=Moving))
    assert read_which(engine, published.reference, "/seen") == "old"
    assert publish.wanted(spec(registry.address, "mount"), site(at)).name.tag != published.tag


def test_an_old_copy_in_the_engine_makes_no_other_image(
    at: Path, engine: engines.Engine, registry: Registry, monkeypatch: pytest.MonkeyPatch
):
    base, aside = f"{registry.address}/stale:1", f"{registry.address}/stale:aside"
    push_base(engine, base, "new")
    engine.docker("pull", base)
    engine.docker("tag", base, aside)
    push_base(engine, base, "old", pull=True)
    engine.docker("tag", base, "old:1")
    engine.docker("tag", aside, base)
    engine.docker("push", base)  # the registry has the new one, and what the engine has under that name is the old one
    engine.docker("tag", "old:1", base)
    (at / "context/Dockerfile").write_text(f"FROM {base}\n")
    with_engine = publish.wanted(spec(registry.address), site(at))
    assert read_which(engine, publish.ensure(spec(registry.address), site(at)).reference) == "new"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{at}/none.sock")
    assert publish.wanted(spec(registry.address), site(at)) == with_engine


def test_without_the_registry_of_its_base_an_image_is_built_all_the_same(
    at: Path, engine: engines.Engine, require, builder: str
):
    require("docker", not missing("docker-registry"), missing("docker-registry"))
    with running_registry() as gone:
        base = f"{gone.address}/base:1"
        push_base(engine, base, "kept", pull=True)
        (at / "context/Dockerfile").write_text(f"FROM {base}\nRUN true\n")
        before = publish.wanted(spec("127.0.0.1:1"), site(at))
    told = list[Event]()
    built = publish.build(spec("127.0.0.1:1"), site(at), told.append)
    assert built.wanted == before
    assert read_which(engine, built.id) == "kept"
    (warning,) = [each.text for each in told if isinstance(each, Warned)]
    assert warning.startswith(f"base image {base}: {gone.address} cannot be reached; ")


def test_the_engines_own_base_may_not_change_meanwhile(at: Path, engine: engines.Engine):
    engine.docker("tag", "base:1", "mine:1")
    (at / "context/Dockerfile").write_text("FROM mine:1\n")
    other = engine.image("other:1", ["sh"])

    class Moving(DockerEngine):
        def build(self, *args, **options) -> str:
            built = super().build(*args, **options)
            engine.docker("tag", other, "mine:1")
            return built

    with pytest.raises(ImageError, match="base image mine:1 changed while the image was built"):
        publish.build(spec("127.0.0.1:1", "own"), site(at, engine=Moving))
    assert "127.0.0.1:1/own" not in engine.docker("images").stdout
    publish.build(spec("127.0.0.1:1", "own"), site(at))
    assert "127.0.0.1:1/own" in engine.docker("images").stdout


# --- faults -----------------------------------------------------------------------------------------------------------


def test_no_engine(at: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{at}/none.sock")
    with pytest.raises(ImageError, match="no Docker engine at") as caught:
        DockerEngine()
    assert "systemctl start docker" in caught.value.next_step


def test_a_socket_that_nobody_listens_to(at: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(at / "dead.sock"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{at}/dead.sock")
    with pytest.raises(ImageError, match="no Docker engine at"):
        DockerEngine()


def test_an_engine_that_is_silent_costs_a_deadline(at: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(at / "silent.sock"))
        silent.listen()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{at}/silent.sock")
        with pytest.raises(ImageError, match="does not answer"):
            DockerEngine(Limits(call_s=0.2))


def test_an_engine_that_this_user_may_not_use(engine: engines.Engine, at: Path):
    import docker.transport  # noqa: F401  what is read later would not be readable

    with pytest.raises(ImageError):  # loads whatever else it needs
        _engine_at(f"unix://{at}/none.sock")
    reads, writes = os.pipe()
    closed = engine.folder.stat().st_mode
    engine.folder.chmod(0o711)  # the way to its socket
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setresuid(65534, 65534, 65534)
            said = "no error"
            try:
                _engine_at(engine.host)
            except ImageError as error:
                said = str(error)
            os.write(writes, said.encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(pid, 0)
    engine.folder.chmod(closed)
    assert said.startswith("you may not use the Docker engine at")
    assert "usermod -aG docker" in said


def _engine_at(host: str) -> None:
    os.environ["DOCKER_HOST"] = host
    DockerEngine()


def test_no_space_for_the_build_or_what_it_leaves(require, at: Path, registry: Registry, monkeypatch):
    require("docker", not missing(), missing())
    with running_engine(data_mib=24) as small:
        small.image("base:1")
        use(small, monkeypatch)
        (at / "context/Dockerfile").write_text("FROM base:1\nRUN dd if=/dev/zero of=/big bs=1M count=30\n")
        with pytest.raises(ImageError, match="failed at 'RUN dd") as caught:
            ensure(at, registry.address, "small")
        assert "docker system prune" in caught.value.next_step
        (at / "context/Dockerfile").write_text("FROM base:1\nCOPY big /\n")
        (at / "context/big").write_bytes(bytes(30 << 20))
        with pytest.raises(ImageError) as caught:
            ensure(at, registry.address, "small")
        assert "docker system prune" in caught.value.next_step
    assert not tags(registry, "small")


@pytest.mark.parametrize(
    ("status", "what"),
    [
        (401, "does not accept the login|wants a login"),
        (403, "refuses access"),
        (404, "has no repository"),
        (429, "too many requests"),
    ],
)
def test_a_registry_that_refuses_a_push(at: Path, status: int, what: str):
    """F46."""
    code = {401: "UNAUTHORIZED", 403: "DENIED", 404: "NAME_UNKNOWN", 429: "TOOMANYREQUESTS"}[status]
    refusal = Said(status, body=json.dumps({"errors": [{"code": code, "message": code.lower()}]}).encode())

    def script(asked) -> Said:
        if asked.path == "/v2/":
            return Said(200)
        return Said(404) if asked.method in ("HEAD", "GET") else refusal

    (at / "context/Dockerfile").write_text("FROM scratch\nCOPY code /\n")
    with scripted(script) as server, pytest.raises(ImageError, match=what) as caught:
        ensure(at, server.address)
    assert caught.value.next_step
    assert caught.value.what.startswith(server.address)


def test_a_push_that_breaks_leaves_nothing_that_anybody_refers_to(at: Path, registry: Registry):
    """F46."""
    with wire(registry.address, cut_after=LIBRARY // 2) as line:
        broken = site(at, engine=lambda: DockerEngine(Limits(push_s=3.0, silence_s=3.0)))
        with pytest.raises(ImageError, match="could not be pushed") as caught:
            publish.ensure(spec(line.address, "broken"), broken)
    assert caught.value.next_step
    assert not tags(registry, "broken")
    again = ensure(at, registry.address, "broken")
    assert again.pushed
    assert tags(registry, "broken") == [again.tag]


def test_a_registry_that_is_killed_while_it_is_pushed_to(require, at: Path, engine: engines.Engine):
    """F46."""
    require("docker", not missing("docker-registry"), missing("docker-registry"))
    port = free_port()
    with running_registry(port=port) as dying:

        def kill(event: Event) -> None:
            if isinstance(event, LayerPushed):
                os.kill(dying.pid, signal.SIGKILL)

        broken = site(at, engine=lambda: DockerEngine(Limits(push_s=3.0, silence_s=3.0)))
        with pytest.raises(ImageError, match=r"could not be pushed|cannot be reached"):
            publish.ensure(spec(dying.address, "killed"), broken, _once(kill))
        assert not tags(dying, "killed")


@contextmanager
def immutable(of: Registry) -> Iterator[str]:
    """The way to a registry whose tags stay what they are, which answers what ECR does; its address."""
    said = "The image tag already exists in the repository and cannot be overwritten because the tag is immutable."
    refusal = Said(400, body=json.dumps({"errors": [{"code": "TAG_INVALID", "message": said}]}).encode())

    def script(asked: Asked) -> Said:
        tag = asked.method == "PUT" and re.fullmatch(r"/v2/(.+)/manifests/([^:]+)", asked.path)
        if tag and tag[2] in tags(of, tag[1]):
            return refusal
        return forwarded(of.address, asked)

    with scripted(script) as server:
        yield server.address


class Slower(DockerEngine):
    """Somebody pushes another build of the same inputs just before us."""

    def push(self, reference: str, *args, **options) -> Pushed:
        ours = self.inspect(reference)
        assert ours is not None
        self.tag("base:1", reference)
        super().push(reference)
        self.tag(ours.id, reference)
        return super().push(reference, *args, **options)


def test_who_was_faster_where_tags_stay_what_they_are_is_taken(at: Path, registry: Registry):
    """F46: two launches of new inputs at once, on ECR."""
    with immutable(registry) as address:
        found = publish.ensure(spec(address, "faster"), site(at, engine=Slower))
    assert (found.built, found.pushed, found.bytes_pushed) == (True, False, 0)
    assert found.reference == f"{address}/faster@{digest_of(registry, 'faster', found.tag)}"


def test_a_refused_push_without_anybody_faster_is_an_error(at: Path, registry: Registry):
    class Refused(DockerEngine):
        def push(self, *_: object, **__: object) -> Pushed:
            raise ImageError("not today", "because", "cure")

    with pytest.raises(ImageError, match="not today"):
        publish.ensure(spec(registry.address, "refused"), site(at, engine=Refused))


def test_a_registry_that_is_gone_after_a_refused_push_hides_no_reason(at: Path, require):
    require("docker", not missing("docker-registry"), missing("docker-registry"))
    with running_registry() as dying:

        class Refused(DockerEngine):
            def push(self, *_: object, **__: object) -> Pushed:
                os.kill(dying.pid, signal.SIGKILL)
                raise ImageError("not today", "because", "cure")

        with pytest.raises(ImageError, match="not today"):
            publish.ensure(spec(dying.address, "refused"), site(at, engine=Refused))


def test_another_image_under_the_tag_is_never_taken_for_ours(at: Path, registry: Registry):
    class Raced(DockerEngine):
        """Somebody pushes the same inputs just after us."""

        def push(self, reference: str, auth: auth.Auth = auth.nobody, emit=lambda _: None) -> Pushed:
            ours = super().push(reference, auth, emit)
            self.tag("base:1", reference)
            super().push(reference, auth, emit)
            return ours

    found = publish.ensure(spec(registry.address, "raced"), site(at, engine=Raced))
    assert (found.pushed, found.bytes_pushed) == (False, 0)
    assert found.reference == f"{registry.address}/raced@{digest_of(registry, 'raced', found.tag)}"
    assert ensure(at, registry.address, "raced") == replace(found, built=False)


def test_a_push_that_left_no_tag_is_an_error(at: Path, registry: Registry):
    class Lost(DockerEngine):
        def push(self, *_: object, **__: object) -> Pushed:
            return Pushed(f"sha256:{'0' * 64}", {})

    with pytest.raises(ImageError, match="is not what was pushed"):
        publish.ensure(spec(registry.address, "lost"), site(at, engine=Lost))


def test_a_build_ends_at_its_deadline_and_so_does_its_container(at: Path, engine: engines.Engine, registry: Registry):
    (at / "context/Dockerfile").write_text("FROM base:1\nRUN while true; do echo x; sleep 0.1; done\n")
    slow = site(at, engine=lambda: DockerEngine(Limits(build_s=0.5, silence_s=5.0)))
    with pytest.raises(ImageError, match=r"within 0\.5 s"):
        publish.ensure(spec(registry.address, "slow"), slow)
    until(lambda: not engine.docker("ps", "-q").stdout)


# --- what is for the build alone --------------------------------------------------------------------------------------


CANARY_CA, CANARY_SECRET = "canary-ca-2f1b", "canary-secret-77aa"
THROWN_AWAY = """\
FROM base:1 AS packages
COPY code .buil[d] /build/
RUN cat /build/ca.pem /build/secrets/TOKEN > /all && head -c 3 /all > /seen
FROM base:1
COPY --from=packages /seen /seen
COPY code /code
"""


def test_certificates_and_secrets_end_in_no_layer(at: Path, engine: engines.Engine, registry: Registry):
    (at / "context/Dockerfile").write_text(THROWN_AWAY)
    # what stands before the certificates of a PEM file is a comment
    (at / "ca.pem").write_text(f"{CANARY_CA}\n{certificate()[0].decode()}")
    image = spec(registry.address, "secret", ca_file="ca.pem", secrets=["TOKEN"])
    told = list[Event]()
    found = publish.ensure(image, site(at, environ={"TOKEN": CANARY_SECRET, "OTHER": "x"}), told.append)
    assert contents(DockerEngine(), found.reference)["seen"] == CANARY_CA[:3].encode()
    whole = everything(engine, found.reference) + json.dumps([each.to_json() for each in told])
    assert not [word for word in (CANARY_CA, CANARY_SECRET) if word in whole]


def test_a_dockerfile_that_would_keep_them_is_refused_before_anybody_is_asked(at: Path):
    (at / "context/Dockerfile").write_text(f"{THROWN_AWAY}COPY . .\n")
    (at / "ca.pem").write_bytes(certificate()[0])
    given = site(at, environ={"TOKEN": CANARY_SECRET}, engine=no_engine)
    for asked in (publish.wanted, publish.find, publish.ensure, publish.build):
        with pytest.raises(InputError, match=r"image\.secrets would end in the image: Dockerfile, line 7"):
            asked(spec("127.0.0.1:1", secrets=["TOKEN"]), given)
        with pytest.raises(InputError, match=r"image\.ca_file would end in the image: Dockerfile, line 7"):
            asked(spec("127.0.0.1:1", ca_file="ca.pem"), given)


@pytest.mark.parametrize("where", ["engine", "registry"])
def test_a_base_image_that_would_keep_them_by_a_trigger_is_refused(
    at: Path, engine: engines.Engine, registry: Registry, where: str
):
    """`ONBUILD` of an image is part of each Dockerfile that begins with it, and stands in none."""
    (at / "ca.pem").write_bytes(certificate()[0])
    image = spec(registry.address, f"by-trigger-{where}", ca_file="ca.pem", secrets=["TOKEN"])
    given = site(at, environ={"TOKEN": CANARY_SECRET})
    for name, trigger in {"all": "COPY . /app", "code": "COPY code /app"}.items():
        base = f"{registry.address}/{name}-{where}:1"
        folder = at / name
        folder.mkdir()
        pyimage.dockerfile(engine, folder, base, f"FROM base:1\nONBUILD {trigger}\n")
        if where == "registry":
            engine.docker("push", base)
            engine.docker("image", "rm", base)
        text = THROWN_AWAY.replace("FROM base:1\nCOPY --from", f"FROM {base}\nCOPY --from")
        (at / "context/Dockerfile").write_text(text)
        if name == "code":
            assert CANARY_SECRET not in everything(engine, publish.ensure(image, given).reference)
            continue
        with pytest.raises(InputError, match=r"image\.secrets would end in the image: Dockerfile, line 4") as raised:
            publish.ensure(image, given)
        assert f"`ONBUILD COPY . /app` of `{base}`" in raised.value.why
        assert publish.find(image, given) is None


@pytest.mark.parametrize("line", ["COPY . /all/", "RUN echo mypkg.build"])
def test_words_that_only_look_like_it_bring_nothing_into_the_context(at: Path, engine: engines.Engine, line: str):
    (at / "context/Dockerfile").write_text(f"FROM base:1\nCOPY . /all/\n{line}\n")
    (at / "ca.pem").write_text(CANARY_CA)
    recipe = Recipe(context.scan(at / "context"), ca_file=at / "ca.pem", network="host")
    assert CANARY_CA not in everything(engine, DockerEngine().build(recipe))


def test_the_proxies_of_dockers_configuration_reach_the_build_and_end_in_no_layer(
    at: Path, engine: engines.Engine, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "docker").mkdir()
    proxies = {"proxies": {"default": {"httpsProxy": f"http://me:{CANARY_SECRET}@proxy.test:3128"}}}
    (tmp_path / "docker/config.json").write_text(json.dumps(proxies))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    (at / "context/Dockerfile").write_text('FROM base:1\nRUN echo "${#HTTPS_PROXY}" > /seen\n')
    found = ensure(at, registry.address, "proxied")
    assert (
        contents(DockerEngine(), found.reference)["seen"]
        == f"{len(f'http://me:{CANARY_SECRET}@proxy.test:3128')}\n".encode()
    )
    assert CANARY_SECRET not in everything(engine, found.reference)


def test_a_dockerfile_that_does_not_ask_gets_neither(at: Path, engine: engines.Engine):
    (at / "context/Dockerfile").write_text("# .build/ is not asked for\nFROM base:1\nCOPY . /all/\n")
    (at / "ca.pem").write_text(CANARY_CA)
    recipe = Recipe(context.scan(at / "context"), ca_file=at / "ca.pem", network="host")
    assert CANARY_CA not in everything(engine, DockerEngine().build(recipe))


def test_secrets_without_a_way_for_them_are_refused(at: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mgpu.image.build.buildx.version", lambda _: "")
    image = spec(registry.address, "noway", secrets=["TOKEN"])
    with pytest.raises(ImageError, match="needs BuildKit"):
        publish.ensure(image, site(at, environ={"TOKEN": CANARY_SECRET}))
    with pytest.raises(InputError, match="TOKEN not set in the environment"):
        publish.ensure(image, site(at))


def test_a_secret_that_a_build_prints_is_not_repeated(at: Path, registry: Registry):
    text = THROWN_AWAY.replace("> /seen", "> /seen && cat /all && exit 1")
    (at / "context/Dockerfile").write_text(text.replace("/build/ca.pem ", ""))
    image = spec(registry.address, "printed", secrets=["TOKEN"])
    with pytest.raises(ImageError) as caught:
        publish.ensure(image, site(at, environ={"TOKEN": CANARY_SECRET}))
    assert "***" in caught.value.why
    assert CANARY_SECRET not in str(caught.value)


def _once(act: Callable[[Event], None]) -> Callable[[Event], None]:
    done = threading.Event()

    def emit(event: Event) -> None:
        if isinstance(event, LayerPushed) and not done.is_set():
            done.set()
            act(event)

    return emit


def tags(of: Registry, name: str) -> list[str]:
    folder = of.folder / "data/docker/registry/v2/repositories" / name / "_manifests/tags"
    return sorted(each.name for each in folder.iterdir()) if folder.exists() else []


def digest_of(of: Registry, name: str, tag: str) -> str:
    link = of.folder / "data/docker/registry/v2/repositories" / name / "_manifests/tags" / tag / "current/link"
    return link.read_text()


def saved(reference: str) -> bytes:
    import docker

    client = docker.from_env()
    try:
        return b"".join(client.api.get_image(reference))
    finally:
        client.close()


def layers(reference: str) -> list[tarfile.TarFile]:
    with tarfile.open(fileobj=io.BytesIO(saved(reference))) as image:
        names = [name for name in image.getnames() if name.endswith("layer.tar")]
        assert names
        return [tarfile.open(fileobj=io.BytesIO(image.extractfile(name).read())) for name in names]  # type: ignore[union-attr]


def contents(engine: DockerEngine, reference: str) -> dict[str, bytes]:
    """Every file of every layer."""
    assert engine.inspect(reference)
    return {
        member.name: layer.extractfile(member).read()  # type: ignore[union-attr]
        for layer in layers(reference)
        for member in layer.getmembers()
        if member.isreg()
    }


def everything(engine: engines.Engine, reference: str) -> str:
    """All that there is of an image: layers, names in them, configuration, history."""
    history = engine.docker("history", "--no-trunc", reference).stdout
    inspected = engine.docker("inspect", reference).stdout
    return history + inspected + saved(reference).decode("latin-1")


def test_a_base_is_pulled_for_the_machines_that_its_stage_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A stage that compiles for other machines runs on this one; the builder has no login to get it."""
    tools, base = (f"r.io/{name}@sha256:{digit * 64}" for name, digit in (("tools", "1"), ("base", "2")))
    pulled = list[tuple[str, str]]()

    class Engine:
        def inspect(self, name: str) -> Inspected | None:
            return Inspected("i", "linux/amd64", (), (), {}) if name == base else None

        def pull(self, name: str, platform: str, _: object) -> None:
            pulled.append((name, platform))

        def build(self, *_: object) -> str:
            raise ImageError("it is not built here")

    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "Dockerfile").write_text(
        f"ARG ON=linux/s390x\nFROM --platform=$ON {tools} AS t\nFROM {base}\nCOPY --from={tools} /a /a\n"
    )
    monkeypatch.setattr(auth, "is_dockers", lambda _: False)
    with pytest.raises(ImageError, match="not built here"):
        publish.build(spec("r.io", platform="linux/arm64"), site(tmp_path, engine=Engine))
    assert pulled == [(tools, "linux/s390x"), (base, "linux/arm64"), (tools, "linux/arm64")]
