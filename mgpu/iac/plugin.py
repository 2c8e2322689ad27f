"""`pulumi-resource-mgpu`: the Pulumi provider plugin of mgpu. The engine starts and ends it; nobody else needs to."""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from mgpu_train.timeouts import Timeouts

from mgpu.iac import tokens
from mgpu.iac.environment import HARD_CAP, IMAGE, MAX_USD, RANKED_UP_TO, SEARCHES
from mgpu.iac.protocol.handler import Handler
from mgpu.iac.protocol.servicer import Servicer, serve

_ORPHAN_S = 1.0


class Handlers(Mapping[str, Handler]):
    """Every resource type's, made when it is first asked for: the engine starts the plug-in for each operation, and
    what the types import that a stack does not have is most of what a start would take."""

    def __init__(
        self,
        timeouts: Timeouts,
        hard_cap_at: float = 0.0,
        image: str = "",
        max_usd: float = 0.0,
        ranked_up_to: Sequence[float] = (),
        searches: int | None = 0,
    ) -> None:
        """A new fleet ends by `hard_cap_at` (UNIX seconds; 0: as inputs say) and before it costs more than `max_usd`
        (0: no limit), is of an offer that is `ranked_up_to` this (empty: any), and runs `image`,
        repository@sha256:... (none: as inputs say). `searches` for it have come to their end before; None: the backend
        counts them."""
        self._timeouts, self._hard_cap_at, self._image, self._max_usd = timeouts, hard_cap_at, image, max_usd
        self._ranked_up_to, self._searches = ranked_up_to, searches
        self._makers: dict[str, Callable[[], Handler]] = {
            tokens.SSH_KEY: self._ssh_key,
            tokens.IMAGE: self._image_handler,
            tokens.FLEET_GUARD: self._guard,
            tokens.FLEET: self._fleet,
            **{token: functools.partial(self._aws, token) for token in tokens.AWS},
        }
        self._made: dict[str, Handler] = {}
        self._lock = threading.Lock()

    def __getitem__(self, token: str) -> Handler:
        maker = self._makers[token]
        with self._lock:  # calls come side by side
            if token not in self._made:
                self._made[token] = maker()
            return self._made[token]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __contains__(self, token: object) -> bool:
        return token in self._makers

    def _ssh_key(self) -> Handler:
        from mgpu.iac.types.ssh_key import SshKeyHandler

        return SshKeyHandler()

    def _image_handler(self) -> Handler:
        from mgpu.iac.types.image import ImageHandler

        return ImageHandler(self._image)

    def _guard(self) -> Handler:
        from mgpu.iac.types.guard import FleetGuardHandler

        return FleetGuardHandler(self._timeouts)

    def _fleet(self) -> Handler:
        from mgpu.iac.types.fleet import FleetHandler

        return FleetHandler(self._timeouts, self._hard_cap_at, self._max_usd, self._ranked_up_to, self._searches)

    def _aws(self, token: str) -> Handler:
        from mgpu.iac.aws.handler import AwsHandler
        from mgpu.iac.aws.kinds import MANAGERS

        return AwsHandler(MANAGERS[token], self._timeouts.destroy_s)


def _schema() -> str:
    from mgpu.iac import schema

    return schema.to_json()


def main() -> None:
    """Serves until the engine ends this process, or dies itself."""
    parent = os.getppid()  # first: of an engine that dies meanwhile
    engine = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
    hard_cap_at, max_usd = (float(os.environ.get(name) or 0) for name in (HARD_CAP, MAX_USD))
    ranked_up_to = json.loads(os.environ.get(RANKED_UP_TO) or "[]")
    times, image = Timeouts.of_environment(os.environ), os.environ.get(IMAGE, "")
    searches = int(os.environ[SEARCHES]) if os.environ.get(SEARCHES) else None
    known = Handlers(times, hard_cap_at, image, max_usd, ranked_up_to, searches)
    server, port = serve(Servicer(known, _schema, engine, tokens.AWS_CONFIG))
    threading.Thread(target=_end_when_orphaned, args=(parent,), daemon=True).start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    server.wait_for_termination()


def _end_when_orphaned(parent: int) -> None:
    """A killed engine leaves its plugins behind for ever. What a create under way makes is adopted by the next `up`."""
    while os.getppid() == parent:
        time.sleep(_ORPHAN_S)
    os._exit(1)


if __name__ == "__main__":
    main()
