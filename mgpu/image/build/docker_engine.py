"""The Docker engine, by its SDK: builds, pushes, looks. BuildKit builds where docker's buildx is there, else the
engine's own builder does."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from mgpu.errors import ImageError
from mgpu.events import Emit, ignore
from mgpu.image.build import archive, buildx, cancel, progress
from mgpu.image.build.recipe import Limits, Recipe
from mgpu.image.registry import failures
from mgpu.image.registry.auth import Auth, nobody
from mgpu.image.registry.reference import Reference

_SLOW = "Try again: what was built and pushed so far is not done twice."


@dataclass(frozen=True)
class Inspected:
    """An image that the engine has. `layers`: SHA-256 of each before compression, lowest first; `triggers`: what an
    `ONBUILD` of it adds to a Dockerfile that begins with it."""

    id: str
    platform: str
    digests: tuple[str, ...]
    layers: tuple[str, ...]
    labels: Mapping[str, str]
    triggers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pushed:
    """What the engine says of a push: the digest, and `pushed` or `there` of each layer by 12 digits of its hash."""

    digest: str
    layers: Mapping[str, str]


class DockerEngine:
    """The engine that docker's own program would use: DOCKER_HOST, else docker's context. Safe from any thread."""

    def __init__(self, limits: Limits | None = None, cancelled: threading.Event | None = None) -> None:
        """Asks the engine whether it is there. Once `cancelled` is set, what it does for us is ended, and every call
        raises Interrupted.

        Raises:
            ImageError: it is not, or this user may not use it.
        """
        self._limits, self._cancelled = limits or Limits(), cancelled or threading.Event()
        self._place = _place()
        self.host = str(self._place.get("base_url", "the usual place"))
        with self._client(self._limits.call_s) as client:
            version = client.version()
        self.platform = f"{version['Os']}/{version['Arch']}"

    def build(self, recipe: Recipe, emit: Emit = ignore) -> str:
        """Builds; the id of the image, which has no name yet.

        Raises:
            ImageError: the failing step and its last 20 lines; no space; a deadline; what BuildKit alone can do.
            InputError: a file changed meanwhile.
        """
        words = progress.Words(recipe.secrets.values())
        with _packed(recipe) as packed:
            if buildx.version(os.environ):
                built = buildx.build(recipe, packed, os.environ, self._limits, emit, words, self._cancelled)
            else:
                built = (self._build(recipe, packed, emit, words),)
        return self._checked(built, recipe.platform).id

    def tag(self, image: str, reference: str) -> None:
        """Gives an image a name. Raises ImageError."""
        name = Reference.parse(reference)
        with self._client(self._limits.call_s) as client:
            client.api.tag(image, name.repository, name.tag, force=True)

    def push(self, reference: str, auth: Auth = nobody, emit: Emit = ignore) -> Pushed:
        """Pushes the image that has the name `reference`.

        Raises:
            ImageError: the registry refuses or cannot be reached, a deadline, no space.
        """
        name, login = Reference.parse(reference), auth()
        stream = progress.Push(emit)
        with self._client(self._limits.silence_s) as client:
            said = client.api.push(
                name.repository,
                name.tag,
                stream=True,
                decode=True,
                auth_config=login.for_engine() if login else {},
            )
            for message in self._in_time(said, self._limits.push_s, f"{name} could not be pushed"):
                stream.take(message)
        if stream.error or not stream.digest:
            raise failures.engine_said(f"{name} could not be pushed", stream.error or "No digest came back.", name)
        return Pushed(stream.digest, stream.states)

    def pull(self, reference: str, platform: str, auth: Auth = nobody) -> None:
        """Gets the image that has the name `reference`, with its digest.

        Raises:
            ImageError: the registry refuses or cannot be reached, a deadline, no space.
        """
        name, login = Reference.parse(reference), auth()
        what = f"{name} could not be pulled"
        with self._client(self._limits.silence_s) as client:
            said = client.api.pull(
                name.repository,
                name.digest,
                stream=True,
                decode=True,
                auth_config=login.for_engine() if login else {},
                platform=platform if platform != self.platform else None,
            )
            for message in self._in_time(said, self._limits.push_s, what):
                if "error" in message:
                    raise failures.engine_said(what, str(message["error"]), name)

    def inspect(self, reference: str) -> Inspected | None:
        """What the engine has under a name or an id; None: nothing. Raises ImageError."""
        from docker.errors import ImageNotFound

        with self._client(self._limits.call_s) as client:
            try:
                data = client.api.inspect_image(reference)
            except ImageNotFound:
                return None
        return Inspected(
            data["Id"],
            f"{data['Os']}/{data['Architecture']}",
            tuple(data.get("RepoDigests") or ()),
            tuple((data.get("RootFS") or {}).get("Layers") or ()),
            (data.get("Config") or {}).get("Labels") or {},
            tuple((data.get("Config") or {}).get("OnBuild") or ()),
        )

    def _build(self, recipe: Recipe, packed: IO[bytes], emit: Emit, words: progress.Words) -> str:
        if recipe.secrets and not recipe.asks:
            why = f"The engine's own builder cannot give {', '.join(sorted(recipe.secrets))} to this Dockerfile."
            cure = "Install docker's buildx plugin (Debian, Ubuntu: docker-buildx-plugin or docker-buildx)."
            raise ImageError("image.secrets needs BuildKit, which is not here", why, cure)
        stream = progress.Classic(emit, words)
        with self._client(self._limits.silence_s) as client:
            said = client.api.build(
                fileobj=packed,
                custom_context=True,
                dockerfile=recipe.context.dockerfile,
                buildargs=dict(recipe.args),
                target=recipe.target,
                platform=recipe.platform if recipe.platform != self.platform else None,
                network_mode=recipe.network,
                use_config_proxy=True,  # as docker's own program does; in no layer, and not in the history
                rm=True,
                forcerm=True,
                decode=True,
                timeout=self._limits.silence_s,
            )
            for message in self._in_time(said, self._limits.build_s, "the image could not be built"):
                stream.take(message)
        if not stream.image:
            raise ImageError("the image could not be built", "The engine named no image at the end.", "Try again.")
        return stream.image

    def _checked(self, built: tuple[str, ...], wanted: str) -> Inspected:
        """The image that has one of these ids."""
        found = next(filter(None, map(self.inspect, built)), None)
        if found is None:
            raise ImageError("the image was built, but the engine does not have it", " ".join(built), "Try again.")
        if found.platform != wanted:
            why = f"image.platform says {wanted}; a base image of that name is here for {found.platform}."
            cure = f"Name a base for {wanted}, or remove the other one: `docker image rm`."
            raise ImageError(f"the image was built for {found.platform}", why, cure)
        return found

    def _in_time(self, said: Iterable[Any], seconds: float, what: str) -> Iterator[Any]:
        """Messages until the deadline; the engine ends what nobody listens to any more."""
        end = time.monotonic() + seconds
        for message in said:
            yield message
            if time.monotonic() >= end:
                raise ImageError(f"{what} within {seconds:g} s", "It was ended at that deadline.", _SLOW)

    @contextmanager
    def _client(self, timeout_s: float) -> Iterator[Any]:
        """A client of its own, so that closing it ends what it has asked for. Raises ImageError, Interrupted."""
        import docker
        from docker.errors import APIError, DockerException
        from requests.exceptions import RequestException
        from urllib3.exceptions import HTTPError

        client, answers = None, list[Any]()

        def take(answer: Any, **_: Any) -> None:
            answers.append(answer)
            self._require_wanted()  # whoever was to hang up may have looked too early

        self._require_wanted()
        try:
            client = docker.DockerClient(**self._place, version="auto", timeout=timeout_s)
            client.api.hooks["response"].append(take)
            with cancel.ending(self._cancelled, partial(_hang_up, answers)):
                yield client
            self._require_wanted()
        except Exception as error:
            self._require_wanted(error)
            if isinstance(error, APIError):
                raise failures.engine_said("the Docker engine refuses", str(error.explanation or error)) from error
            if isinstance(error, (DockerException, RequestException, HTTPError, OSError)):
                raise failures.no_engine(error, self.host) from error
            raise
        finally:
            for answer in answers:
                answer.close()
            if client is not None:
                client.close()

    def _require_wanted(self, cause: Exception | None = None) -> None:
        if self._cancelled.is_set():
            raise cancel.interrupted() from cause


def _hang_up(answers: list[Any]) -> None:
    """Whoever reads one of them reads its end: the engine stops what nobody listens to."""
    for answer in answers:
        with suppress(RuntimeError, ValueError, OSError):  # one that is over has nothing to hang up
            answer.raw.shutdown()


def _packed(recipe: Recipe) -> IO[bytes]:
    """What the builder is sent, from its beginning. Raises ImageError, InputError."""
    ca = archive.read_ca(recipe.ca_file)
    try:
        packed = tempfile.TemporaryFile(prefix="mgpu-context-")  # noqa: SIM115  the caller closes it
        try:
            archive.write(recipe.context, packed, *((ca, recipe.secrets) if recipe.asks else (b"", {})))
            packed.seek(0)  # after what was not written yet
        except BaseException:
            with suppress(OSError):  # it tries to write once more
                packed.close()
            raise
    except OSError as error:
        raise failures.no_room(error) from error
    return packed


def _place() -> dict[str, Any]:
    """How docker's own program finds its engine, as the SDK's arguments."""
    from docker.context import ContextAPI
    from docker.utils import kwargs_from_env

    if os.environ.get("DOCKER_HOST"):
        return {**kwargs_from_env()}
    context = ContextAPI.get_context(os.environ.get("DOCKER_CONTEXT") or None)
    if context is None or not context.Host:
        return {}
    return {"base_url": context.Host, **({"tls": context.TLSConfig} if context.TLSConfig else {})}
