"""What runs every night: a small model that learns to guess the next byte of a text. One process, plain PyTorch.

Beside the three habits of any program, marked (1) to (3), it says in (4) how far it is and how good: the history of the
schedule keeps the newest values of each night. Without mgpu, `python train.py` trains to the end and saves nothing.
"""

import argparse
import json
import os
import signal
import sysconfig
from pathlib import Path

import torch
from torch import nn

CHECKPOINTS = os.environ.get("MGPU_CHECKPOINT_DIR")  # where `step-<n>` folders go
RESUME = os.environ.get("MGPU_RESUME_DIR")  # a checkpoint of ours that mgpu has fetched and verified
METRICS = os.environ.get("MGPU_METRICS_DIR")  # what is appended to `rank-<rank>.jsonl` there is seen by mgpu
CONTEXT, BATCH = 16, 256  # bytes that are seen, guesses a step


def newest_text() -> torch.Tensor:
    """Here yours is read: a bucket, a database. A run that lost its machine reads it again, and wants the same."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)


def batch(text: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Depends on the seed alone: a resumed run sees what the other one would have seen."""
    at = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(seed))
    seen = text[at + torch.arange(CONTEXT + 1)].long()
    return seen[:, :-1], seen[:, -1]


def save(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if CHECKPOINTS is None or (final := Path(CHECKPOINTS, f"step-{step}")).exists():
        return
    # (1) Write into a folder beside the final one, then rename it: a folder with that name is whole.
    aside = final.with_name(f".tmp-step-{step}")
    aside.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, aside / "state.pt")
    aside.rename(final)


def tell(**values: object) -> None:
    if METRICS is not None:
        with Path(METRICS, "rank-0.jsonl").open("a") as file:
            print(json.dumps(values), file=file)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    every = int(os.environ.get("MGPU_CHECKPOINT_EVERY_STEPS", "50"))  # checkpoint.every_steps of the run file
    parser.add_argument("--save-every", type=int, default=every)
    options = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = newest_text()
    learned, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 256), nn.ReLU(), nn.Linear(256, 256)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def loss(of: torch.Tensor, seed: int) -> torch.Tensor:
        seen, following = batch(of, seed)
        return nn.functional.cross_entropy(model(seen.to(device)), following.to(device))

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
        value = loss(learned, step)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        # (4) How far it is.
        tell(kind="step", step=step, steps=options.steps, loss=value.item())
        stop = bool(asked)
        if stop or step % options.save_every == 0 or step == options.steps:
            with torch.no_grad():
                validation = torch.stack([loss(held_out, seed) for seed in range(16)]).mean().item()
            tell(kind="validation", step=step, loss=validation)
            save(step, model, optimizer)
            print(f"step {step}: loss {value.item():.3f}, validation {validation:.3f} nat/byte", flush=True)
        if stop:
            break


if __name__ == "__main__":
    main()
