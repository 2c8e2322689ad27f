"""Saves in the background: training goes on while a checkpoint is copied and written. One at a time is under way."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from mgpu_train.checkpoint.distributed.dcp import Capture, Checkpointer, PeersLost, Progress, import_dcp
from mgpu_train.errors import TrainError


@dataclass(frozen=True)
class Outcome:
    """What became of a save: it stands on every node, or `reason` says why it stands on none."""

    progress: Progress
    stall_s: float  # that training stood still for it, on this rank
    save_s: float  # from its begin until it stood on every node, or had failed
    reason: str | None = None


class Saver:
    """The saves of one rank. All ranks make one each and call the same methods together."""

    def __init__(self, checkpointer: Checkpointer, folder: Path, deadline_s: float) -> None:
        """A save that has not ended after `deadline_s` seconds has failed."""
        self._checkpointer, self._folder, self._deadline_s = checkpointer, folder, deadline_s
        self._save: _Save | None = None
        self._lost = False

    def prepare(self) -> float:
        """Import what saves need, for which the first one would stand still; returns the seconds that training did."""
        began = time.perf_counter()
        import_dcp()
        return time.perf_counter() - began

    @property
    def lost(self) -> bool:
        """True when this rank cannot save again: its disk never answered, or the ranks do not hear one another."""
        save = self._save
        overdue = save is not None and save.is_alive() and self._left_s(save) < 0
        return self._lost or overdue or (save is not None and save.lost)

    @property
    def busy(self) -> bool:
        """True while a save is under way, on this rank."""
        return self._save is not None and self._save.is_alive()

    def begin(self, progress: Progress, meta: dict[str, Any]) -> None:
        """Start a save of the state as it is now. `meta` is what `meta.json` says of this step alone."""
        began = time.perf_counter()
        capture = self._checkpointer.capture(progress, meta)
        self._save = _Save(self._checkpointer, capture, self._folder, began)
        self._save.start()
        self._save.stall_s = time.perf_counter() - began

    def settle(self) -> float:
        """Wait until an optimizer step may change the state; returns the seconds that it took."""
        if self._save is None or self._save.capture.snapshot.filled.is_set():
            return 0.0
        began = time.perf_counter()
        if not self._save.capture.snapshot.filled.wait(self._deadline_s):
            raise TrainError(f"the state could not be copied for a checkpoint in {self._deadline_s:g} s (save_s)")
        waited = time.perf_counter() - began
        self._save.stall_s += waited
        return waited

    def poll(self) -> Outcome | None:
        """What became of the save that was begun last; None while it is under way, and once it was told."""
        if self._save is None or self.busy:
            return None
        save, self._save = self._save, None
        self._lost |= save.lost
        return Outcome(save.capture.progress, save.stall_s, save.ended - save.began, save.reason)

    def wait(self) -> Outcome | None:
        """Training stands still until the save under way has ended; None when there was none.

        Raises TrainError when it does not end in time; then the ranks cannot save any more.
        """
        if self._save is None:
            return None
        began = time.perf_counter()
        self._save.join(max(0.0, self._left_s(self._save)))
        if self.busy:
            raise TrainError(f"the disk did not take the checkpoint in {self._deadline_s:g} s (save_s)")
        self._save.stall_s += time.perf_counter() - began
        return self.poll()

    def close(self) -> None:
        """Give back what the saves needed; one that is still under way comes to nothing."""
        if not self.busy:
            self._checkpointer.close()

    def _left_s(self, save: _Save) -> float:
        return save.began + self._deadline_s - time.perf_counter()


class _Save(Thread):
    """One save on its way. A daemon: a process that ends does not wait for a disk that does not answer."""

    def __init__(self, checkpointer: Checkpointer, capture: Capture, folder: Path, began: float) -> None:
        super().__init__(name=f"save-{capture.progress.step}", daemon=True)
        self.capture, self.began, self.ended = capture, began, began
        self.stall_s = 0.0
        self.reason: str | None = None
        self.lost = False
        self._checkpointer, self._folder = checkpointer, folder

    def run(self) -> None:
        device = self._checkpointer.place.device
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # each thread has its own
            with torch.no_grad():
                self._checkpointer.write(self.capture, self._folder)
        except TrainError as error:
            self.reason, self.lost = str(error), isinstance(error, PeersLost)
        except Exception as error:  # noqa: BLE001 - a bug costs this save, and is told like any other reason
            self.reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        finally:
            self.capture.snapshot.filled.set()
            self.ended = time.perf_counter()
