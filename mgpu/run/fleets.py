"""What this user's machines are, as the providers say, and what stands for each: a run, a stack, or nothing.

A run stands for its machines while somebody supervises it, and while it trains: without a supervisor, too, for that is
no fault of it. A run that neither trains nor is supervised has left them behind, whatever the engine still knows.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu import acquire, paths
from mgpu.iac import schema
from mgpu.iac.environment import backend_dir
from mgpu.iac.naming import fleet_name
from mgpu.providers import registry
from mgpu.providers.base import Handle, NodePhase
from mgpu.run.record import Record, State, every, load, supervised

if TYPE_CHECKING:
    from mgpu.run.stacks import Context


@dataclass(frozen=True)
class Fleet:
    """Machines of one fleet that are not terminated. `used_by` is empty when nothing stands for them."""

    name: str
    provider: str
    ids: tuple[str, ...]
    usd_per_hour: float
    used_by: str
    handle: Handle
    left_by: str = ""  # the run whose supervisor died before it gave them back: `mgpu down` on it is their end

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {k: v for k, v in asdict(self).items() if k != "handle"}


def alive() -> list[Fleet]:
    """All machines of this user at every provider, by fleet."""
    owner, users, found = paths.owner(), _Users(every()[::-1]), list[Fleet]()
    for name in registry.names():
        provider = registry.get(name)
        handles = provider.list_owned(owner)
        for handle, state in zip(handles, provider.describe_all(handles), strict=True):
            nodes = [n for n in state.nodes if n.phase is not NodePhase.TERMINATED]
            if nodes:
                price = sum(n.price_usd_per_hour for n in nodes)
                used_by, left_by = users.of(handle)
                ids = tuple(n.id for n in nodes)
                found.append(Fleet(handle.fleet, name, ids, price, used_by, handle, left_by))
    return found


class _Users:
    """What stands for machines: runs (newest first) and stacks, each of them read once for however many fleets."""

    def __init__(self, runs: list[Record]) -> None:
        self._runs = runs
        self._by_key: dict[tuple[str, str], list[int]] = {}
        for place, record in enumerate(runs):
            for key in _keys(record):
                self._by_key.setdefault(key, []).append(place)

    def of(self, handle: Handle) -> tuple[str, str]:
        """What uses these machines, and, where nothing does, the run that has left them behind."""
        for record in self._on(handle):
            if supervised(record.run_id):
                return f"run {record.run_id}", ""
            if record.state in _TRAINS:
                return f"run {record.run_id}, no supervisor: mgpu attach {record.run_id}", ""
            if _left_behind(record):
                return "", record.run_id
        stack = self._stacks.get(handle.fleet)
        return (f"stack {stack}", "") if stack else ("", "")

    def _on(self, handle: Handle) -> Iterator[Record]:
        """The runs whose machines these are, or were."""
        keys = [("fleet", handle.fleet), *(("machine", name) for name in handle.ids if name)]
        places = {place for key in keys for place in self._by_key.get(key, ())}
        return (self._runs[place] for place in sorted(places))

    @cached_property
    def _stacks(self) -> dict[str, str]:
        """By fleet, the stack that the engine still has a state for: `pulumi destroy` or `mgpu down` is its way out."""
        found: dict[str, str] = {}
        for state in backend_dir().glob(".pulumi/stacks/*/*.json*"):
            stack = state.name.partition(".json")[0]
            for fleet in (fleet_name(state.parent.name, stack), *_named_in(state)):
                found.setdefault(fleet, stack)
        return found


def _keys(record: Record) -> set[tuple[str, str]]:
    """By what a run's machines are known: their ids; a stack of the user's own has other ones at other times, and its
    fleet's name stays."""
    fleet = record.fleet or {}
    nodes = fleet.get("nodes", ())
    if record.own_stack or not nodes:
        return {("fleet", name) for name in (record.fleet_name, fleet.get("fleet")) if name}
    return {("machine", node["id"]) for node in nodes if node.get("id")}


_TRAINS = (State.RUNNING, State.STOPPING)


def _left_behind(record: Record) -> bool:
    """Whether a run that nobody supervises, and that does not train, owes the machines back."""
    if record.teardown in ("kept", "not ours"):
        return False
    return record.own_stack or record.teardown == "asked"  # a stack of the user's own stands for itself until then


def _named_in(state: Path) -> set[str]:
    """The fleets of a stack's state: a program of the user's may name them as it likes, and make several."""
    try:
        data = state.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        resources = json.loads(data)["checkpoint"]["latest"]["resources"]
        found = [each["inputs"] for each in resources if each["type"] in (schema.FLEET, schema.FLEET_GUARD)]
        return {str(inputs.get("fleet") or inputs.get("name")) for inputs in found}
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError):
        return set()  # nothing is in it yet, or it is being written


def end(fleet: Fleet, context: Context) -> None:
    """Ends a fleet's machines, and believes it only when the provider says so; a run that left them is closed.

    Raises:
        InputError: somebody supervises that run now, or it trains.
        TeardownIncomplete: something may still be billed.
    """
    if not fleet.left_by:
        acquire.destroy(registry.get(fleet.provider), fleet.handle, timeouts=context.timeouts, emit=context.emit)
        return
    from mgpu.run.down import down

    down(load(fleet.left_by), context, left=True)
