"""The fake's process: `python -m fakes.aws FOLDER [--machines]`; it ends when its standard input does."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# before moto is imported: its thousands of public images cost a second a region, and none is one of ours
os.environ["MOTO_EC2_LOAD_DEFAULT_AMIS"] = "false"

from moto.moto_api._internal.models import moto_api_backend

from fakes.aws import control, ledger
from fakes.aws.cloud import Cloud
from fakes.aws.server import Front, bound, serve


def main() -> None:
    """Serves until the parent lets go of standard input, by dying too."""
    folder = Path(sys.argv[1])
    cloud = Cloud()

    def reset() -> None:
        with cloud.lock:
            cloud.clear()
            moto_api_backend.reset()

    def calls() -> list[dict]:
        return [{"at": at, **vars(call)} for at, call in cloud.calls]

    listener = bound("127.0.0.1")
    serve(Front(cloud), listener)
    control.listen(folder, {"reset": reset, "calls": calls, "bill": lambda: ledger.bill(cloud)})
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)  # noqa: T201  the ready line
    sys.stdin.buffer.read()


main()
