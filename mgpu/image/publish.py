"""An image that can run: what `image:` describes is found in its registry, or built and pushed there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu import paths
from mgpu.errors import ImageError, InputError
from mgpu.events import Emit, Note, Warned, ignore
from mgpu.image.build import archive, bases, context, inputs
from mgpu.image.build.recipe import Recipe
from mgpu.image.registry import auth as auths
from mgpu.image.registry import failures, registry
from mgpu.image.registry.auth import Auth
from mgpu.image.registry.http import RetryPolicy
from mgpu.image.registry.reference import Reference
from mgpu.spec import environment
from mgpu.spec.image import ImageSpec

if TYPE_CHECKING:
    from mgpu.image.build.docker_engine import DockerEngine

_ONCE = RetryPolicy(total_s=4.0, request_s=2.0, pause_s=8.0)  # for a base that the engine has: one try


@dataclass(frozen=True)
class Published:
    """An image in its registry. `reference` is `repository@sha256:...`: nothing else may run. `tag` is the hash of the
    inputs, or the one that the user named; `bytes_pushed` and `image_bytes`, all of it, are compressed; `labels` are
    what `compat.check` reads."""

    reference: str
    tag: str
    built: bool
    pushed: bool
    bytes_pushed: int
    image_bytes: int
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Wanted:
    """Which image `image:` means. `name`: where it is, or will be: by the hash of its inputs, or as the user named it.
    `inputs_hash`: of all that it is built from, 64 hex digits; empty for one that exists."""

    name: Reference
    inputs_hash: str = ""


@dataclass(frozen=True)
class Built:
    """An image that the engine has built and calls `wanted.name`; nothing was pushed. `id`: the engine's own."""

    wanted: Wanted
    id: str


@dataclass(frozen=True)
class Site:
    """Where images are built and kept. `folder`: the run file's. `repository`: where images go unless `image:` names
    one. `login`: who we are for a registry. `environ`: where secrets come from. `engine`: made when it is needed.
    `network`: of the build, `host` for instance."""

    folder: Path
    repository: str | None
    environ: Mapping[str, str]
    login: Callable[[str], Auth] = auths.of
    engine: Callable[[], DockerEngine] | None = None
    network: str | None = None
    retry: RetryPolicy | None = None

    def ca_file(self, spec: ImageSpec) -> Path | None:
        """What is trusted besides the system's certificates: `image.ca_file`, as the run file's folder has it."""
        return self.folder / spec.ca_file if spec.ca_file else None


def ensure(spec: ImageSpec, site: Site, emit: Emit = ignore) -> Published:
    """Makes sure that the image of a run file is in its registry; what is there is neither built nor pushed.

    Raises:
        ImageError: the engine, the build or the registry; nothing refers to what was pushed by half. Or the cache, in
            which the trainer's context is, cannot be written.
        InputError: the context cannot be read or changes, a secret is not set or would end in the image, no repository
            is named.
    """
    return _Publishing(spec, site, emit).run()


def wanted(spec: ImageSpec, site: Site) -> Wanted:
    """What `ensure` would look for: nothing is built, and the registry is asked for the base images alone.

    Raises:
        ImageError: nobody has a base image; its registry refuses, or cannot be reached. Or the cache: as `ensure`.
        InputError: the context cannot be read, no repository is named.
    """
    return _Publishing(spec, site, ignore).wanted()[0]


def find(spec: ImageSpec, site: Site) -> Published | None:
    """The image of a run file as its registry has it; None: it does not, and `ensure` would build it.

    Raises what `wanted` raises, and ImageError where the image's own registry does not answer.
    """
    return _Publishing(spec, site, ignore).find()


def build(spec: ImageSpec, site: Site, emit: Emit = ignore) -> Built:
    """Builds the image with the engine, whatever the registry has, and gives it its name; nothing is pushed.

    Raises:
        ImageError: the engine or the build.
        InputError: as `ensure` does; or `spec` names an image that exists.
    """
    return _Publishing(spec, site, emit).build()


@dataclass(frozen=True)
class _MadeOf:
    """What an image is built from: `bases` are the images that its Dockerfile names, as they are now."""

    folder: context.BuildContext
    named: bases.Named
    bases: Mapping[str, bases.BaseImage]


class _Publishing:
    def __init__(self, spec: ImageSpec, site: Site, emit: Emit) -> None:
        self._spec, self._site, self._emit = spec, site, emit
        self._ca = site.ca_file(spec)
        self._opened: DockerEngine | None = None
        self._auths = dict[str, Auth]()

    def run(self) -> Published:
        wanted, made_of = self.wanted()
        if made_of is None:
            return self._existing(wanted.name)
        if (digest := self._there(str(wanted.name), ours=True)) is not None:
            return self._published(wanted.name, digest)
        return self._push(self._built(made_of, wanted.name), wanted.name)

    def find(self) -> Published | None:
        name = self.wanted()[0].name
        digest = self._there(str(name), ours=self._spec.builds)
        return None if digest is None else self._published(name, digest)

    def build(self) -> Built:
        wanted, made_of = self.wanted()
        if made_of is None:
            raise InputError(f"{wanted.name} is not built", "image.reference names an image that exists.")
        return Built(wanted, self._built(made_of, wanted.name))

    def wanted(self) -> tuple[Wanted, _MadeOf | None]:
        """And what it is built from."""
        if self._spec.reference is not None:
            return Wanted(Reference.parse(self._spec.reference)), None
        folder = context.scan(self._folder(), self._spec.dockerfile)
        named = bases.read(folder.recipe, self._spec.args, self._spec.platform)
        named.require(self._spec.target, str(folder.root / folder.dockerfile))
        if self._spec.secrets or self._spec.ca_file:
            archive.require_thrown_away(named, self._spec.target, folder.dockerfile, self._spec.secrets)
        found = bases.resolve(named.images, self._here, self._there, self._glance, self._warn)
        whole = inputs.inputs_hash(folder, self._spec, {name: base.digest for name, base in found.items()})
        wanted = Wanted(Reference.parse(f"{self._repository()}:{inputs.tag(whole)}"), whole)
        return wanted, _MadeOf(folder, named, found)

    def _folder(self) -> Path:
        try:
            return context.folder_of(self._spec, self._site.folder)
        except OSError as error:
            raise failures.no_context(error, paths.cache_dir()) from error

    def _existing(self, name: Reference) -> Published:
        digest = self._there(str(name))
        if digest is None:
            cure = "Mend image.reference, or push the image first."
            raise ImageError(f"no image {name}", f"{name.registry} does not have it.", cure)
        return self._published(name, digest)

    def _built(self, made_of: _MadeOf, name: Reference) -> str:
        recipe, engine = self._recipe(made_of), self._engine()
        for each in made_of.named.unused(self._spec.args):
            self._warn(each)
        private = (self._spec.secrets or self._spec.ca_file) and recipe.asks
        for base, platform in dict.fromkeys((use.image, use.platform) for use in made_of.named.uses):
            wanted = platform or self._spec.platform
            self._pull(Reference.parse(base), made_of.bases[base], wanted, needed=bool(private))
        if private:
            self._require_no_trigger(made_of)
        self._emit(Note(f"building {name}"))
        image = engine.build(recipe, self._emit)
        for base, before in made_of.bases.items():
            self._require_same(base, before)
        engine.tag(image, str(name))
        return image

    def _pull(self, name: Reference, base: bases.BaseImage, platform: str, *, needed: bool) -> None:
        """A base that the builder has no login for: it asks docker's configuration alone. `needed`: any other, too."""
        there = name.at(base.digest)
        dockers = auths.is_dockers(name.registry) and not needed
        if not base.pinned or dockers or ((here := self._engine().inspect(there)) and here.platform == platform):
            return
        self._emit(Note(f"pulling the base image {there}"))
        self._engine().pull(there, platform, self._auth(name))

    def _require_no_trigger(self, made_of: _MadeOf) -> None:
        """An `ONBUILD COPY . /app` of a base image takes `.build` along, as one of the Dockerfile's own would."""
        folder, triggers = made_of.folder, dict[str, tuple[str, ...]]()
        for base, now in made_of.bases.items():
            found = self._engine().inspect(Reference.parse(base).at(now.digest) if now.pinned else base)
            triggers[base] = found.triggers if found else ()
        named = bases.read(folder.recipe, self._spec.args, self._spec.platform, triggers)
        archive.require_thrown_away(named, self._spec.target, folder.dockerfile, self._spec.secrets)

    def _require_same(self, base: str, before: bases.BaseImage) -> None:
        """The engine's own images cannot be built on by their digest."""
        now = None if before.pinned else self._here(base)
        if not before.pinned and (now is None or now.digest != before.digest):
            why = f"It was {before.digest}, and is {now.digest if now else 'not there any more'}."
            raise ImageError(f"base image {base} changed while the image was built", why, "Run the command again.")

    def _push(self, image: str, name: Reference) -> Published:
        engine = self._engine()
        try:
            pushed = engine.push(str(name), self._auth(name), self._emit)
        except ImageError:
            if (faster := self._there_now(name)) is None:
                raise
            return self._taken(name, faster)
        digest = self._there(str(name))
        if digest is None:
            why = f"Pushed was {pushed.digest}, the registry has nothing under that tag."
            raise ImageError(f"{name} is not what was pushed", why, "Try again.")
        if digest != pushed.digest:
            return self._taken(name, digest)
        there = self._manifest(name, digest)
        found = engine.inspect(image)
        hashes = found.layers if found else ()
        moved = _moved(there, hashes, pushed.layers)
        return Published(name.at(digest), name.tag, True, True, moved, there.bytes, there.labels)

    def _taken(self, name: Reference, digest: str) -> Published:
        """What somebody else has pushed of the same inputs meanwhile."""
        self._emit(Note(f"{name} was pushed by somebody else meanwhile: that one is taken"))
        return replace(self._published(name, digest), built=True)

    def _there_now(self, name: Reference) -> str | None:
        """After a push that failed, whose reason counts: the registry may refuse because another one was faster."""
        try:
            return self._there(str(name))
        except ImageError:
            return None

    def _published(self, name: Reference, digest: str) -> Published:
        image = self._manifest(name, digest)
        return Published(name.at(digest), name.tag, False, False, 0, image.bytes, image.labels)

    def _manifest(self, name: Reference, digest: str) -> registry.ImageManifest:
        found = registry.manifest(
            name.at(digest), self._auth(name), self._spec.platform, retry=self._site.retry, ca_file=self._ca
        )
        if found is None:
            why = f"{name} is for other machines than image.platform says: {self._spec.platform}."
            raise ImageError(f"no image for {self._spec.platform}", why, "Mend image.platform or image.reference.")
        return found

    def _recipe(self, made_of: _MadeOf) -> Recipe:
        folder = made_of.folder
        return Recipe(
            replace(folder, recipe=bases.pinned(folder.recipe, made_of.named, made_of.bases)),
            self._spec.args,
            self._spec.target,
            self._spec.platform,
            self._ca,
            environment.values(self._spec.secrets, "image.secrets", self._site.environ),
            network=self._site.network,
        )

    def _repository(self) -> str:
        repository = self._spec.repository or self._site.repository
        if repository is None:
            cure = "Set image.repository to registry/name."
            raise InputError("image.repository: where is the image pushed?", "No repository is known.", cure)
        return repository

    def _auth(self, name: Reference) -> Auth:
        if name.registry not in self._auths:
            self._auths[name.registry] = self._site.login(name.registry)
        return self._auths[name.registry]

    def _there(self, reference: str, *, ours: bool = False) -> str | None:
        """What the registry has. `ours`: we would push it."""
        auth = self._auth(Reference.parse(reference))
        return registry.find(reference, auth, retry=self._site.retry, ca_file=self._ca, made_by_push=ours)

    def _warn(self, text: str) -> None:
        self._emit(Warned(text))

    def _glance(self, reference: str) -> str | None:
        name = Reference.parse(reference)
        return registry.find(reference, self._auth(name), retry=_ONCE, ca_file=self._ca)

    def _here(self, reference: str) -> bases.BaseImage | None:
        """What the engine has, as its registry calls it where it came from one. Raises ImageError."""
        found = self._engine().inspect(reference)
        if found is None:
            return None
        repository = Reference.parse(reference).repository
        known = (Reference.parse(each) for each in found.digests)
        digest = next((each.digest for each in known if each.repository == repository), "")
        # one that leaves its images to containerd knows all of them by their digest
        return bases.BaseImage(digest or found.id, pinned=bool(digest), unsure=digest == found.id)

    def _engine(self) -> DockerEngine:
        from mgpu.image.build.docker_engine import DockerEngine

        if self._opened is None:
            self._opened = (self._site.engine or DockerEngine)()
        return self._opened


def _moved(image: registry.ImageManifest, hashes: tuple[str, ...], states: Mapping[str, str]) -> int:
    """Compressed bytes of the layers that the registry did not have.

    An engine names a layer by what it is before compression, one with containerd's store by what is pushed.
    """
    pushed = {name for name, state in states.items() if state == "pushed"}
    before = hashes if len(hashes) == len(image.layers) else ("",) * len(image.layers)
    short = (7, 19)  # the digits after "sha256:" that the engine shows
    return sum(
        size
        for (digest, size), whole in zip(image.layers, before, strict=True)
        if pushed & {digest[slice(*short)], whole[slice(*short)]}
    )
