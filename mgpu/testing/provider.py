"""What every provider promises (`mgpu.providers.base`): one suite for all of them, mgpu's own and anybody's.

A test file runs it that imports all of it and has a fixture `harness` (docs/provider.md).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import asyncssh
import pytest

from mgpu.acquire.refusals import REFUSED
from mgpu.errors import Conflict, InvalidRequest, RateLimited, Transient
from mgpu.plan.model import Offer, Requirements
from mgpu.providers.base import FleetRequest, FleetState, Handle, Intent, NodePhase, Provider, Rekeys, create_token
from mgpu.testing.waiting import until

KEY = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode().strip()


@dataclass
class Harness:
    """One provider under test, with an account of this test's own. `make` gives a new instance each time: nothing may
    be remembered in one."""

    make: Callable[[], Provider]
    kill: Callable[[str], None]  # the machine of this id is lost
    billed: Callable[[], list[str]]  # ids of machines, by the provider's own bill
    needs: dict[str, Any] = field(default_factory=dict)  # what it has to be asked for
    world: str = ""  # tells this test's tokens from others', where one world serves many tests
    answers: bool = True  # there is an SSH server at the address of a node
    image: str = ""  # that its nodes are containers of
    sold_out: Callable[[], object] | None = None  # from now on it has room for one machine in all, or for no more


@pytest.fixture
def provider(harness: Harness) -> Provider:
    """A new instance."""
    return harness.make()


def end_all(harness: Harness) -> None:
    """Ends what a test has left; for the end of the fixture `harness`."""
    provider = harness.make()
    for handle in (*provider.list_owned("o-1"), *provider.list_owned("o-2")):
        gone(provider, handle)


def requirements(harness: Harness, nodes: int = 2) -> Requirements:
    """So many machines, of what the provider has to be asked for."""
    name = harness.make().name
    asked = {"provider": name, "nodes": nodes, "market": "spot", "max_price_usd_per_hour": 100, "max_hours": 1}
    return Requirements.model_validate({**asked, **harness.needs})


def ask(harness: Harness, nodes: int = 2, owner: str = "o-1", generation: int = 1) -> tuple[FleetRequest, Offer, str]:
    """What `create` takes: a request, the first offer for it, and its token."""
    wanted = requirements(harness, nodes)
    offer = harness.make().offers(wanted).offers[0]
    request = FleetRequest(
        fleet="demo",
        generation=generation,
        owner=owner,
        requirements=wanted,
        ssh_public_key=KEY,
        lease_s=300,
        hard_cap_s=600,
        image=harness.image,
    )
    return request, offer, create_token(owner, f"demo-{owner}{harness.world}", generation, offer, 0)


def ready(provider: Provider, handle: Handle) -> FleetState:
    """Its machines, as soon as all can be reached."""
    until(lambda: provider.describe(handle).ready)
    return provider.describe(handle)


def same(first: Handle, second: Handle | None) -> bool:
    """The same machines; the time of their create is known by several clocks."""
    return second is not None and first.model_copy(update={"made_at": second.made_at}) == second


def gone(provider: Provider, handle: Handle, nodes: tuple[str, ...] | None = None) -> None:
    """Ends these machines, and waits until they are gone."""
    until(lambda: provider.destroy(handle, nodes))


def seller_out(harness: Harness) -> Callable[[], object]:
    """What sells the provider out; without it the test is skipped."""
    if harness.sold_out is None:
        pytest.skip("its harness cannot sell it out")
    return harness.sold_out


def refused(make: Callable[[], Handle]) -> bool:
    """Whether the provider says that it has no room; False: call again."""
    try:
        made = make()
    except REFUSED:
        return True
    except (RateLimited, Transient):
        return False
    raise AssertionError(f"there is no room, and it has granted {made}")


def phases(provider: Provider, handle: Handle) -> list[NodePhase]:
    """By rank."""
    return [node.phase for node in provider.describe(handle).nodes]


def test_offers_carry_what_a_plan_needs(provider: Provider, harness: Harness):
    offers = provider.offers(requirements(harness)).offers
    assert offers
    for offer in offers:
        assert offer.provider == provider.name
        assert offer.price_usd_per_hour > 0
        assert 0 < offer.fetched_at <= time.time() + 1


def test_a_gang_comes_up_with_all_that_the_operator_pins(provider: Provider, harness: Harness):
    request, offer, token = ask(harness)
    before = time.time()
    handle = provider.create(request, offer, token)
    assert (handle.provider, handle.fleet, handle.generation) == (provider.name, "demo", 1)
    nodes = ready(provider, handle).nodes
    assert [node.id for node in nodes] == list(handle.ids)
    assert [node.rank for node in nodes] == [0, 1]
    if isinstance(provider, Rekeys):
        assert all(node.host_key == node.one_use_key for node in nodes), "first contact gives each its own"
    else:
        assert len({node.host_key for node in nodes}) == 2, "every node has a host key of its own"
    for node in nodes:
        assert node.user
        assert node.private_address
        if offer.price_is_limit:
            assert 0 < node.price_usd_per_hour <= offer.price_usd_per_hour
        else:
            assert node.price_usd_per_hour == offer.price_usd_per_hour
        assert before + 599 < node.hard_cap_at < time.time() + 601
        if harness.answers:
            with socket.create_connection((node.address, node.port), timeout=5) as connection:
                assert connection.recv(4) == b"SSH-"
    assert sorted(harness.billed()) == sorted(handle.ids)


def test_create_returns_at_once(provider: Provider, harness: Harness):
    request, offer, token = ask(harness)
    start = time.monotonic()
    provider.create(request, offer, token)
    assert time.monotonic() - start < 30


def test_one_token_makes_one_gang_from_any_process(harness: Harness):
    request, offer, token = ask(harness)
    first = harness.make().create(request, offer, token)
    ready(harness.make(), first)
    later = offer.model_copy(update={"fetched_at": offer.fetched_at + 60, "stock": 3})
    assert same(harness.make().create(request, later, token), first)
    assert sorted(harness.billed()) == sorted(first.ids)


def test_two_creates_at_once_make_one_gang(harness: Harness):
    if not harness.make().capabilities.idempotent_create:
        pytest.skip("it is not promised: Pulumi's lock on the stack has to keep them apart")
    request, offer, token = ask(harness)
    barrier = threading.Barrier(4)

    def create(_: int) -> Handle:
        barrier.wait()
        return harness.make().create(request, offer, token)

    with ThreadPoolExecutor(4) as pool:
        handles = list(pool.map(create, range(4)))
    assert all(same(handle, handles[0]) for handle in handles)
    ready(harness.make(), handles[0])
    assert sorted(harness.billed()) == sorted(handles[0].ids)


def test_a_token_with_other_parameters_is_a_conflict(provider: Provider, harness: Harness):
    request, offer, token = ask(harness)
    provider.create(request, offer, token)
    other = request.model_copy(update={"hard_cap_s": 700.0})
    with pytest.raises(Conflict):
        provider.create(other, offer, token)


def test_a_token_stays_used_when_its_gang_has_ended(provider: Provider, harness: Harness):
    request, offer, token = ask(harness)
    handle = provider.create(request, offer, token)
    gone(provider, handle)
    assert same(provider.create(request, offer, token), handle)
    assert phases(provider, handle) == [NodePhase.TERMINATED] * 2
    assert harness.billed() == []


def test_a_gang_that_there_is_no_room_for_is_refused_and_leaves_nothing(provider: Provider, harness: Harness):
    sell_out, asked = seller_out(harness), ask(harness)
    sell_out()
    until(lambda: refused(lambda: provider.create(*asked)))
    until(lambda: harness.billed() == [], why=lambda: f"{harness.billed()} were made, and hidden by a refusal")
    until(lambda: provider.list_owned("o-1") == ())


def test_find_knows_what_a_lost_answer_has_made_and_nothing_else(harness: Harness):
    request, offer, token = ask(harness)
    intent = Intent(fleet="demo", generation=1, owner="o-1", token=token, offer=offer)
    assert harness.make().find(intent) is None
    handle = harness.make().create(request, offer, token)
    assert same(handle, harness.make().find(intent))


def test_destroyed_means_terminated_and_off_the_bill(provider: Provider, harness: Harness):
    handle = provider.create(*ask(harness))
    ready(provider, handle)
    gone(provider, handle)
    assert phases(provider, handle) == [NodePhase.TERMINATED] * 2
    assert harness.billed() == []
    assert provider.list_owned("o-1") == ()
    assert provider.destroy(handle), "absent counts as gone"


def test_destroy_right_after_create_leaves_nothing(provider: Provider, harness: Harness):
    handle = provider.create(*ask(harness))
    gone(provider, handle)
    assert phases(provider, handle) == [NodePhase.TERMINATED] * 2
    assert harness.billed() == []


def test_destroy_of_what_never_was_is_gone(provider: Provider, harness: Harness):
    _, offer, token = ask(harness)
    never = Handle(
        provider=provider.name, region=offer.region, fleet="demo", generation=1, token=token, ids=("0123456789-0", "")
    )
    assert provider.destroy(never)


def test_single_nodes_can_be_destroyed_where_they_can_be_replaced(provider: Provider, harness: Harness):
    handle = provider.create(*ask(harness))
    ready(provider, handle)
    gone(provider, handle, (handle.ids[0],))
    if not provider.capabilities.repairs_single_nodes:
        assert phases(provider, handle) == [NodePhase.TERMINATED] * 2, "a gang ends as one"
        assert harness.billed() == []
        return
    assert phases(provider, handle) == [NodePhase.TERMINATED, NodePhase.RUNNING]
    assert harness.billed() == [handle.ids[1]]


def test_a_rank_without_a_machine_is_terminated(provider: Provider, harness: Harness):
    handle = provider.create(*ask(harness))
    ready(provider, handle)
    grown = handle.model_copy(update={"ids": (*handle.ids, "")})
    assert provider.describe(grown).lost == (2,)


def test_a_lost_machine_shows_as_terminated_without_a_word_from_us(provider: Provider, harness: Harness):
    handle = provider.create(*ask(harness))
    ready(provider, handle)
    harness.kill(handle.ids[1])
    alone = provider.capabilities.repairs_single_nodes
    left = [NodePhase.RUNNING if alone else NodePhase.TERMINATED, NodePhase.TERMINATED]
    until(lambda: phases(provider, handle) == left, why=lambda: provider.describe(handle))
    assert provider.describe(handle).nodes[1].reason
    assert harness.billed() == ([handle.ids[0]] if alone else [])


def test_repair_replaces_the_lost_machine_alone(provider: Provider, harness: Harness):
    if not provider.capabilities.repairs_single_nodes:
        refuses_repair(provider, harness)
        return
    handle = provider.create(*ask(harness))
    before = ready(provider, handle).nodes
    harness.kill(handle.ids[0])
    until(lambda: provider.describe(handle).lost == (0,))
    request, offer, token = ask(harness, generation=2)
    repaired = provider.repair(handle, (0,), request, offer, token)
    after = ready(provider, repaired).nodes
    assert repaired.generation == 2
    assert after[1] == before[1]
    assert after[0].id != before[0].id
    assert after[0].host_key != before[0].host_key
    assert sorted(harness.billed()) == sorted(repaired.ids)
    assert same(provider.repair(handle, (0,), request, offer, token), repaired), "one token, one machine"
    assert same(provider.repair(repaired, (0,), request, offer, token), repaired)
    assert ready(provider, repaired).nodes[0].id == after[0].id


def test_a_replacement_that_there_is_no_room_for_leaves_the_other_machines(provider: Provider, harness: Harness):
    if not provider.capabilities.repairs_single_nodes:
        pytest.skip("a gang of this provider is never repaired")
    sell_out = seller_out(harness)
    handle = provider.create(*ask(harness))
    ready(provider, handle)
    harness.kill(handle.ids[0])
    until(lambda: provider.describe(handle).lost == (0,))
    asked = ask(harness, generation=2)
    sell_out()
    until(lambda: refused(lambda: provider.repair(handle, (0,), *asked)))
    assert phases(provider, handle) == [NodePhase.TERMINATED, NodePhase.RUNNING]
    assert harness.billed() == [handle.ids[1]]


def refuses_repair(provider: Provider, harness: Harness) -> None:
    """Nothing is touched, and nothing made."""
    handle = provider.create(*ask(harness))
    ready(provider, handle)
    with pytest.raises(InvalidRequest, match="replaces no single machine"):
        provider.repair(handle, (0,), *ask(harness, generation=2))
    assert phases(provider, handle) == [NodePhase.RUNNING] * 2
    assert sorted(harness.billed()) == sorted(handle.ids)


def test_repair_ends_what_it_replaces(provider: Provider, harness: Harness):
    if not provider.capabilities.repairs_single_nodes:
        pytest.skip("a gang of this provider is never repaired")
    handle = provider.create(*ask(harness))
    ready(provider, handle)
    request, offer, token = ask(harness, generation=2)
    repaired: list[Handle] = []

    def repair() -> bool:
        try:
            repaired.append(provider.repair(handle, (1,), request, offer, token))
        except Transient:  # "still stopping, call again"
            return False
        return True

    until(repair)
    ready(provider, repaired[0])
    assert sorted(harness.billed()) == sorted(repaired[0].ids)
    assert handle.ids[1] not in harness.billed()


def test_list_owned_is_complete_and_shows_nobody_elses(harness: Harness):
    provider = harness.make()
    mine = provider.create(*ask(harness, nodes=1))
    ready(provider, mine)
    request, offer, token = ask(harness, nodes=1, owner="o-2")
    other = provider.create(request, offer, token)
    for owner, theirs in (("o-1", mine), ("o-2", other)):
        (listed,) = harness.make().list_owned(owner)
        assert same(listed, theirs)
    assert harness.make().list_owned("o-") == ()


def test_a_repaired_fleet_is_listed_whole(provider: Provider, harness: Harness):
    if not provider.capabilities.repairs_single_nodes:
        pytest.skip("a gang of this provider is never repaired")
    handle = provider.create(*ask(harness))
    ready(provider, handle)
    harness.kill(handle.ids[0])
    until(lambda: provider.describe(handle).lost == (0,))
    repaired = provider.repair(handle, (0,), *ask(harness, generation=2))
    listed = {name for owned in provider.list_owned("o-1") for name in owned.ids if name}
    assert listed == set(repaired.ids)
