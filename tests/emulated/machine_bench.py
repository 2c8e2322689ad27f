"""Fake machines without moto: a process in a world of its own that does what lines of JSON on its input say.

One line, `{"do": "start", "with": {...}}`, is one call of a method of Machines; one line answers. It ends, and all its
machines with it, when its input does.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from fakes.aws import world
from fakes.aws.machines import Machine, Machines


def main() -> None:
    off: list[str] = []
    world.enter()
    machines = Machines(Path(sys.argv[1]), off.append, environment={"FAKE": "yes"})

    def wait_off(instance_id: str, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while instance_id not in off and time.monotonic() < end:
            time.sleep(0.01)
        return instance_id in off

    def start(user_data: str, **facts: Any) -> None:
        machines.start(Machine(user_data=base64.b64decode(user_data), **facts))

    def namespace(instance_id: str) -> str:
        return os.readlink(f"/proc/{machines.pid(instance_id)}/ns/pid")  # noqa: PTH115  it leads to no path

    own = {"start": start, "off": lambda: off, "wait_off": wait_off, "pid": os.getpid, "namespace": namespace}
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            done = (own.get(asked["do"]) or getattr(machines, asked["do"]))(**asked["with"])
            answer = {"result": done}
        except Exception as error:  # noqa: BLE001  the test that asked shall see it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)  # noqa: T201
    machines.close()


if __name__ == "__main__":
    main()
