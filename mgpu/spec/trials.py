"""What `--smoke`, `--tune` and `--lr-range` make of a run file: short trainings in the place of the whole one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import yaml
from mgpu_train.config import MOST_TRIES, TrainConfig, Trial, Trials
from mgpu_train.data.order import Slices
from mgpu_train.names import TRIALS
from mgpu_train.strategies import entry as strategies
from mgpu_train.strategies.entry import Sizes
from pydantic import ValidationError

from mgpu.errors import InputError
from mgpu.spec.load import loads
from mgpu.spec.model import Recovery, RunSpec
from mgpu.spec.rules import mistakes
from mgpu.spec.text.wording import where
from mgpu.words import count

SMOKE_STEPS = 5
TUNE_STEPS = 8
RANGE_STEPS = 100
RANGE = 1e-6, 1.0  # rates that no loss falls with yet, and that most models diverge with
# what changes how fast a model learns its samples, and not which samples, or by which rule
TUNABLE = (
    *("micro_batch", "activation_checkpointing", "compile", "strategy", "tensor_parallel", "pipeline_parallel"),
    *("context_parallel", "replicas", "zero_stage", "precision", "threads", "loader_threads"),
)


def smoke(spec: RunSpec) -> RunSpec:
    """A few steps with one process, then one node, then all; what is the same is tried once."""
    _require_train(spec, "--smoke")
    sizes = dict.fromkeys(((1, 1), (1, spec.processes), (spec.nodes, spec.processes)))
    tries = tuple(_stage(spec, nodes, processes) for nodes, processes in sizes)
    return _instead(spec, Trials(purpose="smoke", steps=SMOKE_STEPS, tries=tries))


def tune(spec: RunSpec) -> RunSpec:
    """Every combination of the values that the run file's `matrix` has, or of what may be faster on these machines.
    One that cannot be is a row of its own.

    Raises InputError: the matrix is of something else.
    """
    train = _require_train(spec, "--tune")
    axes: dict[str, tuple[Any, ...]] = {key.removeprefix("train."): values for key, values in spec.matrix.items()}
    if wrong := [key for key in spec.matrix if key.removeprefix("train.") not in TUNABLE or "." not in key]:
        known = ", ".join(f"`train.{key}`" for key in TUNABLE)
        why = f"`--tune` tries what changes the speed alone: {known}."
        raise InputError(
            f"matrix: `{wrong[0]}` cannot be tuned", why, "Leave it out; `mgpu submit` makes a sweep of it."
        )
    if (number := prod(map(len, axes.values()))) > MOST_TRIES:
        why = f"Each combination of the values of `matrix` is one; there are {MOST_TRIES} at most."
        raise InputError(f"matrix: it makes {number} trials", why, "Leave values out.")
    axes = axes or _worth_trying(spec, train)
    combinations = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    tries = tuple(Trial(name=words(each), train=each, refused=_refused(spec, train, each)) for each in combinations)
    return _instead(spec, Trials(purpose="tune", steps=TUNE_STEPS, tries=tries))


def lr_range(spec: RunSpec) -> RunSpec:
    """One training whose rate grows from `train.lr_from` to `train.lr`; without that key over all that may be one."""
    train = _require_train(spec, "--lr-range")
    low, high = RANGE if train.lr_from is None else (train.lr_from, train.lr)
    tried = Trial(name=f"lr: {low:g} to {high:g}", train={"lr_from": low, "lr": high})
    return _instead(spec, Trials(purpose="lr-range", steps=RANGE_STEPS, tries=(tried,)))


def words(changes: dict[str, Any]) -> str:
    """Changes of `train`, as a run file has them."""
    shown = {key: str(value).lower() if isinstance(value, bool) else value for key, value in changes.items()}
    return ", ".join(f"{key}: {value}" for key, value in shown.items())


def write(run_file: Path, changes: dict[str, Any]) -> None:
    """Changes keys of `train` in a run file; all else in it stays as it is written.

    Raises InputError: it is written in a way in which that cannot be done.
    """
    try:
        text = run_file.read_bytes().decode()  # with its line ends as they are
        before, after = loads(text, str(run_file)), _changed(text, changes)
        assert before.train is not None  # noqa: S101 - it was tried
        wanted = TrainConfig.model_validate({**before.train.model_dump(exclude_unset=True), **changes})
        if loads(after, str(run_file)) == before.model_copy(update={"train": wanted}):
            aside = run_file.with_name(f".{run_file.name}")
            aside.write_bytes(after.encode())
            aside.replace(run_file)
            return
        why = "Its `train` block is written in an unusual way."
    except (OSError, UnicodeDecodeError, InputError, LookupError) as error:
        why = str(error)
    raise InputError(f"{run_file} cannot be changed", why, f"Write it yourself: `train: {{{words(changes)}}}`.")


def _changed(text: str, changes: dict[str, Any]) -> str:
    """A run file's text with these keys of its `train`, where they stand, or first in it."""
    root: Any = yaml.compose(text, yaml.SafeLoader)
    train = next(value for key, value in root.value if key.value == "train")
    there = {key.value: value for key, value in train.value}
    first = train.value[0][0].start_mark
    edits = list[tuple[int, int, str]]()
    for key, value in reversed(changes.items()):  # those that are new come before each other
        if (old := there.get(key)) is not None:
            edits.append((old.start_mark.index, old.end_mark.index, words({"": value})[2:]))
        else:
            end = ", " if train.flow_style else ("\r\n" if "\r\n" in text else "\n") + " " * first.column
            edits.append((first.index, first.index, f"{words({key: value})}{end}"))
    for begin, end, new in sorted(edits, key=lambda edit: edit[0], reverse=True):
        text = text[:begin] + new + text[end:]
    return text


def _require_train(spec: RunSpec, option: str) -> TrainConfig:
    if spec.train is not None:
        return spec.train
    why = "Only the bundled trainer can be told to make a few steps and end."
    raise InputError(
        f"{option} is for `train`, and the run file has a `command`", why, "Run it as it is, for a short time."
    )


def _instead(spec: RunSpec, trials: Trials) -> RunSpec:
    """Its machines and data, but the trials alone. The name differs: a run is compared with earlier ones of its own."""
    changes = {
        "name": f"{spec.name[: 39 - len(trials.purpose)].rstrip('-')}-{trials.purpose}",
        "trials": trials,
        "matrix": {},
        "checkpoint": "none",
        "outputs": (TRIALS,),
        "recovery": Recovery(wait_minutes=spec.recovery.wait_minutes),  # type: ignore[call-arg]
        "expect": {},
        "share": False,
    }
    return spec.model_copy(update=changes)


def _worth_trying(spec: RunSpec, train: TrainConfig) -> dict[str, tuple[Any, ...]]:
    """Twice as much accumulation, activations that are computed again, another strategy; compiling beside a GPU alone:
    on a CPU that takes longer than it is worth in a trial."""
    size = Slices(train.global_batch, train.micro_batch, 0, Sizes.of(train, spec.world_size, spec.nodes).data).size
    others = ("ddp", "fsdp") if spec.world_size > 1 else ()
    return {
        "strategy": tuple(dict.fromkeys((train.strategy, *others))),
        "micro_batch": tuple(dict.fromkeys((size, -(-size // 2)))),
        "activation_checkpointing": tuple(dict.fromkeys((train.activation_checkpointing, "none", "full")))[:2],
        **({"compile": (False, True)} if spec.gpus_per_node else {}),
    }


def _refused(spec: RunSpec, train: TrainConfig, changes: dict[str, Any]) -> str:
    """Why it cannot be, where that is known without a machine; "": it can."""
    try:
        changed = TrainConfig.model_validate({**train.model_dump(exclude_unset=True), **changes})
    except ValidationError as error:
        each = error.errors(include_url=False)[0]
        at = where({**each, "loc": ("train", *each["loc"])})[1:]
        return f"{'.'.join(map(str, at))}: {each['msg']}"
    found = next(mistakes(spec.model_copy(update={"train": changed, "matrix": {}})), None)
    return f"{'.'.join(map(str, found.at))}: {found.message}" if found else ""


def _stage(spec: RunSpec, nodes: int, processes: int) -> Trial:
    """With so many nodes and processes of each. A rank has as much to do as it has in the whole run, as far as that
    can be parted so; where it cannot, the parts that do not fit are left out."""
    assert spec.train is not None  # noqa: S101 - `smoke` has looked
    where = "one node" if nodes == 1 else count(nodes, "node")
    name = "one process" if nodes * processes == 1 else f"{where}, {nodes * processes} processes"
    if (nodes, processes) == (spec.nodes, spec.processes):
        return Trial(name=name)
    whole = Sizes.of(spec.train, spec.world_size, spec.nodes)
    each = -(-spec.train.global_batch // whole.data)
    kind = strategies.installed().found[spec.train.strategy]
    changes, sizes = next(_simpler(spec.train, nodes, processes))
    less = kind.sharded or whole.data < whole.world_size
    train = {**changes, "global_batch": each * sizes.data}
    return Trial(name=name, nodes=nodes, processes_per_node=processes, train=train, may_lack_memory=less)


def _simpler(train: TrainConfig, nodes: int, processes: int) -> Iterator[tuple[dict[str, Any], Sizes]]:
    """Changes with which so few ranks can be asked, those that change least first; replicas suit any number."""
    whole = {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1}
    for changes in ({}, *({"strategy": each, **whole} for each in dict.fromkeys((train.strategy, "fsdp", "ddp")))):
        sizes = Sizes.of(train.model_copy(update=changes), nodes * processes, nodes)
        strategy = strategies.installed().found[changes.get("strategy", train.strategy)]
        if not (sizes.refuse() or strategy.refuse(sizes)):
            yield changes, sizes
