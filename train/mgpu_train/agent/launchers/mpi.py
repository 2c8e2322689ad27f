"""mpirun on one node, whose ranks may save when they are to end.

`python -m mgpu_train.agent.launchers.mpi` takes its arguments.

Open MPI's mpirun kills its ranks half a second after it is sent SIGTERM itself. Here the signal goes to the ranks, and
mpirun ends once they have. The standard library is all that it needs.
"""

from __future__ import annotations

import signal
import subprocess
import sys

from mgpu_train.agent.machine import procs

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")  # Open MPI's; MPICH's, and that of what stems from it


def main() -> int:
    """Runs mpirun; returns the exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is somebody to send it to
    try:
        process = subprocess.Popen(["mpirun", *sys.argv[1:]], preexec_fn=_hear)  # no other thread runs yet
    except OSError as error:
        print(  # noqa: T201
            f"`launcher: mpi` cannot start mpirun on this node ({error.strerror}). Install an MPI in the image, or by "
            "`setup`, in a folder of PATH; or take `launcher: torchrun`.",
            file=sys.stderr,
        )
        return 1
    signal.signal(signal.SIGTERM, lambda *_: _ask_ranks(process.pid))
    _hear()
    code = process.wait()
    return 128 - code if code < 0 else code


def _hear() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _ask_ranks(mpirun: int) -> None:
    """Sends SIGTERM to each rank, or to mpirun where there is none yet.

    Of the processes below it that carry a rank's number the oldest is the rank: the others were started by it.
    """
    below = set(procs.descendants(mpirun))
    carriers = [found for name in _RANKS for found in procs.carriers(name).values()]
    ranks = {min(mine, key=lambda each: each.start_ticks) for each in carriers if (mine := below & set(each))}
    for rank in ranks or filter(None, [procs.of(mpirun)]):
        rank.send(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
