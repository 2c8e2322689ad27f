"""Whether a Fleet's inputs can be carried out; asks no provider's service."""

from __future__ import annotations

from mgpu.errors import InputError, MgpuError
from mgpu.iac.naming import fleet_name
from mgpu.iac.protocol.handler import Call, Checked, Properties
from mgpu.iac.protocol.wire import has_unknown
from mgpu.iac.types.fleet_model import FleetInputs, problems
from mgpu.providers import registry
from mgpu.providers.base import Rekeys
from mgpu.spec.block import LEAST_HOURS, MOST_HOURS


def checked(call: Call, old: Properties, new: Properties) -> Checked:
    """Validates everything at once; name and owner default to what they were, else the stack's and the user's."""
    name = fleet_name(call.project, call.stack)
    defaults = {"name": old.get("name") or name, "owner": old.get("owner") or call.settings.owner}
    inputs = defaults | {key: value for key, value in new.items() if value is not None}
    unknown = {key for key, value in inputs.items() if has_unknown(value)}
    # a fleet that has such a value from before can still be repaired
    fresh = {key: value for key, value in inputs.items() if key not in unknown and value != old.get(key)}
    wrong = _out_of_bounds(fresh) | problems(inputs, unknown)
    if not wrong and not unknown & {"provider", "market", "nodes"}:
        wrong = _beyond(FleetInputs.model_validate(inputs | stand_ins(unknown)))
    if wrong:
        return Checked(inputs, wrong)
    # the wire carries every default, so that leaving a key out equals writing its default
    full = FleetInputs.model_validate(inputs | stand_ins(unknown)).to_wire()
    return Checked(full | {key: inputs[key] for key in unknown})


_KNOWN_ENOUGH: Properties = {
    "name": "unknown",
    "owner": "unknown",
    "provider": "unknown",
    "nodes": 1,
    "maxPriceUsdPerHour": 1,
    "maxHours": 1,
    "sshPublicKey": "unknown",
    "sshPrivateKeyFile": "unknown",
}


def stand_ins(unknown: set[str]) -> Properties:
    """Values that pass, in place of those that are not known yet: the others are checked all the same."""
    inputs = FleetInputs.model_validate(_KNOWN_ENOUGH).to_wire()
    return {key: inputs[key] for key in unknown}


def _out_of_bounds(inputs: Properties) -> dict[str, str]:
    """Times that no run file may name, property -> reason; what is no number is told by others."""
    bounds = {"maxHours": (LEAST_HOURS, MOST_HOURS), "leaseMinutes": (0, MOST_HOURS * 60)}
    given = {key: inputs[key] for key in bounds if isinstance(inputs.get(key), int | float)}
    wrong = {key: bounds[key] for key, value in given.items() if not bounds[key][0] <= value <= bounds[key][1]}
    return {key: f"must be from {least:g} to {most:g}, not {given[key]}" for key, (least, most) in wrong.items()}


def _beyond(wanted: FleetInputs) -> dict[str, str]:
    """What the provider as such cannot do, property -> reason."""
    try:
        provider = registry.get(wanted.provider)
    except MgpuError as error:
        return {"provider": str(error)}
    wrong = {}
    try:
        wanted.rented_from()
    except InputError as error:
        wrong["options"] = str(error)
    if isinstance(provider, Rekeys) and not wanted.ssh_private_key_file:
        wrong["sshPrivateKeyFile"] = f"is needed: machines of {wanted.provider} get their host keys over SSH"
    if wanted.market != "on-demand" and not provider.capabilities.spot:
        wrong["market"] = f"{wanted.provider} has no spot market"
    if wanted.nodes > 1 and not provider.capabilities.multi_node:
        wrong["nodes"] = f"{wanted.provider} rents out single machines only"
    return wrong
