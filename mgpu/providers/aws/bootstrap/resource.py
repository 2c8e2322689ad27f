"""What all kinds have in common: a resource as it should be, as it is, and how the second becomes the first."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from mgpu.errors import InputError
from mgpu.providers.aws import names
from mgpu.providers.aws.failures import calling, patiently
from mgpu.providers.aws.session import Account


def fixed(default: Any, description: str) -> Any:
    """A property that nobody sets: it says how the resource has to be, and, looked at, how it is."""
    return Field(default=default, description=description, json_schema_extra={"fixed": True})


class Resource(BaseModel):
    """The properties of one resource. The same type says what it should be and what it is: where the two differ, it has
    drifted, or was never brought in line.
    """

    model_config = ConfigDict(
        defer_build=True, frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True
    )

    facts: ClassVar[dict[str, str]] = {}
    """What is known beyond the properties once it is there: wire name -> description."""
    identity: ClassVar[tuple[str, ...]] = ("existing", "name")
    """The properties whose change makes it another resource."""

    existing: str | None = Field(
        default=None, description="one of yours instead: checked, never changed and never deleted"
    )
    # texts, no map: Pulumi's SDK would turn its keys into camel case
    tags: tuple[str, ...] = Field(default=(), description="tags beside mgpu's own, KEY=VALUE; others stay")
    lacks: tuple[str, ...] = fixed((), "what one of yours lacks")

    @property
    def stays(self) -> bool:
        """Whether it outlives its resource."""
        return self.existing is not None

    @classmethod
    def fixed(cls) -> frozenset[str]:
        """The properties that nobody sets."""
        return frozenset(
            name
            for name, info in cls.model_fields.items()
            if isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get("fixed")
        )


T = TypeVar("T", bound=Resource)


@dataclass(frozen=True)
class Found(Generic[T]):
    """One resource as it is now. `ours`: mgpu made it; `raw`: what its manager needs to bring it in line."""

    id: str
    state: T
    facts: dict[str, str]
    ours: bool = True
    raw: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """Where resources are: one region of one account. `limit_s`: seconds until something that is deleted must be
    gone.
    """

    account: Account
    region: str
    limit_s: float = 300
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def client(self, service: str) -> Any:
        """The region's client of a service."""
        return self.account.client(service, self.region)

    def patiently(self, call: Callable[[], Any], codes: Collection[str], within_s: float | None = None) -> Any:
        """The answer; AWS's errors of these codes are waited out, until `within_s` seconds (default: `limit_s`) are
        over. Then the last one is raised."""
        return patiently(call, codes, self.limit_s if within_s is None else within_s, self.clock, self.sleep)


class Manager(Protocol[T]):
    """What AWS is asked for one kind. Errors are botocore's; the functions below turn them into ours."""

    kind: ClassVar[str]
    resource: ClassVar[type[Resource]]

    def __init__(self, site: Site) -> None: ...

    @property
    def site(self) -> Site:
        """Where it is."""
        ...

    def complete(self, wanted: T) -> T:
        """With its default name, and what follows from the properties that were given."""
        ...

    def expected(self, wanted: T) -> dict[str, str]:
        """The facts that are known before it is there."""
        ...

    def look(self, wanted: T) -> Found[T] | None:
        """As it is now; None: AWS says that it is not there."""
        ...

    def make(self, wanted: T) -> Found[T]:
        """Makes it, not yet in line; one that an interrupted call has made is taken."""
        ...

    def align(self, found: Found[T], wanted: T) -> None:
        """Changes what differs, in place."""
        ...

    def delete(self, wanted: T) -> None:
        """Ends it, and comes back when AWS says that it is gone; absent is success.

        Raises:
            CleanupFailed: it is still there.
        """
        ...


def look(manager: Manager[T], wanted: T) -> Found[T] | None:
    """The resource as it is now; None: AWS says that it is not there. Raises ProviderError where AWS says nothing."""
    with calling(f"looking at the {manager.kind}", manager.site.region):
        return manager.look(wanted)


def remove(manager: Manager[T], wanted: T) -> None:
    """Ends the resource, and comes back when AWS says that it is gone; absent is success, and so is one that `stays`.

    Raises:
        CleanupFailed: it is still there.
    """
    if not wanted.stays:
        with calling(f"deleting the {manager.kind}", manager.site.region):
            manager.delete(wanted)


def examined(manager: Manager[T], wanted: T) -> Found[T] | None:
    """As `look`, with what is in the way of using it raised.

    Raises:
        InputError: one of the user's is not there or lacks something; or another one stands in its place.
    """
    found = look(manager, wanted)
    if wanted.existing is not None:
        return _usable(manager, wanted, found)
    if found is not None and not found.ours:
        raise InputError(
            f"the {manager.kind} {found.id} is there already, and mgpu did not make it",
            f"It has no tag {names.BASE}.",
            "Give it as an existing one to use it as it is, tag it to hand it over, or rename it.",
        )
    return found


def ensure(manager: Manager[T], wanted: T) -> Found[T]:
    """The resource as it should be: found or made, and brought in line. Raises what `examined` raises."""
    found = examined(manager, wanted)
    if found is None or found.state != wanted:
        with calling(f"making the {manager.kind}", manager.site.region):
            found = found or manager.make(wanted)
            manager.align(found, wanted)
    return Found(found.id, wanted, found.facts)


def _usable(manager: Manager[T], wanted: T, found: Found[T] | None) -> Found[T]:
    if found is None:
        raise InputError(f"there is no {manager.kind} {wanted.existing}", "", "Check the name, the account and region.")
    if found.state.lacks:
        why = "\n".join(found.state.lacks)
        raise InputError(f"the {manager.kind} {wanted.existing} cannot be used", why, "Mend it, or name another one.")
    return found


def tags_of(tags: Any) -> dict[str, str]:
    """Tags as AWS lists them, in either spelling."""
    return {tag.get("Key", tag.get("key")): tag.get("Value", tag.get("value")) for tag in tags or ()}


def base_tags(wanted: Resource) -> dict[str, str]:
    """The tags of a resource of base: mgpu's own, and those that it is wanted with."""
    return {names.BASE: "1", **dict(each.split("=", 1) for each in wanted.tags)}


def tags_there(wanted: Resource, found: Mapping[str, str]) -> tuple[str, ...]:
    """Those that it is wanted with and has."""
    return tuple(each for each in wanted.tags if found.get(each.split("=", 1)[0]) == each.split("=", 1)[1])
