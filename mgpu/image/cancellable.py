"""`publish`, for callers that may be cancelled at any time: by a signal, or by Pulumi's engine.

The work has a thread of its own, which ends what it has begun. A registry that is silent is not waited for longer than
END_S after a cancel: nothing is left of a question.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from mgpu.events import Emit, Event
from mgpu.image import publish
from mgpu.image.build import buildx, cancel
from mgpu.image.build.docker_engine import DockerEngine
from mgpu.image.publish import Built, Published, Site
from mgpu.spec.image import ImageSpec

END_S = buildx.GRACE_S + 3.0  # for a build, to end and to clear up
_T = TypeVar("_T")


def ensure(spec: ImageSpec, site: Site, emit: Emit, cancelled: threading.Event) -> Published:
    """As `publish.ensure`, and Interrupted once `cancelled` is set: no build or push goes on then."""
    return _until(cancelled, emit, lambda told: publish.ensure(spec, _ended_by(cancelled, site), told))


def build(spec: ImageSpec, site: Site, emit: Emit, cancelled: threading.Event) -> Built:
    """As `publish.build`, and Interrupted once `cancelled` is set: no build goes on then."""
    return _until(cancelled, emit, lambda told: publish.build(spec, _ended_by(cancelled, site), told))


def _ended_by(cancelled: threading.Event, site: Site) -> Site:
    return replace(site, engine=partial(DockerEngine, cancelled=cancelled))


def _until(cancelled: threading.Event, emit: Emit, work: Callable[[Emit], _T]) -> _T:
    over, outcome = threading.Event(), list[tuple[_T | None, BaseException | None]]()

    def told(event: Event) -> None:
        if cancelled.is_set():  # who asked has left, or is about to
            raise cancel.interrupted()
        emit(event)

    def run() -> None:
        try:
            outcome.append((work(told), None))
        except BaseException as error:  # noqa: BLE001  raised again by who waits
            outcome.append((None, error))
        over.set()

    threading.Thread(target=run, name="mgpu-image", daemon=True).start()
    while not over.wait(cancel.LOOK_S):
        if cancelled.is_set():
            over.wait(END_S)
            break
    if cancelled.is_set():
        raise cancel.interrupted()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  of `work`, which may be None
