"""What a search was refused, which other offers that rules out, and how it is told."""

from __future__ import annotations

from mgpu.errors import AuthError, BidTooLow, NoCapacity, NoOffer, PermissionDenied, ProviderError, QuotaExceeded
from mgpu.plan.model import Offer, Refusal

REFUSED = (NoCapacity, BidTooLow, QuotaExceeded, NoOffer)
"""The answers after which the next offer is tried: `refuses`."""
_CLOSED = (AuthError, PermissionDenied)

_PLACES = {
    "offer": ("region", "zone"),
    "zone": ("region", "zone"),
    "region": ("region",),
    "provider": (),
    "account": (),
}
_CURES = 3  # that one message names
_Shape = tuple[str, ...]  # the properties of an offer that a refusal goes by


def refuses(error: BaseException) -> bool:
    """Whether another offer may be granted after it. Credentials that one region does not take, or lets do nothing, may
    be good in the next."""
    return isinstance(error, REFUSED) or (isinstance(error, _CLOSED) and error.scope == "region")


class Refusals:
    """All refusals of one search. Each is kept as what the offers it rules out have in common."""

    def __init__(self) -> None:
        self.tried: list[Refusal] = []
        self.skipped = 0  # offers that were not asked for, because an earlier refusal rules them out
        self._errors: list[ProviderError] = []
        self._blocked: dict[_Shape, set[tuple[object, ...]]] = {}

    def add(self, offer: Offer, reason: str, error: ProviderError | None = None) -> None:
        """Notes that the offer was not to be had; an `error` rules out others too."""
        self.tried.append(Refusal(offer=offer, reason=reason))
        if error is not None:
            self._errors.append(error)
            shape = _shape(error)
            self._blocked.setdefault(shape, set()).add(_values(offer, shape))

    def rule_out(self, offer: Offer) -> bool:
        """Whether asking for this offer would meet with a refusal that is known already."""
        return any(_values(offer, shape) in blocked for shape, blocked in self._blocked.items())

    def table(self) -> str:
        """A line for every offer that was tried: type, market, place, reason."""
        width = max((len(refusal.offer.label) for refusal in self.tried), default=0) + 1
        lines = [f"{refusal.offer.label + ':':<{width}} {refusal.reason}" for refusal in self.tried]
        if self.skipped:
            lines.append(f"and {self.skipped} more that these rule out")
        return "\n".join(lines)

    def verdict(self, fleet: str) -> ProviderError:
        """The error of a search that has nothing left to try."""
        if not self.tried:
            return NoOffer(f"fleet {fleet}: there is no offer to try")
        kinds = {type(error) for error in self._errors}
        cls = kinds.pop() if len(kinds) == 1 else NoCapacity
        steps = [*dict.fromkeys(error.next_step for error in reversed(self._errors) if error.next_step)][:_CURES]
        cure = "Allow other regions, GPU types or markets in the run file, or try later."
        return cls(f"fleet {fleet}: none of the offers was granted", self.table(), " ".join(steps) or cure)


def told_of(offer: Offer, reason: str) -> str:
    """A reason without the offer's own name, which stands before it wherever it is shown."""
    return reason.rpartition(f"{offer.label.removeprefix(offer.provider).strip()}: ")[2]


def _shape(error: ProviderError) -> _Shape:
    place = _PLACES[error.scope]
    if isinstance(error, (NoOffer, *_CLOSED)) and error.scope != "offer":
        return place  # nothing is to be had there, of whatever type
    if isinstance(error, QuotaExceeded):
        return ("limit", "market", *(place if "zone" not in place else ("region",)))
    return ("instance_type", "market", *place)


def _values(offer: Offer, shape: _Shape) -> tuple[object, ...]:
    return tuple(_limit(offer) if name == "limit" else getattr(offer, name) for name in shape)


def _limit(offer: Offer) -> str:
    return offer.quota or offer.instance_type.partition(".")[0]
