"""What commands and other programs are shown of a run. The record itself is mgpu's own, and may change."""

from __future__ import annotations

import time
from typing import Any

from pydantic import Field

from mgpu.plan.model import Value
from mgpu.run.record.record import Check, Interruption, Record, known


class InterruptionView(Value):
    """An end of an attempt that was not the run's end, and the way back."""

    attempt: int
    reason: str
    fault: str | None = Field(description="user, infrastructure, provider or stopped; null: not known")
    nodes: list[int] = Field(description="ranks whose machines were lost, or were about to be")
    step: int | None = Field(description="the newest step that was seen")
    steps_lost: int | None = Field(description="steps that were done again; null: not known yet")
    heard_at: float = Field(description="when a lost node was last heard from; without one, when the end was seen")
    noticed_at: float
    ended_at: float | None = Field(description="nothing of the attempt ran any more")
    repaired_at: float | None = Field(description="the fleet was whole again")
    started_at: float | None = Field(description="all agents had started the next attempt")
    resumed_at: float | None = Field(description="its first new step, by the node's clock")
    resumed_step: int | None = Field(description="of the checkpoint that it went on from; 0: from the beginning")

    @classmethod
    def of(cls, each: Interruption) -> InterruptionView:
        """As it is shown."""
        plain = {name: getattr(each, name) for name in cls.model_fields}
        resumed = None if each.resumed_step is None else max(0, each.resumed_step)
        return cls.model_validate(plain | {"step": known(each.step), "resumed_step": resumed})


class CheckView(Value):
    """A metric of a run that has succeeded, and whether it is as its run file expects."""

    metric: str
    met: bool
    said: str = Field(description="with what it was compared, in words")
    value: float | None = Field(description="null: the run has never reported it")
    median: float | None = Field(description="of earlier runs; null: it was not compared with any")
    runs: int = Field(description="earlier runs that were there to compare it with")

    @classmethod
    def of(cls, each: Check) -> CheckView:
        """As it is shown."""
        return cls.model_validate({name: getattr(each, name) for name in cls.model_fields})


class RunView(Value):
    """A run. null: not known, or not reached."""

    run_id: str
    name: str
    state: str = Field(
        description="queued, provisioning, running, repairing, stopping or teardown; at the end succeeded, failed or "
        "stopped"
    )
    reason: str | None = Field(description="why it ended, or what it waits for")
    fault: str | None = Field(description="whose: user, infrastructure, provider or stopped")
    stop_reason: str | None = Field(
        description="the limit that ended it: user (`mgpu stop`, a signal), hard_cap of its machines, budget "
        "(its max_usd), month (`mgpu limits`), deadline (its own max_hours); null: none"
    )
    exit_code: int | None = Field(description="of the command that supervised its end")
    as_expected: bool | None = Field(
        description="whether a run that has succeeded is as its run file expects (`expect`): if not, the exit code is "
        "6; null: nothing is expected, or it has not succeeded"
    )
    checks: list[CheckView] = Field(description="what came of each of these expectations")
    teardown: str = Field(
        description="none, asked (some machines may be billed), confirmed (they are gone), kept, not ours"
    )
    project: str = Field(description="the folder of the Pulumi program")
    run_file: str
    schedule: str | None = Field(description="whose due time started it; null: somebody did")
    due_at: float | None = Field(description="that time")
    code: str | None = Field(description="the commit that its code is of, git+URL@SHA; null: it came from a folder")
    sweep: str | None = Field(description="that it is one run of")
    setting: dict[str, str] = Field(description="by which it differs from others of its sweep")
    stack: str
    own_stack: bool = Field(description="made for this run by `mgpu launch`")
    kept_by: str | None = Field(description="the run whose kept fleet this one was put on; null: on none")
    slots: list[int] = Field(
        description="of each node of a kept fleet that it shares: numbers of GPUs, or of places; empty: it has all"
    )
    provider: str
    nodes: int
    node_phases: list[str] = Field(description="by node_rank")
    price_usd_per_hour: float | None = Field(description="of all nodes")
    spent_usd: float | None = Field(
        description="on machines, their disks and public addresses so far; null: no price is known"
    )
    max_hours: float
    max_usd: float | None = Field(description="that it may spend in all; null: no limit")
    hard_cap_at: float | None = Field(description="when the machines end whatever happens")
    lease_until: float | None = Field(description="of a fleet that was kept")
    created_at: float
    created_by: str | None = Field(description="user and host; of a schedule's, who has added it; null: not known")
    updated_at: float
    ended_at: float | None
    phase_seconds: dict[str, float] = Field(description="seconds of wall time in each state")
    agent_seconds: dict[str, float] = Field(description="seconds of node 0's own phases, within `training`")
    attempt: int = Field(description="0: none has begun")
    recoveries: int = Field(description="attempts after the first of this launch")
    interruptions: list[InterruptionView]
    step: int | None
    steps: int | None = Field(description="in all")
    metrics: dict[str, float] = Field(
        description="newest values by the program's own names; the bundled trainer's are `loss`, `tokens_per_s`, `lr`, "
        "`grad_norm`, `samples`, `validation_loss`, `first_validation_loss`, `unigram_entropy`, `bigram_entropy`"
    )
    store: str | None = Field(description="where its checkpoints are: a URL")
    checkpoint_id: str | None = Field(description="the newest that was committed")
    checkpoint_step: int | None
    saves: dict[str, float] = Field(
        description="of this attempt, by node 0: `stall_s`, `save_s` of the newest; how many `failed`, were `skipped`; "
        "`drain_s`, what the last uploads get, where that is longer than usual"
    )
    outputs: dict[str, Any] | None = Field(
        description="of the newest attempt: `folder`, `files`, `bytes`, how many are `missing`"
    )
    trials: list[dict[str, Any]] = Field(
        description="of `--smoke`, `--tune` or `--lr-range`, in their order: `purpose`, `name`, `train` (what was "
        "changed), `world_size`, `outcome` (ok, refused, out of memory, failed, too slow), `said`, `seconds`, `unit`, "
        "`units_per_s`, `memory_gib`, `mfu`, `usd_per_million` (units); of lr-range `rates` (of each step `lr`, "
        "`loss`, and `smooth`, the mean of the steps around it) and `lr` (where the loss falls fastest; null: nowhere)"
    )
    image: str | None = Field(description="repository@sha256:..., of every attempt; null: without a container")
    fleet: dict[str, Any] | None = Field(description="the stack output `mgpu`, as it was read")

    @classmethod
    def of(cls, record: Record) -> RunView:
        """As it is shown."""
        plain = {name: getattr(record, name, None) for name in cls.model_fields}
        shown = {
            "state": str(record.state),
            "reason": record.reason or None,
            "created_by": record.created_by or None,
            "schedule": record.schedule or None,
            "due_at": record.due_at or None,
            "code": record.code or None,
            "sweep": record.sweep or None,
            "kept_by": record.kept_by or None,
            "spent_usd": round(record.spent_usd(time.time()), 4) if record.priced else None,
            "max_usd": record.max_usd or None,
            "price_usd_per_hour": record.price_usd_per_hour or None,
            "hard_cap_at": record.hard_cap_at or None,
            "lease_until": record.lease_until or None,
            "as_expected": not record.unmet if record.checks else None,
            "checks": [CheckView.of(each) for each in record.checks],
            "interruptions": [InterruptionView.of(each) for each in record.interruptions],
            "step": known(record.step),
            "metrics": record.metrics | {f"first_{name}": value for name, value in record.first_metrics.items()},
            "checkpoint_step": known(record.checkpoint_step),
        }
        return cls.model_validate(plain | shown)


def lasts(record: Record) -> bool:
    """Whether the machines that a run has kept take another one, as far as its record says: the provider has taken none
    of them, and neither a limit nor their lease has ended them."""
    # what a budget pays for bounds the machines that were rented for the run, and no others
    limits = ("hard_cap", "budget", "month") if record.own_stack else ("hard_cap",)
    lost = record.fault == "provider" or (record.under_repair is not None and bool(record.under_repair.nodes))
    return not (record.stop_reason in limits or lost or 0 < record.lease_until < time.time())


def resumes(record: Record, *, kept: bool) -> str:
    """The command that goes on with a run from its newest checkpoint; `kept`: on the machines that it has kept, which
    have to be given back before it gets others."""
    on = f"run{record.file_argument} --stack {record.stack}" if kept else f"launch{record.file_argument}"
    return f"mgpu {on} --resume {record.run_id}"
