"""How an error travels from the plugin through the engine to the driver: as text, with a mark of what it was below.

    fleet f: none of the offers was granted
    us-east-1a: sold out
    Try later.
    [mgpu:NoCapacity why=1 next=1 scope=zone retry_after=30.0]

`why` and `next` count lines; `scope` and `retry_after` are a ProviderError's. The engine indents lines, and drops
empty ones.
"""

from __future__ import annotations

import re
from typing import cast

from mgpu import errors
from mgpu.errors import (
    HostKeyMismatch,
    ImageError,
    InputError,
    MgpuError,
    ProviderError,
    Scope,
    StackError,
    TeardownIncomplete,
)

_KEPT = (InputError, ProviderError, ImageError, TeardownIncomplete, HostKeyMismatch)
_MARK = re.compile(r"\n\s*\[mgpu:(\w+)((?: \w+=[\w.]+)*)\]")
# how the engine shows the reasons of a partial failure, and of one in a preview
_LIST = re.compile(r"\A\s*(\d+ errors? occurred:\s*\* |Preview failed: )")


def describe(error: MgpuError) -> str:
    """The error as the engine shows it: its three lines, and below them a mark of what it was."""
    facts: dict[str, object] = {"why": len(_lines(error.why)), "next": len(_lines(error.next_step))}
    if isinstance(error, ProviderError):
        facts |= {"scope": error.scope} | ({} if error.retry_after is None else {"retry_after": error.retry_after})
    # a provider may have kinds of its own, of which the driver knows nothing
    kind = next(each.__name__ for each in type(error).__mro__ if getattr(errors, each.__name__, None) is each)
    return f"{error}\n[mgpu:{kind} {' '.join(f'{name}={fact}' for name, fact in facts.items())}]"


def parse(text: str) -> MgpuError | None:
    """The error that `describe` wrote into `text`; None when there is none.

    A ProviderError comes back as its own class, with its exit code, scope and retry_after, and so do InputError,
    ImageError, TeardownIncomplete and HostKeyMismatch; everything else as a StackError.
    """
    mark = _MARK.search(text)
    if mark is None:
        return None
    found = getattr(errors, mark[1], None)
    kind = found if isinstance(found, type) and issubclass(found, _KEPT) else StackError
    if issubclass(kind, InputError):
        kind = InputError  # SpecError is not made of three lines
    facts = dict(fact.split("=") for fact in mark[2].split())
    said = _lines(_LIST.sub("", text[: mark.start()]))
    next_at = len(said) - int(facts.get("next", 0))
    why_at = next_at - int(facts.get("why", 0))
    lines = "\n".join(said[:why_at]) or "the plugin failed", "\n".join(said[why_at:next_at]), "\n".join(said[next_at:])
    error = kind(*lines)
    if isinstance(error, ProviderError):
        error.scope = cast("Scope", facts.get("scope", error.scope))
        error.retry_after = float(facts["retry_after"]) if "retry_after" in facts else None
    return error


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]
