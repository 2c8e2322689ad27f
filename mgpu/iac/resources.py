"""The Python SDK of `pulumi-resource-mgpu`: what a Pulumi program imports.

spec = mgpu.run_spec()
key = mgpu.SshKey("key")
image = mgpu.Image("image", mgpu.image_args(spec)) if spec.image else None
fleet = mgpu.Fleet("fleet", mgpu.fleet_args(spec), key=key, image=image)
pulumi.export("mgpu", fleet.output)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pulumi
from pulumi import Input, Output, ResourceOptions
from pydantic.alias_generators import to_camel

from mgpu.errors import InputError, MgpuError
from mgpu.iac.failures import describe
from mgpu.iac.outputs import VERSION, NodeOutput, StackOutput
from mgpu.plan import rank
from mgpu.spec.load import accepted, sweep
from mgpu.spec.model import ANY, RunSpec
from mgpu.spec.provider import starts_from_image

FLEET_OUTPUTS = (
    *("generation", "handle", "machines", "offer", "offers_considered", "bought_as", "region"),
    *("price_usd_per_hour", "other_usd_per_hour", "hard_cap_at"),
)
"""What a Fleet knows beyond its inputs."""

IMAGE_OUTPUTS = ("tag", "digest", "hash", "bytes", "labels")
"""What an Image knows beyond its inputs, and beyond `reference`, which is both."""

_MACHINE = ("host_key", "private_address", "price_usd_per_hour")
_OF_OTHERS = ("ssh_public_key", "ssh_private_key_file", "image_labels", "image")


def run_spec() -> RunSpec:
    """The run file of this stack: `pulumi config set mgpu:runFile FILE`, by default `mgpu.yaml` beside Pulumi.yaml.
    Of several providers it names the one that `mgpu:provider` says, by default the first.

    Raises:
        pulumi.RunError: the file is not there, or has mistakes; ends the program without a traceback.
    """
    path, config = _run_file(), pulumi.Config("mgpu")
    try:  # of a run's own copy, what it names was looked at when it was submitted
        spec = accepted(path.read_text(encoding="utf-8"), str(path)) if config.get("folder") else _of_all_runs(path)
    except OSError as error:
        raise pulumi.RunError(f"{path} cannot be read: {error.strerror}") from error
    except MgpuError as error:
        raise pulumi.RunError(describe(error)) from error
    chosen = config.get("provider") or (spec.provider if ANY not in spec.providers else "")
    if not chosen:
        raise pulumi.RunError(f"{path}: provider: {ANY}: say which: `pulumi config set mgpu:provider NAME`")
    if chosen not in spec.candidates:
        raise pulumi.RunError(f"mgpu:provider is {chosen}, which {path} does not name: {', '.join(spec.candidates)}")
    return spec.of(chosen)


def _of_all_runs(path: Path) -> RunSpec:
    """A run file; of a sweep, whose runs share a fleet, the first run. Raises InputError: they want different ones."""
    first, *others = [spec for _, spec in sweep(path)]
    asked = rank.requirements(first), first.image
    if any((rank.requirements(each), each.image) != asked for each in others):
        why = "Its `matrix` has runs on other machines, or with another image, and a stack has one fleet."
        raise InputError(f"{path} is a sweep", why, "Name a run file of one: `pulumi config set mgpu:runFile FILE`.")
    return first


def _run_file() -> Path:
    return _project_root() / (pulumi.Config("mgpu").get("runFile") or "mgpu.yaml")


def _folder() -> Path:
    """What the run file's paths are relative to: `mgpu:folder`, where a run has a copy of its run file."""
    return Path(pulumi.Config("mgpu").get("folder") or _run_file().resolve().parent)


def _project_root() -> Path:
    # the SDK's own get_root_directory() is empty under an older language host; a program starts in its `main` folder
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if (folder / "Pulumi.yaml").is_file()), here)


@dataclass
class FleetArgs:
    """What a fleet is asked to be: the inputs of `Fleet`, each documented in the schema and in docs/formats.md."""

    provider: Input[str]
    nodes: Input[int]
    max_price_usd_per_hour: Input[float]
    max_hours: Input[float]
    gpu: Input[Sequence[str]] | None = None
    gpus_per_node: Input[int] | None = None
    processes_per_node: Input[int] | None = None
    market: Input[str] | None = None
    regions: Input[Sequence[str]] | None = None
    lease_minutes: Input[float] | None = None
    disk_gib: Input[int] | None = None
    options: Input[Mapping[str, str]] | None = None
    stores: Input[Sequence[str]] | None = None
    memory_gib: Input[float] | None = None
    compute_capability: Input[float] | None = None
    name: Input[str] | None = None
    owner: Input[str] | None = None


def fleet_args(spec: RunSpec) -> FleetArgs:
    """The requirements that a run file states."""
    needed = rank.requirements(spec).model_dump(mode="json")
    return FleetArgs(options=needed.pop("provider_options"), **needed)


@dataclass
class ImageArgs:
    """Which image: the inputs of `Image`, each documented in the schema. `folder` is the run file's, absolute."""

    folder: Input[str]
    provider: Input[str]
    options: Input[Mapping[str, str]] | None = None
    regions: Input[Sequence[str]] | None = None
    reference: Input[str] | None = None
    repository: Input[str] | None = None
    context: Input[str] | None = None
    dockerfile: Input[str] | None = None
    args: Input[Mapping[str, str]] | None = None
    target: Input[str] | None = None
    platform: Input[str] | None = None
    certificates: Input[str] | None = None
    secrets: Input[Sequence[str]] | None = None


def image_args(spec: RunSpec) -> ImageArgs:
    """What a run file says in `image:`, and who its provider is.

    Raises:
        ValueError: it says nothing there.
    """
    if spec.image is None:
        raise ValueError("the run file has no `image:`")
    needed, given = rank.requirements(spec), spec.image.model_dump(mode="json", exclude_defaults=True)
    return ImageArgs(
        folder=str(_folder()),
        provider=spec.provider,
        options=needed.provider_options,
        regions=needed.regions,
        certificates=given.pop("ca_file", None),
        **given,
    )


class Provider(pulumi.ProviderResource):
    """Configuration of the plugin; kept in state, so that `destroy` uses what `up` used, on any machine."""

    def __init__(
        self,
        resource_name: str,
        owner: Input[str] | None = None,
        state_dir: Input[str] | None = None,
        opts: ResourceOptions | None = None,
        *,
        account: Input[str] | None = None,
        region: Input[str] | None = None,
        profile: Input[str] | None = None,
        endpoint_url: Input[str] | None = None,
    ) -> None:
        aws = {"account": account, "region": region, "profile": profile, "endpointUrl": endpoint_url}
        super().__init__("mgpu", resource_name, {"owner": owner, "stateDir": state_dir, **aws}, opts)


class _Resource(pulumi.CustomResource):
    """Translates the names of our properties, and those alone: the keys of a user's map stay as they are."""

    _names: Mapping[str, str] = {}

    def translate_input_property(self, prop: str) -> str:
        """Python's name -> the wire's."""
        return self._names.get(prop, prop)

    def translate_output_property(self, prop: str) -> str:
        """The wire's name -> Python's."""
        return next((ours for ours, wire in self._names.items() if wire == prop), prop)


def _camel(*names: str) -> dict[str, str]:
    return {name: to_camel(name) for name in names}


class SshKey(_Resource):
    """An ed25519 pair; the private half is a secret and a 0600 file (`path`, default: in mgpu's state folder)."""

    path: Output[str]
    public_key: Output[str]
    private_key: Output[str]
    private_key_file: Output[str]

    _names = _camel("public_key", "private_key", "private_key_file")

    def __init__(self, resource_name: str, path: Input[str] | None = None, opts: ResourceOptions | None = None) -> None:
        props = {"path": path, **dict.fromkeys(self._names)}
        secret = ResourceOptions(additional_secret_outputs=["privateKey"])
        super().__init__("mgpu:index:SshKey", resource_name, props, ResourceOptions.merge(opts, secret))


class Image(_Resource):
    """A container image in its registry: found there by what it is made of, else built and pushed.

    `reference` is what nodes may run, repository@sha256:...; the image stays in its registry when the resource goes.
    """

    reference: Output[str]
    repository: Output[str]
    tag: Output[str]
    digest: Output[str]
    hash: Output[str]
    bytes: Output[int]
    labels: Output[dict[str, str]]

    def __init__(self, resource_name: str, args: ImageArgs, opts: ResourceOptions | None = None) -> None:
        inputs = {field.name: getattr(args, field.name) for field in fields(args)}
        super().__init__("mgpu:index:Image", resource_name, {**inputs, **dict.fromkeys(IMAGE_OUTPUTS)}, opts)


class FleetGuard(_Resource):
    """Goes after its fleet, and ends what a crash left outside the state. `Fleet` makes its own."""

    fleet: Output[str]
    owner: Output[str]
    provider: Output[str]
    options: Output[dict[str, str]]
    earlier: Output[list[Any]]

    def __init__(
        self,
        resource_name: str,
        provider: Input[str],
        fleet: Input[str] | None = None,
        owner: Input[str] | None = None,
        options: Input[Mapping[str, str]] | None = None,
        opts: ResourceOptions | None = None,
    ) -> None:
        props = {"provider": provider, "fleet": fleet, "owner": owner, "options": options, "earlier": None}
        super().__init__("mgpu:index:FleetGuard", resource_name, props, opts)


class Fleet(_Resource):
    """N equal machines, with the guard that they depend on.

    `output` is what a program exports as `mgpu` for runs to use; `store` is the default of `checkpoint.to` in it.
    `image`: what nodes run; nothing is rented before it is in its registry, and no machine that cannot run it.
    """

    nodes: Output[int]
    generation: Output[int]
    handle: Output[dict[str, Any]]
    machines: Output[list[dict[str, Any]]]
    offer: Output[dict[str, Any]]
    offers_considered: Output[list[str]]
    bought_as: Output[str]
    region: Output[str]
    price_usd_per_hour: Output[float]
    other_usd_per_hour: Output[float]
    hard_cap_at: Output[float]
    output: Output[dict[str, Any]]

    _names = _camel(*(field.name for field in fields(FleetArgs)), *_OF_OTHERS, *FLEET_OUTPUTS, *_MACHINE)

    def __init__(
        self,
        resource_name: str,
        args: FleetArgs,
        *,
        key: SshKey,
        store: Input[str] | None = None,
        image: Image | None = None,
        opts: ResourceOptions | None = None,
    ) -> None:
        inputs = {field.name: getattr(args, field.name) for field in fields(args)}
        guard_opts = ResourceOptions(provider=opts.provider, parent=opts.parent) if opts else None
        guard = FleetGuard(f"{resource_name}-guard", args.provider, args.name, args.owner, args.options, guard_opts)
        # the guard's: it keeps the one that it has when the fleet is replaced, and sweeps by it
        props = {**inputs, "name": guard.fleet, **dict.fromkeys(FLEET_OUTPUTS)}
        props |= {"ssh_public_key": key.public_key, "ssh_private_key_file": key.private_key_file}
        props["image_labels"] = image.labels if image else None
        from_image = not isinstance(args.provider, str) or starts_from_image(args.provider)
        props["image"] = image.reference if image and from_image else None  # for others a new one is no new fleet
        after = ResourceOptions(depends_on=[guard], delete_before_replace=True)
        super().__init__("mgpu:index:Fleet", resource_name, props, ResourceOptions.merge(opts, after))
        self.output = Output.all(
            store=store,
            image=image.reference if image else None,
            private_key_file=key.private_key_file,
            **{attribute: getattr(self, attribute) for attribute in _EXPORTED},
        ).apply(_stack_output)


_EXPORTED = (
    *(
        "name",
        "generation",
        "owner",
        "provider",
        "options",
        "region",
        "machines",
        "gpus_per_node",
        "processes_per_node",
    ),
    *("handle", "offer", "bought_as", "price_usd_per_hour", "other_usd_per_hour", "lease_minutes", "hard_cap_at"),
)


def _stack_output(values: dict[str, Any]) -> dict[str, Any]:
    renamed = {"name": "fleet", "bought_as": "market", "machines": "nodes", "offer": "gpu"}
    exported = {renamed.get(name, name): value for name, value in values.items()}
    nodes = tuple(NodeOutput.model_validate(machine) for machine in exported["nodes"])
    handle = exported.pop("handle")
    exported |= {"version": VERSION, "token": handle["token"], "made_at": handle.get("made_at", 0)}
    exported |= {"account": handle.get("account", "")}
    exported |= {"gpu": exported["gpu"].get("gpu"), "nodes": nodes, "options": exported["options"] or {}}
    return StackOutput.model_validate(exported).model_dump(mode="json")
