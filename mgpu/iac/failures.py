"""How an error travels from the plugin through the engine to the driver: as text with its class in brackets."""

from __future__ import annotations

import re

from mgpu import errors
from mgpu.errors import (
    HostKeyMismatch,
    ImageError,
    InputError,
    MgpuError,
    ProviderError,
    StackError,
    TeardownIncomplete,
)

_KEPT = (InputError, ProviderError, ImageError, TeardownIncomplete, HostKeyMismatch)
_MARK = re.compile(r"\n\s*\[mgpu:(\w+)\]")
# how the engine shows the reasons of a partial failure, and of one in a preview
_LIST = re.compile(r"\A\s*(\d+ errors? occurred:\s*\* |Preview failed: )")


def describe(error: MgpuError) -> str:
    """The error as the engine shows it: its three lines, and its class in brackets below them."""
    return f"{error}\n[mgpu:{type(error).__name__}]"


def parse(text: str) -> MgpuError | None:
    """The error that `describe` wrote into `text`; None when there is none.

    A ProviderError comes back as its own class, with its exit code, and so do InputError, ImageError,
    TeardownIncomplete and HostKeyMismatch; everything else as a StackError.
    """
    mark = _MARK.search(text)
    if mark is None:
        return None
    found = getattr(errors, mark[1], None)
    kind = found if isinstance(found, type) and issubclass(found, _KEPT) else StackError
    if issubclass(kind, InputError):
        kind = InputError  # SpecError is not made of three lines
    said = _LIST.sub("", text[: mark.start()])
    what, *rest = [line.strip() for line in said.splitlines() if line.strip()] or ["the plugin failed"]
    next_step = rest.pop() if rest else ""
    return kind(what, "\n".join(rest), next_step)
