"""The fake's process: `python -m fakes.aws.process FOLDER SCALE [--machines [--engines]] [--all-regions]`; it ends with
its input."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# before moto is imported: its thousands of public images cost a second a region, and none is one of ours
os.environ["MOTO_EC2_LOAD_DEFAULT_AMIS"] = "false"

from fakes.aws import (
    buckets,
    control,
    ec2,
    ecr,
    fleets,
    images,
    permissions,
    placement,
    prices,
    reading,
    reservations,
    schedules,
    sessions,
    tasks,
    world,
)
from fakes.aws.backing import Backing
from fakes.aws.cloud import Cloud
from fakes.aws.server import Front, bound, serve
from fakes.aws.verbs import verbs


def main() -> None:
    """Serves until the parent lets go of standard input, by dying too."""
    folder, machines = Path(sys.argv[1]), "--machines" in sys.argv
    listeners = [bound("127.0.0.1")]
    port = listeners[0].getsockname()[1]
    if machines:
        world.enter()  # before any thread starts
        listeners.append(bound("0.0.0.0", port))
    cloud = Cloud(float(sys.argv[2]))
    images.install()
    buckets.install()
    ec2.install(cloud)
    if "--all-regions" not in sys.argv:
        ec2.enable_few_regions()
    reading.install(cloud)
    fleets.install(cloud)
    placement.install(cloud)
    reservations.install(cloud)
    prices.install(cloud)
    permissions.install(cloud)
    schedules.install(cloud)
    tasks.install()
    streams = sessions.install(cloud, world.GATEWAY if machines else "127.0.0.1")
    if machines:
        engines = "--engines" in sys.argv
        registry = ecr.serve(folder) if engines else None  # noqa: F841  it ends when its pipe does
        cloud.machines = Backing(cloud, folder, port, engines)
    for listener in listeners:
        serve(Front(cloud), listener)
    control.listen(folder, verbs(cloud, streams))
    print(json.dumps({"port": port}), flush=True)  # noqa: T201  the ready line
    sys.stdin.buffer.read()
    cloud.machines.close()
    os._exit(0)  # threads that still wait for a client shall not hold it


if __name__ == "__main__":
    main()
