"""Task lm trained by a loop as one writes it by hand: `python -m bench.train_plain '{"steps": 40}'`, also by torchrun.

It reads what `train:` says of model, data, AdamW, clipping and the learning rate, and does nothing else: it saves
nothing, validates nothing and hears no signal. The bundled trainer is measured against it, and has its losses.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from mgpu_train.config import LmOptions, TrainConfig
from mgpu_train.data.order import Order
from mgpu_train.models.gpt import GPT
from mgpu_train.optim.schedule import learning_rate
from mgpu_train.tasks.lm import LM, Sequences
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

CPU = torch.device("cpu")


class Text:
    """What a step is trained on: tokens, int64, shape (sequences of this rank, seq_len + 1)."""

    def __init__(self, data: Sequences, config: TrainConfig, rank: int, world: int) -> None:
        self.data, self.order = data, Order(len(data), config.seed)
        self.batch, self.local, self.rank = config.global_batch, config.global_batch // world, rank

    def of(self, step: int) -> Tensor:
        first = (step - 1) * self.batch + self.rank * self.local
        samples = [self.order[position] for position in range(first, first + self.local)]
        return self.data.batch(samples, samples)["tokens"]


def make(config: TrainConfig, rank: int, world: int, device: torch.device = CPU) -> tuple[GPT, torch.optim.AdamW, Text]:
    """The model with its first values on this device, its optimizer, and the text."""
    torch.set_num_threads(config.threads or torch.get_num_threads())
    task = LM(LmOptions.model_validate(config.task_options))
    model = task.model()
    torch.manual_seed(config.seed)
    task.initialise(model)
    model.to(device)
    matrices = {"params": [each for each in model.parameters() if each.ndim >= 2], "weight_decay": config.weight_decay}
    gains = {"params": [each for each in model.parameters() if each.ndim < 2], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([matrices, gains], lr=config.lr, betas=(0.9, 0.95), fused=True)
    data = task.data("train")
    assert isinstance(data, Sequences)  # noqa: S101 - task lm's
    return model, optimizer, Text(data, config, rank, world)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of every next byte, in nat."""
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def main() -> None:
    """Prints when each step was over, in UNIX seconds, and its loss on this rank."""
    config = TrainConfig.model_validate_json(sys.argv[1])
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        distributed.init_process_group("gloo")
    model, optimizer, text = make(config, rank, world)
    trained = DistributedDataParallel(model) if world > 1 else model
    times, losses = [], []
    for step in range(1, config.steps + 1):
        tokens = text.of(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16"):
            loss = loss_of(trained, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(trained.parameters(), config.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.time())
    print(json.dumps({"times": times, "losses": losses}), flush=True)
    os._exit(0)  # gloo's threads may abort a process that tears itself down


if __name__ == "__main__":
    main()
