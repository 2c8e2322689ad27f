"""How long a pass with nothing to do takes, and how many requests it makes; also beside 1,000 runs that are over.

A pass of every five minutes on a laptop, in a cron line or a CI job should cost nothing that anybody notices.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bench.gateway import BUCKET, versitygw
from bench.tools import MGPU, environment, median_s

RUNS = 1000
_FILL = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from mgpu.run.record.record import Record, State, new_run_id, save
from mgpu.schedule import kept
from mgpu.schedule.model import Schedule

def run(number):
    run_id = new_run_id("night", now - 86400 * number, number.to_bytes(5, "big"))
    given = {"own_stack": True, "fleet_name": run_id, "provider": "local", "nodes": 2, "teardown": "confirmed"}
    save(Record(run_id, "night", "/p", "/p", "/p/mgpu.yaml", run_id, **given, state=State.SUCCEEDED, created_at=now))

now = time.time()
if sys.argv[1] == "0":
    kept.add(Schedule("nightly", "u1", "0 2 29 2 *", "UTC", {"name": "night"}, now, "me@here", now))
with ThreadPoolExecutor(16) as pool:
    list(pool.map(run, range(int(sys.argv[1]))))
"""
_COUNTED = """
import botocore.httpsession, sys
from mgpu.cli import main
count, send = [0], botocore.httpsession.URLLib3Session.send
def counted(self, request):
    count[0] += 1
    return send(self, request)
botocore.httpsession.URLLib3Session.send = counted
try:
    main(["reconcile"])
finally:
    print(count[0], "requests", file=sys.stderr)
"""


def main() -> None:
    """Prints medians in seconds, and requests."""
    print("a pass with nothing to do, median of 9 (limits: 0.4 s on a folder, 1 s and 5 requests on S3)")
    with tempfile.TemporaryDirectory() as name, versitygw() as server:
        home = Path(name)
        folder = {"PULUMI_BACKEND_URL": f"file://{home}/state"}
        bucket = {"PULUMI_BACKEND_URL": f"s3://{BUCKET}/backend?region=us-east-1", **server.env}
        for runs in (0, RUNS):
            for place, where in (("a folder", folder), ("S3", bucket)):
                env = _environment(home, place, where)
                subprocess.run([sys.executable, "-c", _FILL, str(runs)], env=env, check=True)
                subprocess.run([str(MGPU), "reconcile"], env=env, check=True, capture_output=True)  # the hour's sweep
                seconds = median_s([str(MGPU), "reconcile"], cwd=home, env=env)
                asked = f", {_requests(env)}" if place == "S3" else ""
                print(f"  {place:<9} one schedule, {runs:>5,} runs  {seconds:.3f} s{asked}")


def _environment(home: Path, place: str, where: Mapping[str, str]) -> dict[str, str]:
    own = {name: str(home / place / name) for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")}
    return environment() | own | {"PULUMI_CONFIG_PASSPHRASE": "bench", "HOME": str(home)} | dict(where)


def _requests(env: Mapping[str, str]) -> str:
    done = subprocess.run([sys.executable, "-c", _COUNTED], env=env, capture_output=True, text=True, check=False)
    return (done.stderr.strip().splitlines() or ["?"])[-1]
