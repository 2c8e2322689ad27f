"""One node of provider `slurm`, the task of a Slurm step: an SSH server, a lease, and the end of all that ran there.

    python3 GANG/node.py          keeps the node until it is told to end
    python3 GANG/node.py sweep    ends what is left of a node whose keeper was killed

GANG is the folder that login node and nodes share: `asked.json` says what was asked for. The node adds
`made-<rank>` (its own folder is this gang's), `node-<rank>.json` (how it is reached) and, when all of it has ended,
`ended-<rank>.json` (when, and why). It runs with the standard library of Python 3.9; `mgpu` and `mgpu_train` here are
the parts of them that lie in GANG.

    SIGUSR2            ends the node: the gang is given back
    SIGURG, SIGTERM    a notice for the agent: the time limit is near; Slurm takes the node (preemption, scancel)

Slurm sends a signal to all that runs in a step, training included: SIGURG, because programs ignore it by default.
"""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mgpu_train.system import prctl

from mgpu.providers.keeper import Keeper, Terms, write

GANG = Path(__file__).resolve().parent
STEPS_OWN = ("SLURM", "SBATCH", "SRUN", "PMI", "MGPU_")  # a program would take itself for the step's task
BEFORE_KILL_S = 3.0  # a node that Slurm ends is cleared so long before its SIGKILL


class Node(Keeper):
    """The keeper of one node; `told` is what was asked for."""

    left_out, kept = STEPS_OWN, ("SLURM_CONF",)

    def __init__(self, told: dict[str, Any], rank: int) -> None:
        self.told, self.rank = told, rank
        node = f"{told['token'][:10]}-{rank}"
        terms = Terms(**{name: told[name] for name in Terms.__dataclass_fields__})
        super().__init__(node, Path(told["node_folder"]).expanduser() / f"mgpu-{node}", GANG, terms)
        self.kill_wait_s = int(os.environ["MGPU_KILL_WAIT"])
        self.leaves_at = float("inf")  # monotonic; Slurm kills all of it soon after

    def run(self) -> int:
        """Keeps the node until it is told to end; the task's exit code."""
        prctl.become_subreaper()
        wakeup = self.listen()
        reason, code = "the node's keeper failed", 1
        try:
            self.furnish()
            self.serve()
            while not self.ending and time.monotonic() < self.leaves_at:
                self.wait(wakeup)
            reason, code = self.ending or "Slurm took the node", 0
        except OSError as error:
            reason = str(error)
            sys.stderr.write(f"{reason}\n")
        finally:
            ended = self.end(reason)
        return code if ended else 1  # then `sweep` tries once more

    def listen(self) -> int:
        """Takes Slurm's signals, too."""
        wakeup = super().listen()
        signal.signal(signal.SIGURG, lambda *_: self.notice(self.told["notice_s"]))
        signal.signal(signal.SIGTERM, self.on_term)
        return wakeup

    def on_term(self, *_: object) -> None:
        """Slurm says it once more when its grace is over: the first time counts."""
        if (GANG / "given-back").exists():
            self.ending = "given back"
        elif self.leaves_at == float("inf"):
            self.leaves_at = time.monotonic() + max(0.5, self.kill_wait_s - BEFORE_KILL_S)
            self.notice(self.kill_wait_s)

    def on_made(self) -> None:
        """Says that the folder is this gang's: `sweep` may remove it."""
        (GANG / f"made-{self.rank}").touch()

    def serve(self) -> None:
        """As any keeper's; then tells how the node is reached."""
        super().serve()
        endpoint = {"address": address(), "port": self.port, "user": getpass.getuser(), "host_key": self.host_key}
        endpoint |= {"began_at": self.began_at, "hard_cap_at": self.began_at + self.hard_cap_s}
        endpoint |= {"node": os.environ.get("SLURMD_NODENAME", ""), "pid": os.getpid()}
        write(GANG / f"node-{self.rank}.json", json.dumps(endpoint))

    def end_command(self) -> str:
        """All nodes of the gang, by Slurm; and where its controller does not answer, this one all the same."""
        job, pid = os.environ["SLURM_JOB_ID"], os.getpid()
        end = f"timeout 20 scancel --signal=USR2 {job}; kill -USR2 {pid}; timeout 20 scancel {job}; "
        return end + super().end_command()

    def end(self, reason: str) -> bool:
        """Ends all that runs on the node, removes its folder, and says so. False: something lives on."""
        reason = self.reason(reason)
        ended = self.clear()
        if ended:
            write(GANG / f"ended-{self.rank}.json", json.dumps({"at": time.time(), "why": reason}))
        return ended

    def sweep(self) -> int:
        """Ends what a keeper that was killed has left; the exit code."""
        if not (GANG / f"ended-{self.rank}.json").exists():
            self.made = (GANG / f"made-{self.rank}").exists()
            self.end("its keeper was killed")
        return 0


def address() -> str:
    """This node as Slurm's own daemons reach it."""
    name = os.environ.get("SLURMD_NODENAME", "")
    asked = ["scontrol", "show", "node", "-o", name]
    try:
        said = subprocess.run(asked, stdout=subprocess.PIPE, timeout=30, check=False).stdout.decode().split()
    except (OSError, subprocess.TimeoutExpired):
        said = []
    found = [word[len("NodeAddr=") :] for word in said if word.startswith("NodeAddr=")]
    return found[0] if found else name or socket.gethostname()


if __name__ == "__main__":
    node = Node(json.loads((GANG / "asked.json").read_text(encoding="utf-8")), int(os.environ["SLURM_PROCID"]))
    sys.exit(node.sweep() if sys.argv[1:] == ["sweep"] else node.run())
