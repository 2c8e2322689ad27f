"""200 kills of the uploader alone, at random moments: each start is a new attempt that goes on from what verifies.

They come in sets, each with a seed of its own; `make test` draws among the sets. MGPU_KILL_SEED tells all sets anew.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from pathlib import Path

import pytest
from failure.checkpoint.judge import Place
from failure.checkpoint.servers import Savers
from fakes import gateway
from mgpu_train.checkpoint.log.lines import Commit
from mgpu_train.checkpoint.transfer.verify import verify
from waiting import until

SETS, KILLS = 8, 25  # in each
SEED = os.environ.get("MGPU_KILL_SEED", "7")
PATIENCE_S = 30.0  # for one save


@pytest.mark.timeout(1200)  # a minute on two quiet cores
def test_the_durable_step_never_goes_back_whenever_the_uploader_is_killed(places, savers, record_property, share):
    place: Place = places("versitygw" if gateway.program() else "file")("world")
    sets = [f"{SEED}-{number}" for number in range(SETS)]
    if "MGPU_KILL_SEED" not in os.environ:
        sets = share.of("sets of random kills", sets, sources=[Path(__file__).with_name("saver.py")])
    server, kills = savers(), len(sets) * KILLS
    draws = itertools.chain.from_iterable([random.Random(seed)] * KILLS for seed in sets)
    once_s = 1.0
    verified: set[str] = set()
    durable = empty = 0
    began = time.monotonic()
    for number, draw in enumerate(draws):
        pid = server.begin("go on", **place.given)
        if number == 0 or draw.random() < 0.4:  # of five, two are killed after its first save, in any of the next
            lasts = until_saved(place, pid, server)
            once_s = lasts if number == 0 else 0.7 * once_s + 0.3 * lasts
        time.sleep(draw.uniform(0, once_s))
        os.kill(pid, signal.SIGKILL)
        assert server.wait(pid) == -signal.SIGKILL, server.said
        standing = place.log.checkpoints()
        assert [each.step for each in standing] == sorted({each.step for each in standing}, reverse=True)
        assert standing[0].step >= durable, "I5: the durable step went back"
        new = [each for each in standing if each.checkpoint_id not in verified]
        assert [(each.checkpoint_id, why) for each in new for why in check(place, each)] == []
        verified |= {each.checkpoint_id for each in new}
        empty, durable = empty + (not new), standing[0].step

    assert place.broken() == []
    attempt, step = place.log.newest_attempt() + 1, place.newest + 1
    assert server.run("save", **place.given, attempt=attempt, step=step) == 0, server.said
    assert place.left() == [f"a{attempt:03d}-step-{step}"]
    told = f"{kills} random kills of an uploader, {empty} before it had committed; {len(verified)} checkpoints whole"
    record_property("counted", f"{told}, up to step {durable}; {time.monotonic() - began:.0f} s")
    assert kills / 10 < empty < kills * 9 / 10, "the kills do not fall where they are to fall"


def until_saved(place: Place, pid: int, server: Savers) -> float:
    """Seconds until it had saved once."""
    began = time.monotonic()
    until((place.world / f"saved-{pid}").exists, PATIENCE_S, lambda: server.said)
    return time.monotonic() - began


def check(place: Place, commit: Commit) -> tuple[str, ...]:
    return verify(place.store, place.run, place.log.manifest(commit), deep=True)
