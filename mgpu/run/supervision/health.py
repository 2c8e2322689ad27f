"""What the state of all nodes means for the run. Pure: recomputed at every pass, never from remembered events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from mgpu_train.agent.status.status import LEASE_ENDS, AgentStatus, Fault, Phase


class Action(StrEnum):
    """What the supervisor does next."""

    WAIT = "wait"
    STOP = "stop"  # ask every agent to stop and upload
    END = "end"  # the attempt is over


@dataclass(frozen=True)
class NodeView:
    """One node as it was last seen; `silent_s` is how long ago that was."""

    rank: int
    status: AgentStatus | None
    silent_s: float = 0.0
    gone: bool = False  # its provider says that it is going, or gone
    dead: bool = False  # its agent has ended without a word, says the node itself
    why: str = ""  # what the provider gives as the reason

    @property
    def absence(self) -> str:
        """How it is missed, in words."""
        if self.gone:
            return f"node {self.rank} is gone" + (f" ({self.why})" if self.why else "")
        return f"node {self.rank} has not answered for {self.silent_s:.0f} s"


@dataclass(frozen=True)
class Verdict:
    """What to do; with STOP, whether a save still has a point; with END, how the attempt ended."""

    action: Action
    now: bool = False  # STOP: without a save
    succeeded: bool = False
    reason: str = ""
    fault: Fault | None = None
    lost: tuple[int, ...] = ()  # ranks whose machines are gone, silent for too long, about to be taken, or seem broken
    starved: bool = False  # the program is at fault, in that a machine was out of memory


def decide(views: tuple[NodeView, ...], *, attempt: int, silence_s: float) -> Verdict:
    """The verdict over one pass. A silent node is UNKNOWN until `silence_s`; a provider's word is believed at once."""
    nodes = tuple(_Node(view, attempt, silence_s) for view in views)
    causes = [kind for kind in (_lost, _noticed) if any(kind(node) for node in nodes)]
    causes += [_hung] * all(_hung(node) for node in nodes) + [_failed] * any(_failed(node) for node in nodes)
    over = all(_lost(node) or node.final or node.view.dead for node in nodes)
    if not causes:
        return Verdict(Action.END, succeeded=True) if over else Verdict(Action.WAIT)
    reason, fault = _CAUSES[causes[0]](nodes)
    lost = tuple(node.view.rank for node in nodes if node.absent or node.notice or node.suspect)
    starved = fault is Fault.USER and any(node.status is not None and node.status.starved for node in nodes)
    if over:
        return Verdict(Action.END, reason=reason, fault=fault, lost=lost, starved=starved)
    return Verdict(Action.STOP, now=not _can_save(nodes), reason=reason, fault=fault, lost=lost, starved=starved)


def _can_save(nodes: tuple[_Node, ...]) -> bool:
    """Without a peer no rank can save any more; before a machine goes all of them can, if there is time."""
    alone = all(_hung(node) for node in nodes)
    alone = alone or any(
        _lost(node) or (_failed(node) and node.fault not in (Fault.STOPPED, Fault.PROVIDER)) for node in nodes
    )
    return not alone and all(node.notice.fits for node in nodes if node.notice)


class _Node:
    """One view, and what it says of this attempt: another attempt's status says nothing."""

    def __init__(self, view: NodeView, attempt: int, silence_s: float) -> None:
        self.view = view
        self.status = view.status if view.status and view.status.attempt == attempt else None
        self.final = self.status is not None and self.status.phase.final
        self.done = self.status is not None and self.status.phase is Phase.DONE
        self.absent = view.gone or view.silent_s > silence_s
        self.fault = self.status.fault if self.status else None
        self.notice = self.status.notice if self.status else None
        self.suspect = self.status is not None and self.status.suspect


def _lost(node: _Node) -> bool:
    # what has ended needs its machine no more; but a machine that goes ends its program first, which may say so
    return not node.done if node.view.gone else node.absent and not node.final


def _noticed(node: _Node) -> bool:
    return node.notice is not None and not node.done


def _hung(node: _Node) -> bool:
    # agents that never heard of each other leave it to whoever sees them all
    return node.status is not None and node.status.overdue and not node.done


def _failed(node: _Node) -> bool:
    # an agent names the fault before it drains: the peers need not wait for its uploads
    named = node.status is not None and (node.status.phase is Phase.FAILED or node.status.fault is not None)
    return named or node.view.dead


def _of_losses(nodes: tuple[_Node, ...]) -> tuple[str, Fault]:
    lost = [node.view for node in nodes if _lost(node)]
    fault = Fault.PROVIDER if any(view.gone for view in lost) else Fault.INFRASTRUCTURE
    return "; ".join(view.absence for view in lost), fault


def _of_notices(nodes: tuple[_Node, ...]) -> tuple[str, Fault]:
    noticed = [node for node in nodes if _noticed(node)]
    leases = [node.notice is not None and node.notice.action == LEASE_ENDS for node in noticed]
    why = ("the provider takes the machine", "its lease cannot be renewed, and ends the machine")
    words = (f"node {node.view.rank}: {why[lease]}" for node, lease in zip(noticed, leases, strict=True))
    return "; ".join(words), Fault.INFRASTRUCTURE if all(leases) else Fault.PROVIDER


def _of_hangs(nodes: tuple[_Node, ...]) -> tuple[str, Fault]:
    longest_s = max((node.status.quiet_s or 0.0 for node in nodes if node.status), default=0.0)
    return f"no sign of progress on any of {len(nodes)} nodes for {longest_s:g} s{_missing(nodes)}", Fault.USER


def _missing(nodes: Iterable[_Node]) -> str:
    """Which rank the others waited for, by the nodes that know it."""
    known = [node for node in nodes if node.status and node.status.missing_rank is not None]
    return "".join(f"; node {node.view.rank}: {node.status.hang}" for node in known if node.status)


# evidence of a broken machine comes first: its peers crash in many ways. A program that crashes takes its peers'
# connections along, and a peer may say so first; one that was told to stop is no cause at all
_BLAME = (Fault.USER, Fault.PROVIDER, Fault.INFRASTRUCTURE, None, Fault.STOPPED)


def _of_failures(nodes: tuple[_Node, ...]) -> tuple[str, Fault | None]:
    broken = [node for node in nodes if node.suspect]
    failures = [_failure(node) for node in broken or nodes if _failed(node)]
    _, reason, fault, node = min(failures, key=lambda each: (_BLAME.index(each[2]), each[0]))
    if node.status is not None and node.status.hang is not None and node.status.missing_rank is None:
        reason += _missing(nodes)  # its own ranks only waited
    return reason, fault


def _failure(node: _Node) -> tuple[float, str, Fault | None, _Node]:
    """When, what and whose it was, and where."""
    rank, status = node.view.rank, node.status
    if status is None or (node.view.dead and status.fault is None):
        return (status.updated_at if status else 0.0), f"node {rank}: its agent died", Fault.INFRASTRUCTURE, node
    return status.updated_at, f"node {rank}: {status.reason or ''}", status.fault, node


_CAUSES = {_lost: _of_losses, _noticed: _of_notices, _hung: _of_hangs, _failed: _of_failures}
