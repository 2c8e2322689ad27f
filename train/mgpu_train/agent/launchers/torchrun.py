"""torchrun, which leaves behind how its ranks ended.

`python -m mgpu_train.agent.launchers.torchrun` takes torchrun's own arguments, and `... torchrun accelerate` those of
`accelerate launch`, which starts ranks by torchrun, too.

torchrun prints the exit codes of its ranks and ends with 1, whatever they were. Here the file that MGPU_FAILURE_FILE
names gets what torchrun itself knows of the rank that failed first, as JSON: {"rank": of the whole run, "exit_code":
negative for a signal}. A stop that was asked for is no error and prints no stack.

torchrun waits for the other nodes' in C++, at the rendezvous and up to 300 s at its exit barrier, where no handler of
Python's runs: a peer that is gone would keep it there, whatever it is sent. Here it ends once its ranks have.

The ranks of the bundled trainer are forked (`forked`). On several nodes without GPUs it first measures what they can
do, where the agent asks for it (`health.processors`).

It runs in the Python that has the user's requirements: the standard library, torch, and what it is to start are all
that it needs.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from mgpu_train.agent.launchers import forked
from mgpu_train.agent.machine import procs
from mgpu_train.health import processors
from mgpu_train.names import FAILURE_FILE, PREFLIGHT
from mgpu_train.system import collector

ACCELERATE = "accelerate"  # the first word
_STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}  # torchrun's own
_LOOK_S = 0.2
_BY_ITSELF_S = 3.0  # torchrun's own end, after that of its ranks


def main() -> int:
    """Runs torchrun; returns the exit code."""
    target, meeting = os.environ.pop(FAILURE_FILE, ""), os.environ.pop(PREFLIGHT, "")  # ranks are not to have them
    usual = gc.get_threshold()
    collector.seldom()
    forked.prepare(sys.argv[1:], usual)
    from torch.distributed import run  # sets its loggers' levels, which are set after it
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if "LOGLEVEL" not in os.environ:  # torchrun's own variable: else a stop is told in four lines for each rank
        for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
            logging.getLogger(name).setLevel(logging.ERROR)
    _end_when_asked()
    if meeting and not _fit(processors.Meeting(**json.loads(meeting))):
        return 1
    try:
        if sys.argv[1:2] == [ACCELERATE]:
            return _accelerate(sys.argv[2:])
        run.main(sys.argv[1:])
        return 0
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            print(f"torchrun: rank {rank} {procs.ended(failure.exitcode)} (pid {failure.pid})", file=sys.stderr)  # noqa: T201
        rank, failure = error.get_first_failure()
        _leave(target, rank, failure.exitcode)
        return 1
    except SignalException as stop:
        _say_stopped(stop.sigval)
        return 1


def _fit(at: processors.Meeting) -> bool:
    """Whether the nodes are; if not, the line that it ends with is a sign of the agent's (`agent.attempt.faults`)."""
    found = processors.examine(at)
    print(f"torchrun: preflight: {found.said}", file=sys.stderr, flush=True)  # noqa: T201
    if found.machine or found.network:
        error = f"MachineError: {found.machine}" if found.machine else f"PreflightError: {found.network}"
        print(error, file=sys.stderr, flush=True)  # noqa: T201
    return not (found.machine or found.network)


def _accelerate(words: Sequence[str]) -> int:
    """To its end; returns the exit code. Raises ChildFailedError and SignalException."""
    try:
        from accelerate.commands import launch
    except ImportError as error:
        print(  # noqa: T201
            f"`launcher: accelerate` finds no accelerate in {sys.executable} ({error}). "
            "Name it in the file of `code.requirements`, or take `launcher: torchrun`.",
            file=sys.stderr,
        )
        return 1
    launch.simple_launcher = launch.multi_gpu_launcher  # torchrun for whatever is not DeepSpeed or a TPU: also on CPUs
    launch.launch_command(launch.launch_command_parser().parse_args(words))
    return 0


def _end_when_asked() -> None:
    """From here on a signal that asks torchrun to end is obeyed wherever its main thread waits."""
    heard, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)  # written to as the signal comes, by no code of Python's
    threading.Thread(target=_end_after_ranks, args=(heard,), daemon=True).start()


def _end_after_ranks(heard: int) -> None:
    while (number := os.read(heard, 1)[0]) not in _STOPS:
        pass
    while procs.descendants(os.getpid()):
        time.sleep(_LOOK_S)
    time.sleep(_BY_ITSELF_S)
    _say_stopped(signal.Signals(number))
    os._exit(1)


def _say_stopped(by: signal.Signals) -> None:
    print(f"torchrun: stopped by {by.name}", file=sys.stderr, flush=True)  # noqa: T201


def _leave(target: str, rank: int, exit_code: int) -> None:
    if not target:
        return
    try:
        with open(target, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump({"rank": rank, "exit_code": exit_code}, file)
    except OSError as error:  # a full disk: what was printed has to do
        print(f"torchrun: {target} cannot be written: {error}", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
