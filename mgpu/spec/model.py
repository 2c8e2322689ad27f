"""The run file's keys. Units stand in the names; memory is GiB (2^30 bytes), money is US dollars.

Only what one key can say of itself is checked here; what several keys say together is in `mgpu.spec.rules`, and
`mgpu.spec.load` applies both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from mgpu_train import launchers
from mgpu_train.config import DataItem, EnvName, MetricName, Retention, Text, TrainConfig, Trials, Writers
from mgpu_train.strategies import entry as strategies
from mgpu_train.tasks import entry as tasks
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    create_model,
    field_serializer,
)

from mgpu.spec import sink as sinks
from mgpu.spec.block import LEAST_HOURS, MOST_HOURS, Block, MachineKeys, Names, ProviderOptions, Word, as_list
from mgpu.spec.expect import Expectation
from mgpu.spec.image import ImageSpec
from mgpu.spec.provider import installed, on_this_machine
from mgpu.spec.values import form

DEFAULT_EVERY_STEPS = 100  # between checkpoints of the bundled trainer
# fields that are unions, and the tags of what they are, as pydantic shows them in a path
UNIONS = {("checkpoint",): ("<block>", "<none>"), ("train", "micro_batch"): ("<number>", "<auto>")}


def _block_or_none(value: Any) -> str:
    return "<none>" if isinstance(value, str) else "<block>"


def is_shell(launcher: object) -> bool:
    """Whether a launcher, by name, takes a script or a line of a shell as `command`."""
    found = launchers.installed().found.get(launcher) if isinstance(launcher, str) else None
    return found is not None and found.takes == "shell"


ANY = "any"  # all providers but those of this machine


def candidates(providers: Iterable[str]) -> tuple[str, ...]:
    """The providers whose machines a run that names these may have."""
    found = installed().found
    others = [name for name in installed().names if not found[name].capabilities.this_machine]
    return tuple(dict.fromkeys(name for each in providers for name in (others if each == ANY else [each])))


_Seller = Annotated[Word, WithJsonSchema({"type": "string", "enum": [ANY, *installed().names]})]
Providers = Annotated[tuple[Word, ...], BeforeValidator(as_list, json_schema_input_type=_Seller | tuple[_Seller, ...])]
Teardown = Literal["always", "keep"]
Name = Annotated[
    str,
    form(
        r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$",
        "lower-case letters, digits and `-`, at most 40, beginning with a letter",
    ),
]
StoreUrl = Annotated[
    str,
    form(
        r"^(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\x00-\x20]*)?|file:///[^\x00-\x1f]+)$",
        "s3://bucket/prefix or file:///folder",
        max_length=1024,
    ),
]


def _plain(value: Any) -> Any:
    if isinstance(value, dict | list):
        raise ValueError("one text, number, yes or no is needed")
    return value


_Plain = Annotated[Any, AfterValidator(_plain), WithJsonSchema({"type": ["string", "number", "boolean"]})]


class _Cadence(Block):
    to: StoreUrl | None = Field(
        None, description="s3://bucket/prefix or file:///folder (default: with provider local a folder of this machine)"
    )
    every_steps: int | None = Field(
        None,
        ge=1,
        description="optimizer steps between checkpoints; a `command` finds it in MGPU_CHECKPOINT_EVERY_STEPS "
        f"(default with `train:`: {DEFAULT_EVERY_STEPS})",
    )
    every_minutes: float | None = Field(
        None,
        gt=0,
        description="minutes between checkpoints; a `command` finds it in MGPU_CHECKPOINT_EVERY_MINUTES "
        "(default: none)",
    )


class Checkpoint(Retention, _Cadence):
    """`checkpoint:` where checkpoints go, how often they are made, and which are kept."""

    max_upload_mib_per_s: float | None = Field(
        default=None,
        ge=1,
        description="MiB per second that one node uploads or downloads at most (default: as fast as it goes)",
    )
    writers: Writers | None = Field(
        None,
        description="which nodes have a part in a checkpoint: rank0 (node 0 alone) or all "
        "(default: all with `train:`, rank0 with `command:`)",
    )


CheckpointOrNone = Annotated[
    Annotated[Checkpoint, Tag("<block>")] | Annotated[Literal["none"], Tag("<none>")], Discriminator(_block_or_none)
]


class Recovery(Block):
    """`recovery:` what happens when a machine is lost."""

    attempts: int = Field(1, ge=1, le=1000, description="starts of the launcher in all")
    wait_minutes: float = Field(
        10,
        ge=0,
        json_schema_extra={"maximum": MOST_HOURS * 60},
        description="minutes to wait for capacity, or the store, before an attempt",
    )


_Minutes = Annotated[float, Field(gt=0, json_schema_extra={"maximum": MOST_HOURS * 60})]


class PhaseTimeouts(Block):
    """`timeouts:` how long a healthy program may be quiet, on all nodes together, before it counts as hung.

    A line on any node, a metric and a checkpoint are signs of progress. A program of your own says by a metrics line of
    kind `phase` where it is; without one, it is training after its first sign.
    """

    building_minutes: _Minutes | None = Field(
        None, description="minutes while `train` builds its model, or loads it (default: 30, with `command` 120)"
    )
    first_step_minutes: _Minutes | None = Field(
        None,
        description="minutes before the first step, or a `command`'s first sign (default: 30, with `command` 120)",
    )
    training_minutes: _Minutes | None = Field(
        None, description="minutes between two signs of progress (default: 13, with `command` 120)"
    )
    validation_minutes: _Minutes | None = Field(
        None, description="minutes while it validates (default: 30, with `command` 120)"
    )
    saving_minutes: _Minutes | None = Field(
        None, description="minutes while it saves; the trainer's own limit, too (default: 30, with `command` 120)"
    )
    finishing_minutes: _Minutes | None = Field(
        None, description="minutes from its last save until it has ended (default: 10, with `command` 120)"
    )


class Code(Block):
    """`code:` the user's folder, sent to the nodes."""

    workdir: Text = Field(".", description="folder to send, relative to the run file")
    mode: Literal["sync", "image"] = Field(
        "sync", description="sync: changed files only, over SSH; image: the last layer of the image"
    )
    requirements: Text | None = Field(
        None,
        description="a requirements file in workdir, installed into an environment of the node's own (default: none)",
    )


class Data(DataItem):
    """`data:` one entry: files that every node fetches before the program starts."""

    model_config = ConfigDict(populate_by_name=False)

    source: StoreUrl = Field(
        alias="from", description="s3://bucket/prefix, or file:///folder where nodes see this machine's files"
    )
    to: Text = Field(
        description="folder on the node, relative to the work folder (or absolute, but with provider local)"
    )


class _Named(Block):
    name: Name = Field(description="short name; run and stack ids begin with it")
    providers: Providers = Field(
        alias="provider",
        min_length=1,
        description="who rents out the machines; a list, or `any` that is set up here and not this machine itself: the "
        "best offer of all is asked for first, then the next one's",
    )

    @field_serializer("providers")
    def _one_as_a_word(self, value: tuple[str, ...]) -> str | list[str]:
        return value[0] if len(value) == 1 else list(value)


class Keys(MachineKeys, _Named):
    """What every run file may say: all but the providers' own blocks."""

    max_hours: float = Field(
        ge=LEAST_HOURS,
        le=MOST_HOURS,
        description="hard cap: hours after which the machines end, whatever happens",
    )
    processes_per_node: int | None = Field(
        None, ge=1, le=256, description="processes of a machine, where there are no GPUs (default: 1)"
    )
    train: TrainConfig | None = Field(None, description="the bundled trainer; or `command` (default: none)")
    trials: Trials | None = Field(
        None,
        description="what `--smoke`, `--tune` and `--lr-range` make of a run file: short trainings that are tried in "
        "the place of `train`, with `checkpoint: none` (default: none)",
    )
    command: tuple[Text, ...] | None = Field(
        None,
        min_length=1,
        description="the user's program and its arguments; with `launcher: bash` a script and its arguments, or one "
        "line as text; or `train` (default: none)",
    )
    launcher: Word = Field(
        "torchrun",
        description="what starts the program on each node: one of mgpu's, or one that a package brings",
        json_schema_extra={"enum": list(launchers.installed().names)},
    )
    code: Code | None = Field(
        None,
        description="the user's folder, with `command` or a task that is not mgpu's (default: the run file's folder)",
    )
    image: ImageSpec | None = Field(None, description="the container image that nodes run (default: none)")
    setup: Names = Field(
        (),
        description="shell lines that every node runs in the folder of the code before a `command`, once for a "
        "machine; `python` and `pip` are the program's; what they leave running ends with the attempt (default: none)",
    )
    env: dict[EnvName, Text] = Field({}, description="environment of the program; nothing secret (default: none)")
    secrets: tuple[EnvName, ...] = Field(
        (), description="names; values come from the operator's environment (default: none)"
    )
    data: tuple[Data, ...] = Field(
        (), description="files that every node fetches before the program starts (default: none)"
    )
    outputs: Names = Field(
        (),
        description="files that a `command` writes and that come back: paths in its folder, globs (`**` for any "
        "folders), folders (default: none)",
    )
    checkpoint: CheckpointOrNone = Field(Checkpoint(), description="where checkpoints go, or `none`")  # type: ignore[call-arg]
    recovery: Recovery = Field(Recovery(), description="what happens when a machine is lost")  # type: ignore[call-arg]
    preflight: bool = Field(
        default=True,
        description="GPUs, and the links between them, are examined before each start of the program; without GPUs the "
        "processors of several nodes and the network between them",
    )
    timeouts: PhaseTimeouts = Field(PhaseTimeouts(), description="how long the program may be quiet")  # type: ignore[call-arg]
    matrix: dict[Text, Annotated[tuple[_Plain, ...], Field(min_length=1, max_length=256)]] = Field(
        {},
        description="a sweep, which `mgpu submit` queues: of each key, as `train.lr`, all values that it is to have; "
        "one run for each combination (default: none)",
    )
    max_usd: float | None = Field(
        None,
        gt=0,
        description="dollars that the run may spend in all on machines, their disks and public addresses, as far as "
        "their prices are known, also when it is resumed; it stops with a "
        "checkpoint before that, and no machine lives longer than it pays for (default: no limit)",
    )
    expect: dict[MetricName, Expectation] = Field(
        {},
        description="what metrics of a run that succeeds have to be, by their names in `mgpu status --json`, or "
        "`cost_usd`, `duration_s`, `recoveries`; if one is not, the exit code is 6 (default: nothing)",
    )
    share: bool = Field(
        default=False,
        description="a queued run may have a part of a kept fleet's nodes, so many GPUs (or processes) as it asks for, "
        "beside others; with `teardown: keep`, others may on its fleet; both say it",
    )
    teardown: Teardown = Field(
        "always", description="always: the machines go when the run ends; keep: they stay under their lease"
    )

    @property
    def candidates(self) -> tuple[str, ...]:
        """The providers whose machines the run may have."""
        return candidates(self.providers)

    @property
    def provider(self) -> str:
        """The provider that the machines are of; where there are several that they may be of, the first one."""
        return next(iter(self.candidates), ANY)

    def of(self, provider: str) -> Self:
        """The same with the machines of one of its candidates."""
        return self.model_copy(update={"providers": (provider,)})

    @property
    def processes(self) -> int:
        """Processes of one node: one a GPU, or `processes_per_node`."""
        return self.gpus_per_node or self.processes_per_node or 1

    @property
    def world_size(self) -> int:
        """Processes of all nodes."""
        return self.nodes * self.processes

    @property
    def shell(self) -> bool:
        """Whether `command` is for a shell, not for Python."""
        return is_shell(self.launcher)

    @property
    def own_code(self) -> bool:
        """Whether nodes run code that is not mgpu's: a `command`, or a task or strategy of somebody else's."""
        train = self.train
        return train is None or train.task not in tasks.OURS or train.strategy not in strategies.OURS

    @property
    def on_this_machine(self) -> bool | None:
        """Whether nodes run on the operator's own machine; None: no provider of this name is installed."""
        return on_this_machine(self.provider)

    @property
    def shares_files(self) -> bool | None:
        """Whether nodes see this machine's files; None: no provider of this name is installed."""
        found = installed().found.get(self.provider)
        shared = (self.options or found.options()).shares_files() if found else None
        return self.on_this_machine or shared

    @property
    def options(self) -> ProviderOptions | None:
        """The provider's own block, where the run file has one."""
        return getattr(self, self.provider, None)


for _name in [
    name for name in installed().found if hasattr(Keys, name) or name in Keys.model_fields or name in ("sinks", ANY)
]:
    installed().set_aside(_name, "a key of the run file has this name")
for _name in [name for name in sinks.installed().found if hasattr(Block, name)]:
    sinks.installed().set_aside(_name, "the name is taken")

if TYPE_CHECKING:

    class RunSpec(Keys):
        """A run file: what to run, on which machines, at most at which price, and where its checkpoints go."""

        sinks: Block = Block()

else:  # each provider and each sink that is installed has a block of its own name
    Sinks = create_model(
        "Sinks",
        __base__=Block,
        __doc__="`sinks:` who hears a run's events besides the console.",
        **{
            name: (entry.options | None, Field(None, description=f"settings of sink {name}"))
            for name, entry in sinks.installed().found.items()
        },
    )
    RunSpec = create_model(
        "RunSpec",
        __base__=Keys,
        __doc__="A run file: what to run, on which machines, at most at which price, and where its checkpoints go.",
        **{
            name: (entry.options | None, Field(None, description=f"settings of provider {name}"))
            for name, entry in installed().found.items()
        }
        | {"sinks": (Sinks, Field(Sinks(), description="who hears the run's events besides the console"))},
    )
