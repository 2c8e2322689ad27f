"""torchrun, which leaves behind how its ranks ended: `python -m mgpu_train.torchrun` takes torchrun's own arguments.

torchrun prints the exit codes of its ranks and ends with 1, whatever they were. Here the file that MGPU_FAILURE_FILE
names gets what torchrun itself knows of the rank that failed first, as JSON: {"rank": of the whole run, "exit_code":
negative for a signal}. A stop that was asked for is no error and prints no stack.

It runs in the Python that has the user's requirements: the standard library and torch are all that it needs.
"""

from __future__ import annotations

import json
import logging
import os
import sys

FAILURE_FILE = "MGPU_FAILURE_FILE"


def main() -> int:
    """Runs torchrun; returns the exit code."""
    target = os.environ.pop(FAILURE_FILE, "")  # ranks are not to have it
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if "LOGLEVEL" not in os.environ:  # torchrun's own variable: else a stop is told in four lines for each rank
        for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
            logging.getLogger(name).setLevel(logging.ERROR)
    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            print(f"torchrun: rank {rank} {ended(failure.exitcode)} (pid {failure.pid})", file=sys.stderr)  # noqa: T201
        rank, failure = error.get_first_failure()
        _leave(target, rank, failure.exitcode)
        return 1
    except SignalException as stop:
        print(f"torchrun: stopped by {stop.sigval.name}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def ended(code: int) -> str:
    """How a process with this exit code has ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    import signal

    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _leave(target: str, rank: int, exit_code: int) -> None:
    if not target:
        return
    try:
        with open(target, "w") as file:  # noqa: PTH123
            json.dump({"rank": rank, "exit_code": exit_code}, file)
    except OSError as error:  # a full disk: what was printed has to do
        print(f"torchrun: {target} cannot be written: {error}", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
