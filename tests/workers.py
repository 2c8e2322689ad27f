"""xdist's workers, forked by one server: each would read all tests, and import torch and the like, for itself.

xdist starts this program in place of an interpreter. It passes its input and output on to a worker, and waits for it.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from forks import Forks

# the tests come last: what writes logs keeps the stream that it was imported with, and pytest closes those of a reading
_FORKS = Forks("torch._dynamo", "torch.distributed.checkpoint", "transformers", "mgpu_train.tasks.hf", "collected")
_WORKER = "worker"


def fork(specs: list[Any]) -> None:
    """Has the workers of these specifications, execnet's, forked."""
    for spec in specs:
        spec.python = shlex.join([sys.executable, __file__])


if __name__ == "__main__":
    if sys.argv[1:] == [_WORKER]:
        exec(eval(sys.stdin.readline()))  # noqa: S102, S307 - as execnet has an interpreter do
    else:
        signal.signal(signal.SIGINT, lambda *_: None)  # the worker ends when its input does
        sys.exit(_FORKS.start(Path(__file__), [_WORKER], os.environ, stdin=0, stdout=1, stderr=2).wait())
