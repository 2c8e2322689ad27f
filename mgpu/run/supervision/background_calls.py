"""Calls that run beside the supervisor: one that hangs holds up nothing but itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable


class BackgroundCalls:
    """Calls under way, each known by a key. Not for two threads at once: one begins them, and waits."""

    def __init__(self) -> None:
        self._under_way: dict[Hashable, _Call] = {}

    def begin(self, key: Hashable, call: Callable[[], None]) -> bool:
        """Starts it in a thread of its own; False: one of this key is still under way, and nothing was started."""
        if key in self._under_way:
            return False
        self._under_way[key] = _Call(call)
        return True

    def wait(self, seconds: float, *keys: Hashable) -> None:
        """Until those of these keys (none: all) have ended, `seconds` at most; those that have not go on.

        Raises what one of them raised: a bug.
        """
        until = time.monotonic() + seconds
        for key, call in [each for each in self._under_way.items() if not keys or each[0] in keys]:
            call.join(max(0.0, until - time.monotonic()))
            if call.is_alive():
                continue
            del self._under_way[key]
            if call.error is not None:
                raise call.error


class _Call(threading.Thread):
    """Ends with the process: nobody waits for it then."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__(name="mgpu-call", daemon=True)
        self._call = call
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Calls it."""
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self.error = error
