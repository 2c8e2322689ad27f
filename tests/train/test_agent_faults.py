"""Whose fault an end is, of which rank, and why: excerpts of real logs, each with where it was seen; ranks that really
end so, under a real agent; and the kernel's log."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from mgpu_train.agent.attempt import faults
from mgpu_train.agent.attempt.decide import AttemptFailed, Ended, verdict
from mgpu_train.agent.machine import kernel_log
from mgpu_train.agent.status.log import last_words
from mgpu_train.agent.status.status import Fault
from mgpu_train.config import Job

MACHINE, PEERS, USER = (Fault.INFRASTRUCTURE, True), (Fault.INFRASTRUCTURE, False), (Fault.USER, False)
JOB = {"run_id": "r", "attempt": 1, "writer": "w", "node_rank": 0, "processes_per_node": 8, "command": ("t.py",)}
NOISE = "CUDA kernel errors might be asynchronously reported at some other API call.\nCompile with `TORCH_USE_CUDA_DSA`"
ILLEGAL = "RuntimeError: CUDA error: unspecified launch failure"
TIMED_OUT = (
    "[rank4]:[E321 02:07:08.414640780 ProcessGroupNCCL.cpp:607] [Rank 4] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600067 "
    "milliseconds before timing out.\nframe #3: <unknown function> + 0xdbbf4"
)


class Said(NamedTuple):
    """How the rank that failed first ended, what stood in the log, and what the kernel said meanwhile."""

    log: str
    kernel: str = ""
    code: int = 1
    first: int = 6  # that rank, by torchrun
    more: Mapping[str, Any] = {}


# whose it is and whether the machine is replaced, the rank, the cause in the words of the verdict, and what was seen
FAULTS = {
    # --- the machine's, by what the program says
    # huggingface/accelerate#1192, vllm-project/vllm#5222, kohya-ss/sd-scripts#1434
    "ecc": (MACHINE, 6, "a GPU's memory has failed", Said(
        f"RuntimeError: CUDA error: uncorrectable ECC error encountered\n{NOISE}")),
    "ecc, met by the watchdog": (MACHINE, 1, "a GPU's memory has failed", Said(
        "[E ProcessGroupNCCL.cpp:916] [Rank 1] NCCL watchdog thread terminated with exception: CUDA error: "
        f"uncorrectable ECC error encountered\n{NOISE}\nframe #0: c10::Error::Error(c10::SourceLocation) + 0x57",
        code=-6)),
    # huggingface/huggingface_hub#4134
    "fabric manager": (MACHINE, 6, "the GPUs' fabric manager is not ready", Said(
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
        "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized")),
    # cudaGetErrorString(cudaErrorNvlinkUncorrectable)
    "nvlink": (MACHINE, 3, "an NVLink has failed", Said(
        "[rank3]: RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution")),
    # NVML, as nvidia-smi and pynvml say it
    "gpu handle": (MACHINE, 6, "a GPU is lost", Said(
        "RuntimeError: Unable to determine the device handle for GPU 0000:81:00.0: Unknown Error")),
    "gpu lost, by pynvml": (MACHINE, 6, "a GPU is lost", Said(
        "Traceback (most recent call last):\npynvml.NVMLError_GpuIsLost: GPU is lost")),
    "gpu lost, by nvml": (MACHINE, 6, "a GPU is lost", Said(
        "RuntimeError: NVML: GPU is lost. Reboot the system to recover this GPU")),
    "driver": (MACHINE, 6, "the GPU driver does not answer", Said(
        "RuntimeError: Failed to initialize NVML: Driver/library version mismatch")),
    # our own trainer
    "gpus rented": (MACHINE, 6, "it lacks what was rented", Said(
        "MachineError: node 1 (i-0abc) has 7 of 8 GPUs")),
    # karpathy/neuraltalk2#127
    "gpu held": (MACHINE, 6, "a GPU is held by something else", Said(
        "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable")),
    "disk": (MACHINE, 6, "the disk has failed", Said(
        "OSError: [Errno 5] Input/output error: '/data/shard-00041.tar'")),
    # our own trainer
    "disk, by the trainer": (MACHINE, 0, "the disk has failed", Said(
        "[rank0]: TrainError: cannot read /data/a.txt: Input/output error")),
    "disk, by an image": (MACHINE, 0, "the disk has failed", Said(
        "[rank0]: TrainError: cannot read the image /data/0/a.jpg: [Errno 5] Input/output error")),
    # opendatalab/MinerU#426: another card of the same kind, and it was gone
    "launch failure": (MACHINE, 2, "a GPU has failed, or a kernel that it ran", Said(
        f"[rank2]: RuntimeError: CUDA error: unspecified launch failure\n{NOISE}")),
    "unknown error": (MACHINE, 6, "a GPU has failed, or a kernel that it ran", Said(
        f"RuntimeError: CUDA error: unknown error\n{NOISE}")),
    # --- the machine's, by what the kernel says, while the program says what follows
    # leptonai/gpud#1209, NVIDIA/NVSentinel#155
    "xid 79": (MACHINE, 6, "the GPU or its link has failed: NVRM: Xid (PCI:0000:44:00): 79", Said(
        "Segmentation fault", "NVRM: Xid (PCI:0000:44:00): 79, pid=4124, GPU has fallen off the bus.", -11)),
    "off the bus": (MACHINE, 6, "the GPU has fallen off the bus", Said(
        "Segmentation fault", "NVRM: fallen off the bus and is not responding to commands.", -11)),
    # docs.nvidia.com/deploy/dynamic-page-retirement
    "xid 48": (MACHINE, 6, "the GPU or its link has failed", Said(
        "x", "NVRM: Xid (PCI:0000:10:1c): 48, pid=1896, An uncorrectable double bit error (DBE) was detected")),
    "xid 74": (MACHINE, 6, "the GPU or its link has failed", Said(
        "NCCL watchdog", "NVRM: Xid (PCI:0000:10:1c): 74, pid=1896, NVLink: fatal error detected on link 3", -6)),
    "xid 119": (MACHINE, 6, "the GPU or its link has failed", Said(
        "x", "NVRM: Xid (PCI:0000:4e:00): 119, pid=3344, Timeout waiting for RPC from GSP1!")),
    "machine check": (MACHINE, 6, "a processor or its memory has failed", Said(
        "x", "mce: [Hardware Error]: Machine check events logged: Uncorrected, software containable error", -7)),
    "nvme": (MACHINE, 6, "the disk has failed", Said(
        "x", "I/O error, dev nvme1n1, sector 184 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2", -7)),
    "read-only": (MACHINE, 6, "the disk has failed", Said(
        "OSError: [Errno 30] Read-only file system", "EXT4-fs (nvme1n1): Remounting filesystem read-only")),
    # --- the program's; an Xid of its own outweighs a failure that could be either's
    "xid 31": (USER, 6, "the program has made the GPU fail: NVRM: Xid (PCI:0000:01:00): 31", Said(
        ILLEGAL, "NVRM: Xid (PCI:0000:01:00): 31, pid=4124, name=python, Ch 00000008, MMU Fault")),
    "xid 13": (USER, 6, "the program has made the GPU fail: NVRM: Xid (PCI:0000:01:00): 13", Said(
        ILLEGAL, "NVRM: Xid (PCI:0000:01:00): 13, pid=4124, Graphics SM Warp Exception")),
    "floppy disk": (USER, 6, "exit code 1: ValueError: x", Said(
        "ValueError: x", "I/O error, dev fd0, sector 0 op 0x0:(READ) flags 0x0")),
    "docker's network": (USER, 6, "exit code 1: ValueError: x", Said(
        "ValueError: x", "docker0: port 1(veth0045dd3) entered disabled state")),
    # CUDA and torch
    "gpu memory": (USER, 5, "a smaller batch, or a GPU with more memory", Said(
        "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 5 has a total")),
    # QwenLM/Qwen3#873
    "gpu memory, of cublas": (USER, 6, "a smaller batch, or a GPU with more memory", Said(
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
    # NVIDIA/nccl#1235
    "gpu memory, of nccl": (USER, 6, "a smaller batch leaves NCCL the GPU memory that it needs", Said(
        "ng30903:3063028:3066152 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n"
        "ng30903:3063028:3066152 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes\n"
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1691, unhandled cuda error, NCCL\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.")),
    # torch 2.15, as it raised it here
    "host memory": (USER, 6, "smaller batches, fewer workers of the data loader, or a machine with more memory", Said(
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 4503599627370496 bytes. Error code 12 (Cannot allocate memory)")),
    "assert": (USER, 6, "an index out of range, mostly", Said(
        f"RuntimeError: CUDA error: device-side assert triggered\n{NOISE}")),
    "illegal access": (USER, 6, "a kernel reads or writes where it may not", Said(
        f"RuntimeError: CUDA error: an illegal memory access was encountered\n{NOISE}")),
    "ordinal": (USER, 6, "it asks for more GPUs than the node has", Said(
        "RuntimeError: CUDA error: invalid device ordinal")),
    "no kernel": (USER, 6, "this torch was not built for this GPU", Said(
        "RuntimeError: CUDA error: no kernel image is available for execution on the device")),
    "old driver": (USER, 6, "this torch needs a newer driver than the machine has", Said(
        "RuntimeError: CUDA driver version is insufficient for CUDA runtime version")),
    # NCCL 2.30.7, net plugins: none has the name that NCCL_NET says
    "net plugin": (USER, 6, "the machine's direct network (EFA, InfiniBand) cannot be used", Said(
        "ip-10-0-0-7:412:431 [0] plugin/net.cc:364 NCCL WARN Failed to initialize any NET plugin\n"
        "[rank0]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, invalid usage")),
    # facebookresearch/mmf#441, pytorch/pytorch#5040
    "shared memory": (USER, 6, "fewer workers of the data loader, or smaller batches", Said(
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n"
        "RuntimeError: DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory. Please try to raise your shared memory limit.")),
    "disk full": (USER, 6, "the disk is full: `disk_gib`", Said("OSError: [Errno 28] No space left on device")),
    "shape": (USER, 6, "exit code 1: RuntimeError: shape '[8, -1]'", Said(
        "RuntimeError: shape '[8, -1]' is invalid for input of size 9")),
    # --- a peer's, or of what lies between
    # NVIDIA/nccl#1814
    "peer gone": (PEERS, 6, "a peer is gone", Said(
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or there "
        "was a network error, NCCL version 2.27.3\nncclRemoteError: A call failed possibly due to a network error or a "
        "remote process exiting prematurely.")),
    "file server": (PEERS, 6, "a file server has lost the file", Said(
        "OSError: [Errno 116] Stale file handle: '/data/tokens.bin'")),
    "file server, by the trainer": (PEERS, 3, "a file server has lost the file", Said(
        "[rank3]: TrainError: cannot read /data/a.txt: Stale file handle")),
    "infiniband": (PEERS, 6, "the network to a peer has failed", Said(
        "hostname:983:1261 [3] NCCL WARN NET/IB : Got completion from peer 10.1.2.3<55921> with status=12 opcode=1 "
        "len=0 vendor err 129 (Send)\nframe #8: clone + 0x40", code=-6)),
    # hiyouga/LlamaFactory#7396
    "collective": (PEERS, 4, "a collective waited for a rank that did not come", Said(TIMED_OUT, code=-6)),
    "rendezvous": (PEERS, 6, "a peer did not come to the rendezvous", Said(
        "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/2 clients.")),
    "preflight": (PEERS, 6, "the network between the nodes is not fit", Said(
        "PreflightError: node 1 got another sum than the others from an all-reduce over all nodes")),
    # every machine answers: ranks that call different collectives
    "collective, of the program": (USER, 4, "rank 7 did not come to nccl:all_reduce, number 8", Said(
        TIMED_OUT, code=-6,
        more={"peers_answer": True, "hang": "rank 7 did not come to nccl:all_reduce, number 8, where ranks 0, 4 wait"},
    )),
}  # fmt: skip


def judged(said: str, *kernel: str, code: int = 1, nodes: int = 2, rank: int = 0, **more: Any) -> AttemptFailed:
    job = Job.model_validate({**JOB, "nodes": nodes, "master_addr": "127.0.0.1", "master_port": 1})
    lines = tuple(said.splitlines())
    words = last_words(lines)
    end = Ended(exit_code=1, rank=rank, rank_code=code, last_words=words, lines=lines, kernel=kernel, **more)
    failure = verdict(job, end)
    assert failure is not None
    return failure


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_put_down_to_its_rank_its_cause_and_its_side(name):
    whose, rank, cause, seen = FAULTS[name]
    failure = judged(seen.log, *filter(None, [seen.kernel]), code=seen.code, rank=seen.first, **seen.more)
    assert (failure.fault, failure.suspect) == whose, failure.reason
    assert failure.reason.startswith(f"rank {rank} ")
    assert cause in failure.reason


def test_every_sign_of_the_table_has_been_seen_somewhere():
    signs = {sign for name, each in vars(faults).items() if name.isupper() and isinstance(each, tuple) for sign in each}
    seen = " ".join(
        judged(said.log, *filter(None, [said.kernel]), code=said.code).reason for *_, said in FAULTS.values()
    )
    assert not {sign.means for sign in signs if sign.means not in seen}


def test_one_node_has_no_peers_to_blame():
    assert judged(TIMED_OUT, code=-6, nodes=1).fault is Fault.USER


def test_a_collective_that_hangs_while_every_machine_answers_is_the_programs():
    """Ranks that call different collectives: the same as an attempt without progress, which an agent ends."""
    assert judged(TIMED_OUT, code=-6, peers_answer=True).fault is Fault.USER
    assert judged(TIMED_OUT, code=-6, peers_answer=False).fault is Fault.INFRASTRUCTURE
    broken = FAULTS["infiniband"][-1]
    assert judged(broken.log, code=-6, peers_answer=True).fault is Fault.INFRASTRUCTURE


@pytest.mark.parametrize(
    "printed",
    [
        "epoch 3: mean absolute error: 802.5",
        "wandb: WARNING Failed to initialize NVML: Driver/library version mismatch",
        "look for `uncorrectable ECC error encountered` in the logs",
    ],
)
def test_what_a_program_prints_beside_its_end_proves_nothing_of_the_machine(printed):
    failure = judged(f"{printed}\nValueError: shapes do not fit")
    assert (failure.fault, failure.suspect) == USER, failure.reason


def test_an_error_that_a_program_has_survived_is_not_its_end():
    survived = "RuntimeError: CUDA out of memory: batch halved\nValueError: no data left"
    found = faults.find(survived.splitlines(), last_words="ValueError: no data left")
    assert found is None


def test_the_kernels_log_is_read_from_a_time_on(tmp_path):
    kmsg = tmp_path / "kmsg"
    kmsg.write_bytes(b"6,1,1000000,-;old\n4,2,2500000,-;NVRM: Xid 79\xff\n SUBSYSTEM=pci\n4,3,2600000,c;new\n")
    assert kernel_log.since(2.0, kmsg) == ["NVRM: Xid 79\ufffd", "new"]


def test_where_nobody_lets_us_read_it_the_kernel_has_said_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no sudo
    assert kernel_log.since(0, tmp_path / "absent") == []


# --- ranks that really end so, under a real agent ---------------------------------------------------------------------

# stands for torchrun, which takes seconds to be imported: three ranks, and who failed first is left in a file
LAUNCHER = {"argv": ["{python}", "launch.py", "{failure_file}", "prog.py", "{program}"]}
LAUNCH = """
import json, os, subprocess, sys
target, *program = sys.argv[1:]
ranks = [subprocess.Popen([sys.executable, *program], env={**os.environ, "RANK": str(rank)}) for rank in range(3)]
pid, status = os.wait()
(rank,) = (number for number, each in enumerate(ranks) if each.pid == pid)
with open(target, "w") as file:
    json.dump({"rank": rank, "exit_code": os.waitstatus_to_exitcode(status)}, file)
for each in ranks:
    each.kill()
sys.exit(1)
"""
RANK = """
import ctypes, mmap, os, sys, time
from mgpu_train import stacks
stacks.show_on_request(int(os.environ["RANK"]))
print("begun", flush=True)
exec(compile("def all_reduce(): time.sleep(300)", "torch/distributed/distributed_c10d.py", "exec"))  # as torch's
if os.environ["RANK"] != "1":
    all_reduce()
"""
REAL = {
    "exit code": (USER, "rank 1 ended with exit code 3", "sys.exit(3)"),
    "exception": (USER, "rank 1 ended with exit code 1: ValueError: no such key", "raise ValueError('no such key')"),
    "segmentation fault": (USER, "rank 1 was ended by SIGSEGV", "ctypes.string_at(0)"),
    "killed": (USER, "rank 1 was ended by SIGKILL: most often that is a limit of memory", "os.kill(os.getpid(), 9)"),
    "bus error": (USER, "rank 1 was ended by SIGBUS: most often /dev/shm is full", """
with open("mapped", "w+b") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
    file.truncate(0)
    mapped[0]
"""),
    "full disk": (USER, "rank 1 ended with exit code 1: the disk is full", "open('/dev/full', 'w', 1).write('x\\n')"),
    "host memory": (USER, "rank 1 ended with exit code 1: smaller batches", "bytearray(1 << 60)"),
    "hang": (USER, "ranks 0, 2 wait in all_reduce, and not rank 1: rank 1 is in prog.py:11 (late)", """
def late():
    time.sleep(300)
late()
"""),
}  # fmt: skip


def real(node: Any, program: str) -> dict[str, Any]:
    """The last status of an agent whose three ranks run this; the second alone comes to the end of it."""
    node.program(RANK + program)
    (node.run / "work" / "launch.py").write_text(LAUNCH)
    job = {"checkpoint": None, "processes_per_node": 3, "launcher": LAUNCHER, "command": ["x"]}
    node.job(**job, timeouts={"first_step_s": 30, "stall_s": 2})
    node.start()
    return node.ended()


@pytest.mark.parametrize("name", REAL)
def test_a_rank_that_really_ends_so_is_found_with_its_cause_and_its_side(node, name):
    whose, words, program = REAL[name]
    ended = real(node, program)
    assert (ended["fault"], ended["suspect"]) == whose, ended["reason"]
    assert words in ended["reason"]
    assert ended["missing_rank"] == (1 if name == "hang" else None)


@pytest.fixture
def group(require) -> Iterator[Path]:
    """A cgroup of 48 MiB, for whoever writes its number there."""
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    made = Path("/sys/fs/cgroup", "" if unified else "memory", f"mgpu-test-{os.getpid()}")
    try:
        made.mkdir()
        (made / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(48 << 20))
    except OSError as error:
        require("cgroups", False, f"{made} cannot be made: {error.strerror}")
    yield made
    with suppress(OSError):
        made.rmdir()


def test_a_rank_that_the_kernel_kills_for_its_memory_is_found_with_its_cause(node, group):
    program = f"open('{group}/cgroup.procs', 'w').write(str(os.getpid()))\nkept = b'x' * (256 << 20)"
    ended = real(node, program)
    assert (ended["fault"], ended["suspect"]) == USER
    assert ended["reason"].startswith("rank 1 was ended by SIGKILL: out of memory, the kernel says: a smaller batch")
