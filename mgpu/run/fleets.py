"""What this user's machines are, as the providers say, and what stands for each: a stack, or nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mgpu_train.timeouts import Timeouts

from mgpu import acquire, paths
from mgpu.events import Emit
from mgpu.iac.environment import backend_dir
from mgpu.iac.naming import fleet_name
from mgpu.providers import registry
from mgpu.providers.base import Handle, NodePhase
from mgpu.run.record import every, supervised


@dataclass(frozen=True)
class Fleet:
    """Machines of one fleet that are not terminated. `used_by` is empty when nothing stands for them."""

    name: str
    provider: str
    ids: tuple[str, ...]
    usd_per_hour: float
    used_by: str
    handle: Handle

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {k: v for k, v in asdict(self).items() if k != "handle"}


def alive() -> list[Fleet]:
    """All machines of this user at every provider, by fleet."""
    owner, found = paths.owner(), []
    for name in registry.names():
        provider = registry.get(name)
        for handle in provider.list_owned(owner):
            nodes = [n for n in provider.describe(handle).nodes if n.phase is not NodePhase.TERMINATED]
            if nodes:
                price = sum(n.price_usd_per_hour for n in nodes)
                found.append(Fleet(handle.fleet, name, tuple(n.id for n in nodes), price, _user(handle), handle))
    return found


def _user(handle: Handle) -> str:
    for record in reversed(every()):
        if not record.state.final and record.fleet_name == handle.fleet and supervised(record.run_id):
            return f"run {record.run_id}"
    # a stack that the engine still has a state for: `pulumi destroy` or `mgpu down` is its way out
    for state in backend_dir().glob(".pulumi/stacks/*/*.json*"):
        stack = state.name.partition(".json")[0]
        if fleet_name(state.parent.name, stack) == handle.fleet:
            return f"stack {stack}"
    return ""


def end(fleet: Fleet, timeouts: Timeouts, emit: Emit) -> None:
    """Ends a fleet's machines, and believes it only when the provider says so."""
    acquire.destroy(registry.get(fleet.provider), fleet.handle, timeouts=timeouts, emit=emit)
