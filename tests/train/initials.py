"""What the tests of first values look at: models of several kinds, given values whole and shard by shard.

`initials.py OUT` writes what each rank found to OUT/RANK.json; `initials.py OUT PRESET` the memory that a model of this
size takes.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mgpu_train import parallel
from mgpu_train.config import LmOptions, ModelConfig, TrainConfig
from mgpu_train.errors import TrainError
from mgpu_train.health import hardware
from mgpu_train.strategies import initial
from mgpu_train.strategies.fsdp import Shards
from mgpu_train.strategies.precision import Policy
from mgpu_train.tasks.base import Layout, Task
from mgpu_train.tasks.lm import LM
from torch import nn
from torch.distributed.tensor import DTensor

SEED = 7


class Modules(Task):
    """Layers that torch brings, each with the values that torch gives it."""

    def __init__(self, *layers: Any) -> None:
        self.layers = layers

    def data(self, split):
        raise NotImplementedError

    def loss(self, model, batch):
        raise NotImplementedError

    def model(self) -> nn.Module:
        return nn.Sequential(*(make() for make in self.layers))

    def initialise(self, model: nn.Module) -> None:
        for layer in model:
            layer.reset_parameters()

    def layout(self, model: nn.Module) -> Layout:
        return Layout(blocks=("0",))


class Drawn(Modules):
    """In torch's ways to draw."""

    def initialise(self, model: nn.Module) -> None:
        for layer, draw in zip(
            model, (nn.init.trunc_normal_, nn.init.xavier_normal_, nn.init.kaiming_uniform_), strict=False
        ):
            draw(layer.weight)
            nn.init.normal_(layer.bias)
        with torch.no_grad():
            model[0].bias.exponential_().mul_(2).sub_(1)


class Tied(Modules):
    def model(self) -> nn.Module:
        model = super().model()
        model[2].weight = model[1].weight
        return model


class Scaled(Modules):
    """With what is no parameter."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("scale", torch.linspace(0, 1, 5))
        model.register_buffer("counts", torch.arange(4))
        model.register_buffer("seen", torch.ones(1, 4).expand(3, -1))
        return model

    def initialise(self, model: nn.Module) -> None:
        super().initialise(model)
        model.get_buffer("scale").copy_(torch.linspace(0, 1, 5))
        model.counts = torch.arange(4)
        model.get_buffer("seen").copy_(torch.ones(3, 4))


class Half(Modules):
    def initialise(self, model: nn.Module) -> None:
        model[0].reset_parameters()


class Orthogonal(Modules):
    def initialise(self, model: nn.Module) -> None:
        super().initialise(model)
        nn.init.orthogonal_(model[0].weight)


def linear(rows: int, columns: int) -> Any:
    return lambda: nn.Linear(columns, rows)


KINDS: dict[str, Any] = {
    "lm": lambda: LM(LmOptions(model=ModelConfig(layers=2, dim=24, heads=2), seq_len=8)),
    "uneven": lambda: Modules(linear(5, 3), linear(1, 5), linear(7, 1)),
    "chunks": lambda: Modules(linear(1049, 1003), linear(1024, 1025), linear(3, 7)),
    "drawn": lambda: Drawn(linear(33, 17), linear(9, 33), linear(40, 9)),
    "tied": lambda: Tied(linear(4, 6), linear(6, 6), linear(6, 6)),
    "scaled": lambda: Scaled(linear(4, 6), linear(3, 4)),
    "padded": lambda: Modules(lambda: nn.Embedding(10, 6, padding_idx=3), linear(3, 6)),
    "orthogonal": lambda: Orthogonal(linear(8, 8), linear(3, 8)),
    "half": lambda: Half(linear(8, 8), linear(3, 8)),
}


def compared(task: Task, place: parallel.Place) -> dict[str, Any]:
    """Names of what differs between the two ways, and whether generators stand at one place after them."""
    whole = dict(initial._values(initial.whole(task, SEED)))
    after = torch.get_rng_state()
    model, _ = initial.spread(Shards(place, Policy()), task, TrainConfig(seed=SEED))
    spread = dict(initial._values(model))
    sharded = [name for name, value in spread.items() if isinstance(value, DTensor)]
    gathered = {name: spread[name].full_tensor() if name in sharded else spread[name] for name in spread}
    return {
        "differ": [name for name in whole if not torch.equal(whole[name], gathered[name])],
        "sharded": sharded,
        "random": bool(torch.equal(after, torch.get_rng_state())),
    }


class Memory(NamedTuple):
    """Of one rank, in bytes: what it keeps of a model, and the most that it had more than before while giving it its
    values."""

    kept: int
    most: int


def memory(task: Task, place: parallel.Place) -> Memory:
    hardware.forget_most()
    before = hardware.resident_bytes()
    model, _ = initial.spread(Shards(place, Policy()), task, TrainConfig(seed=SEED))
    most = hardware.resident_bytes(most=True)
    return Memory(sum(initial._local(value).nbytes for _, value in initial._values(model)), most - before)


def kinds(place: parallel.Place) -> dict[str, Any]:
    """What each kind of model has come to, and the memory of one."""
    found, told = dict[str, Any](), list[str]()
    initial.log.warning = lambda text, *words: told.append(text % words)  # type: ignore[method-assign]
    for name, make in KINDS.items():
        told.clear()
        try:
            found[name] = compared(make(), place)
        except TrainError as error:
            found[name] = {"failed": str(error)}
        found[name]["told"] = list(told)
    return {**found, "memory": memory(Modules(*[linear(4096, 4096)] * 4), place)}


def main() -> None:
    place, out, *preset = parallel.join(240, 240), *sys.argv[1:]
    logging.getLogger("mgpu_train").addHandler(logging.Handler())
    if preset:
        small, large = (ModelConfig.model_validate(each) for each in ({"dim": 24, "heads": 2}, {"preset": preset[0]}))
        memory(LM(LmOptions(model=small, seq_len=8)), place)  # what is loaded once is no model's
        found: Any = memory(LM(LmOptions(model=large, seq_len=8)), place)
    else:
        found = kinds(place)
    Path(out, f"{place.rank}.json").write_text(json.dumps(found))
    parallel.leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    os._exit(0)
