"""`pulumi-resource-mgpu`: the Pulumi provider plugin of mgpu. The engine starts and ends it; nobody else needs to."""

from __future__ import annotations

import os
import sys
import threading
import time

from mgpu_train.timeouts import Timeouts

from mgpu.iac import schema
from mgpu.iac.aws.handler import BaseHandler
from mgpu.iac.aws.kinds import KEEPERS
from mgpu.iac.environment import HARD_CAP, IMAGE
from mgpu.iac.fleet import FleetHandler
from mgpu.iac.guard import FleetGuardHandler
from mgpu.iac.handler import Handler
from mgpu.iac.image import ImageHandler
from mgpu.iac.servicer import Servicer, serve
from mgpu.iac.sshkey import SshKeyHandler

_ORPHAN_S = 1.0


def handlers(timeouts: Timeouts, hard_cap_at: float = 0.0, image: str = "") -> dict[str, Handler]:
    """Every resource type, by its token. A new fleet ends by `hard_cap_at` (UNIX seconds; 0: as inputs say), and runs
    `image`, repository@sha256:... (none: as inputs say)."""
    return {
        schema.SSH_KEY: SshKeyHandler(),
        schema.IMAGE: ImageHandler(image),
        schema.FLEET_GUARD: FleetGuardHandler(timeouts),
        schema.FLEET: FleetHandler(timeouts, hard_cap_at),
        **{token: BaseHandler(keeper, timeouts.destroy_s) for token, keeper in KEEPERS.items()},
    }


def main() -> None:
    """Serves until the engine ends this process, or dies itself."""
    engine = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
    settled = float(os.environ.get(HARD_CAP) or 0), os.environ.get(IMAGE, "")
    known = handlers(Timeouts.of_environment(os.environ), *settled)
    server, port = serve(Servicer(known, schema.to_json(), engine))
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    threading.Thread(target=_end_when_orphaned, args=(os.getppid(),), daemon=True).start()
    server.wait_for_termination()


def _end_when_orphaned(parent: int) -> None:
    """A killed engine leaves its plugins behind for ever. What a create under way makes is adopted by the next `up`."""
    while os.getppid() == parent:
        time.sleep(_ORPHAN_S)
    os._exit(1)


if __name__ == "__main__":
    main()
