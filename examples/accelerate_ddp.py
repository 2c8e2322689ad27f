"""Hugging Face Accelerate on several nodes. What a program owes mgpu are three habits, marked (1) to (3) below.

It runs without mgpu as well: `python accelerate_ddp.py` saves nothing and trains to the end.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

CHECKPOINTS = os.environ.get("MGPU_CHECKPOINT_DIR")  # where `step-<n>` folders go
RESUME = os.environ.get("MGPU_RESUME_DIR")  # a checkpoint of ours, of all nodes, that mgpu has fetched and verified


class Progress:
    """What Accelerate does not know of: how far training is."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def batch(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Depends on these numbers alone: a resumed run sees what the other one would have seen."""
    x = torch.rand(128, 2, generator=torch.Generator().manual_seed(step * world + rank)) * 2 - 1
    return x, torch.sin(3 * x[:, :1]) * torch.cos(3 * x[:, 1:])


def save(accelerator: Accelerator, step: int) -> None:
    """All processes call it together: the first one writes the model, each one its random state."""
    if CHECKPOINTS is None or (final := Path(CHECKPOINTS, f"step-{step}")).exists():
        return
    # (1) Write into a folder beside the final one, then rename it: a folder with that name is whole. With
    # `checkpoint.writers: all` each node has a part, with the files of its own processes.
    aside = final.with_name(f".tmp-step-{step}")
    accelerator.save_state(str(aside))
    accelerator.wait_for_everyone()
    if accelerator.is_local_main_process:
        aside.rename(final)
    accelerator.wait_for_everyone()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    every = int(os.environ.get("MGPU_CHECKPOINT_EVERY_STEPS", "100"))  # checkpoint.every_steps of the run file
    parser.add_argument("--save-every", type=int, default=every)
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    # (2) Go on from the checkpoint that mgpu gives, if it gives one.
    if RESUME is not None:
        accelerator.load_state(RESUME)
        accelerator.print(f"goes on from step {progress.step}", flush=True)

    # (3) SIGTERM means: the machine is about to go, or somebody has said stop. Save after this step, then leave.
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))

    while progress.step < options.steps:
        progress.step = step = progress.step + 1
        x, y = batch(step, accelerator.process_index, accelerator.num_processes)
        loss = nn.functional.mse_loss(model(x.to(accelerator.device)), y.to(accelerator.device))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        flag = torch.tensor(float(bool(asked)), device=accelerator.device)
        stop = bool(accelerator.reduce(flag))  # the sum over all processes: they leave at the same step
        if stop or step % options.save_every == 0 or step == options.steps:
            save(accelerator, step)
            accelerator.print(f"step {step}: loss {loss.item():.6f}", flush=True)
        if stop:
            break
    accelerator.end_training()


if __name__ == "__main__":
    main()
