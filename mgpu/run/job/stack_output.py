"""A fleet's stack output as others want it: targets of the remote layer, the handle of its provider, the provider."""

from __future__ import annotations

from mgpu.iac.outputs import StackOutput
from mgpu.plan import rank
from mgpu.providers import registry
from mgpu.providers.base import Handle, Provider, dialled
from mgpu.remote.targets import Target, hop
from mgpu.spec.model import RunSpec


def targets(fleet: StackOutput) -> tuple[Target, ...]:
    """The nodes as the remote layer wants them."""
    return tuple(
        Target(
            node.rank,
            dialled(node.address, node.private_address, node.via),
            node.port,
            node.user,
            node.host_key,
            hop(node.via.model_dump() if node.via else None),
            node.python,
        )
        for node in fleet.nodes
    )


def handle_of(fleet: StackOutput) -> Handle:
    """The provider's handle of the fleet that a stack output names."""
    return Handle(
        provider=fleet.provider,
        region=fleet.region,
        fleet=fleet.fleet,
        generation=fleet.generation,
        token=fleet.token,
        ids=tuple(node.id for node in fleet.nodes),
        made_at=fleet.made_at,
        account=fleet.account,
    )


def provider_of(fleet: StackOutput) -> Provider | None:
    """Who describes the machines; None for a fleet that a program of the user's own made."""
    return registry.get(fleet.provider, fleet.options) if fleet.owner else None


def usd_per_hour(fleet: StackOutput, part: float = 1.0) -> float | None:
    """What a fleet, or a part of it, costs, with what it has beside its machines; None: not known."""
    machines = fleet.machines_usd_per_hour
    return None if machines is None else part * (machines + (fleet.other_usd_per_hour or 0.0))


def provider_for(spec: RunSpec) -> Provider:
    """Whom the run file names, with its settings; of several the first one."""
    return registry.get(spec.provider, rank.requirements(spec).provider_options)
