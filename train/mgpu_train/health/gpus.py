"""The GPUs that a node has to have, asked of its driver before anything trains.

Without a GPU torch would train on the CPU, and its user would pay for GPUs. Whoever needs them says how many, and where
there are fewer the machine is at fault. The driver is asked by a process of its own: one whose CUDA has failed may stay
without it. Standard library only: that process is this very file.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

LOOK_S = 60.0  # for one answer: a driver that no program uses wakes every GPU first
EVERY_S = 2.0  # between two looks
DEVICES = Path("/dev")
_LIBRARY = "libcuda.so.1"
# of a machine whose driver, or fabric manager, still starts: cudaErrorSystemNotReady, cudaErrorNoDevice
_STARTING = {802: "system not yet initialized", 100: "no CUDA-capable device is detected"}


@dataclass(frozen=True)
class Seen:
    """How many GPUs the driver has. `why`: what it says where there may be more; `starting`: they may still come;
    `hidden`: the machine has them, and its driver's library is not to be seen here."""

    count: int
    why: str = ""
    starting: bool = False
    hidden: bool = False


def ask_driver(devices: Path = DEVICES) -> Seen:
    """Asks this machine's driver; all GPUs count, also those that CUDA_VISIBLE_DEVICES hides from a program."""
    hidden = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    pipe, files = subprocess.PIPE, sum(1 for path in devices.glob("nvidia[0-9]*") if path.name[6:].isdigit())
    there = f"; {files} device files {devices}/nvidia*"
    try:
        asked = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment
        )
    except OSError as error:
        return Seen(0, f"the driver cannot be asked: {error}{there}")
    try:
        out, _ = asked.communicate(timeout=LOOK_S)
        seen = Seen(**json.loads(out))
    except subprocess.TimeoutExpired:
        asked.kill()  # and no wait for it: what hangs in a driver does not die
        return Seen(0, f"the driver did not answer within {LOOK_S:g} s{there}", starting=True)
    except (ValueError, TypeError):
        return Seen(0, f"the driver gave no answer (exit status {asked.returncode}){there}")
    if seen.hidden and files:
        cure = "an image shows it with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return replace(seen, why=f"{seen.why}{there}; {cure}")
    return replace(seen, why=f"{seen.why}{there}".removeprefix("; "), hidden=False)


@dataclass(frozen=True)
class Lack:
    """What a node has too few of, in one line that names it. `machine`: another one would do."""

    words: str
    machine: bool = True


@dataclass(frozen=True)
class Demand:
    """So many GPUs on this node, within `wait_s` seconds where its driver still starts."""

    count: int
    node: str  # which one it is, in words
    wait_s: float
    look: Callable[[], Seen] = ask_driver
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def unmet(self) -> Lack | None:
        """What the node lacks; None: it has what is demanded."""
        end = self.clock() + self.wait_s
        while (seen := self.look()).count < self.count:
            if not seen.starting or self.clock() >= end:
                why = f": {seen.why}" if seen.why else ""
                waited = f" (waited {self.wait_s:g} s for it)" if seen.starting else ""
                return Lack(f"{self.node} has {seen.count} of {self.count} GPUs{why}{waited}", machine=not seen.hidden)
            self.sleep(EVERY_S)
        return None


def _ask() -> Seen:
    """In a process of its own: what the driver's library says."""
    try:
        cuda = ctypes.CDLL(_LIBRARY)
        if code := cuda.cuInit(0):
            return _failed(cuda, code)
        count = ctypes.c_int()
        if code := cuda.cuDeviceGetCount(ctypes.byref(count)):
            return _failed(cuda, code)
    except (OSError, AttributeError) as error:
        return Seen(0, f"there is no driver: {error}", hidden=True)
    return Seen(count.value)


def _failed(cuda: ctypes.CDLL, code: int) -> Seen:
    words = ctypes.c_char_p()
    known = cuda.cuGetErrorString(code, ctypes.byref(words)) == 0 and words.value
    text = words.value.decode(errors="replace") if known and words.value else _STARTING.get(code, "unknown")
    return Seen(0, f"CUDA error {code}: {text}", starting=code in _STARTING)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_ask())))
