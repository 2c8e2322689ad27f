"""What `create` and `repair` were asked for, one record a token: `<root>/gangs/<token>.json`.

The record is claimed in one step before anything can run, and holds the ids of all its nodes: whoever finds it can
complete the gang, describe it, or end it. It stays, so that a token is never used for a second gang.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from mgpu.errors import Conflict, InvalidRequest
from mgpu.plan.model import Offer, Value
from mgpu.providers.base import FleetRequest, Handle
from mgpu.providers.local import files
from mgpu.providers.local.nodes import Instance, NodeSpec

REGION = "here"
_TOKEN = re.compile(r"[0-9a-f]{8,64}")
_ID = re.compile(r"[0-9a-f]{10}-[0-9]+")


class Gang(Value):
    """What one token stands for; `ids` is in rank order, empty for ranks that are not of this gang."""

    token: str
    ids: tuple[str, ...]
    request: FleetRequest
    offer: Offer
    python: str
    asked_at: float = 0.0  # when it was first asked for, UNIX seconds

    @property
    def handle(self) -> Handle:
        """As `create` returns it."""
        request = self.request
        return Handle(
            provider="local",
            region=REGION,
            fleet=request.fleet,
            generation=request.generation,
            token=self.token,
            ids=self.ids,
        )

    def require_same(self, asked: Gang) -> None:
        """Raises `Conflict` when the token was now used with other parameters; a price list's age is none."""
        age = {"fetched_at", "stock"}
        ours, theirs = self.offer.model_dump(exclude=age), asked.offer.model_dump(exclude=age)
        if (self.ids, self.request, ours) != (asked.ids, asked.request, theirs):
            raise Conflict(
                f"fleet {asked.request.fleet}: this create was made before with other parameters",
                f"the token {self.token} stands for {len([name for name in self.ids if name])} nodes of generation "
                f"{self.request.generation}, {self.offer.label}",
                "Ask for a new generation of the fleet, or end the old one.",
                scope="offer",
            )

    def node_spec(self, rank: int) -> NodeSpec:
        """What this rank's node process is told."""
        request = self.request
        return NodeSpec(
            rank=rank,
            fleet=request.fleet,
            generation=request.generation,
            owner=request.owner,
            ssh_public_key=request.ssh_public_key,
            python=self.python,
            lease_s=request.lease_s,
            hard_cap_s=request.hard_cap_s,
            price_usd_per_hour=self.offer.price_usd_per_hour,
            market=self.offer.market,
            asked_at=self.asked_at,
        )


class Gangs:
    """All gangs under one root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._folder = root / "gangs"

    def node_id(self, token: str, rank: int) -> str:
        """The id of a token's node; its mark on processes, so another root's never equals it."""
        return f"{hashlib.sha256(f'{self.root} {token}'.encode()).hexdigest()[:10]}-{rank}"

    def claim(self, gang: Gang) -> Gang:
        """Writes the record, and returns it: the first one, where it was asked for before.

        Raises:
            Conflict: there is one already, for something else.
        """
        self._folder.mkdir(exist_ok=True, mode=0o700)
        first = files.claim(self._path(gang.token), gang.model_dump(mode="json"))
        known = None if first else self.get(gang.token)
        if known is not None:
            known.require_same(gang)
        return known or gang

    def get(self, token: str) -> Gang | None:
        """The gang of this token."""
        data = files.load(self._path(token))
        return Gang.model_validate(data) if data else None

    def all(self) -> Iterator[Gang]:
        """Every gang there ever was, in the order of their tokens."""
        for path in sorted(self._folder.glob("[0-9a-f]*.json")):
            gang = self.get(path.stem)
            if gang is not None:
                yield gang

    def instance(self, gang: Gang | None, name: str) -> Instance | None:
        """The instance of this id; a record that a crash left unwritten is written now. None: not known here."""
        if not _ID.fullmatch(name):
            return None
        instance = Instance(self.root, name)
        if gang is not None and name in gang.ids:
            instance.register(gang.node_spec(gang.ids.index(name)))
        return instance if instance.registered else None

    def _path(self, token: str) -> Path:
        if not _TOKEN.fullmatch(token):
            raise InvalidRequest(f"{token!r} is not a token", "a token is 8 to 64 hexadecimal digits")
        return self._folder / f"{token}.json"
