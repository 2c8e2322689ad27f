"""A distributed training program of your own: plain PyTorch, started by torchrun on every node.

It owes mgpu nothing but one habit: write a checkpoint into a folder beside its final place, then rename it to
`step-<n>` in MGPU_CHECKPOINT_DIR. From there it is uploaded, committed, and given back in MGPU_RESUME_DIR.
"""

import argparse
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Batches(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """What a rank sees in a step depends on both numbers alone: a resumed run sees what the other one would have."""

    def __init__(self, first: int, last: int, rank: int, world: int) -> None:
        self.first, self.last, self.rank, self.world = first, last, rank, world

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for step in range(self.first, self.last + 1):
            generator = torch.Generator().manual_seed(step * self.world + self.rank)
            x = torch.rand(256, 2, generator=generator) * 2 - 1
            yield x, torch.sin(3 * x[:, :1]) * torch.cos(3 * x[:, 1:])


def deaf(_worker: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun signals these as well, and the last step needs its batch


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    root = os.environ.get("MGPU_CHECKPOINT_DIR")
    if root is None or dist.get_rank() != 0:
        return
    aside, final = Path(root, f".tmp-step-{step}"), Path(root, f"step-{step}")
    if final.exists():
        return
    aside.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    with open(aside / "state.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(final)


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    root = os.environ.get("MGPU_RESUME_DIR")
    if root is None:
        return 0
    state = torch.load(Path(root, "state.pt"), weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    every = int(os.environ.get("MGPU_CHECKPOINT_EVERY_STEPS", "50"))  # checkpoint.every_steps in mgpu.yaml
    parser.add_argument("--save-every", type=int, default=every)
    options = parser.parse_args()

    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))  # asked to stop: save at the next step, then leave

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = load(model, optimizer)
    if dist.get_rank() == 0:
        print(f"goes on from step {first}" if first else "begins", flush=True)
    parallel = DistributedDataParallel(model, device_ids=[device.index] if cuda else None)

    batches = Batches(first + 1, options.steps, dist.get_rank(), dist.get_world_size())
    loader = DataLoader(batches, batch_size=None, num_workers=1, worker_init_fn=deaf)
    for step, (x, y) in enumerate(loader, start=first + 1):
        loss = nn.functional.mse_loss(parallel(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        asked = torch.tensor(float(bool(stop)), device=device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)  # every rank leaves at the same step
        if step % options.save_every == 0 or step == options.steps or asked.item():
            save(model, optimizer, step)
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
        if asked.item():
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
