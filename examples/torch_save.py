"""One process, plain PyTorch, `torch.save`. What a program owes mgpu are three habits, marked (1) to (3) below.

It runs without mgpu as well: `python torch_save.py` saves nothing and trains to the end.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import nn

CHECKPOINTS = os.environ.get("MGPU_CHECKPOINT_DIR")  # where `step-<n>` folders go
RESUME = os.environ.get("MGPU_RESUME_DIR")  # a checkpoint of ours that mgpu has fetched and verified


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Depends on the step alone: a resumed run sees what the other one would have seen."""
    x = torch.rand(128, 2, generator=torch.Generator().manual_seed(step)) * 2 - 1
    return x, torch.sin(3 * x[:, :1]) * torch.cos(3 * x[:, 1:])


def save(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if CHECKPOINTS is None or (final := Path(CHECKPOINTS, f"step-{step}")).exists():
        return
    # (1) Write into a folder beside the final one, then rename it: a folder with that name is whole.
    aside = final.with_name(f".tmp-step-{step}")
    aside.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, aside / "state.pt")  # with dropout and the like: torch.get_rng_state() as well
    aside.rename(final)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    every = int(os.environ.get("MGPU_CHECKPOINT_EVERY_STEPS", "100"))  # checkpoint.every_steps of the run file
    parser.add_argument("--save-every", type=int, default=every)
    options = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    # (2) Go on from the checkpoint that mgpu gives, if it gives one.
    first = 0
    if RESUME is not None:
        state = torch.load(Path(RESUME, "state.pt"), map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        print(f"goes on from step {first}", flush=True)

    # (3) SIGTERM means: the machine is about to go, or somebody has said stop. Save after this step, then leave.
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))

    for step in range(first + 1, options.steps + 1):
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stop = bool(asked)
        if stop or step % options.save_every == 0 or step == options.steps:
            save(step, model, optimizer)
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
        if stop:
            break


if __name__ == "__main__":
    main()
