"""One question asked many times at once: of every region, of every machine type."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import TypeVar

from mgpu.errors import ProviderError, Transient

_AT_ONCE = 12
_T = TypeVar("_T")


def ask_all(
    names: Collection[str], ask: Callable[[str], _T], end: float
) -> tuple[dict[str, _T], dict[str, ProviderError]]:
    """Answers and refusals by name, until `end` (monotonic); daemon threads: no process waits for who is late. Raises
    what `ask` has raised that is no ProviderError."""
    answers: dict[str, _T] = {}
    errors: dict[str, Exception] = {}
    gate = threading.Semaphore(_AT_ONCE)

    def work(name: str) -> None:
        with gate:
            try:
                answers[name] = ask(name)
            except Exception as error:  # noqa: BLE001  raised again by who waits for it
                errors[name] = error

    threads = [threading.Thread(target=work, args=(name,), daemon=True, name=f"asking {name}") for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    there = {name: answers[name] for name in names if name in answers}
    late = Transient("no full answer in time", scope="region")
    return there, {name: _refusal(errors.get(name, late)) for name in names if name not in there}


def in_a_line(error: ProviderError) -> str:
    """An error as a row of a table tells it."""
    return "; ".join(part for part in (error.what, error.why) if part)


def _refusal(error: Exception) -> ProviderError:
    if isinstance(error, ProviderError):
        return error
    raise error
