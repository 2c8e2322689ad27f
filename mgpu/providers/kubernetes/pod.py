"""One node of provider `kubernetes`, the first process of a pod: an SSH server, a lease, and the end of both.

    python3 FOLDER/pod.py      FOLDER is the pod's own disk; `asked.json` in it says what was asked for

Its one line on standard output, the container's log, says how the node is reached (`Told`). It runs with the standard
library; `mgpu` and `mgpu_train` here are the parts of them that lie in FOLDER.

    SIGTERM    Kubernetes ends the pod in its time of grace (eviction, preemption, a node that is drained): a notice
    SIGUSR2    the lease, or the hard cap, has ended

When this process ends, the kernel ends all that runs in the pod.
"""

from __future__ import annotations

import json
import os
import pwd
import signal
import sys
from pathlib import Path
from typing import Any

from mgpu.providers.keeper import Keeper, Terms

FOLDER = Path(__file__).resolve().parent
PODS_OWN = ("MGPU_", "JOB_COMPLETION_INDEX")


class Pod(Keeper):
    """The keeper of one pod; `told` is what was asked for."""

    left_out = PODS_OWN

    def __init__(self, told: dict[str, Any], rank: int) -> None:
        self.told = told
        terms = Terms(**{name: told[name] for name in Terms.__dataclass_fields__})
        super().__init__(f"{told['token'][:10]}-{rank}", FOLDER / "node", FOLDER, terms)

    def run(self) -> int:
        """Keeps the node until it is told to end; the container's exit code."""
        wakeup = self.listen()
        try:
            user = pwd.getpwuid(os.geteuid())
            if os.path.basename(user.pw_shell) in ("nologin", "false"):  # noqa: PTH119
                raise OSError(f"user {user.pw_name} of the image has no shell in /etc/passwd, only {user.pw_shell}")
            self.furnish()
            self.serve()
            told = {"port": self.port, "user": user.pw_name, "host_key": self.host_key, "began_at": self.began_at}
            print(json.dumps({"mgpu": told}), flush=True)  # noqa: T201  the container's log
            while not self.ending:
                self.wait(wakeup)
        except KeyError:
            sys.stderr.write(f"mgpu: the image has no name for user {os.geteuid()} in /etc/passwd\n")
            return 1
        except OSError as error:
            sys.stderr.write(f"mgpu: {error}\n")
            return 1
        sys.stderr.write(f"mgpu: {self.reason('it was told to end')}\n")
        return 0

    def listen(self) -> int:
        """Takes Kubernetes' signal, too."""
        wakeup = super().listen()
        signal.signal(signal.SIGTERM, lambda *_: self.notice(self.told["notice_s"]))
        return wakeup


if __name__ == "__main__":
    sys.exit(
        Pod(
            json.loads((FOLDER / "asked.json").read_text(encoding="utf-8")), int(os.environ["JOB_COMPLETION_INDEX"])
        ).run()
    )
