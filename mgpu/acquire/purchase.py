"""A reservation is bought once, whatever is lost on the way: nobody can give it back.

A provider may have no tokens for purchases. So the intent is written down before the only call; after an answer that
was lost, in this process or in one that died, what it has bought is looked for until the provider would show it, and
nothing is bought meanwhile. Entries of the journal, each with the `token`: `intent` (all of the offer), then `bought`
(the reservation) or `refused` (nothing was bought). One file a process, all of them in one folder.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu import journal as journals
from mgpu.acquire.pauses import pauses
from mgpu.errors import AmbiguousCreate, ProviderError, RateLimited, Transient
from mgpu.events import Emit, Note, ignore
from mgpu.journal import Journal
from mgpu.plan.model import Reservation
from mgpu.providers.base import ReservationOffer, SellsReservations

SHOWN_S = 300.0  # after a purchase: until then a provider may not show what was bought
_EVERY_S = 15.0
_CURE = "`mgpu reservations ls` shows what there is; `mgpu reservations buy` looks again before it buys anything."


@dataclass(frozen=True)
class Begun:
    """A purchase without an end: asked for `at` (UNIX seconds) by a process that is gone, or still at it."""

    token: str
    offer: ReservationOffer
    at: float


@dataclass(frozen=True)
class Purchase:
    """What buying takes. `folder` has the journals; `clock` and `sleep` are in seconds, `now` in UNIX seconds."""

    provider: SellsReservations
    folder: Path
    emit: Emit = ignore
    now: Callable[[], float] = time.time
    sleep: Callable[[float], object] = time.sleep

    def unfinished(self, account: str) -> list[tuple[ReservationOffer, Reservation]]:
        """What earlier purchases by this account, of which nobody has heard, have bought after all; those of which
        nothing came are closed.

        Raises:
            AmbiguousCreate: one may have bought something that is not shown yet.
            ProviderError: the provider does not answer.
        """
        begun = [each for each in _begun(self.folder) if each.offer.account == account]
        return [(each.offer, found) for each in begun if (found := self._settled(each)) is not None]

    def buy(self, offer: ReservationOffer, owner: str) -> Reservation:
        """Buys it, with one call.

        Raises:
            AmbiguousCreate: the answer was lost, and what was bought, if anything, is not shown.
            ProviderError: nothing was bought.
            OSError: the intent could not be written down; nothing was bought.
        """
        token = secrets.token_hex(20)
        with self._journal() as entries:
            begun = Begun(token, offer, self.now())
            entries.append("intent", token=token, offer=offer.model_dump(mode="json"))
            try:
                bought = self.provider.buy_reservation(offer, owner, token)
            except AmbiguousCreate as error:
                self.emit(Note(f"{error.what}; looking for what it bought, {SHOWN_S / 60:.0f} min at most"))
                bought = self._shown(begun, error)
            except ProviderError as error:
                entries.append("refused", token=token, why=str(error))
                raise
            entries.append("bought", token=token, reservation=bought.model_dump(mode="json"))
        return bought

    def _settled(self, begun: Begun) -> Reservation | None:
        found = self.provider.bought_reservation(begun.offer, begun.token, begun.at)
        left_s = begun.at + SHOWN_S - self.now()
        if found is None and left_s > 0:
            what = f"a purchase of {begun.offer.id} is under way, or its answer was lost"
            why = f"It was asked for {self.now() - begun.at:.0f} s ago, and nothing is shown of it yet."
            raise AmbiguousCreate(what, why, f"Nothing else is bought meanwhile: try again in {left_s:.0f} s.")
        with self._journal() as entries:
            if found is None:
                entries.append("refused", token=begun.token, why="nothing was bought")
            else:
                entries.append("bought", token=begun.token, reservation=found.model_dump(mode="json"))
        return found

    def _shown(self, begun: Begun, lost: AmbiguousCreate) -> Reservation:
        """What a purchase has bought whose answer was lost. Raises AmbiguousCreate: nothing is shown."""
        until, trouble = begun.at + SHOWN_S, lost.why
        for pause in pauses(_EVERY_S):
            try:
                found = self.provider.bought_reservation(begun.offer, begun.token, begun.at)
            except (RateLimited, Transient) as error:
                found, trouble = None, str(error)
            if found is not None:
                return found
            if self.now() >= until:
                break
            self.sleep(min(pause, max(0.0, until - self.now())))
        raise AmbiguousCreate(f"{lost.what}, and nothing is shown of it", trouble, _CURE)

    def _journal(self) -> Journal:
        return Journal(self.folder / f"{os.getpid()}-{time.time_ns()}.jsonl", self.now)


def _begun(folder: Path) -> Iterator[Begun]:
    entries: list[dict[str, Any]] = [
        entry for path in sorted(folder.glob("*.jsonl")) for entry in journals.read(path) if "token" in entry
    ]
    ended = {entry["token"] for entry in entries if entry["kind"] != "intent"}
    for entry in entries:
        if entry["token"] not in ended:
            yield Begun(entry["token"], ReservationOffer.model_validate(entry["offer"]), entry["at"])
