"""The node's status file: what the agent says of itself. The supervisor judges a run by it, not by exit codes."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from mgpu_train.config import Model


class Phase(StrEnum):
    """Where a node is in an attempt, in this order; DONE and FAILED are final."""

    PREPARING = "preparing"  # folders, requirements, data
    RESUMING = "resuming"  # the checkpoint is fetched and verified
    LAUNCHING = "launching"  # the launcher runs, no progress yet
    TRAINING = "training"
    DRAINING = "draining"  # the launcher has ended; uploads and commits are finished
    DONE = "done"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        """True when nothing will change any more."""
        return self in (Phase.DONE, Phase.FAILED)


class Fault(StrEnum):
    """Whose fault an end is."""

    USER = "user"  # the program exits 1, requirements do not install
    INFRASTRUCTURE = "infrastructure"  # disk, store, a lost peer
    PROVIDER = "provider"  # it took the machine
    STOPPED = "stopped"  # the operator or a deadline asked for it


class CheckpointStatus(Model):
    """What has become of the node's checkpoints in this attempt; steps are optimizer steps, -1 = none yet."""

    saved_step: int = Field(default=-1, description="newest finished on local disk")
    uploaded_step: int = Field(default=-1, description="newest whose part from this node is in the store")
    committed_step: int = Field(default=-1, description="newest in the commit log (known to node 0's agent)")
    committed_id: str | None = Field(default=None, description="its checkpoint id")
    skipped: int = Field(default=0, description="saves that were not uploaded because one was in flight")
    failed: int = Field(default=0, description="saves whose upload or commit failed")
    problem: str | None = Field(default=None, description="the newest failure, in words")
    stall_s: float | None = Field(default=None, description="seconds that training stood still for the newest save")
    save_s: float | None = Field(
        default=None, description="seconds from the beginning of the newest save until it stood on disk on every node"
    )
    save_failed: int = Field(default=0, description="saves that failed before they stood on disk; training goes on")
    save_skipped: int = Field(default=0, description="saves that were due while one was still being written")
    save_problem: str | None = Field(default=None, description="the newest failed save: its step, and why")


LEASE_ENDS = "lease"
_LATER = ("starved", "damaged", "drain_s")  # keys of `AgentStatus` that operators of before refuse


class Notice(Model):
    """This machine goes: by the provider's warning, as the agent has read it, or by a lease that cannot be renewed."""

    action: str = Field(
        description="terminate, stop or hibernate: the provider; lease: it cannot be renewed. Training ends with each"
    )
    at: float = Field(description="when the machine goes, UNIX seconds of the node's clock")
    fits: bool = Field(description="a save and its upload fit before that, by what the earlier ones took")


class AgentStatus(Model):
    """`status.json`, version 2. Times are UNIX seconds of the node's clock."""

    model_config = ConfigDict(extra="ignore")  # a newer agent may say more

    version: Literal[2] = 2

    @model_validator(mode="before")
    @classmethod
    def _of_version_1(cls, data: Any) -> Any:
        """An agent that was started by an older mgpu: it named its metrics one by one."""
        if not isinstance(data, dict) or data.get("version") != 1:
            return data
        names = ("loss", "tokens_per_s", "validation_loss", "validation_step")
        metrics = {name: value for name in names if (value := data.get(name)) is not None}
        if metrics.get("validation_step") == -1:
            del metrics["validation_step"]
        first = data.get("first_validation_loss")
        kept = {name: value for name, value in data.items() if name not in (*names, "first_validation_loss")}
        known = {"metrics": metrics} | ({} if first is None else {"first_metrics": {"validation_loss": first}})
        return kept | {"version": 2} | known

    run_id: str
    attempt: int
    node_rank: int
    phase: Phase
    agent_pid: int
    beat: int = Field(
        default=0, description="grows with every pass of the agent; one that stands still is an old status"
    )
    started_at: float
    updated_at: float
    phase_seconds: dict[str, float] = Field(default_factory=dict, description="seconds spent in each phase so far")
    step: int = Field(default=-1, description="newest optimizer step seen in this node's metrics; -1 = none")
    steps: int | None = Field(default=None, description="optimizer steps in all, where known")
    metrics: dict[str, float] = Field(
        default_factory=dict,
        description="newest values by name, as the program calls them; `validation_*`: at a validation, whose step is "
        "`validation_step`",
    )
    first_metrics: dict[str, float] = Field(
        default_factory=dict, description="of what validations measure: the first values of this attempt"
    )
    progress_at: float | None = Field(default=None, description="when progress was last seen")
    quiet_s: float | None = Field(
        default=None,
        description="seconds without a sign of progress on any node after which the attempt counts as hung",
    )
    quiet_until: float | None = Field(default=None, description="when they are over, as far as is known here")
    overdue: bool = Field(
        default=False, description="they are over, but some nodes were never heard here: the operator judges"
    )
    checkpoint: CheckpointStatus = Field(default_factory=CheckpointStatus)
    drain_s: float | None = Field(
        default=None,
        description="seconds that the last uploads get, where they are known to take longer than `timeouts.drain_s`",
    )
    notice: Notice | None = Field(default=None, description="the machine is about to be taken")
    at_risk_since: float | None = Field(
        default=None, description="the provider's hint that it may take the machine soon, which is no notice: when"
    )
    hang: str | None = Field(
        default=None, description="where the ranks of this node were when the attempt hung; empty: nobody knows"
    )
    missing_rank: int | None = Field(default=None, description="the rank that others waited for then, if it is known")
    exit_code: int | None = Field(default=None, description="the launcher's; for the record, not for the verdict")
    fault: Fault | None = Field(default=None, description="with FAILED: whose")
    suspect: bool = Field(default=False, description="this machine seems to be broken: it is replaced")
    starved: bool = Field(
        default=False, description="the kernel ended the program, since the machine was out of memory"
    )
    damaged: str | None = Field(
        default=None,
        description="id of the checkpoint that the attempt was to go on from, where it is not what was committed",
    )
    reason: str | None = Field(default=None, description="with FAILED: what happened, one line, no secret")

    @model_serializer(mode="wrap")
    def _written(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what an older operator does not know, as long as nothing is to be said by it."""
        said = whole(self)
        return {name: value for name, value in said.items() if name not in _LATER or value}
