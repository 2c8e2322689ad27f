"""Whose fault the end of a program is, by what it and the kernel have left to read. Pure: a table of signs.

Without a sign the program is at fault: all that it can do to itself it would do again on another machine. The Xids are
those of NVIDIA's catalog whose cause is hardware, or that end with a reset of the GPU
(https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html); the words are CUDA's (`cudaGetErrorString`),
NCCL's, torch's and Linux's. Where each was seen stands in the tests.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from mgpu_train.agent.status.log import clean, errors
from mgpu_train.agent.status.status import Fault
from mgpu_train.health.hardware import NO_GPU_MEMORY, NO_HOST_MEMORY

LONGEST = 300  # characters of the line that is shown
_XID = re.compile(r"NVRM: Xid \(.*?\): (\d+)")
_HARDWARE_XIDS = {46, 48, 62, 64, 74, 79, 92, 94, 95, 109, 110, 119, 120, 122, 123, 136, 140, 142, 143, 145, 149, 150}
_PROGRAMS_XIDS = {13, 31, 43, 45, 69}
_RANK = re.compile(r"\[rank ?(\d+)\]", re.IGNORECASE)


@dataclass(frozen=True)
class Sign:
    """What a line proves. `machine`: this machine is suspect, and is replaced. `hang`: of a peer's machine only where
    that is heard no more."""

    means: str
    pattern: re.Pattern[str]
    fault: Fault = Fault.USER
    machine: bool = False
    hang: bool = False


@dataclass(frozen=True)
class Finding:
    """A sign, the line that it was found in, and the rank that the line names, if it does."""

    sign: Sign
    line: str
    rank: int | None = None


def _machine(means: str, pattern: str) -> Sign:
    return Sign(means, re.compile(pattern), Fault.INFRASTRUCTURE, machine=True)


def _peers(means: str, pattern: str, *, hang: bool = False) -> Sign:
    return Sign(means, re.compile(pattern), Fault.INFRASTRUCTURE, hang=hang)


def _another(means: str, pattern: str) -> Sign:
    """Neither this machine's nor the program's: it may work the next time."""
    return Sign(means, re.compile(pattern), Fault.INFRASTRUCTURE)


def _user(means: str, pattern: str) -> Sign:
    return Sign(means, re.compile(pattern))


_FATAL_XID = _machine("the GPU or its link has failed", "")
_PROGRAMS_XID = _user("the program has made the GPU fail", "")

_OFF_THE_BUS = _machine("the GPU has fallen off the bus", r"fallen off the bus")

KERNEL = (
    _OFF_THE_BUS,
    _machine("a processor or its memory has failed", r"\[Hardware Error\].*(?:[Uu]ncorrected|[Ff]atal)|EDAC .*\bUE\b"),
    _machine("the disk has failed", r"I/O error, dev (?:nvme|sd|x?vd)\w+|(?:EXT4|XFS)\b.*(?:read-only|metadata I/O)"),
)
MACHINE = (
    _machine("it lacks what was rented, or is not fit", r"\bMachineError: "),
    _machine("a GPU's memory has failed", r"uncorrectable ECC error encountered"),
    _machine("an NVLink has failed", r"uncorrectable NVLink error"),
    _machine("the GPUs' fabric manager is not ready", r"system not yet initialized"),
    _machine("a GPU is lost", r"GPU is lost|Unable to determine the device handle for GPU"),
    _machine("the GPU driver does not answer", r"Failed to initialize NVML: (?:Driver/library|Unknown)"),
    _machine("a GPU is held by something else", r"CUDA-capable device\(s\) is/are busy or unavailable"),
)
PROGRAM = (
    Sign("a smaller batch, or a GPU with more memory", NO_GPU_MEMORY),
    Sign("smaller batches, fewer workers of the data loader, or a machine with more memory", NO_HOST_MEMORY),
    _user("an index out of range, mostly: CUDA_LAUNCH_BLOCKING=1 shows where", r"device-side assert triggered"),
    _user("a kernel reads or writes where it may not", r"an illegal memory access was encountered"),
    _user("it asks for more GPUs than the node has", r"invalid device ordinal"),
    _user("this torch was not built for this GPU", r"no kernel image is available for execution"),
    _user("this torch needs a newer driver than the machine has", r"CUDA driver version is insufficient"),
    _user("fewer workers of the data loader, or smaller batches", r"insufficient shared memory|out of shared memory"),
    _user("the disk is full: `disk_gib`", r"No space left on device"),
)
NCCL = (  # says why far above its last line, which names no cause
    _user(
        "a smaller batch leaves NCCL the GPU memory that it needs",
        r"NCCL WARN (?:Cuda failure.*out of memory|Failed to CUDA .*alloc)|Cuda failure \d+ 'out of memory'",
    ),
    _user(
        "the machine's direct network (EFA, InfiniBand) cannot be used: an image needs ibverbs-providers, librdmacm1 "
        "and libhwloc15 for it; `env: {NCCL_NET: Socket}` takes TCP",
        r"NCCL WARN.*Failed to initialize any NET plugin",
    ),
)
SUSPECT = (
    _machine("the disk has failed", r"OSError: \[Errno 5\] Input/output error"),
    _machine("the disk has failed", r"TrainError: .*cannot read .*Input/output error"),  # our own trainer's words
    _another("a file server has lost the file", r"(?:OSError: \[Errno 116\]|TrainError: .*) Stale file handle"),
    _machine("a GPU has failed, or a kernel that it ran", r"CUDA error: (?:unspecified launch failure|unknown error)"),
)
PEERS = (
    _peers("the network to a peer has failed", r"NET/(?:IB|OFI)\b.*(?:status|error)[= ]?12\b"),
    _peers("a peer is gone", r"ncclRemoteError|remote process exited or there was a network error"),
    _peers(
        "a collective waited for a rank that did not come", r"Watchdog caught collective operation timeout", hang=True
    ),
    _peers("the network between the nodes is not fit", r"^PreflightError: "),
    _peers("a peer did not come to the rendezvous", r"RendezvousConnectionError|DistStoreError: Timed out"),
)


def hardware(kernel: Iterable[str]) -> Finding | None:
    """What the kernel says of a GPU that is broken, whatever program made it show."""
    kernel = tuple(kernel)
    fatal = (line for line in kernel if (found := _XID.search(line)) and int(found[1]) in _HARDWARE_XIDS)
    first = next((Finding(_FATAL_XID, clean(line, LONGEST)) for line in fatal), None)
    return first or next(iter(_found((_OFF_THE_BUS,), kernel)), None)


def find(
    lines: Iterable[str], kernel: Iterable[str] = (), *, last_words: str = "", code: int = 1, nodes: int = 1
) -> Finding | None:
    """The sign that weighs most, in its first line.

    Args:
        lines: the end of the program's log.
        kernel: what the kernel has said since the program began, where it may be read.
        last_words: the line that says best why it ended; a program may have lived on after errors that it printed.
        code: exit code of the rank that failed first, negative for a signal.
        nodes: of the attempt; one node has no peers on other machines.
    """
    lines, kernel = tuple(lines), tuple(kernel)
    xids = [(int(found[1]), line) for line in kernel if (found := _XID.search(line))]
    fatal = [Finding(_FATAL_XID, clean(line, LONGEST)) for xid, line in xids if xid in _HARDWARE_XIDS]
    programs = [Finding(_PROGRAMS_XID, clean(line, LONGEST)) for xid, line in xids if xid in _PROGRAMS_XIDS]
    said = lines if code == -signal.SIGABRT else (last_words,)  # a C++ abort has its cause far above its last line
    by_weight = (
        *fatal,
        *_found(KERNEL, kernel),
        *_found(MACHINE, said if code == -signal.SIGABRT else (*errors(lines), last_words)),
        *_found(PROGRAM, (last_words,)),
        *_found(NCCL, lines),
        *programs,
        *_found(SUSPECT, said),
        *(_found(PEERS, said) if nodes > 1 else ()),
    )
    return by_weight[0] if by_weight else None


def _found(signs: Iterable[Sign], lines: Iterable[str]) -> list[Finding]:
    pairs = ((sign, next((line for line in lines if sign.pattern.search(line)), None)) for sign in signs)
    return [
        Finding(sign, clean(line, LONGEST), int(rank[1]) if (rank := _RANK.search(line)) else None)
        for sign, line in pairs
        if line is not None
    ]
