"""A supervisor of its own process: `watcher.py LINE` takes over the run that the file LINE describes.

Prints how it ended and the most memory that it had (MiB), as one JSON line.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from mgpu_train.timeouts import Timeouts

from mgpu.events import ignore
from mgpu.iac.outputs import StackOutput
from mgpu.providers.local.provider import LocalProvider
from mgpu.run.job.request import resolve
from mgpu.run.lifecycle.attempt import watch_again
from mgpu.run.record.record import load
from mgpu.run.record.session import Session
from mgpu.spec.load import loads

line = json.loads(Path(sys.argv[1]).read_text())
times = Timeouts(**line["times"])
session = Session(load(line["run_id"]), ignore, times)
request = resolve(loads(line["run_file"], "mgpu.yaml"), line["run_id"], Path(line["base"]), timeouts=times)
fleet = StackOutput.model_validate(line["fleet"])
before_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
ended = watch_again(session, fleet, LocalProvider(), request)
most_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
answer = {"succeeded": ended.succeeded, "reason": ended.reason, "before_mib": before_mib, "most_mib": most_mib}
print(json.dumps(answer))  # noqa: T201
