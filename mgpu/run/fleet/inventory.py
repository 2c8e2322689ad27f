"""What this user's machines are, as the providers say, and what stands for each: a run, a stack, or nothing.

A run stands for its machines while somebody supervises it, and while it trains: without a supervisor, too, for that is
no fault of it. A run that neither trains nor is supervised has left them behind, whatever the engine still knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from mgpu_train.store import NotFound

from mgpu import paths
from mgpu.backend.owner import owner
from mgpu.errors import InputError, MgpuError
from mgpu.events import Emit, Warned
from mgpu.iac import tokens
from mgpu.iac.engine import state_file
from mgpu.iac.naming import fleet_name, unmarked
from mgpu.iac.types import generations
from mgpu.providers import registry
from mgpu.providers.base import Handle, Listing, NodePhase, listing
from mgpu.run.record.record import Record, State, every, supervised
from mgpu.spec.provider import installed

_AT_ONCE = 16  # fleets that are ended at the same time
_BEFORE = "mgpu:before"  # marks inputs that a guard's fleet does not have any more
_REGION = "mgpu:region"  # beside the inputs of a fleet: where its machines are


@dataclass(frozen=True)
class StandingFleet:
    """Machines of one fleet that are not terminated. `used_by` is empty when nothing stands for them."""

    name: str
    provider: str
    ids: tuple[str, ...]
    usd_per_hour: float
    used_by: str
    handle: Handle
    left_by: str = ""  # the run whose supervisor died before it gave them back: `mgpu down` on it is their end
    options: Mapping[str, str] = field(default_factory=dict)  # by which the provider is reached

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {k: v for k, v in asdict(self).items() if k not in ("handle", "options")}


@dataclass(frozen=True)
class Survey:
    """All that could be seen. `failures`: of who could not be asked; what they have is not among the fleets. `unused`:
    those of them that no run and no stack names. `former`: by provider, why one could not be asked that is named only
    because a stack's fleet was there before, and has left nothing that is known: no failure. `closed`: by provider and
    region, why nobody may look there, where no run and no stack is known to have anything: no failure either."""

    fleets: tuple[
        StandingFleet, ...
    ]  # those of one name more than once, where its machines were made one after the other
    failures: tuple[MgpuError, ...] = ()
    unused: tuple[MgpuError, ...] = ()
    former: Mapping[str, MgpuError] = field(default_factory=dict)
    closed: Mapping[tuple[str, str], MgpuError] = field(default_factory=dict)

    def warn(self, emit: Emit) -> None:
        """Says who of `former` could not be asked, and which regions are `closed`."""
        for name, error in self.former.items():
            emit(Warned(f"{name}, where a stack's fleet was before, cannot be asked: {error.what}"))
        for name, kind in sorted({(at, type(error)) for (at, _), error in self.closed.items()}, key=str):
            closed = {at: error for at, error in self.closed.items() if (at[0], type(error)) == (name, kind)}
            regions = sorted(region for _, region in closed)
            why = closed[name, regions[0]].what
            emit(
                Warned(f"it was not looked for machines in {', '.join(regions)}, where nothing is known of any: {why}")
            )

    @property
    def by_name(self) -> tuple[StandingFleet, ...]:
        """Each fleet once, with all its machines, for people and scripts to read."""
        found: dict[tuple[str, ...], StandingFleet] = {}
        for fleet in self.fleets:
            key = (fleet.provider, fleet.handle.region, fleet.name, fleet.used_by, fleet.left_by)
            if (known := found.get(key)) is not None:
                ids, price = (*known.ids, *fleet.ids), known.usd_per_hour + fleet.usd_per_hour
                fleet = replace(known, ids=ids, usd_per_hour=price)
            found[key] = fleet
        return tuple(found.values())


@dataclass(frozen=True)
class _Access:
    """A provider with the settings by which it is reached."""

    provider: str
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, provider: str, options: Mapping[str, str]) -> _Access:
        """Without the settings that do not say whose account it is, and where."""
        matter = registry.get(provider, options).capabilities.account_options
        return cls(provider, tuple(sorted((key, value) for key, value in options.items() if key in matter)))

    def fleets(self, owner: str) -> tuple[list[StandingFleet], Listing]:
        """What the owner has there, whatever uses it; and what could not be asked. Raises MgpuError."""
        options = dict(self.options)
        provider, found = registry.get(self.provider, options), list[StandingFleet]()
        seen = listing(provider, owner)
        for handle, state in zip(seen.handles, provider.describe_all(seen.handles), strict=True):
            nodes = [n for n in state.nodes if n.phase is not NodePhase.TERMINATED]
            if nodes:
                price = sum(n.price_usd_per_hour for n in nodes)
                ids = tuple(n.id for n in nodes)
                found.append(StandingFleet(handle.fleet, self.provider, ids, price, "", handle, options=options))
        return found, seen


def survey(records: Callable[[], list[Record]] | None = None) -> Survey:
    """All machines of this user at every provider that is set up, or that a run or a stack names, by fleet. One that
    cannot be asked hides nothing of the others. `records`: of all runs that may have machines, oldest first."""
    tag, records = owner(), records or partial(every, fresh=True)
    before = _Users(records()[::-1])
    broken, used = installed().broken, {provider for provider, _ in before.named}
    accesses, lost = _accesses([*((name, None) for name in registry.names()), *before.named])
    left, former = _accesses(before.left)
    failures, unused = [*map(_unusable, broken, broken.values()), *(error for _, error in lost)], list[MgpuError]()
    found: dict[tuple[str, ...], StandingFleet] = {}
    closed: dict[tuple[str, str], MgpuError] = {}
    with ThreadPoolExecutor(max(1, len(accesses | left)), thread_name_prefix="mgpu-survey") as pool:
        asked_of = [(access, pool.submit(access.fleets, tag)) for access in accesses | left]
        for access, asked in asked_of:
            try:
                fleets, seen = asked.result()
                unseen = seen.failures
                closed |= {(access.provider, region): error for region, error in seen.closed.items()}
                for fleet in fleets:  # two ways may lead to one account
                    found.setdefault((fleet.provider, fleet.handle.region, fleet.handle.token, *fleet.ids), fleet)
            except MgpuError as error:
                unseen = (error,)
                if access in accesses and access.provider not in used:
                    unused.append(error)
            if access in accesses:
                failures += unseen
            else:
                former += ((access.provider, error) for error in unseen)
    # anew: whoever has rented meanwhile has said so before
    users = _Users(records()[::-1]) if found else None
    fleets = tuple(users.used(fleet) for fleet in found.values()) if users else ()
    named = before.regions if closed else set[str]()
    failures += [error for (_, region), error in closed.items() if region in named]
    closed = {place: error for place, error in closed.items() if place[1] not in named}
    return Survey(fleets, tuple(failures), tuple(unused), dict(former), closed)


def _unusable(name: str, why: str) -> MgpuError:
    what = f"provider {name} is installed, but cannot be used: what it has of yours is not seen"
    return InputError(what, why, "Install again the package that brings it, or remove it.")


def _accesses(
    named: Iterable[tuple[str, Mapping[str, str] | None]],
) -> tuple[dict[_Access, None], list[tuple[str, MgpuError]]]:
    """Each once; and, by provider, the errors of those that mean nothing to this version, or do not work. Without
    settings: where it is set up here."""
    found, failures = dict[_Access, None](), list[tuple[str, MgpuError]]()
    for provider, options in named:
        try:
            if options is not None or registry.get(provider).configured():
                found[_Access.of(provider, options or {})] = None
        except MgpuError as error:
            failures.append((provider, error))
    return found, failures


def _sellers(run: Record) -> Iterator[tuple[str, dict[str, str]]]:
    fleet = run.fleet or {}
    known = {fleet.get("provider", run.provider): _settings(fleet.get("options"))}
    yield from ((name, known.get(name) or options) for name, options in run.sellers.items())


class _Users:
    """What stands for machines: runs (newest first) and stacks, each of them read once for however many fleets."""

    def __init__(self, runs: list[Record]) -> None:
        self._runs = runs
        self._by_key: dict[tuple[str, str], list[int]] = {}
        for place, record in enumerate(runs):
            for key in _keys(record):
                self._by_key.setdefault(key, []).append(place)

    @property
    def named(self) -> list[tuple[str, dict[str, str]]]:
        """Providers, with their settings, that may have machines of a run or a stack."""
        found = [each for run in self._owing for each in _sellers(run)]
        return found + [_named(each) for each in self._inputs if "provider" in each and not _left(each)]

    @property
    def _owing(self) -> list[Record]:
        return [run for run in self._runs if run.teardown not in ("confirmed", "not ours")]

    @property
    def regions(self) -> set[str]:
        """Where a run or a stack may have machines: those that it knows of, and those that it has asked for."""
        runs, inputs = self._owing, self._inputs
        fleets = {*(run.fleet_name for run in runs), *(str(each.get("fleet") or each.get("name")) for each in inputs)}
        begun = (each for name in fleets if name for each in generations.begun(paths.state_dir(), owner(), name))
        known = {str((run.fleet or {}).get("region")) for run in runs} | {str(each.get(_REGION)) for each in inputs}
        return known | {each.region for each in begun}

    @property
    def left(self) -> list[tuple[str, dict[str, str]]]:
        """The same, where a stack's fleet was before, and nothing that it was asked for is open."""
        return [_named(each) for each in self._inputs if "provider" in each and _left(each)]

    def used(self, fleet: StandingFleet) -> StandingFleet:
        """With what uses it."""
        used_by, left_by = self.of(fleet.handle)
        return replace(fleet, used_by=used_by, left_by=left_by)

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
    def _states(self) -> list[tuple[str, str, list[dict[str, Any]]]]:
        """Project, stack and the fleets' inputs of every stack that the engine still has a state for. One whose state
        is damaged is none: the engine cannot end its machines."""
        read = [((project, stack), key, _fleets_in(key)) for project, stack, key in state_file.stacks()]
        damaged = {stack for stack, key, found in read if found is None and key.endswith((".json", ".gz"))}
        return [(*stack, found or []) for stack, _, found in read if stack not in damaged]

    @property
    def _inputs(self) -> list[dict[str, Any]]:
        return [inputs for _, _, fleets in self._states for inputs in fleets]

    @cached_property
    def _stacks(self) -> dict[str, str]:
        """By fleet, its stack: `pulumi destroy` or `mgpu down` is its way out. A program of the user's may name its
        fleets as it likes, and make several."""
        found: dict[str, str] = {}
        for project, stack, fleets in self._states:
            names = (str(inputs.get("fleet") or inputs.get("name")) for inputs in fleets)
            for fleet in (fleet_name(project, stack), unmarked(project, stack), *names):
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


def _settings(options: Any) -> dict[str, str]:
    """Of a state that anybody may have written."""
    return {str(key): str(value) for key, value in options.items()} if isinstance(options, dict) else {}


def _named(inputs: dict[str, Any]) -> tuple[str, dict[str, str]]:
    return str(inputs["provider"]), _settings(inputs.get("options"))


def _left(inputs: dict[str, Any]) -> bool:
    """As FleetGuard has it: it goes without the answer of one that it had before, where nothing is open."""
    if _BEFORE not in inputs:
        return False
    begun = generations.begun(paths.state_dir(), str(inputs["owner"]), str(inputs["fleet"]))
    return not any(each.provider in ("", inputs["provider"]) for each in begun)


def _fleets_in(key: str) -> list[dict[str, Any]] | None:
    """The inputs of a stack's fleets and guards, and those that guards had before; None: its state is damaged."""
    try:
        resources = state_file.read(key)["checkpoint"]["latest"]["resources"]
        ours = [each for each in resources if each["type"] in (tokens.FLEET, tokens.FLEET_GUARD)]
        return [found for each in ours for found in (_inputs_of(each), *_earlier(each))]
    except NotFound:  # it has just gone
        return []
    except (OSError, EOFError, ValueError):
        return None
    except (LookupError, TypeError, AttributeError):
        return []  # nothing is in it yet


def _inputs_of(resource: dict[str, Any]) -> dict[str, Any]:
    return {**resource["inputs"], _REGION: (resource.get("outputs") or {}).get("region")}


def _earlier(resource: dict[str, Any]) -> list[dict[str, Any]]:
    """Where a guard's fleet may have machines still: it went from there to another provider."""
    known = (resource.get("outputs") or {}).get("earlier")
    found = [each for each in known if isinstance(each, dict)] if isinstance(known, list) else []
    whose = {key: resource["inputs"].get(key) for key in ("fleet", "owner")}
    return [{**whose, **each, _BEFORE: True} for each in found]
