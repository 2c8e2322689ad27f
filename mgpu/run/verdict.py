"""What the state of all nodes means for the run. Pure: recomputed at every pass, never from remembered events."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mgpu_train.agent.status import AgentStatus, Fault, Phase


class Action(StrEnum):
    """What the supervisor does next."""

    WAIT = "wait"
    STOP = "stop"  # ask every agent to save, stop and upload
    END = "end"  # the attempt is over


@dataclass(frozen=True)
class NodeView:
    """One node as it was last seen; `silent_s` is how long ago that was, `gone` when its provider says it is going."""

    rank: int
    status: AgentStatus | None
    silent_s: float = 0.0
    gone: bool = False


@dataclass(frozen=True)
class Verdict:
    """What to do, and with END how the attempt ended."""

    action: Action
    succeeded: bool = False
    reason: str = ""
    fault: Fault | None = None


def decide(views: tuple[NodeView, ...], *, attempt: int, silence_s: float) -> Verdict:
    """The verdict over one pass. A silent node is UNKNOWN until `silence_s`; a provider's word is believed at once."""
    lost = [v for v in views if v.gone or v.silent_s > silence_s]
    failed = [v for v in views if v.status and v.status.attempt == attempt and _failing(v.status)]
    over = [v for v in views if v in lost or _final(v, attempt)]
    if len(over) < len(views):
        if lost or failed:
            return Verdict(Action.STOP, reason=_why(failed, lost), fault=_fault(failed, lost))
        return Verdict(Action.WAIT)
    if lost or failed:
        return Verdict(Action.END, reason=_why(failed, lost), fault=_fault(failed, lost))
    return Verdict(Action.END, succeeded=True)


def _final(view: NodeView, attempt: int) -> bool:
    return view.status is not None and view.status.attempt == attempt and view.status.phase.final


def _failing(status: AgentStatus) -> bool:
    # an agent names the fault before it drains: the peers need not wait for its uploads
    return status.phase is Phase.FAILED or status.fault is not None


# a program that crashes takes its peers' connections along, and a peer may say so first; one that was told to stop is
# no cause at all
_BLAME = (Fault.USER, Fault.INFRASTRUCTURE, None, Fault.STOPPED)


def _first(failed: list[NodeView]) -> NodeView:
    return min(failed, key=lambda v: (_BLAME.index(v.status.fault), v.status.updated_at) if v.status else (9, 0.0))


def _why(failed: list[NodeView], lost: list[NodeView]) -> str:
    if lost:
        return "; ".join(
            f"node {v.rank} " + ("is gone" if v.gone else f"has not answered for {v.silent_s:.0f} s") for v in lost
        )
    first = _first(failed)
    return f"node {first.rank}: {first.status.reason if first.status else ''}"


def _fault(failed: list[NodeView], lost: list[NodeView]) -> Fault | None:
    if lost:
        return Fault.INFRASTRUCTURE
    status = _first(failed).status
    return status.fault if status else None
