"""`mgpu:index:Image`: an image in its registry, named by what it is made of. `mgpu.image` does the work.

`check` hashes all that the image is built from: while that hash stays, nothing differs, nothing is built and the
registry is not asked. Of an image that exists, the digest stands in its place: a tag that was moved shows.

A refresh asks the registry; an image that is gone from there is built again by the next `up`. Where the registry does
not answer, what was known stays, with a warning: a teardown refreshes, too, and must not wait for a registry.

The image of a resource that ends stays in the registry: other stacks and running fleets may use it, and the next `up`
finds it. Old ones end by the repository's own rules (mgpu:aws:Repository has some).
"""

from __future__ import annotations

from pydantic import ValidationError

from mgpu.errors import ImageError, InputError, MgpuError
from mgpu.events import Note, Warned
from mgpu.iac.protocol.handler import Call, Checked, Difference, Properties, ReadResult, changed
from mgpu.iac.protocol.wire import UNKNOWN, has_unknown
from mgpu.iac.types.image_model import ImageInputs, ImageOutputs
from mgpu.image import cancellable, publish
from mgpu.image.publish import Site
from mgpu.image.registry import auth, registry
from mgpu.image.registry.http import RetryPolicy
from mgpu.image.registry.reference import Reference
from mgpu.spec.image import ImageSpec

_UPDATES = ("hash", "reference", "platform")
_MADE = ("reference", "tag", "digest", "bytes", "labels")
_LOOK_S = 10.0  # for a registry, at a refresh


class ImageHandler:
    """Handles Image. The id is the repository. `settled`: the image of the run that calls, by its digest: that one and
    no other, whatever was changed in the context since the run began."""

    secret: frozenset[str] = frozenset()
    refresh_before_update = False  # `destroy` would ask the registry, too

    def __init__(self, settled: str = "") -> None:
        self._settled = settled

    def check(self, call: Call, old: Properties, new: Properties) -> Checked:
        """Validates everything at once, fills in defaults, and works out which image is meant."""
        given = {key: value for key, value in new.items() if value is not None and key != "hash"}
        if has_unknown(given):  # in a preview: the update checks again
            return Checked({**given, "hash": UNKNOWN})
        try:
            wanted = self._instead(ImageInputs.model_validate(given))
            spec = wanted.spec()
        except ValidationError as error:
            return Checked(given, {str(each["loc"][0]): each["msg"] for each in error.errors()})
        if spec.reference is not None and spec.model_fields_set & {"repository", "context", "target", "args"}:
            return Checked(given, {"reference": "names an image that exists; all else is for one that is built"})
        meant, whole = _meant(spec, wanted)
        return Checked(wanted.model_copy(update={"repository": meant.repository, "hash": whole}).to_wire())

    def diff(self, old_inputs: Properties, old: Properties, new: Properties) -> Difference:
        """What the image is; never where the run file lies. One of another repository is another one."""
        return Difference(changed(_UPDATES, old_inputs, new), changed(("repository",), old_inputs, new), False)

    def create(self, call: Call, inputs: Properties) -> tuple[str, Properties]:
        """Finds the image in its registry, or builds and pushes it."""
        if has_unknown(inputs):
            return "", {**inputs, **dict.fromkeys(_MADE, UNKNOWN)}
        outputs = self._made(call, ImageInputs.model_validate(inputs))
        return str(outputs["repository"]), outputs

    def read(self, call: Call, resource_id: str, old: Properties, inputs: Properties) -> ReadResult | None:
        """The image if its registry still has it, or does not answer; None: the registry says that it has not.

        Raises:
            InputError: an import was asked for.
        """
        if not old:
            why = "An Image is found by what it is made of, and an existing one is named by `reference`."
            raise InputError("an Image cannot be imported", why, "Run `pulumi up`: what is there is not built again.")
        image = ImageOutputs.model_validate(old)
        try:
            there = _there(image)
        except MgpuError as error:
            call.emit(Warned(f"whether {image.reference} is still there is not known: {error.what}"))
            there = True
        return ReadResult(resource_id, inputs, old) if there else None

    def update(self, call: Call, resource_id: str, old: Properties, new: Properties) -> Properties:
        """As create: other inputs make another image."""
        return self.create(call, new)[1]

    def delete(self, call: Call, resource_id: str, old: Properties) -> None:
        """Leaves the image in its registry."""
        call.emit(Note(f"Image {call.urn.rpartition('::')[2]}: kept in its registry"))

    def _instead(self, wanted: ImageInputs) -> ImageInputs:
        """The settled image in place of what the run file says."""
        if not self._settled:
            return wanted
        kept = wanted.model_dump(include={"folder", "provider", "options", "regions", "platform", "certificates"})
        return ImageInputs(reference=self._settled, **kept)

    def _made(self, call: Call, wanted: ImageInputs) -> Properties:
        spec, site = _whole(wanted)
        if not call.preview:
            made = cancellable.ensure(spec, site, call.emit, call.cancelled)
            return ImageOutputs.of(wanted, made).to_wire()
        found = publish.find(spec, site)
        if found is not None:
            return ImageOutputs.of(wanted, found).to_wire()
        name = publish.wanted(spec, site).name
        call.emit(Note(f"would build and push {name}"))
        return {**wanted.to_wire(), **dict.fromkeys(_MADE, UNKNOWN), "tag": name.tag}


def _whole(wanted: ImageInputs) -> tuple[ImageSpec, Site]:
    """What `mgpu.image` is asked for: `check` has named the repository of one that exists, too."""
    if wanted.reference is not None:
        wanted = wanted.model_copy(update={"repository": None})
    return wanted.spec(), wanted.site()


def _meant(spec: ImageSpec, wanted: ImageInputs) -> tuple[Reference, str]:
    """The image by its name, and by the hash that stays as long as it does."""
    if spec.reference is not None and (digest := Reference.parse(spec.reference).digest):
        return Reference.parse(spec.reference), digest.partition(":")[2]
    site = wanted.site()
    meant = publish.wanted(spec, site)
    if meant.inputs_hash:
        return meant.name, meant.inputs_hash
    found = registry.find(str(meant.name), site.login(meant.name.registry), ca_file=wanted.ca)
    if found is None:
        cure = "Mend image.reference, or push the image first."
        raise ImageError(f"no image {meant.name}", f"{meant.name.registry} does not have it.", cure)
    return meant.name, found.partition(":")[2]


def _there(image: ImageOutputs) -> bool:
    login = auth.of(Reference.parse(image.reference).registry, image.sold_by())
    return registry.find(image.reference, login, retry=RetryPolicy(total_s=_LOOK_S), ca_file=image.ca) is not None
