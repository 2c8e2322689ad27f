"""The loop of `bench.train_plain` as Accelerate's and Lightning Fabric's own pages write it.

`python -m bench.train_peers accelerate | fabric '{"steps": 40}'`: what `train:` says, and torchrun's variables.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

from mgpu_train.config import TrainConfig
from mgpu_train.optim.schedule import learning_rate
from torch import Tensor

from bench.train_plain import loss_of, make

Step = Callable[[int], Tensor]  # trains one, whose number it is given; returns its loss


def accelerate(config: TrainConfig, rank: int, world: int) -> Step:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if config.precision == "bf16" else "no")
    model, optimizer, text = make(config, rank, world)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(number: int) -> Tensor:
        with accelerator.autocast():
            loss = loss_of(model, text.of(number))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), config.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number, config)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def fabric(config: TrainConfig, rank: int, world: int) -> Step:
    """Lightning Fabric."""
    from lightning_fabric import Fabric

    runner = Fabric(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        precision="bf16-mixed" if config.precision == "bf16" else "32-true",
    )
    runner.launch()
    model, optimizer, text = make(config, rank, world)
    model, optimizer = runner.setup(model, optimizer)

    def step(number: int) -> Tensor:
        loss = loss_of(model, text.of(number))
        runner.backward(loss)
        runner.clip_gradients(model, optimizer, max_norm=config.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number, config)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


PEERS = {"accelerate": accelerate, "fabric": fabric}


def main() -> None:
    """Prints when each step was over, in UNIX seconds, and its loss on this rank."""
    config = TrainConfig.model_validate_json(sys.argv[2])
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    step = PEERS[sys.argv[1]](config, rank, world)
    times, losses = [], []
    for number in range(1, config.steps + 1):
        losses.append(step(number).item())
        times.append(time.time())
    print(json.dumps({"times": times, "losses": losses}), flush=True)
    os._exit(0)  # as the plain one


if __name__ == "__main__":
    main()
