"""What the fake knows beyond moto: one lock, its timers, the calls that came, the lives of machines, the rules."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from fakes.aws.faults import Faults
from fakes.aws.life import Life, Lives
from fakes.aws.pace import realistic
from fakes.aws.protocol import Call
from fakes.aws.rules import About, Pool, Rules


class Timers:
    """Runs functions at their time, in one thread, under the lock that requests are answered under."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._wake = threading.Condition()
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        threading.Thread(target=self._run, name="timers", daemon=True).start()

    def after(self, seconds: float, run: Callable[[], None]) -> None:
        """Runs `run` once, `seconds` from now; at once, in the caller's thread, where that is not in the future."""
        if seconds <= 0:
            with self._lock:
                run()
            return
        with self._wake:
            heapq.heappush(self._due, (time.time() + seconds, next(self._order), run))
            self._wake.notify()

    def clear(self) -> None:
        """Forgets all."""
        with self._wake:
            self._due.clear()

    def age(self, seconds: float) -> None:
        """Makes everything due that much earlier; what is overdue then is run before this returns."""
        with self._wake:
            self._due = [(when - seconds, order, run) for when, order, run in self._due]
        while run := self._overdue():
            run()

    def _overdue(self) -> Callable[[], None] | None:
        with self._wake:
            return heapq.heappop(self._due)[2] if self._due and self._due[0][0] <= time.time() else None

    def _run(self) -> None:
        while True:
            with self._lock:  # taken first: what is due and what a request sees never overlap
                if run := self._overdue():
                    run()
                    continue
            with self._wake:
                wait = self._due[0][0] - time.time() if self._due else None
                if wait is None or wait > 0:
                    self._wake.wait(wait)


class Machines(Protocol):
    """What stands behind the instances."""

    real: bool  # whether there are any

    def start(self, life: Life) -> None:
        """Begins to boot; returns at once."""

    def end(self, life: Life) -> None:
        """Begins to take it down; returns at once."""

    def busy(self, life: Life) -> bool:
        """Whether something of it is left."""
        ...

    def notice(self, life: Life, kind: str, body: dict[str, Any] | None) -> None:
        """Puts a notice where the machine can read it."""

    def address(self, instance_id: str, public: str | None) -> None:
        """Its public address has changed."""

    def trouble(self, life: Life, what: str, value: Any) -> None:
        """Something that a machine alone can have: `wire`, `hang` or `metadata`."""

    def clear(self) -> None:
        """Ends all; returns when nothing is left."""

    def close(self) -> None:
        """Ends all, and what serves them."""


class NoMachines:
    """Instances that are entries in moto and nothing else."""

    real = False

    def start(self, life: Life) -> None:
        """Nothing boots."""

    def end(self, life: Life) -> None:
        """Nothing is taken down."""

    def busy(self, life: Life) -> bool:
        """Never."""
        return False

    def notice(self, life: Life, kind: str, body: dict[str, Any] | None) -> None:
        """Nobody reads it."""

    def address(self, instance_id: str, public: str | None) -> None:
        """Nobody has it."""

    def trouble(self, life: Life, what: str, value: Any) -> None:
        """A test that wants it would prove nothing."""
        raise RuntimeError("this fake has no machines: FakeAws.start(..., machines=True)")

    def clear(self) -> None:
        """There are none."""

    def close(self) -> None:
        """There are none."""


class Cloud:
    """The fake's own state; the rest is in moto."""

    def __init__(self, scale: float = 1.0) -> None:
        """`scale`: how much faster than the wall's its clock is, where a test says nothing of the pace."""
        self.scale, self.lock = scale, threading.RLock()
        self.timers = Timers(self.lock)
        self.machines: Machines = NoMachines()
        self.clear()

    def clear(self) -> None:
        """As new."""
        self.timers.clear()
        self.calls: list[tuple[float, Call]] = []
        self.rules = Rules(**realistic(self.scale))
        self.faults = Faults()
        self.lives = Lives(self)
        self.tokens: dict[tuple[str, ...], tuple[str, Any]] = {}  # client token -> what was asked, the answer
        self.addresses = itertools.count(1)
        self.enforced = False  # permissions
        self.organization: list[dict[str, Any]] = []  # statements of its policy
        self.failed_schedules: list[str] = []
        self.groups: dict[tuple[str, str, str], Any] = {}  # placement groups by account, region, name
        self.reservations: dict[str, Any] = {}  # capacity reservations by id
        self.offerings: dict[str, dict[str, Any]] = {}  # of Capacity Blocks by id, as EC2 gives them

    def emptied(self, pool: Pool) -> None:
        """The spot market has taken a machine of this pool: for a while there is no other one."""
        rules, none = self.rules, (About(pool.instance_type, pool.zone, pool.market), 0, "InsufficientInstanceCapacity")
        if rules.emptied_s > 0 and pool.market == "spot":
            rules.capacities.append(none)
            self.timers.after(rules.emptied_s, lambda: rules.capacities.remove(none))

    def public_address(self) -> str:
        """One that nobody has; the first 254 are of the range for documentation."""
        number = next(self.addresses)
        return f"198.51.100.{number}" if number < 255 else f"198.18.{number // 256}.{number % 256}"
