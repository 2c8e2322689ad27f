"""Changing moto at named places, each of which has to be there: the fake is made for one version of it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

MOTO = "5.2.5"


class MotoChanged(Exception):
    """moto has no such name any more; the hook that needs it has to be written anew."""


def replace(owner: Any, name: str, new: Any) -> Any:
    """Puts `new` at `owner.name` and returns what was there."""
    old = existing(owner, name)
    setattr(owner, name, new)
    return old


def existing(owner: Any, name: str) -> Any:
    """What stands at `owner.name`; `MotoChanged` if nothing does."""
    try:
        return getattr(owner, name)
    except AttributeError:
        where = getattr(owner, "__name__", type(owner).__name__)
        said = f"moto {version('moto')} has no {where}.{name}: the fake AWS is made for moto {MOTO}"
        raise MotoChanged(said) from None


def add(owner: Any, name: str, new: Any) -> None:
    """Puts `new` at `owner.name`, where moto has nothing yet; `MotoChanged` if it now does."""
    if hasattr(owner, name):
        raise MotoChanged(f"moto {version('moto')} has its own {owner.__name__}.{name} now: the fake's can go")
    setattr(owner, name, new)


def add_action(cloud: Any, owner: Any, name: str, action: Callable[[Any, Any], Any]) -> None:
    """Puts an action of EC2's at `owner.name`, where moto has nothing yet: of a dry run it does nothing."""

    def run(self: Any) -> Any:
        self.error_on_dryrun()
        return action(cloud, self)

    add(owner, name, run)
