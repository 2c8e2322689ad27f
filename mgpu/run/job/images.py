"""The image of a run: settled once, before anything is rented. Every attempt runs the one digest that was recorded."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from mgpu_train.config import Trial
from mgpu_train.tasks import extras

from mgpu.acquire import fit
from mgpu.acquire.fit import ANY, Machines
from mgpu.errors import InputError, MgpuError
from mgpu.events import Emit, Note, PhaseFinished, PhaseStarted, Warned, ignore
from mgpu.iac.outputs import StackOutput
from mgpu.image import cancellable, compat, place, publish
from mgpu.image.build import bases, context
from mgpu.image.publish import Site
from mgpu.image.registry import auth, registry
from mgpu.image.registry.auth import Auth, nobody
from mgpu.image.registry.http import RetryPolicy
from mgpu.image.registry.reference import Reference
from mgpu.providers.base import Provider
from mgpu.run.job.stack_output import handle_of, provider_for, provider_of
from mgpu.run.record.record import Record
from mgpu.run.record.signals import Interrupts
from mgpu.spec.image import ImageSpec
from mgpu.spec.model import RunSpec
from mgpu.words import amount

_COMPARE_S = 10.0  # for a registry, where the stack's image runs all the same if it is silent


@dataclass(frozen=True)
class ImageToRun:
    """An image by its digest. `auth` is asked when a node has to pull: a repair hours later gets a login of its own."""

    reference: str  # repository@sha256:...
    compressed_bytes: int | None = None  # of its layers in the registry; None: not known, no disk is looked at
    auth: Auth = field(default=nobody, repr=False, compare=False)
    by_role: Mapping[str, str] = field(default_factory=dict)  # `ImageHost.pulled_by_role`; `auth` is not asked then


@dataclass(frozen=True)
class Settled:
    """An image by its digest, `repository@sha256:...`, and what a run has to know of it. Nothing secret.

    `workdir`: the folder in it that its programs run in; `seconds`: how long it took to settle it.
    """

    reference: str
    compressed_bytes: int | None = None
    workdir: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def to_run(self, provider: Provider) -> ImageToRun:
        """As nodes get it: who pulls is asked at every pull."""
        registry = Reference.parse(self.reference).registry
        login, by_role = auth.of(registry, provider), place.pulled_by_role(registry, provider)
        return ImageToRun(self.reference, self.compressed_bytes, login, by_role)


@dataclass(frozen=True)
class Looked:
    """What the run file's image is now. `name`: repository:tag; None in `there`: it will be built and pushed."""

    name: str
    there: Settled | None

    def __str__(self) -> str:
        if self.there is None:
            return f"image {self.name}: not in its registry yet, it is built and pushed first"
        return f"image {self.there.reference}: in its registry"


def look(spec: RunSpec, base: Path) -> Looked | None:
    """What the run file's image is, built by nobody; None: it names none. `base`: the run file's folder.

    Raises:
        ImageError: a registry does not answer, or an image that should exist does not.
        InputError: the context cannot be read; an image that does not fit the run file.
    """
    if spec.image is None:
        return None
    _require_extras(spec, spec.image, base)
    site = _site(spec, spec.image, base)
    found = (publish.find if spec.image.builds else publish.ensure)(spec.image, site)
    if found is None:
        return Looked(str(publish.wanted(spec.image, site).name), None)
    name = f"{found.reference.partition('@')[0]}:{found.tag}" if found.tag else found.reference
    return Looked(name, _read(spec, spec.image, site, found.reference))


def settle(spec: RunSpec, base: Path, emit: Emit = ignore, machines: Machines = ANY) -> Settled | None:
    """The run file's image, in its registry: built and pushed where it is not there; None: it names none.

    Raises:
        ImageError: it cannot be built, pushed or found.
        InputError: it does not fit the run file, or these machines.
        Interrupted: a signal asked for the end; no build or push goes on.
        ProviderError: nobody can tell the driver of the machines.
    """
    if spec.image is None:
        return None
    _require_extras(spec, spec.image, base)
    site = _site(spec, spec.image, base)
    begin = time.monotonic()
    emit(PhaseStarted("image", (spec.image.reference or spec.image.repository or "").partition("@")[0]))
    with cancelling() as cancelled:
        published = cancellable.ensure(spec.image, site, emit, cancelled)
    settled = _read(spec, spec.image, site, published.reference)
    seconds = round(time.monotonic() - begin, 3)
    emit(PhaseFinished("image", seconds))
    emit(Note(told(published)))
    fit.require(settled.labels, machines)
    return Settled(settled.reference, settled.compressed_bytes, settled.workdir, settled.labels, seconds)


@contextmanager
def cancelling() -> Iterator[threading.Event]:
    """What Ctrl-C, SIGTERM and the end of the terminal set while the block runs. The second of them waits for nothing:
    KeyboardInterrupt."""
    interrupts = Interrupts()
    with interrupts.installed(), interrupts.leaving():
        yield interrupts.cancelled


def for_stack(spec: RunSpec, base: Path, fleet: StackOutput, emit: Emit = ignore) -> Settled | None:
    """The image for a fleet that stands: the one that its stack names, else the run file's; None: there is neither.

    Raises:
        ImageError: it is not in its registry any more, that does not answer, or it cannot be built.
        InputError: it is not named by its digest, does not fit the run file or the machines, or has other code in it
            than the run file's folder.
        ProviderError: nobody can tell the driver of the machines.
    """
    machines = Machines.standing(fleet.gpu, handle_of(fleet), provider_of(fleet))
    if fleet.image is None:
        return settle(spec, base, emit, machines)
    if not Reference.parse(fleet.image).digest:
        why = "A tag may mean another image tomorrow; only a digest ever runs."
        raise InputError(f"the stack's image {fleet.image} is not named by its digest", why, "Export its `reference`.")
    ours = spec.image or ImageSpec()  # type: ignore[call-arg]
    image = ours.model_copy(update={"reference": fleet.image})
    site = _site(spec, image, base)
    settled = _read(spec, image, site, publish.ensure(image, site).reference)
    fit.require(settled.labels, machines)
    _compare(spec, base, fleet.image, emit)
    return settled


def _compare(spec: RunSpec, base: Path, reference: str, emit: Emit) -> None:
    """Whether the stack's image is what the run file builds now: where the code is in it, no older one may run."""
    if spec.image is None or not spec.image.builds:
        return
    what = f"the stack's image is not {spec.image.context or 'images/trainer'} as it is now"
    try:
        site = replace(_site(spec, spec.image, base), retry=RetryPolicy(total_s=_COMPARE_S))
        now = publish.wanted(spec.image, site).name
        login, ca_file = site.login(now.registry), site.ca_file(spec.image)
        digest = registry.find(str(now), login, retry=site.retry, ca_file=ca_file)
    except MgpuError as error:
        emit(Warned(f"whether {what.replace(' is not ', ' is ')} is not known: {error.what}"))
        return
    if digest == Reference.parse(reference).digest:
        _require_extras(spec, spec.image, base)
        return
    if in_image(spec):
        raise InputError(
            f"{what}, and the code is in it", f"It would be {now}.", "Run `pulumi up` for that stack first."
        )
    emit(Warned(f"{what} (that would be {now.tag}): `pulumi up` brings it"))


def unused_args(image: ImageSpec, base: Path) -> list[str]:
    """What is said of arguments that the Dockerfile does not take; nothing where it cannot be read."""
    return _named(image, base).unused(image.args) if image.args else []


def _named(image: ImageSpec, base: Path) -> bases.Named:
    try:
        recipe = (context.folder_of(image, base) / image.dockerfile).read_bytes()
    except OSError:
        recipe = b""  # whoever looks at the image says it
    return bases.read(recipe, image.args)


def _require_extras(spec: RunSpec, image: ImageSpec, base: Path) -> None:
    """The trainer's image has what its Dockerfile says. Of other images, and of what a run installs beside one, nothing
    is known."""
    if not image.builds or image.context is not None:
        return
    said = _named(image, base).args.get("EXTRAS")
    if said is None:  # an older copy of the user's
        return
    there = tuple(said.split())
    _require_locks(there, context.folder_of(image, base) / "extras")
    if spec.train is None or spec.setup or (spec.code and spec.code.requirements):
        return
    tries = spec.trials.tries if spec.trials else (Trial(name="all of it"),)
    trainings = (spec.train.model_copy(update=each.train) for each in tries if not each.refused)
    if lacking := {extra: key for train in trainings for extra, key in extras.lacking(train, there).items()}:
        extra, key = next(iter(lacking.items()))
        why = f"It is built with {', '.join(there) or 'none'} of mgpu-train's extras, and {key} needs `{extra}`."
        cure = f"Write `image: {{args: {{EXTRAS: {json.dumps(' '.join((*there, *lacking)))}}}}}`."
        raise InputError(f"image: the trainer's image lacks {' and '.join(lacking)}", why, cure)


def _require_locks(names: tuple[str, ...], folder: Path) -> None:
    known = sorted(path.stem for path in folder.glob("*.lock"))
    if unknown := [each for each in names if each not in known]:
        why = f"EXTRAS takes names of lock files, with spaces between them: {', '.join(known)}."
        raise InputError(f"image: `{unknown[0]}` is none of the trainer's extras", why, "Mend `image.args`.")


def remember(record: Record, image: Settled | None) -> None:
    """Writes into a record what every later attempt, and whoever takes over, runs."""
    if image is None:
        return
    record.image, record.image_bytes = image.reference, image.compressed_bytes
    record.image_workdir, record.image_labels = image.workdir, dict(image.labels)
    if image.seconds:
        record.phase_seconds["image"] = image.seconds


def remembered(record: Record) -> Settled | None:
    """The image of a run that has begun; None: it has none."""
    if record.image is None:
        return None
    return Settled(record.image, record.image_bytes, record.image_workdir, record.image_labels)


def _site(spec: RunSpec, image: ImageSpec, base: Path) -> Site:
    return place.site(image, base, provider_for(spec), spec.regions, os.environ)


def _read(spec: RunSpec, image: ImageSpec, site: Site, reference: str) -> Settled:
    """What the image says of itself, as its registry keeps it."""
    name = Reference.parse(reference)
    auth, ca_file = site.login(name.registry), site.ca_file(image)
    found = registry.manifest(reference, auth, image.platform, retry=site.retry, ca_file=ca_file)
    if found is None:
        why = f"{name.registry} has none for {image.platform} any more."
        raise InputError(f"no image {reference}", why, "Push it again, or mend `image:`.")
    _require_code(spec, found.workdir)
    return Settled(reference, found.bytes, found.workdir, compat.said(found.labels))


def _require_code(spec: RunSpec, workdir: str) -> None:
    if in_image(spec) and workdir.strip("/") == "":
        why = "The program is run in the folder that the image's last WORKDIR names, and it names none."
        cure = "End the Dockerfile with `WORKDIR /app` and `COPY . .`, or use `code: {mode: sync}`."
        raise InputError("code.mode: the image does not say where the code is", why, cure)


def in_image(spec: RunSpec) -> bool:
    """Whether the code is the image's last layer; else it is sent."""
    return spec.code is not None and spec.code.mode == "image"


def told(published: publish.Published) -> str:
    """What was done for it; sizes are those in the registry, compressed."""
    size = amount(published.image_bytes)
    if not published.pushed:
        return f"found in its registry, {size}: nothing was built or pushed"
    return f"built and pushed: {amount(published.bytes_pushed)} of {size} went to the registry"
