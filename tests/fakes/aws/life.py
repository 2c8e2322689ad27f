"""The life of each machine: pending, running, shutting-down, terminated, and one day forgotten."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from moto.ec2.models.instances import Instance, InstanceState, StateReason

from fakes.aws.rules import Pool

if TYPE_CHECKING:
    from fakes.aws.cloud import Cloud

CODES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48, "stopped": 80}
ENDED = ("terminated", "stopped")

# how a life can end: code and message of StateReason
BY_USER = ("Client.UserInitiatedShutdown", "User initiated shutdown")
BY_ITSELF = ("Client.InstanceInitiatedShutdown", "Instance initiated shutdown")
BY_SPOT = ("Server.SpotInstanceTermination", "Spot instance termination")
STARTED_NOT = ("Server.InternalError", "Internal error on launch")
KEY_DENIED = ("Client.InternalError", "Client error on launch")


@dataclass
class Life:
    """One machine's; times in UNIX seconds."""

    instance: Any
    pool: Pool
    usd_per_hour: float
    locked: bool = False  # EC2 may not use the key of its disk
    reservation: str = ""  # that it is in
    launched_at: float = field(default_factory=time.time)
    ended_at: float | None = None  # terminated or stopped: not billed any more
    reason: tuple[str, str] | None = None
    forgotten: bool = False  # EC2 does not know it any more
    history: list[tuple[float, InstanceState]] = field(default_factory=list)

    @property
    def state(self) -> str:
        """Its name, as EC2 spells it."""
        return self.instance._state.name

    def enter(self, state: str) -> None:
        """Moves on, and remembers when."""
        self.instance._state = InstanceState(state, CODES[state])
        now = time.time()
        self.history.append((now, self.instance._state))
        self.ended_at = now if state in ENDED else None
        if self.reason:
            code, message = self.reason
            self.instance.state_reason = StateReason(f"{code}: {message}", code)
            stamp = time.strftime("%Y-%m-%d %H:%M:%S GMT", time.gmtime(now))
            self.instance._reason = f"{code}: {message}" if code == BY_SPOT[0] else f"User initiated ({stamp})"

    def counts(self, dead_s: float) -> bool:
        """Whether it counts against its quota, where the dead do so for a while."""
        if self.state in ("pending", "running"):
            return True
        return dead_s > 0 and (self.ended_at is None or time.time() < self.ended_at + dead_s)

    def seen(self, at: float) -> Any | None:
        """The machine as it was at UNIX time `at`; None if it was not yet."""
        past = [state for when, state in self.history if when <= at]
        if not past or past[-1] is self.instance._state:
            return self.instance if past else None
        before = copy.copy(self.instance)
        before._state = past[-1]
        return before

    def age(self, seconds: float) -> None:
        """Makes all of it that much earlier."""
        self.launched_at -= seconds
        self.instance.launch_time -= timedelta(seconds=seconds)
        self.ended_at = self.ended_at and self.ended_at - seconds
        self.history = [(when - seconds, state) for when, state in self.history]


class Lives:
    """All machines that ever were, the forgotten ones too."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud, self.by_id = cloud, dict[str, Life]()

    def begin(self, instance: Any, pool: Pool, *, locked: bool, reservation: str = "") -> None:
        """A machine is launched."""
        usd = 0.0 if pool.market == "capacity-block" else self.cloud.rules.usd(pool)  # paid as a whole
        life = Life(instance, pool, usd, locked, reservation)
        self.by_id[instance.id] = life
        life.enter("pending")
        self.cloud.timers.after(self.cloud.rules.starts_s(pool), lambda: self._run(life))
        self.cloud.machines.start(life)

    def _run(self, life: Life) -> None:
        if life.state == "pending" and life.locked:
            self.end(life, KEY_DENIED)
        elif life.state == "pending":
            life.enter("running")

    def end(self, life: Life, reason: tuple[str, str]) -> None:
        """A machine begins to end; one that has begun goes on with it."""
        if life.state in ("shutting-down", "terminated"):
            return
        life.reason = reason
        if reason == BY_SPOT:
            self.cloud.emptied(life.pool)
        life.enter("shutting-down")
        self.cloud.machines.end(life)
        self.cloud.timers.after(self.cloud.rules.ending_s, lambda: self._ended(life))

    def _ended(self, life: Life) -> None:
        if self.cloud.machines.busy(life):  # its machine is still being taken down
            self.cloud.timers.after(0.05, lambda: self._ended(life))
        elif life.state == "shutting-down":
            terminate(life.instance)
            life.enter("terminated")
            self.cloud.timers.after(self.cloud.rules.forget_s, lambda: self._forget(life))

    def _forget(self, life: Life) -> None:
        life.forgotten = True
        for reservation in life.instance.ec2_backend.reservations.values():
            reservation.instances = [each for each in reservation.instances if each is not life.instance]

    def powered_off(self, instance_id: str) -> None:
        """The machine has ended itself: what that means was said at launch."""
        life = self.by_id.get(instance_id)
        if life is None or life.state not in ("pending", "running"):
            return
        if life.instance.instance_initiated_shutdown_behavior == "terminate":
            self.end(life, BY_ITSELF)
        else:
            life.reason = BY_ITSELF
            life.enter("stopped")

    def alive(self, *states: str) -> list[Life]:
        """Those that count against capacity and quotas, or those in the states named."""
        wanted = states or ("pending", "running", "shutting-down")
        return [life for life in self.by_id.values() if life.state in wanted]


def terminate(instance: Any) -> None:
    """moto's own: interfaces and disks that go with the machine go, addresses come loose."""
    for address in instance.ec2_backend.addresses:
        if address.instance is instance or (address.eni and address.eni.instance is instance):
            address.instance = address.eni = address.association_id = None
    for private in instance._private_ips:
        instance.ec2_backend.get_subnet(instance.subnet_id).del_subnet_ip(private)
    instance._private_ips = set()
    MOTO_TERMINATE(instance)


MOTO_TERMINATE = Instance.terminate
