"""Tensor parallelism as Megatron-LM does it: each layer's matrices are shared out among all ranks.

The first matrix of a block is cut by columns and the second by rows, so that a block costs one sum over the ranks.
What a program owes mgpu are three habits, marked (1) to (3) below. It runs without mgpu as well: `python
tensor_parallel.py` saves nothing and trains to the end.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

CHECKPOINTS = os.environ.get("MGPU_CHECKPOINT_DIR")  # where `step-<n>` folders go
RESUME = os.environ.get("MGPU_RESUME_DIR")  # a checkpoint of ours that mgpu has fetched and verified
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # put together again: it can be read with fewer ranks


class Block(nn.Module):
    """A perceptron, added to the residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The same on all ranks, which share the layers and not the data; it depends on the step alone."""
    x = torch.rand(128, 2, generator=torch.Generator().manual_seed(step)) * 2 - 1
    return x, torch.sin(3 * x[:, :1]) * torch.cos(3 * x[:, 1:])


def save(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """All ranks call it together; the first one writes, which is what `checkpoint.writers: rank0` says."""
    if CHECKPOINTS is None or (final := Path(CHECKPOINTS, f"step-{step}")).exists():
        return
    weights, moments = get_state_dict(model, optimizer, options=WHOLE)
    if distributed.get_rank() == 0:
        # (1) Write into a folder beside the final one, then rename it: a folder with that name is whole.
        aside = final.with_name(f".tmp-step-{step}")
        aside.mkdir(parents=True, exist_ok=True)
        torch.save({"model": weights, "optimizer": moments, "step": step}, aside / "state.pt")
        aside.rename(final)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    every = int(os.environ.get("MGPU_CHECKPOINT_EVERY_STEPS", "100"))  # checkpoint.every_steps of the run file
    parser.add_argument("--save-every", type=int, default=every)
    options = parser.parse_args()

    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update({name: os.environ.get(name, value) for name, value in alone.items()})
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), Block(64), Block(64), nn.Linear(64, 1)).to(kind)
    for block in (model[1], model[2]):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)  # some are shared out, others are not

    # (2) Go on from the checkpoint that mgpu gives, if it gives one.
    first, rank = 0, distributed.get_rank()
    if RESUME is not None:
        state = torch.load(Path(RESUME, "state.pt"), weights_only=True)
        weights, moments = state["model"], state["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=WHOLE)
        first = state["step"]
        if rank == 0:
            print(f"goes on from step {first}", flush=True)

    # (3) SIGTERM means: the machine is about to go, or somebody has said stop. Save after this step, then leave.
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))

    for step in range(first + 1, options.steps + 1):
        x, y = (each.to(kind) for each in batch(step))
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        flag = torch.tensor(float(bool(asked)), device=kind)
        distributed.all_reduce(flag)
        stop = bool(flag)  # of any rank: all leave at the same step
        if stop or step % options.save_every == 0 or step == options.steps:
            save(step, model, optimizer)
            if rank == 0:
                print(f"step {step}: loss {loss.item():.6f}", flush=True)
        if stop:
            break
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
