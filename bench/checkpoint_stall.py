"""How long training stands still for a checkpoint: ours beside torch.save and torch's own asynchronous save.

One process, on a GPU where there is one, one state of about 1 GiB (fp32 weights and both moments of AdamW), the same
disk, one after the other in each round. A save is begun, one forward and backward pass run, and the optimizer steps:
what the loop waited for the save in between is its stall. The next save begins when the one before stands on disk.
"""

from __future__ import annotations

import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from mgpu_train import parallel
from mgpu_train.checkpoint.distributed.dcp import Checkpointer, Progress
from mgpu_train.checkpoint.distributed.saver import Saver
from mgpu_train.checkpoint.state import ModelPart, OptimizerPart
from mgpu_train.config import LmOptions, ModelConfig, TrainConfig
from mgpu_train.optim import base as optim
from mgpu_train.strategies import initial
from mgpu_train.tasks.base import Layout
from mgpu_train.tasks.lm import LM
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from bench.tools import ROOT

MODEL = ModelConfig(layers=7, dim=1024, heads=8)
SEQUENCES, SEQ_LEN = 2, 64
ROUNDS = 5
DEADLINE_S = 600.0
LIMIT = 0.05  # of a blocking save
WHOLE, OUTSIDE = "torch.save, flushed", "mgpu, a process writes"

log = logging.getLogger(__name__)

Between = Callable[[], None]


class Training:
    """A model that trains, and where its checkpoints go."""

    def __init__(self, folder: Path, model: ModelConfig = MODEL) -> None:
        self.folder = folder
        self.place = parallel.join(DEADLINE_S, DEADLINE_S)
        self.task = LM(LmOptions(model=model, seq_len=SEQ_LEN))
        self.model = initial.whole(self.task, 0).to(self.place.device)
        (self.optimizer,) = optim.make(self.model, Layout(), TrainConfig()).each
        self.step()

    def step(self, settle: Between | None = None) -> None:
        """One optimizer step; `settle` is called before anything changes."""
        tokens = torch.randint(256, (SEQUENCES, SEQ_LEN + 1), device=self.place.device)
        self.task.loss(self.model, {"tokens": tokens}).total.backward()
        if settle is not None:
            settle()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def now(self) -> float:
        """Seconds, once the device is through with all that it was given."""
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)
        return time.perf_counter()

    def state(self) -> dict[str, object]:
        """As torch's own saves take it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    @property
    def gib(self) -> float:
        """The size of the state."""
        return 3 * sum(parameter.nbytes for parameter in self.model.parameters()) / (1 << 30)


Save = Callable[[], tuple[float, float]]  # one save: how long training stood still, and until it stood on disk, seconds


def blocking(training: Training) -> Save:
    """torch.save, flushed to disk, while training stands still."""
    path = training.folder / "blocking.pt"

    def save() -> tuple[float, float]:
        began = training.now()
        with path.open("wb") as file:
            torch.save({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        stall_s = time.perf_counter() - began
        training.step()
        path.unlink()
        return stall_s, stall_s

    return save


def dcp(training: Training, stager: DefaultStager | None) -> Save:
    """torch.distributed.checkpoint.async_save; without a stager it makes one for each save."""
    folder = training.folder / "dcp"

    def save() -> tuple[float, float]:
        began = training.now()
        answer = async_save(
            training.state(), checkpoint_id=folder, process_group=training.place.control, async_stager=stager
        )
        stalls = [time.perf_counter() - began]

        def settle() -> None:
            if isinstance(answer, AsyncSaveResponse):
                waited = time.perf_counter()
                answer.staging_completion.result()
                stalls.append(time.perf_counter() - waited)

        training.step(settle)
        (answer.upload_completion if isinstance(answer, AsyncSaveResponse) else answer).result()
        save_s = time.perf_counter() - began
        shutil.rmtree(folder)
        return sum(stalls), save_s

    return save


def ours(training: Training, *, outside: bool) -> Save:
    """The trainer's own; `outside`: written by a process of its own, as beside a GPU."""
    folder = training.folder / "ours"
    checkpointer = checkpointer_of(training, outside=outside)
    checkpointer.lay_out()
    saver = Saver(checkpointer, folder, DEADLINE_S)

    def save() -> tuple[float, float]:
        training.now()
        saver.begin(Progress(1, 1), {})
        training.step(lambda: settle())
        while saver.busy:  # not `wait`, which counts as standing still
            time.sleep(0.01)
        outcome = saver.poll()
        if outcome is None or outcome.reason is not None:
            raise SystemExit(f"a save failed: {outcome}")
        shutil.rmtree(folder)
        return outcome.stall_s, outcome.save_s

    def settle() -> None:
        saver.settle()

    return save


def checkpointer_of(training: Training, *, outside: bool) -> Checkpointer:
    """The trainer's, for this training."""
    parts = {
        "model": ModelPart(training.model),
        "optimizer": OptimizerPart(training.model, training.optimizer),
    }
    return Checkpointer(parts, training.place, "all", {}, outside_s=DEADLINE_S if outside else None)


def measure(training: Training, rounds: int = ROUNDS) -> dict[str, list[tuple[float, float]]]:
    """Of each kind of save, the first one and as many as there are rounds: how long training stood still, and until it
    stood on disk, seconds. Beside a GPU the trainer has a process that writes, and DCP pinned memory."""
    gpu = training.place.device.type == "cuda"
    cached = DefaultStager(StagingOptions(gpu, False, True, gpu))
    inside = {} if gpu else {"mgpu": ours(training, outside=False)}
    saves = {
        WHOLE: blocking(training),
        "DCP async_save": dcp(training, None),
        "DCP async_save, own stager kept, async": dcp(training, cached),
        **inside,
        OUTSIDE: ours(training, outside=True),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in saves}
    for _ in range(1 + rounds):
        for name, save in list(saves.items()):
            try:
                taken[name].append(save())
            except Exception as error:
                if not name.startswith("DCP"):
                    raise
                # torch 2.11 closes a stager that it was given, and cannot save by it twice: a peer less
                log.warning("%s fails with torch %s, and is left out: %r", name, torch.__version__, error)
                del saves[name], taken[name]
    return taken


def main() -> tuple[float, float]:
    """Prints the first save apart, the medians of the others, and their ratios to a blocking save.

    Returns the stall of ours over a blocking save's, and over that of DCP's best.
    """
    aside = ROOT / ".mgpu"
    aside.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=aside) as folder:
        training = Training(Path(folder))
        where = f"{torch.get_num_threads()} threads, {training.place.device.type}"
        print(f"stall of a save, {training.gib:.2f} GiB of state, {where}, {ROUNDS} rounds")
        shares = report(measure(training))
    parallel.leave()
    return shares


def report(taken: dict[str, list[tuple[float, float]]]) -> tuple[float, float]:
    """Prints it; returns the stall of ours over a blocking save's, and over that of DCP's best."""
    print(f"  {'':<40}{'first':>9}{'median':>9}{'max':>9}{'of torch.save':>15}{'on disk after':>15}   (seconds)")
    medians = {name: statistics.median(stall for stall, _ in each[1:]) for name, each in taken.items()}
    whole, name_of_ours = medians[WHOLE], "mgpu" if "mgpu" in medians else OUTSIDE
    for name, each in taken.items():
        first, most, stands = each[0][0], max(stall for stall, _ in each[1:]), statistics.median(s for _, s in each[1:])
        share = f"{medians[name] / whole:.1%}"
        print(f"  {name:<40}{first:9.4f}{medians[name]:9.4f}{most:9.4f}{share:>15}{stands:15.2f}")
    mine, theirs = medians[name_of_ours], min(stall for name, stall in medians.items() if name.startswith("DCP"))
    print(f"  mgpu / torch.save {mine / whole:.2%} (limit {LIMIT:.0%})")
    print(f"  mgpu / DCP's best {mine / theirs:.2f} (limit 1)")
    return mine / whole, mine / theirs


if __name__ == "__main__":
    main()
