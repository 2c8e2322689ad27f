"""`mgpu:index:FleetGuard`: stands before its fleet and goes after it; on the way out it sweeps by tag.

A crash of the engine in the middle of a create leaves machines that state does not know, and `pulumi destroy` would go
past them. The guard was in state before they could exist, so `destroy` comes to it, last, and it ends whatever the
provider lists under the fleet's name. A fleet may go from one provider, or account, to another: the guard stays, and
remembers where its machines may have been.
"""

from __future__ import annotations

from typing import Any

from mgpu_train.timeouts import Timeouts

from mgpu.errors import MgpuError, TeardownIncomplete
from mgpu.events import Warned
from mgpu.iac.naming import fleet_name
from mgpu.iac.protocol.handler import Call, Checked, Difference, Properties, ReadResult, changed
from mgpu.iac.protocol.wire import UNKNOWN, has_unknown
from mgpu.iac.types import generations
from mgpu.iac.types.fleet_model import full_options
from mgpu.iac.types.sweep import sweep
from mgpu.providers import registry

_REPLACES = ("fleet", "owner")
_UPDATES = ("provider", "options")  # another guard of the same fleet would sweep the fleet that comes after this one's


class FleetGuardHandler:
    """Handles FleetGuard. The id is `<provider>/<fleet>`."""

    secret: frozenset[str] = frozenset()
    refresh_before_update = False

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts

    def check(self, call: Call, old: Properties, new: Properties) -> Checked:
        """The same defaults as Fleet's."""
        name = fleet_name(call.project, call.stack)
        fleet, owner = new.get("fleet") or old.get("fleet") or name, new.get("owner") or old.get("owner")
        inputs = {**new, "fleet": fleet, "owner": owner or call.settings.owner, "options": new.get("options") or {}}
        wrong = {key: "a FleetGuard has no such property" for key in inputs if key not in (*_REPLACES, *_UPDATES)}
        if inputs.get("provider") is None:
            wrong["provider"] = "is needed"
        elif inputs["provider"] != UNKNOWN:
            try:
                registry.get(inputs["provider"])
            except MgpuError as error:
                wrong["provider"] = str(error)
        return Checked(inputs, wrong)

    def diff(self, old_inputs: Properties, old: Properties, new: Properties) -> Difference:
        """Another fleet has another guard. The new one comes first: the old one's sweep has to follow its own fleet."""
        updates = changed(_UPDATES, full_options({"options": {}, **old_inputs}), full_options(new))
        return Difference(updates, changed(_REPLACES, old_inputs, new), delete_first=False)

    def create(self, call: Call, inputs: Properties) -> tuple[str, Properties]:
        """Nothing but an entry in state."""
        return f"{inputs['provider']}/{inputs['fleet']}", inputs

    def read(self, call: Call, resource_id: str, old: Properties, inputs: Properties) -> ReadResult | None:
        """It is what state says; there is nothing to import."""
        return ReadResult(resource_id, inputs, old) if old else None

    def update(self, call: Call, resource_id: str, old: Properties, new: Properties) -> Properties:
        """Takes the inputs over; a provider, or an account at one, that the fleet had before is looked at in the end,
        too."""
        if has_unknown(new):  # a preview
            return new
        known, now = [_seller(old), *old.get("earlier", ())], _account(_seller(new))
        earlier = [each for each in known if _account(each) != now]
        return {**new, "earlier": earlier} if earlier else new

    def delete(self, call: Call, resource_id: str, old: Properties) -> None:
        """Ends everything that its providers list under this fleet and owner. Raises what the first one raises, when
        all of them were looked at; an earlier one that cannot be asked is told, where nothing that it was asked for is
        open."""
        failures = list[MgpuError]()
        begun = generations.begun(call.settings.state_dir, old["owner"], old["fleet"])
        open_at = {each.provider for each in begun}
        for place, each in enumerate((_seller(old), *old.get("earlier", ()))):
            try:
                provider = registry.get(each["provider"], each["options"])
                sweep(call, provider, old["owner"], old["fleet"], self._timeouts)
            except TeardownIncomplete as error:
                failures.append(error)
            except MgpuError as error:
                if place and not open_at & {"", each["provider"]}:
                    call.emit(Warned(f"{each['provider']}, where the fleet was before, cannot be asked: {error.what}"))
                else:
                    failures.append(error)
        if failures:
            raise failures[0]


def _seller(known: Properties) -> dict[str, Any]:
    return {"provider": known["provider"], "options": known.get("options") or {}}


def _account(seller: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Whose machines they are: of the options those that say whose account it is, and where."""
    name, options = seller["provider"], seller["options"]
    try:
        matter = registry.get(name, options).capabilities.account_options
    except MgpuError:  # it is not installed any more
        return name, options
    return name, {key: value for key, value in options.items() if key in matter}
