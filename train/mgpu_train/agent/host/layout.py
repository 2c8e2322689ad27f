"""Every path of a run on a node, in one class; the operator and the agent use the same names.

All of it lies under the SSH user's home: `runs/<run id>/`. Paths are relative to the home unless `home` is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

LIB = PurePosixPath(".mgpu/lib")
LEASE = PurePosixPath(".mgpu/lease")
NOTICE = PurePosixPath(".mgpu/notice.json")  # as EC2's spot/instance-action: {"action": "terminate", "time": RFC 3339}
ENVIRONMENTS = PurePosixPath(".mgpu/env")
FETCHED = ".mgpu-fetched.jsonl"  # in a folder of `data:`: which version of each object is there, since when
AMAZON = Path("/opt/amazon")  # where AWS's installer puts EFA's libraries and NCCL's plugin for it
AMAZON_OF_MACHINE = Path("/opt/mgpu-efa")  # where a container sees its machine's


@dataclass(frozen=True)
class RunLayout:
    """The paths of one run on one node."""

    run_id: str
    home: PurePosixPath = PurePosixPath()

    @property
    def root(self) -> PurePosixPath:
        """The run's folder."""
        return self.home / "runs" / self.run_id

    @property
    def job(self) -> PurePosixPath:
        """`job.json` of the newest attempt."""
        return self.root / "job.json"

    def attempt_job(self, attempt: int) -> PurePosixPath:
        """`MGPU_JOB`: the job of one attempt, which a newer `job.json` does not change."""
        return self.root / f"job-{attempt}.json"

    def save_request(self, attempt: int) -> PurePosixPath:
        """`MGPU_SAVE_REQUEST`: appears in an attempt when a checkpoint ahead of time is wise."""
        return self.root / f"save-{attempt}"

    def failure(self, attempt: int) -> PurePosixPath:
        """What torchrun has left of the rank that failed first, if one did (`mgpu_train.agent.launchers.torchrun`)."""
        return self.root / f"failure-{attempt}.json"

    def stacks(self, attempt: int) -> PurePosixPath:
        """`MGPU_STACKS_DIR`: where the ranks of an attempt say that they show their stacks, and do."""
        return self.root / f"stacks-{attempt}"

    def preflight(self, attempt: int) -> PurePosixPath:
        """What was measured on the ranks before an attempt's program (`mgpu_train.health.preflight`)."""
        return self.root / f"preflight-{attempt}.json"

    @property
    def lock(self) -> PurePosixPath:
        """Held by the living agent (flock)."""
        return self.root / "agent.lock"

    @property
    def agent(self) -> PurePosixPath:
        """Which process the newest agent is: its attempt, pid and start time."""
        return self.root / "agent.json"

    @property
    def renewal(self) -> PurePosixPath:
        """The socket over which the living agent takes fresh credentials of the store."""
        return self.root / "agent.sock"

    @property
    def status(self) -> PurePosixPath:
        """The agent's status file (`AgentStatus`), replaced atomically."""
        return self.root / "status.json"

    @property
    def log(self) -> PurePosixPath:
        """What agent, launcher and ranks print, of all attempts, append-only."""
        return self.root / "log"

    @property
    def log_times(self) -> PurePosixPath:
        """When the log had which size: `<bytes> <UNIX seconds>` for each second in which it grew, append-only."""
        return self.root / "log.times"

    @property
    def work(self) -> PurePosixPath:
        """The user's code, synced; the launcher's working directory."""
        return self.root / "work"

    @property
    def checkpoints(self) -> PurePosixPath:
        """`MGPU_CHECKPOINT_DIR`: finished local checkpoints, `step-<n>`."""
        return self.root / "checkpoints"

    @property
    def resume(self) -> PurePosixPath:
        """`MGPU_RESUME_DIR`: the verified checkpoint that the attempt starts from."""
        return self.root / "resume"

    @property
    def outputs(self) -> PurePosixPath:
        """Files that the run file names as outputs, as the newest attempt left them."""
        return self.root / "outputs"

    @property
    def outputs_list(self) -> PurePosixPath:
        """Which ones there are (`OutputList`), written when all of them are in place."""
        return self.root / "outputs.json"

    @property
    def metrics(self) -> PurePosixPath:
        """`MGPU_METRICS_DIR`: `rank-<rank>.jsonl`."""
        return self.root / "metrics"
