"""Provider `aws` with many machines, on the fake AWS of the tests: seconds until 32 run, and to look at 1,000."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mgpu_train.timeouts import Timeouts

from bench.tools import MGPU, ROOT
from mgpu import acquire, paths
from mgpu.journal import Journal
from mgpu.plan.model import Requirements
from mgpu.plan.rank import plan
from mgpu.providers.aws.provider import AwsProvider
from mgpu.providers.base import FleetRequest, NodePhase

if TYPE_CHECKING:
    from fakes.aws import FakeAws

T = TypeVar("T")
NODES, ACQUIRE_LIMIT_S = 32, 5.0
MACHINES, LOOK_LIMIT_S = 1000, 10.0
CHECK_LIMIT_S = 3.0
HERE = "us-east-1"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA6NmDsU5s6N6qCx6nBFJvFxLhkS0Xo3vYhZ0AL1Kxkq bench"


def main() -> None:
    """Prints seconds and limits. The fake answers one call at a time, in Python, on the same machine: AWS is faster."""
    print(f"aws, on the fake: {NODES} nodes acquired and given back, {MACHINES} machines looked at; seconds")
    with tempfile.TemporaryDirectory() as folder, _fake(Path(folder)) as aws:
        _timed("mgpu check aws", CHECK_LIMIT_S, functools.partial(_quietly, "check", "aws"))
        _acquire(Path(folder))
        _look(aws)


@contextmanager
def _fake(folder: Path) -> Iterator[FakeAws]:
    """This process and its children take the fake for AWS, and have state folders of their own."""
    sys.path.insert(0, str(ROOT / "tests"))
    from fakes.aws import FOREIGN, FakeAws

    before = dict(os.environ)
    with FakeAws.start(folder / "aws", all_regions=True) as aws:
        for name in FOREIGN:
            os.environ.pop(name, None)
        os.environ.update(aws.env, XDG_STATE_HOME=str(folder / "state"), XDG_CACHE_HOME=str(folder / "cache"))
        aws.base(HERE)
        aws.quick()  # what takes time here is mgpu's own
        for code in ("L-3819A6DF", "L-DB2E81BA"):  # G machines, spot and on-demand
            aws.quota(code, 1e6)
        try:
            yield aws
        finally:
            os.environ.clear()
            os.environ.update(before)


def _acquire(folder: Path) -> None:
    provider = AwsProvider()
    requirements = Requirements(
        provider="aws", nodes=NODES, gpu=("A10G",), gpus_per_node=1, market="spot", regions=(HERE,),
        max_price_usd_per_hour=1000, max_hours=1,
    )  # fmt: skip
    request = FleetRequest(
        fleet="bench", generation=1, owner="bench", requirements=requirements, ssh_public_key=KEY, lease_s=300,
        hard_cap_s=3600,
    )  # fmt: skip
    offers = plan(requirements, provider.offers(requirements).offers).offers
    journal, timeouts = Journal(folder / "journal"), Timeouts()
    made = _timed(
        f"acquire {NODES}",
        ACQUIRE_LIMIT_S,
        lambda: acquire.acquire(provider, request, offers, journal, timeouts=timeouts),
    )
    _timed(f"give {NODES} back", None, lambda: acquire.destroy(provider, made.handle, timeouts=timeouts))


def _look(aws: FakeAws) -> None:
    from fakes import fleets

    aws.pace(pending_s=0)
    owner = paths.owner()
    fleets.rent(aws, MACHINES // 2, owner=owner, ranked=False)
    for number, region in zip(range(MACHINES // 2), itertools.cycle((HERE, "eu-west-1", "us-west-2")), strict=False):
        name = f"small-{number}"
        fleets.rent(aws, 1, token=name, fleet=name, owner=owner, region=region, ranked=False, template=False)
    provider = AwsProvider()
    handles = _timed("list all regions", LOOK_LIMIT_S, lambda: provider.list_owned(owner))
    states = _timed(f"describe {len(handles)} fleets", LOOK_LIMIT_S, lambda: provider.describe_all(handles))
    live = [node for state in states for node in state.nodes if node.phase is NodePhase.RUNNING]
    print(f"  machines seen                {len(live):6}   (of {MACHINES})")
    largest = max(handles, key=lambda handle: len(handle.ids))
    _timed(f"describe a fleet of {len(largest.ids)}", LOOK_LIMIT_S, lambda: provider.describe(largest))
    for command in ("gc", "ls"):
        _timed(f"mgpu {command}", LOOK_LIMIT_S, functools.partial(_quietly, command))


def _quietly(*words: str) -> None:
    done = subprocess.run([str(MGPU), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if done.returncode not in (0, 3):  # 3: a check found something, e.g. that this machine's address is not let in
        raise SystemExit(f"mgpu {' '.join(words)} ended with {done.returncode}")


def _timed(what: str, limit_s: float | None, call: Callable[[], T]) -> T:
    begun = time.perf_counter()
    answer = call()
    limit = f"   (limit {limit_s:.0f} s)" if limit_s else ""
    print(f"  {what:<28} {time.perf_counter() - begun:6.2f} s{limit}", flush=True)
    return answer
