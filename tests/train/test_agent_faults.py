"""Whose fault an end is: excerpts of real logs, each with where it was seen; and the kernel's log."""

from __future__ import annotations

import pytest
from mgpu_train.agent.attempt import faults
from mgpu_train.agent.attempt.decide import Ended, verdict
from mgpu_train.agent.machine import kernel_log
from mgpu_train.agent.status.log import last_words
from mgpu_train.agent.status.status import Fault
from mgpu_train.config import Job

MACHINE, PEERS, USER = (Fault.INFRASTRUCTURE, True), (Fault.INFRASTRUCTURE, False), (Fault.USER, False)
JOB = {"run_id": "r", "attempt": 1, "writer": "w", "node_rank": 0, "processes_per_node": 8, "command": ("t.py",)}
NOISE = "CUDA kernel errors might be asynchronously reported at some other API call.\nCompile with `TORCH_USE_CUDA_DSA`"

# said by the program: whose it is, exit code of the first rank, the rank that the line names, lines
SAID = [
    # huggingface/accelerate#1192, vllm-project/vllm#5222, kohya-ss/sd-scripts#1434
    (MACHINE, 1, None, f"RuntimeError: CUDA error: uncorrectable ECC error encountered\n{NOISE}"),
    (
        MACHINE, -6, 1,
        "[E ProcessGroupNCCL.cpp:916] [Rank 1] NCCL watchdog thread terminated with exception: CUDA error: "
        f"uncorrectable ECC error encountered\n{NOISE}\nframe #0: c10::Error::Error(c10::SourceLocation) + 0x57",
    ),
    # huggingface/huggingface_hub#4134
    (
        MACHINE, 1, None,
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
        "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized",
    ),
    # cudaGetErrorString(cudaErrorNvlinkUncorrectable)
    (MACHINE, 1, 3, "[rank3]: RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution"),
    # NVML, as nvidia-smi and pynvml say it
    (
        MACHINE, 1, None,
        "RuntimeError: Unable to determine the device handle for GPU 0000:81:00.0: Unknown Error",
    ),
    (MACHINE, 1, None, "Traceback (most recent call last):\npynvml.NVMLError_GpuIsLost: GPU is lost"),
    (MACHINE, 1, None, "RuntimeError: NVML: GPU is lost. Reboot the system to recover this GPU"),
    (MACHINE, 1, None, "RuntimeError: Failed to initialize NVML: Driver/library version mismatch"),
    # karpathy/neuraltalk2#127
    (MACHINE, 1, None, "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    (MACHINE, 1, None, "OSError: [Errno 5] Input/output error: '/data/shard-00041.tar'"),
    # opendatalab/MinerU#426: another card of the same kind, and it was gone
    (MACHINE, 1, 2, f"[rank2]: RuntimeError: CUDA error: unspecified launch failure\n{NOISE}"),
    (MACHINE, 1, None, f"RuntimeError: CUDA error: unknown error\n{NOISE}"),
    # CUDA and torch: errors of the program
    (USER, 1, 5, "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 5 has a total"),
    (USER, 1, None, f"RuntimeError: CUDA error: device-side assert triggered\n{NOISE}"),
    (USER, 1, None, f"RuntimeError: CUDA error: an illegal memory access was encountered\n{NOISE}"),
    (USER, 1, None, "RuntimeError: CUDA error: invalid device ordinal"),
    (USER, 1, None, "RuntimeError: CUDA error: no kernel image is available for execution on the device"),
    (USER, 1, None, "RuntimeError: CUDA driver version is insufficient for CUDA runtime version"),
    # NCCL 2.30.7, net plugins: none has the name that NCCL_NET says
    (
        USER, 1, None,
        "ip-10-0-0-7:412:431 [0] plugin/net.cc:364 NCCL WARN Failed to initialize any NET plugin\n"
        "[rank0]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, invalid usage",
    ),
    # facebookresearch/mmf#441, pytorch/pytorch#5040
    (
        USER, 1, None,
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n"
        "RuntimeError: DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory. Please try to raise your shared memory limit.",
    ),
    (USER, 1, None, "OSError: [Errno 28] No space left on device"),
    (USER, 1, None, "RuntimeError: shape '[8, -1]' is invalid for input of size 9"),
    (USER, -11, None, "Fatal Python error: Segmentation fault"),
    # NVIDIA/nccl#1814
    (
        PEERS, 1, None,
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or there "
        "was a network error, NCCL version 2.27.3\nncclRemoteError: A call failed possibly due to a network error or a "
        "remote process exiting prematurely.",
    ),
    (
        PEERS, -6, None,
        "hostname:983:1261 [3] NCCL WARN NET/IB : Got completion from peer 10.1.2.3<55921> with status=12 opcode=1 "
        "len=0 vendor err 129 (Send)\nframe #8: clone + 0x40",
    ),
    # hiyouga/LlamaFactory#7396
    (
        PEERS, -6, 4,
        "[rank4]:[E321 02:07:08.414640780 ProcessGroupNCCL.cpp:607] [Rank 4] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) "
        "ran for 600067 milliseconds before timing out.\nframe #3: <unknown function> + 0xdbbf4",
    ),
    (PEERS, 1, None, "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/2 clients."),
]  # fmt: skip

# said by the kernel: whose it is, lines, while the program says what follows
ILLEGAL = "RuntimeError: CUDA error: unspecified launch failure"
KERNEL = [
    # leptonai/gpud#1209, NVIDIA/NVSentinel#155
    (MACHINE, "NVRM: Xid (PCI:0000:44:00): 79, pid=4124, GPU has fallen off the bus.", "Segmentation fault"),
    (MACHINE, "NVRM: fallen off the bus and is not responding to commands.", "Segmentation fault"),
    # docs.nvidia.com/deploy/dynamic-page-retirement
    (MACHINE, "NVRM: Xid (PCI:0000:10:1c): 48, pid=1896, An uncorrectable double bit error (DBE) was detected", "x"),
    (MACHINE, "NVRM: Xid (PCI:0000:10:1c): 74, pid=1896, NVLink: fatal error detected on link 3", "NCCL watchdog"),
    (MACHINE, "NVRM: Xid (PCI:0000:4e:00): 119, pid=3344, Timeout waiting for RPC from GSP1!", "x"),
    (MACHINE, "mce: [Hardware Error]: Machine check events logged: Uncorrected, software containable error", "x"),
    (MACHINE, "I/O error, dev nvme1n1, sector 184 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2", "x"),
    (MACHINE, "EXT4-fs (nvme1n1): Remounting filesystem read-only", "OSError: [Errno 30] Read-only file system"),
    # an Xid of the program itself outweighs a failure that could be either's
    (USER, "NVRM: Xid (PCI:0000:01:00): 31, pid=4124, name=python, Ch 00000008, MMU Fault", ILLEGAL),
    (USER, "NVRM: Xid (PCI:0000:01:00): 13, pid=4124, Graphics SM Warp Exception", ILLEGAL),
    # what has nothing to do with it
    (USER, "I/O error, dev fd0, sector 0 op 0x0:(READ) flags 0x0", "ValueError: x"),
    (USER, "docker0: port 1(veth0045dd3) entered disabled state", "ValueError: x"),
]  # fmt: skip


def judged(said: str, *kernel: str, code: int = 1, nodes: int = 2, answer: bool = False):
    job = Job.model_validate({**JOB, "nodes": nodes, "master_addr": "127.0.0.1", "master_port": 1})
    lines = tuple(said.splitlines())
    end = Ended(
        exit_code=1,
        rank=0,
        rank_code=code,
        last_words=last_words(lines),
        lines=lines,
        kernel=kernel,
        peers_answer=answer,
    )
    failure = verdict(job, end)
    assert failure is not None
    return failure


@pytest.mark.parametrize(("whose", "code", "rank", "said"), SAID, ids=range(len(SAID)))
def test_what_a_program_says_is_put_down_to_whom_it_belongs(whose, code, rank, said):
    failure = judged(said, code=code)
    assert (failure.fault, failure.suspect) == whose, failure.reason
    assert failure.reason.startswith(f"rank {rank or 0} ")


@pytest.mark.parametrize(("whose", "line", "said"), KERNEL, ids=range(len(KERNEL)))
def test_what_the_kernel_says_of_the_hardware_outweighs_the_programs_words(whose, line, said):
    failure = judged(said, line)
    assert (failure.fault, failure.suspect) == whose, failure.reason
    assert (line in failure.reason) == (whose is MACHINE or "Xid" in line)


def test_one_node_has_no_peers_to_blame():
    timed_out = next(said for *_, said in SAID if "Watchdog" in said)
    assert judged(timed_out, code=-6, nodes=1).fault is Fault.USER


def test_a_collective_that_hangs_while_every_machine_answers_is_the_programs():
    """Ranks that call different collectives: the same as an attempt without progress, which an agent ends."""
    timed_out = next(said for *_, said in SAID if "Watchdog" in said)
    assert judged(timed_out, code=-6, answer=True).fault is Fault.USER
    assert judged(timed_out, code=-6, answer=False).fault is Fault.INFRASTRUCTURE
    broken = next(said for *_, said in SAID if "NET/IB" in said)
    assert judged(broken, code=-6, answer=True).fault is Fault.INFRASTRUCTURE


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
