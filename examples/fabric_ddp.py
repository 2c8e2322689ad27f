"""Lightning Fabric with several processes. What a program owes mgpu are three habits, marked (1) to (3) below.

It runs without mgpu as well: `python fabric_ddp.py` saves nothing and trains to the end.
"""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import nn

CHECKPOINTS = os.environ.get("MGPU_CHECKPOINT_DIR")  # where `step-<n>` folders go
RESUME = os.environ.get("MGPU_RESUME_DIR")  # a checkpoint of ours that mgpu has fetched and verified


def batch(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Depends on these numbers alone: a resumed run sees what the other one would have seen."""
    x = torch.rand(128, 2, generator=torch.Generator().manual_seed(step * world + rank)) * 2 - 1
    return x, torch.sin(3 * x[:, :1]) * torch.cos(3 * x[:, 1:])


def save(fabric: Fabric, state: dict[str, Any]) -> None:
    """All processes call it together; with DDP the first one writes, which is what `checkpoint.writers: rank0` says."""
    if CHECKPOINTS is None or (final := Path(CHECKPOINTS, f"step-{state['step']}")).exists():
        return
    # (1) Write into a folder beside the final one, then rename it: a folder with that name is whole.
    aside = final.with_name(f".tmp-step-{state['step']}")
    fabric.save(aside / "state.ckpt", state)
    if fabric.is_global_zero:
        aside.rename(final)
    fabric.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    every = int(os.environ.get("MGPU_CHECKPOINT_EVERY_STEPS", "100"))  # checkpoint.every_steps of the run file
    parser.add_argument("--save-every", type=int, default=every)
    options = parser.parse_args()

    # torchrun has started the processes: Fabric is only told how many there are
    processes, nodes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("MGPU_NODES", "1"))
    fabric = Fabric(devices=processes, num_nodes=nodes, strategy="ddp" if processes * nodes > 1 else "auto")
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}

    # (2) Go on from the checkpoint that mgpu gives, if it gives one.
    if RESUME is not None:
        fabric.load(Path(RESUME, "state.ckpt"), state)
        fabric.print(f"goes on from step {state['step']}", flush=True)

    # (3) SIGTERM means: the machine is about to go, or somebody has said stop. Save after this step, then leave.
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))

    while state["step"] < options.steps:
        state["step"] = step = state["step"] + 1
        x, y = batch(step, fabric.global_rank, fabric.world_size)
        loss = nn.functional.mse_loss(model(x.to(fabric.device)), y.to(fabric.device))
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        flag = torch.tensor(float(bool(asked)), device=fabric.device)
        stop = bool(fabric.all_reduce(flag, reduce_op="sum"))  # all processes leave at the same step
        if stop or step % options.save_every == 0 or step == options.steps:
            save(fabric, state)
            fabric.print(f"step {step}: loss {loss.item():.6f}", flush=True)
        if stop:
            break


if __name__ == "__main__":
    main()
