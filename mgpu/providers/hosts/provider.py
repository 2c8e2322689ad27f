"""The provider contract for machines that are there already: taken by a lock of their own, and given back.

Everything is known from the hosts alone (`on_host`). An id is `<address>/<name>.<UNIX seconds of the hard cap>`: a host
is found that is in no list any more, and one that never answers is known to be free after its hard cap.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mgpu import paths
from mgpu.errors import AuthError, Conflict, InputError, MgpuError, NoCapacity, ProviderError, Transient
from mgpu.plan.model import Offer, Requirements
from mgpu.providers.base import (
    Finding,
    FleetRequest,
    FleetState,
    Handle,
    Intent,
    Listing,
    NodePhase,
    NodeState,
    Offers,
    Provider,
    as_one,
)
from mgpu.providers.hosts import machines
from mgpu.providers.hosts.machines import REGION, Answer
from mgpu.providers.hosts.options import ENTRY, Host, HostsOptions
from mgpu.providers.hosts.ssh import Client, Mute, script

_AT_ONCE = 32
_PEERS = 16  # hosts, up to which each is asked whether it reaches all others
_LEASE = Path(__file__).parents[1] / "lease.sh"


class HostsProvider(Provider):
    """Takes hosts of a list, one owner each; nothing is rented, nothing powered off."""

    name = HostsOptions.block
    capabilities = ENTRY.capabilities

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        self._options = HostsOptions.of(options or {})
        self._client = Client(self._options.ssh_config)

    def configured(self) -> bool:
        """Whether there is a list."""
        return bool(self._options.addresses or self._options.inventory)

    def check(self) -> None:
        """Returns where a host can be logged in to. Raises the first one's error where none can."""
        answers = [answer for _, answer in self._looked_at(self._options.hosts())]
        errors = [answer for answer in answers if isinstance(answer, MgpuError)]
        if len(errors) == len(answers):
            raise errors[0]

    def findings(self, requirements: Requirements | None, here: Callable[[], str]) -> tuple[Finding, ...]:
        """Each host, as far as runs need it, and whether it reaches the others."""
        try:
            hosts = self._options.hosts()
        except InputError as error:
            return (Finding.of("hosts", error),)
        found = self._looked_at(hosts, facts=True)
        if len(hosts) <= _PEERS:
            reached = [(h, a["node"]["private_address"], a["node"]["port"]) for h, a in found if isinstance(a, dict)]
            others = {h.address: [[*to] for other, *to in reached if other != h] for h in hosts}
            found = self._looked_at(hosts, facts=True, reach=others)
        return machines.findings(requirements, found)

    def offers(self, requirements: Requirements) -> Offers:
        """The hosts of the list as they are now, by kind; `notes` say of each that is not free who has it. Raises
        InputError: there is no list."""
        found = self._looked_at(self._options.hosts(), facts=True)
        notes = tuple(f"{host.address} {why}" for host, answer in found if (why := machines.used_by(answer)))
        return Offers(offers=machines.offers(requirements, found), source="live", notes=notes)

    def create(self, request: FleetRequest, offer: Offer, token: str) -> Handle:
        """Takes free hosts of the offer's kind, in the order of the list: all that are needed, or none.

        Raises:
            Conflict: the token was used with other parameters.
            NoCapacity: there are not so many; those that were taken are free again.
        """
        ids = self._taken(request, offer, token, range(request.requirements.nodes))
        return self._handle(request, token, [ids.get(rank, "") for rank in range(request.requirements.nodes)])

    def find(self, intent: Intent) -> Handle | None:
        """What the intent's token holds, or has held, on the hosts that answer."""
        records = _of_token(self._looked_at(self._options.hosts(), [intent.token]), intent.token)
        return _handle_of(intent.token, records) if records else None

    def describe(self, handle: Handle) -> FleetState:
        """The hosts as they say themselves; remains of a run whose watch was killed are ended first.

        Raises:
            Transient: one does not answer, and nobody has asked it to end: nothing is known about it.
            AuthError: one cannot be logged in to any more.
            InvalidRequest: one cannot say it.
        """
        found = dict(self._each_id(handle.ids, lambda host, name: self._look(host, [name])))
        return FleetState(nodes=tuple(_described(rank, each, found.get(each)) for rank, each in enumerate(handle.ids)))

    def repair(
        self, handle: Handle, missing: tuple[int, ...], request: FleetRequest, offer: Offer, token: str
    ) -> Handle:
        """Takes spare hosts for these ranks. A lost host that answers is given back first; one that does not is left to
        its lease. Raises what `create` raises, and Transient while a lost one still ends."""
        ours = _of_token(self._looked_at(self._options.hosts(), [token]), token)
        lost = tuple(handle.ids[rank] for rank in missing if handle.ids[rank] not in ("", _id(ours.get(rank))))
        if not self.destroy(handle, lost) and (there := [each for each in lost if not _asked_to_end(each).exists()]):
            raise Transient("a lost host still ends what ran on it", f"still there: {', '.join(there)}", "Call again.")
        ids = self._taken(request, offer, token, missing, last=[_parts(each)[0] for each in lost])
        whole = [ids.get(rank, each) if rank in missing else each for rank, each in enumerate(handle.ids)]
        return self._handle(request, token, whole)

    def list_owned(self, owner: str) -> tuple[Handle, ...]:
        """What hosts of the list that answer hold for this owner."""
        return self.list_reached(owner).handles

    def list_reached(self, owner: str) -> Listing:
        """The same, and which hosts could not be asked."""
        found, gangs = self._looked_at(self._options.hosts()), dict[str, dict[int, dict[str, Any]]]()
        for host, answer in found:
            if isinstance(answer, dict) and (record := answer["held"]) and record["owner"] == owner:
                gangs.setdefault(record["token"], {})[record["rank"]] = {**record, "address": host.address}
        handles = tuple(_handle_of(token, records) for token, records in gangs.items())
        return Listing(handles=handles, failures=tuple(each for _, each in found if isinstance(each, MgpuError)))

    def destroy(self, handle: Handle, nodes: tuple[str, ...] | None = None) -> bool:
        """Ends all that the run has on these hosts, removes its folders and its key, and lets go of the lock. A host
        that does not answer counts as gone after its hard cap; one that runs nothing of mgpu's any more is told once
        after it, by an error, and then counts as given up.

        Raises:
            AuthError: one cannot be logged in to, before its hard cap.
            InvalidRequest: one has answered that it cannot do it: what runs there may go on.
            Transient: the same, while others of the whole are silent, or end what runs there: call again. Of `nodes`
                it is told at once: the others wait for their replacement.
        """
        request = {"verb": "end", "reason": "given back"}
        wanted = handle.ids if nodes is None else nodes
        found = self._each_id(wanted, lambda host, name: self._client.ask(host, {**request, "names": [name]}))
        stays = [(each, answer) for each, answer in found if not self._gone(each, answer)]  # all have been asked
        refused = [each for each in stays if isinstance(each[1], ProviderError) and not isinstance(each[1], Transient)]
        if mute := [answer for each, answer in refused if isinstance(answer, Mute) and _late(each)]:
            raise _for_the_last_time(mute)  # first: what else there is says so again
        if refused:
            raise as_one([_not_yet(each, answer) for each, answer in (stays if nodes is None else refused)])
        return not stays

    def _gone(self, each: str, answer: dict[str, Any] | ProviderError) -> bool:
        note = _asked_to_end(each)
        if isinstance(answer, Mute) and _given_up(each):
            return True
        silent = isinstance(answer, Transient) and _late(each)
        if isinstance(answer, ProviderError) and not silent:
            note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            note.touch()
            return False
        note.unlink(missing_ok=True)
        return isinstance(answer, ProviderError) or answer["gone"]

    # --- taking -------------------------------------------------------------------------------------------------

    def _taken(
        self, request: FleetRequest, offer: Offer, token: str, ranks: Iterable[int], last: Sequence[str] = ()
    ) -> dict[int, str]:
        """The ids of the ranks that the token has taken, now or before. `last`: hosts that others are preferred to."""
        asked = _digest(request, offer)
        with _one_at_a_time():
            found = self._looked_at(self._options.hosts(), [token], facts=True)
            known = _of_token(found, token)
            if any(record["asked"] != asked for record in known.values()):
                raise Conflict(f"token {token[:10]} was used with other parameters", "", "Run it again.")
            free = [(h, a["node"]) for h, a in found if isinstance(a, dict) and _fits(h, a, offer)]
            free.sort(key=lambda each: each[0].address in last)
            missing, made = [rank for rank in ranks if rank not in known], dict[int, dict[str, Any]]()
            told = [f"{host.address} {why}" for host, answer in found if (why := machines.used_by(answer))]
            while missing and len(free) >= len(missing):
                batch, free = free[: len(missing)], free[len(missing) :]
                with ThreadPoolExecutor(_AT_ONCE) as pool:
                    taken = list(pool.map(lambda *each: self._take(request, token, asked, *each), missing, batch))
                for rank, (host, _), record in zip(missing, batch, taken, strict=True):
                    if isinstance(record, dict):
                        made[rank] = {**record, "address": host.address}
                    else:
                        told.append(f"{host.address} {record}")
                missing = [rank for rank in missing if rank not in made]
            if missing:
                self._let_go({**{rank: known[rank] for rank in ranks if rank in known}, **made})
                cure = "Wait for those that are held, or name more hosts."
                raise NoCapacity(f"hosts: {len(missing)} too few are free", "\n".join(told), cure, scope="offer")
        return {rank: _id(record) for rank, record in {**known, **made}.items()}

    def _take(
        self, request: FleetRequest, token: str, asked: str, rank: int, it: tuple[Host, dict[str, Any]]
    ) -> dict[str, Any] | str:
        """The record of one host that was taken, or why it was not, in words."""
        host, node = it
        name, who = f"{token[:10]}-{rank}", f"{_user()}@{os.uname().nodename}"
        record = {"name": name, "token": token, "rank": rank, "size": request.requirements.nodes, "asked": asked}
        record |= {"owner": request.owner, "fleet": request.fleet, "generation": request.generation}
        take = request.model_dump(include={"lease_s", "hard_cap_s", "ends_by"}) | {"key": request.ssh_public_key}
        texts = {"source": script(), "lease_script": _LEASE.read_text(encoding="utf-8"), "folder": host.folder}
        wanted = {"verb": "take", "names": [token[:10]], "record": {**record, "by": who, "node": node}, **take, **texts}
        try:
            held = self._client.ask(host, wanted)["held"]
        except ProviderError as error:  # it may be ours: given back if it answers, else by its lease
            self._let_go({rank: {"address": host.address, "name": name}})
            return f"could not be taken: {error.why or error.what}"
        if held is None or held["token"] != token or held["rank"] != rank:
            return "was taken by somebody else just now"
        return held

    def _let_go(self, made: Mapping[int, dict[str, Any]]) -> None:
        """Gives back what a call has taken that takes nothing: its token can be used again."""

        def let_go(record: Mapping[str, Any]) -> None:
            request = {"verb": "end", "reason": "not needed", "names": [record["name"]], "forget": True}
            with suppress(ProviderError):  # its lease ends it
                self._client.ask(self._host(record["address"]), request)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(let_go, made.values()))

    # --- asking -------------------------------------------------------------------------------------------------

    def _looked_at(
        self,
        hosts: Sequence[Host],
        tokens: Sequence[str] = (),
        *,
        facts: bool = False,
        reach: Mapping[str, list[list[Any]]] | None = None,
    ) -> list[tuple[Host, Answer]]:
        """All hosts, asked at once, with their answers or errors. With `facts` each is met anew (`Client.ask`)."""

        def look(host: Host) -> Answer:
            try:
                peers = (reach or {}).get(host.address, [])
                return self._look(host, [token[:10] for token in tokens], facts=facts, reach=peers)
            except ProviderError as error:
                return error

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(zip(hosts, pool.map(look, hosts), strict=True))

    def _look(self, host: Host, names: list[str], *, facts: bool = False, reach: Sequence[Any] = ()) -> dict[str, Any]:
        request = {"verb": "look", "names": names, "reach": reach}
        request |= {"facts": {"folder": host.folder, "python": host.python}} if facts else {}
        before = time.time()
        answer = self._client.ask(host, request, meet=facts)
        return {**answer, "between": (before, time.time())}

    def _each_id(
        self, ids: Sequence[str], ask: Callable[[Host, str], dict[str, Any]]
    ) -> list[tuple[str, dict[str, Any] | ProviderError]]:
        """What the hosts of these ids answer, or why they do not: after its hard cap a host that nobody can log in to
        is one that does not answer. Ids that are none of ours are left out."""
        ours = [each for each in ids if _parts(each)[0]]

        def asked(each: str) -> dict[str, Any] | ProviderError:
            address, name, hard_cap_at = _parts(each)
            try:
                return ask(self._host(address), name)
            except AuthError as error:
                return Transient(error.what, error.why) if time.time() >= hard_cap_at else error
            except ProviderError as error:
                return error

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(zip(ours, pool.map(asked, ours), strict=True))

    def _host(self, address: str) -> Host:
        """As the list has it, or, where that does not have it any more, by its address alone."""
        try:
            listed = {host.address: host for host in self._options.hosts()}
        except InputError:
            listed = {}
        return listed.get(address) or Host(address=address, folder=self._options.folder, python=self._options.python)

    def _handle(self, request: FleetRequest, token: str, ids: Sequence[str]) -> Handle:
        return Handle(
            provider=self.name,
            region=REGION,
            fleet=request.fleet,
            generation=request.generation,
            token=token,
            ids=tuple(ids),
            made_at=time.time(),
        )


def _described(rank: int, each: str, answer: dict[str, Any] | ProviderError | None) -> NodeState:
    if answer is None:
        return NodeState(rank=rank, id=each, phase=NodePhase.TERMINATED, reason="no host was taken for this rank")
    address, name, hard_cap_at = _parts(each)
    if isinstance(answer, Mute) and _given_up(each):
        given_up = f"{address} runs nothing of mgpu's any more: given up after its hard cap"
        return NodeState(rank=rank, id=each, phase=NodePhase.TERMINATED, reason=given_up)
    if isinstance(answer, ProviderError):
        if not isinstance(answer, Transient) or (time.time() < hard_cap_at and not _asked_to_end(each).exists()):
            raise answer
        why, late = f"{address} does not answer", time.time() >= hard_cap_at
        phase, clock = (NodePhase.TERMINATED, "hard cap") if late else (NodePhase.ENDING, "lease")
        return NodeState(rank=rank, id=each, phase=phase, reason=f"{why}: its {clock} ends what runs there")
    record = answer["held"] or {}
    if record.get("name") != name:
        found = [each["ended"] for each in answer["ended"] if each["name"] == name]
        ended = found[0] if found else "the host knows nothing of it any more"
        return NodeState(rank=rank, id=each, phase=NodePhase.TERMINATED, reason=ended)
    phase = NodePhase.STOPPING if record.get("ending") else NodePhase.RUNNING
    reason = record.get("ending", "")
    return NodeState(rank=rank, id=each, phase=phase, hard_cap_at=hard_cap_at, reason=reason, **record["node"])


def _fits(host: Host, answer: dict[str, Any], offer: Offer) -> bool:
    return not machines.used_by(answer) and machines.kind(host, answer) == offer.instance_type


def _of_token(found: Iterable[tuple[Host, Answer]], token: str) -> dict[int, dict[str, Any]]:
    """What a token holds, and has held, by rank."""
    records = dict[int, dict[str, Any]]()
    for host, answer in found:
        for record in (answer["held"] or {}, *answer["ended"]) if isinstance(answer, dict) else ():
            if record.get("token") == token:
                records.setdefault(record["rank"], {**record, "address": host.address})
    return records


def _handle_of(token: str, records: Mapping[int, dict[str, Any]]) -> Handle:
    first = next(iter(records.values()))
    size, made_at = max(first["size"], *(rank + 1 for rank in records)), max(each["since"] for each in records.values())
    return Handle(
        provider=HostsOptions.block,
        region=REGION,
        fleet=first["fleet"],
        generation=first["generation"],
        token=token,
        ids=tuple(_id(records.get(rank)) for rank in range(size)),
        made_at=made_at,
    )


def _id(record: Mapping[str, Any] | None) -> str:
    return f"{record['address']}/{record['name']}.{record['hard_cap_at']}" if record else ""


def _parts(each: str) -> tuple[str, str, float]:
    """Address, name and hard cap (UNIX seconds) of an id; empty for one that is none of ours."""
    address, _, rest = each.rpartition("/")
    name, _, cap = rest.partition(".")
    return (address, name, float(cap)) if address and cap.isdecimal() else ("", "", 0.0)


def _digest(request: FleetRequest, offer: Offer) -> str:
    """Of all that one token has to be used with; what changes by itself is none of it."""
    said = offer.model_dump(mode="json", exclude={"fetched_at", "stock", "obstacle", "vcpus", "memory_gib"})
    text = json.dumps([request.model_dump(mode="json"), said], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _asked_to_end(each: str) -> Path:
    """Is there once a host was asked to end a run, and did not answer: a hint of this machine's, for `describe`."""
    return paths.state_dir() / "hosts" / hashlib.sha256(each.encode()).hexdigest()[:20]


def _not_yet(each: str, answer: dict[str, Any] | ProviderError) -> ProviderError:
    if isinstance(answer, ProviderError):
        return answer
    return Transient(f"host {_parts(each)[0]} still ends what ran there")


def _late(each: str) -> bool:
    """Whether its hard cap is over."""
    return time.time() >= _parts(each)[2]


def _given_up(each: str) -> bool:
    """Whether a user was told after the hard cap that nobody can say what runs there."""
    try:
        return _asked_to_end(each).stat().st_mtime >= _parts(each)[2]
    except FileNotFoundError:
        return False


def _for_the_last_time(errors: Sequence[Mute]) -> Mute:
    why = "Its hard cap is over, but without a Python its own clock cannot end what ran there, and nobody can look."
    cure = 'Look there by hand (docs/hosts.md, "how to clean up"). `mgpu down` once more takes it as given up.'
    what, said = ("; ".join(each.what for each in errors), dict.fromkeys(each.why for each in errors if each.why))
    return Mute(what, "\n".join((*said, why)), cure, scope="offer")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return str(os.getuid())


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Of this user's creates on this machine: two of one token would take each other's hosts."""
    folder = paths.state_dir() / "hosts"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
