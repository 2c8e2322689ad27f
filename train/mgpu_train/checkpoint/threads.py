"""The same work for many things by a few threads, with a bounded number of them under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_threads(work: Callable[[T], R], things: Iterable[T], threads: int) -> list[R]:
    """What `work` returns for each thing, in the order of the things, which are drawn only as they are needed.

    After the first failure nothing more is begun, and nothing still runs when it is raised.
    """
    numbered, drawing, over = enumerate(things), threading.Lock(), threading.Event()
    results: dict[int, R] = {}

    def draw() -> tuple[int, T] | None:
        with drawing:
            return None if over.is_set() else next(numbered, None)

    def worker() -> None:
        try:
            while (drawn := draw()) is not None:
                results[drawn[0]] = work(drawn[1])
        finally:
            over.set()  # nothing is left, or it failed

    with ThreadPoolExecutor(threads, "checkpoint") as pool:
        try:
            for future in [pool.submit(worker) for _ in range(threads)]:
                future.result()
        finally:
            over.set()  # also when the caller is interrupted while it waits
    return [results[number] for number in range(len(results))]
