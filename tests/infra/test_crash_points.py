"""The plugin is killed at every write of its journal and around every call of its provider: the next `up` converges.

A process that is killed undoes nothing: from that moment on none of its calls and writes has an effect. The engine is
played by `World`: it calls what Pulumi calls, in Pulumi's order, and knows only what it was told before the kill. Each
write has three points (before, torn in the middle, after), each call and each save of the state has two.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mgpu_train.timeouts import Timeouts

from mgpu.events import ignore
from mgpu.iac.protocol.handler import Call, Settings
from mgpu.iac.types.fleet import FleetHandler
from mgpu.iac.types.guard import FleetGuardHandler
from mgpu.journal import Journal
from mgpu.providers import registry
from mgpu.providers.base import NodePhase

TIMES = Timeouts().scaled(0.002).model_copy(update={"provision_s": 60.0, "destroy_s": 60.0})  # on a busy machine
URN = "urn:pulumi:dev::mgpu::mgpu:index:Fleet::fleet"
CALLS = ("offers", "create", "find", "describe", "repair", "list_owned", "destroy")


class Killed(BaseException):
    """The process is gone."""


@dataclass
class Life:
    """One process: it ends at its `end`-th point, counted from 1; None: it lives on."""

    end: int | None = None
    points: int = 0
    killed: bool = False

    def point(self, last_act: Callable[[], object] = lambda: None) -> None:
        self.points += 1
        if self.killed or self.points == self.end:
            if not self.killed:
                last_act()
            self.killed = True
            raise Killed

    def call(self, effect: Callable[[], Any]) -> Any:
        self.point()
        answer = effect()
        self.point()
        return answer


class Mortal:
    """A provider whose calls belong to a process that can be killed."""

    def __init__(self, provider: Any, world: World) -> None:
        self._provider, self._world = provider, world

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._provider, name)
        if name not in CALLS:
            return found
        return lambda *args: self._world.life.call(lambda: found(*args))


@dataclass
class World:
    """Provider, journal and state, which outlive every process; and the process that lives now."""

    fake: Any
    folder: Path
    life: Life = field(default_factory=Life)
    inputs: dict[str, Any] = field(default_factory=dict)
    state: tuple[str, dict[str, Any], dict[str, Any]] | None = None  # id, inputs, outputs
    most: int = 0  # machines that ran at once

    def __post_init__(self) -> None:
        self.fleet, self.guard = FleetHandler(TIMES), FleetGuardHandler(TIMES)
        self.fake.on_create = lambda _fresh: setattr(self, "most", max(self.most, len(self.fake.running)))

    @property
    def call(self) -> Call:
        return Call(URN, Settings(self.folder, "o"), ignore, threading.Event())

    @property
    def ids(self) -> list[str]:
        assert self.state is not None
        return [machine["id"] for machine in self.state[2]["machines"]]

    def want(self, **changes: Any) -> None:
        wanted = {"provider": "fake", "nodes": 2, "maxPriceUsdPerHour": 1, "maxHours": 2, "sshPublicKey": "k"}
        self.inputs = self.fleet.check(self.call, {}, wanted | changes).inputs

    def save(self, state: tuple[str, dict[str, Any], dict[str, Any]] | None) -> None:
        self.life.call(lambda: setattr(self, "state", state))

    def up(self) -> None:
        if self.state:  # `refresh_before_update`
            found = self.fleet.read(self.call, self.state[0], self.state[2], self.state[1])
            self.save(found and (found.resource_id, found.inputs, found.outputs))
        if self.state is None:
            made, outputs = self.fleet.create(self.call, self.inputs)
            self.save((made, self.inputs, outputs))
            return
        name, old_inputs, old = self.state
        change = self.fleet.diff(old_inputs, old, self.inputs)
        if change.replaces:
            self.fleet.delete(self.call, name, old)
            self.save(None)
            self.up()
        elif change.updates:
            self.save((name, self.inputs, self.fleet.update(self.call, name, old, self.inputs)))

    def destroy(self) -> None:
        if self.state:
            self.fleet.delete(self.call, self.state[0], self.state[2])
            self.save(None)
        self.guard.delete(self.call, "fake/dev", {"provider": "fake", "owner": "o", "fleet": "dev"})

    def lose(self, rank: int) -> None:
        self.fake.phases[self.ids[rank]] = NodePhase.TERMINATED

    def killed(self, operation: Callable[[], None], end: int) -> bool:
        """Whether the operation was killed at this point; False: it has none so late, and came to its end."""
        self.life = Life(end)
        try:
            operation()
        except Killed:
            return True
        finally:
            self.life = Life()
        return False

    def judge(self, *, created: int, most: int) -> None:
        assert self.fake.running == set(self.ids), "what runs is what state knows"
        assert len(self.fake.created) == created, "nothing was rented that need not have been"
        assert self.most <= most, "I2"


@dataclass(frozen=True)
class Scenario:
    """What stands before; what is wanted then; how many machines it takes in all, and at most at once."""

    name: str
    before: Callable[[World], None]
    wanted: dict[str, Any]
    created: int
    most: int


def nothing(_world: World) -> None: ...


def two(world: World) -> None:
    world.want()
    world.up()


def four(world: World) -> None:
    world.want(nodes=4)
    world.up()


def two_and_one_lost(world: World) -> None:
    two(world)
    world.lose(1)


def two_and_both_lost(world: World) -> None:
    two_and_one_lost(world)
    world.lose(0)


def two_destroyed(world: World) -> None:
    two(world)
    world.destroy()


def repaired_and_lost_again(world: World) -> None:
    two_and_one_lost(world)
    world.up()
    world.lose(0)


SCENARIOS = [
    Scenario("create", nothing, {}, 2, 2),
    Scenario("create after a destroy", two_destroyed, {}, 4, 2),
    Scenario("repair", two_and_one_lost, {}, 3, 2),
    Scenario("repair after a repair", repaired_and_lost_again, {}, 4, 2),
    Scenario("all lost", two_and_both_lost, {}, 4, 2),
    Scenario("grow", two, {"nodes": 4}, 4, 4),
    Scenario("shrink", four, {"nodes": 2}, 4, 4),
    Scenario("replace", two, {"maxHours": 3}, 4, 2),
]


@pytest.fixture
def new_world(fake, tmp_path, monkeypatch) -> Iterator[Callable[[], World]]:
    """`new_world()`: a provider, a journal and a state of its own; the process that lives is its."""
    current: list[World] = []
    count = itertools.count()
    append = Journal.append

    def mortal_append(journal: Journal, kind: str, **fields: Any) -> int:
        life = current[-1].life
        life.point()
        life.point(lambda: os.write(journal._fd, b'{"seq":7,"at":1,"kind":"gene'))
        number = append(journal, kind, **fields)
        life.point()
        return number

    def get(_name: str, _options: object = None) -> Any:
        return Mortal(current[-1].fake, current[-1])

    def new() -> World:
        current[:] = [World(type(fake)(), tmp_path / str(next(count)))]
        return current[-1]

    monkeypatch.setattr(Journal, "append", mortal_append)
    monkeypatch.setattr(registry, "get", get)
    return new


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_killed_at_any_point_the_next_up_has_what_was_wanted_and_nothing_else(new_world, scenario):
    for end in itertools.count(1):
        world = new_world()
        scenario.before(world)
        world.want(**scenario.wanted)
        was_killed = world.killed(world.up, end)
        world.up()
        world.judge(created=scenario.created, most=scenario.most)
        world.up()
        world.judge(created=scenario.created, most=scenario.most)
        if not was_killed:
            break
    assert end > 10, "the points are counted"


def test_killed_twice_at_any_two_points_of_a_repair(new_world, share):
    ends = range(1, 60, 3)
    pairs = {f"{first}, {second}": (first, second) for first, second in itertools.product(ends, ends)}
    for first, second in map(pairs.get, share.of("pairs of points to kill a repair at", pairs)):
        world = new_world()
        two_and_one_lost(world)
        world.killed(world.up, first)
        world.killed(world.up, second)
        world.up()
        world.judge(created=3, most=2)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_killed_at_any_point_a_destroy_leaves_nothing(new_world, scenario):
    for end in itertools.count(1):
        world = new_world()
        scenario.before(world)
        world.want(**scenario.wanted)
        was_killed = world.killed(world.up, end)
        world.destroy()
        assert not world.fake.running
        assert world.most <= scenario.most
        if not was_killed:
            break


@pytest.mark.parametrize("then", ["destroy", "up"])
def test_a_destroy_that_was_killed_at_any_point(new_world, then):
    for end in itertools.count(1):
        world = new_world()
        two(world)
        was_killed = world.killed(world.destroy, end)
        getattr(world, then)()
        assert world.fake.running == (set(world.ids) if then == "up" else set())
        assert world.most <= 2
        if not was_killed:
            break
    assert end > 8


def test_a_node_lost_while_it_starts_and_a_kill_at_any_point(new_world):
    for end in itertools.count(1):
        world = new_world()
        world.want()

        def lose_one(fresh: tuple[str, ...], world: World = world) -> None:
            world.most = max(world.most, len(world.fake.running))
            if len(world.fake.created) == 2:
                world.fake.phases[fresh[1]] = NodePhase.TERMINATED

        world.fake.on_create = lose_one
        was_killed = world.killed(world.up, end)
        world.up()
        world.judge(created=4, most=2)
        if not was_killed:
            break
