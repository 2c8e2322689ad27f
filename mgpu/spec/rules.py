"""What the keys of a run file say together. Each rule reads a `RunSpec` and yields every mistake that it finds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import PurePosixPath
from typing import NamedTuple

from mgpu_train import launchers
from mgpu_train.config import FP8_CAPABILITY, LmOptions, TrainConfig
from mgpu_train.data.order import Slices
from mgpu_train.strategies import entry as strategies
from mgpu_train.strategies.entry import Sizes
from mgpu_train.tasks import entry as tasks
from mgpu_train.tasks.entry import TaskEntry
from pydantic import ValidationError

from mgpu.spec import command
from mgpu.spec import sink as sinks
from mgpu.spec.block import MOST_HOURS
from mgpu.spec.expect import OF_THE_RUN, by_name
from mgpu.spec.gpus import capability_of
from mgpu.spec.image import ImageSpec
from mgpu.spec.model import ANY, DEFAULT_EVERY_STEPS, Checkpoint, PhaseTimeouts, RunSpec
from mgpu.spec.provider import installed, starts_from_image
from mgpu.spec.values import no_name

Where = tuple[str | int, ...]

# torchrun sets or reads these itself, and MGPU_* is ours
_RESERVED = {
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "RANK",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "WORLD_SIZE",
}
_OF_ANY = ("reference", "platform")  # keys of an image that exists, too
_RESERVED_PREFIXES = ("MGPU_", "TORCHELASTIC_", "PET_")


class Mistake(NamedTuple):
    """What is wrong at `at`; `reads`: the other fields that it was concluded from; `absent`: what it names is not
    installed here."""

    at: Where
    message: str
    reads: tuple[Where, ...] = ()
    nearest: str | None = None
    absent: bool = False


def mistakes(spec: RunSpec) -> Iterator[Mistake]:
    """Yields every mistake of every rule; with several providers what one of them would make a mistake is one. Of `any`
    those are left out for which the run file has mistakes, if there are others."""
    yield from (of_all := [*_providers(spec)])
    found = [[mistake for rule in RULES for mistake in rule(spec.of(name))] for name in spec.candidates]
    if ANY in spec.providers:
        found = [min(found, key=len)]
    told = {mistake.at for mistake in of_all}
    for each in found:
        yield from (mistake for mistake in each if mistake.at not in told)
        told |= {mistake.at for mistake in each}


def _one_program(spec: RunSpec) -> Iterator[Mistake]:
    if spec.train is None and spec.command is None:
        yield Mistake(("train",), "needed: `train` (the bundled trainer), or `command` (your program)", (("command",),))
    if spec.train is not None and spec.command is not None:
        yield Mistake(("command",), "either `train` or `command` is given, not both", (("train",),))


def _providers(spec: RunSpec) -> Iterator[Mistake]:
    """Their names, and what is not of one of them alone."""
    several = len(spec.providers) > 1
    for index, name in enumerate(spec.providers):
        at = ("provider", index) if several else ("provider",)
        if name == ANY and several:
            yield Mistake(at, f"`{ANY}` stands alone: it is all of them")
        elif name != ANY and name not in installed().found:
            why, nearest = installed().complaint(name)
            yield Mistake(at, why, (), nearest, absent=True)
    for name, times in Counter(spec.providers).items():
        if times > 1:
            yield Mistake(("provider",), f"`{name}` is given {times} times")
    if all(name in installed().found for name in spec.candidates):
        for other in installed().names:
            if other not in spec.candidates and getattr(spec, other) is not None:
                names = ", ".join(spec.candidates)
                yield Mistake((other,), f"settings of another provider: `provider` is {names}", (("provider",),))
    if len(spec.candidates) > 1 and spec.image is not None and spec.image.builds and spec.image.repository is None:
        message = "is needed with several providers, of which each would have another one: registry/name"
        yield Mistake(("image", "repository"), message, (("provider",), ("image", "reference")))


def _options(spec: RunSpec) -> Iterator[Mistake]:
    seller = installed().found.get(spec.provider)
    options = spec.options or (seller.options() if seller else None)  # without a block it is one of defaults
    for key, wrong in options.contradicts(spec) if options else ():
        yield Mistake((key,), wrong, ((spec.provider,),))


def _sinks(spec: RunSpec) -> Iterator[Mistake]:
    for name, sink in sinks.installed().found.items():
        block = getattr(spec.sinks, name)
        for key, wrong in sink.mistakes(block) if block is not None else ():
            yield Mistake(("sinks", name, key), wrong)


def _processes(spec: RunSpec) -> Iterator[Mistake]:
    if spec.gpus_per_node and spec.processes_per_node is not None:
        message = "either `gpus_per_node` (one process each) or `processes_per_node` is given, not both"
        yield Mistake(("processes_per_node",), message, (("gpus_per_node",),))
    if spec.gpu and not spec.gpus_per_node:
        message = "`gpus_per_node` is needed with it: how many of these a machine has"
        yield Mistake(("gpu",), message, (("gpus_per_node",),))


def _times(spec: RunSpec) -> Iterator[Mistake]:
    """What is longer than any machine lives is a slip; a run that has begun with one goes on."""
    given: dict[Where, float | None] = {
        ("lease_minutes",): spec.lease_minutes,
        ("recovery", "wait_minutes"): spec.recovery.wait_minutes,
        **{("timeouts", key): getattr(spec.timeouts, key) for key in PhaseTimeouts.model_fields},
    }
    for at, minutes in given.items():
        if minutes is not None and minutes > MOST_HOURS * 60:
            yield Mistake(at, f"must be at most {MOST_HOURS * 60}, not {minutes:g}")


def _share(spec: RunSpec) -> Iterator[Mistake]:
    if spec.share and spec.image is not None:
        yield Mistake(
            ("share",), "is for runs without `image`: a node has one run's container at a time", (("image",),)
        )
    if spec.share and "CUDA_VISIBLE_DEVICES" in spec.env:
        message = "says which GPUs the run has, and with `share` mgpu does"
        yield Mistake(("env", "CUDA_VISIBLE_DEVICES"), message, (("share",),))


def _code(spec: RunSpec) -> Iterator[Mistake]:
    if spec.code is not None and not spec.own_code:
        yield Mistake(
            ("code",), "is for `command`, or a task or strategy that is not mgpu's", (("train",), ("train", "task"))
        )
    if spec.code is None:
        return
    for key, value in (("workdir", spec.code.workdir), ("requirements", spec.code.requirements)):
        if value is not None and value.startswith(("/", "~")):
            yield Mistake(("code", key), "is relative: to the run file's folder, or to workdir for requirements")
    if spec.code.requirements and ".." in PurePosixPath(spec.code.requirements).parts:
        yield Mistake(("code", "requirements"), "is a file inside `code.workdir`: no `..`")


def _image(spec: RunSpec) -> Iterator[Mistake]:
    image = spec.image
    if spec.code and spec.code.mode == "image" and (image is None or image.context is None):
        message = "with `image` the code is part of the image: that needs `image.context`, a folder of yours whose "
        message += "Dockerfile copies the code into its last WORKDIR"
        message += ", in place of `image.reference`" if image and image.reference else ""
        yield Mistake(("code", "mode"), message, (("image",), ("image", "reference"), ("image", "context")))
    if image is None:
        if starts_from_image(spec.provider):
            message = f"needed: machines of {spec.provider} are containers of an image"
            yield Mistake(("image",), message, (("provider",),))
        return
    seller = installed().found.get(spec.provider)
    if seller is not None and seller.capabilities.platform not in ("", image.platform):
        message = f"machines of {spec.provider} are {seller.capabilities.platform}"
        yield Mistake(("image", "platform"), message, (("provider",),))
    if image.builds:
        yield from _build(spec, image)
        return
    for key in (key for key in ImageSpec.model_fields if key not in _OF_ANY and key in image.model_fields_set):
        message = "is for building, and `reference` names an image that exists"
        yield Mistake(("image", key), message, (("image", "reference"),))


def _build(spec: RunSpec, image: ImageSpec) -> Iterator[Mistake]:
    seller = installed().found.get(spec.provider)
    if image.repository is None and seller is not None and not seller.capabilities.image_repository:
        message = f"is needed with provider {spec.provider}, which has no registry: registry/name"
        yield Mistake(("image", "repository"), message, (("provider",), ("image", "reference")))
    if image.context is None and "dockerfile" in image.model_fields_set:
        message = "goes with a `context` of your own"
        yield Mistake(("image", "dockerfile"), message, (("image", "context"), ("image", "reference")))
    if image.context is not None and image.context.startswith(("/", "~")):
        yield Mistake(("image", "context"), "is relative to the run file's folder")
    if image.dockerfile.startswith(("/", "~")) or ".." in PurePosixPath(image.dockerfile).parts:
        yield Mistake(("image", "dockerfile"), "is a file inside `image.context`: relative, and no `..`")
    if image.ca_file is not None and image.ca_file.startswith("~"):
        yield Mistake(("image", "ca_file"), "no `~`: absolute, or relative to the run file's folder")
    for index, name in enumerate(image.secrets):
        if name in image.args:
            message = f"`{name}` is in `image.args` too: a secret's value never stands in the run file"
            yield Mistake(("image", "secrets", index), message, (("image", "args"),))


def _training(spec: RunSpec) -> Iterator[Mistake]:
    if spec.train is None:
        return
    sizes: tuple[Where, ...] = (("nodes",), ("gpus_per_node",), ("processes_per_node",))
    train, world = spec.train, spec.world_size
    parts = Sizes.of(train, world, spec.nodes)
    launcher = launchers.installed().found.get(spec.launcher)
    if launcher is not None and not launcher.trainer:
        message = f"{spec.launcher} is for a `command`; the trainer is started by torchrun"
        yield Mistake(("launcher",), message, (("train",),))
    elif launcher is not None and launcher.one_process and world > 1:
        message = f"{spec.launcher} starts one process, and {world} are asked for: use torchrun"
        yield Mistake(("launcher",), message, sizes)
    strategy = strategies.installed().found.get(spec.train.strategy)
    if strategy is None:
        why, nearest = strategies.installed().complaint(spec.train.strategy)
        yield Mistake(("train", "strategy"), why, (), nearest, absent=True)
    elif why := parts.refuse() or strategy.refuse(parts):
        yield Mistake(("train", "strategy"), why, sizes)
    elif why := Slices(train.global_batch, train.micro_batch, 0, parts.data).refuse(parts.pipeline):
        yield Mistake(("train", "global_batch"), why, sizes)


def _precision(spec: RunSpec) -> Iterator[Mistake]:
    if spec.train is None or spec.train.precision != "fp8":
        return
    if not spec.gpus_per_node:
        message = "fp8 is computed by GPUs: say `gpus_per_node`, or take bf16"
        yield Mistake(("train", "precision"), message, (("gpus_per_node",),))
    for index, name in enumerate(spec.gpu):
        if 0 < (found := capability_of(name)) < FP8_CAPABILITY:
            message = f"{name} has compute capability {found:.1f}, and `precision: fp8` takes {FP8_CAPABILITY:.1f}"
            yield Mistake(("gpu", index), message, (("train", "precision"),))


def _trials(spec: RunSpec) -> Iterator[Mistake]:
    if spec.trials is None:
        return
    if spec.train is None:
        yield Mistake(("trials",), "are of `train`, the bundled trainer", (("train",), ("command",)))
        return
    if spec.checkpoint != "none":
        yield Mistake(("checkpoint",), "trials keep none: `checkpoint: none`", (("trials",),))
    given = spec.train.model_dump(exclude_unset=True)
    for index, trial in enumerate(spec.trials.tries):
        at: Where = ("trials", "tries", index)
        if (trial.nodes or 1) > spec.nodes or (trial.processes_per_node or 1) > spec.processes:
            yield Mistake(at, f"the run has {spec.nodes} nodes of {spec.processes} processes", (("nodes",),))
        try:
            TrainConfig.model_validate({**given, **trial.train})
        except ValidationError as error:
            if not trial.refused:
                yield Mistake((*at, "train"), error.errors(include_url=False)[0]["msg"], (("train",),))


def _task(spec: RunSpec) -> Iterator[Mistake]:
    if spec.train is None:
        return
    task, options = spec.train.task, spec.train.options
    entry = tasks.installed().found.get(task)
    if entry is not None:
        yield from _parted(spec.train, entry)
    if ":" not in task and task not in tasks.installed().found:
        why, nearest = tasks.installed().complaint(task)
        message = f"{why}; a class of yours is package.module:Class"
        yield Mistake(("train", "task"), message, (), nearest, absent=True)
    for key in LmOptions.model_fields:
        if key in spec.train.model_fields_set and task != "lm":
            message = f"is an option of task lm; those of {task} stand in `train.options`"
            yield Mistake(("train", key), message, (("train", "task"),))
        elif key in spec.train.model_fields_set and key in options:
            yield Mistake(("train", key), "`train.options` says it, too", (("train", "options"),))


def _parted(train: TrainConfig, entry: TaskEntry) -> Iterator[Mistake]:
    try:
        given = entry.options.model_validate(train.task_options)
    except ValidationError:  # told of elsewhere, with line and field
        return
    if why := entry.refuse(given, train.tensor_parallel, train.pipeline_parallel):
        at = "tensor_parallel" if entry.refuse(given, train.tensor_parallel, 1) else "pipeline_parallel"
        yield Mistake(("train", at), why, (("train", "model"), ("train", "options")))
    if train.context_parallel > 1 and (why := entry.refuse_context(given, train.context_parallel)):
        yield Mistake(("train", "context_parallel"), why, (("train", "seq_len"), ("train", "options")))


def _variables(spec: RunSpec) -> Iterator[Mistake]:
    launcher = launchers.installed().found.get(spec.launcher)
    reserved = _RESERVED | set(launcher.environment if launcher else ())
    for at, name in [*((("env", n), n) for n in spec.env), *((("secrets", i), n) for i, n in enumerate(spec.secrets))]:
        if name in reserved or name.startswith(_RESERVED_PREFIXES):
            yield Mistake(at, f"`{name}` is reserved: mgpu and its launchers set it themselves")
    for index, name in enumerate(spec.secrets):
        if name in spec.env:
            yield Mistake(
                ("secrets", index), f"`{name}` is in `env` too: a secret's value never stands in the run file"
            )


def _launcher(spec: RunSpec) -> Iterator[Mistake]:
    if spec.launcher not in launchers.installed().found:
        why, nearest = launchers.installed().complaint(spec.launcher)
        yield Mistake(("launcher",), why, (), nearest, absent=True)
    elif launchers.installed().found[spec.launcher].one_node and spec.nodes > 1:
        message = f"{spec.launcher} starts the processes of one node, and {spec.nodes} nodes are asked for"
        yield Mistake(("launcher",), message, (("nodes",),))


def _command(spec: RunSpec) -> Iterator[Mistake]:
    if not spec.command:
        return
    if wrong := command.wrong(spec.command, spec.launcher, shell=spec.shell):
        yield Mistake(("command", 0), wrong, (("launcher",),))


def _repeats(spec: RunSpec) -> Iterator[Mistake]:
    lists: list[tuple[Where, tuple[str, ...]]]
    lists = [(("gpu",), spec.gpu), (("regions",), spec.regions), (("secrets",), spec.secrets)]
    lists.append((("outputs",), spec.outputs))
    if spec.image:
        lists.append((("image", "secrets"), spec.image.secrets))
    for at, values in lists:
        for value, count in Counter(values).items():
            if count > 1:
                yield Mistake(at, f"`{value}` is given {count} times")


def _checkpoint(spec: RunSpec) -> Iterator[Mistake]:
    if not isinstance(spec.checkpoint, Checkpoint):
        return
    to = spec.checkpoint.to
    if to is None and spec.on_this_machine is False:
        message = f"is needed with provider {spec.provider}: s3://bucket/prefix, or `checkpoint: none`"
        yield Mistake(("checkpoint", "to"), message, (("provider",),))
    if to is not None:
        yield from _url(spec, ("checkpoint", "to"), to)
    name = spec.train.strategy if spec.train else ""
    strategy = strategies.installed().found.get(name) if name else None
    if spec.train is not None and spec.train.pipeline_parallel > 1 and spec.checkpoint.writers == "rank0":
        message = "rank 0 has one stage of the pipeline alone: each node has to write its own part (`writers: all`)"
        yield Mistake(("checkpoint", "writers"), message, (("train", "pipeline_parallel"),))
    if spec.checkpoint.writers == "rank0" and strategy is not None and strategy.sharded and spec.nodes > 1:
        message = f"rank0 would lose the other nodes' shards with strategy {name}: use all"
        yield Mistake(("checkpoint", "writers"), message, (("train", "strategy"), ("nodes",)))
    if spec.train is not None and spec.checkpoint.keep_best is not None:
        yield from _best(spec.train, spec.checkpoint)


def _directions(spec: RunSpec) -> Iterator[Mistake]:
    """The default is that less is better, which would keep the worst, and end what gets better."""
    kept, ended = spec.checkpoint, spec.train and spec.train.early_stopping
    if isinstance(kept, Checkpoint) and kept.keep_best is not None and "best_mode" not in kept.model_fields_set:
        yield from _direction(("checkpoint", "best_mode"), kept.best_metric, ("checkpoint", "best_metric"))
    if ended and "mode" not in ended.model_fields_set:
        at = "train", "early_stopping"
        yield from _direction((*at, "mode"), ended.metric, (*at, "metric"))


def _direction(at: Where, metric: str, named: Where) -> Iterator[Mistake]:
    if by_name(metric) == "higher":
        message = f"is needed: by its name more of `{metric}` is better (max), and min is the default"
        yield Mistake(at, message, (named,))


def _best(train: TrainConfig, kept: Checkpoint) -> Iterator[Mistake]:
    """What checkpoints of the bundled trainer can be compared by."""
    metric = kept.best_metric
    if metric == "loss":
        return
    if not metric.startswith("validation_"):
        message = "a checkpoint of `train` has `loss`, and `validation_...` where its step was validated"
        yield Mistake(("checkpoint", "best_metric"), message, (("train",),), f"validation_{metric}")
        return
    every = kept.every_steps or (None if kept.every_minutes else DEFAULT_EVERY_STEPS)
    # a short trial of a file that is right has no such checkpoint either, and is as right
    if every is None or (every % train.validate_every and math.lcm(every, train.validate_every) >= train.steps):
        message = (
            f"no checkpoint before the last one is sure to have `{metric}`, which comes of a validation: make "
            f"`checkpoint.every_steps` a multiple of `train.validate_every` ({train.validate_every})"
        )
        reads = (("checkpoint", "every_steps"), ("train", "validate_every"), ("train", "steps"))
        yield Mistake(("checkpoint", "keep_best"), message, reads)


def _url(spec: RunSpec, at: Where, url: str) -> Iterator[Mistake]:
    if ".." in url.split("/"):
        yield Mistake(at, "no `..` in an address")
    if url.startswith("file:") and spec.shares_files is False:
        message = f"machines of provider {spec.provider} do not see this machine's files: use s3://"
        yield Mistake(at, message, (("provider",), (spec.provider,)))


def _data(spec: RunSpec) -> Iterator[Mistake]:
    for index, item in enumerate(spec.data):
        yield from _url(spec, ("data", index, "from"), item.source)
        at, to = ("data", index, "to"), PurePosixPath(item.to)
        if ".." in to.parts or item.to.startswith("~"):
            yield Mistake(at, "no `..` or `~` in a folder on the node")
        elif to.is_absolute() and spec.on_this_machine:
            message = f"is relative with provider {spec.provider}: all nodes share this machine's file system"
            yield Mistake(at, message, (("provider",),))
        elif not to.is_absolute() and spec.code is not None and spec.code.mode == "image":
            message = "is absolute with `code.mode: image`: nothing is written to the image"
            yield Mistake(at, message, (("code", "mode"),))


def _setup(spec: RunSpec) -> Iterator[Mistake]:
    if spec.setup and not spec.own_code:
        yield Mistake(
            ("setup",), "is for `command`, or a task or strategy that is not mgpu's", (("train",), ("train", "task"))
        )
    for index, line in enumerate(spec.setup):
        if not line.strip():
            yield Mistake(("setup", index), "is empty")


def _outputs(spec: RunSpec) -> Iterator[Mistake]:
    if spec.outputs and spec.command is None and spec.trials is None:
        reads: tuple[Where, ...] = (("train",), ("command",))
        yield Mistake(("outputs",), "are files that a `command` writes; `train` has checkpoints", reads)
    for index, name in enumerate(spec.outputs):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or name.startswith("~"):
            yield Mistake(("outputs", index), "is not below the folder of the code: paths are relative to it")


def _expect(spec: RunSpec) -> Iterator[Mistake]:
    name = spec.train.task if spec.train else ""
    task = tasks.installed().found.get(name)
    told = task.metrics if task else ()
    if spec.train and spec.train.ema is not None:  # each validation is made of the mean parameters, too
        names = (metric.partition("validation_") for metric in told if metric.startswith("validation_"))
        told = (*told, *(f"validation_ema_{value}" for _, _, value in names if value != "step"))
    for metric, each in spec.expect.items():
        at: Where = ("expect", metric)
        if told and metric not in (*told, *OF_THE_RUN):
            near = get_close_matches(metric, (*told, *OF_THE_RUN), 1)
            message = f"task {name} reports no such metric; there are {', '.join(told)}"
            yield Mistake(at, message, (("train", "task"),), near[0] if near else None)
        if each.max is None and each.min is None and each.median_of is None:
            reads = ((*at, "max"), (*at, "min"), (*at, "median_of"))
            yield Mistake(at, "says nothing: `max`, `min` or `median_of` is needed", reads)
        if each.max is not None and each.min is not None and each.max < each.min:
            yield Mistake((*at, "max"), f"{each.max:g} is less than `min`, {each.min:g}", ((*at, "min"),))
        if each.median_of is None:
            for key in ("tolerance_percent", "better"):
                if getattr(each, key) is not None:
                    yield Mistake((*at, key), "is for `median_of`: how many earlier runs", ((*at, "median_of"),))
            continue
        if each.tolerance_percent is None:
            message = "`tolerance_percent` is needed with it: by how much it may be worse than the median"
            yield Mistake((*at, "median_of"), message, ((*at, "tolerance_percent"),))
        if each.direction(metric) is None:
            message = f"`better: lower` or `better: higher` is needed with it: the name {metric} does not say it"
            yield Mistake((*at, "median_of"), message, ((*at, "better"),))


def _names_of_files(spec: RunSpec) -> Iterator[Mistake]:
    option = (("command", 0), "-c" if spec.shell else "-m")  # what comes next is no file
    for at, name in _files(spec):
        if (wrong := no_name(name)) and (at, name) != option:
            yield Mistake(at, wrong)


def _files(spec: RunSpec) -> Iterator[tuple[Where, str]]:
    if spec.command:
        yield ("command", 0), spec.command[0]
    if spec.code:
        yield ("code", "workdir"), spec.code.workdir
    if spec.code and spec.code.requirements is not None:
        yield ("code", "requirements"), spec.code.requirements
    for key in ("text", "tokens") if spec.train else ():
        if (name := getattr(spec.train, key)) is not None:
            yield ("train", key), name
    for index, item in enumerate(spec.data):
        yield ("data", index, "to"), item.to
    for index, name in enumerate(spec.outputs):
        yield ("outputs", index), name
    for key in ("context", "dockerfile", "ca_file") if spec.image else ():
        if (name := getattr(spec.image, key)) is not None:
            yield ("image", key), name


RULES: tuple[Callable[[RunSpec], Iterator[Mistake]], ...] = (
    _one_program,
    _options,
    _sinks,
    _processes,
    _times,
    _share,
    _code,
    _image,
    _training,
    _precision,
    _trials,
    _task,
    _variables,
    _launcher,
    _command,
    _repeats,
    _checkpoint,
    _directions,
    _data,
    _setup,
    _outputs,
    _expect,
    _names_of_files,
)
