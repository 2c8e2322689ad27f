"""What a cancel does to work that is under way: it is ended, and only then is it over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mgpu.errors import Interrupted

LOOK_S = 0.1  # until a cancel is seen


@contextmanager
def ending(cancelled: threading.Event, end: Callable[[], None]) -> Iterator[None]:
    """While the block runs, a cancel calls `end`, once, in another thread. It is over when `end` has returned."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            if cancelled.is_set():
                return end()
        return None

    watcher = threading.Thread(target=look, name="mgpu-cancel", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def interrupted() -> Interrupted:
    """What a cancelled build or push ends with."""
    return Interrupted("the image was not finished: cancelled", "Nothing refers to what was built or pushed of it.")
