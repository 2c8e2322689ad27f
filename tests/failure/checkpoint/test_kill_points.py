"""SIGKILL at every call to disk and store of one save: written, uploaded, committed, the old one deleted, fetched.

The points are generated: a recording saver writes down each one that it meets (points.py). Then one process a point
dies there, is judged, and the same save is asked for again. `make test` draws among the points; those that points-*.txt
beside this file lack are new. MGPU_SAVE_POINTS=REGEX replays those whose name it fits.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from failure.checkpoint.judge import Place
from failure.checkpoint.saver import NODES, differs
from failure.checkpoint.servers import Savers

AT_ONCE = 2
FEWEST = 100  # points that a save has at least


class Story:
    """One place whose saver died at a point, and what became of it: step `first` stood, the next one was under way."""

    def __init__(self, place: Place, first: int, point: str) -> None:
        self.place, self.first, self.point = place, first, point
        self.killed = False
        self.problems: list[str] = []

    def demand(self, true: object, problem: str) -> None:
        if not true:
            self.problems.append(problem)

    def live(self, server: Savers) -> None:
        given, first, second = self.place.given, self.first, self.first + 1
        self.demand(server.run("save", **given, attempt=1, step=first) == 0, f"step {first} was not saved")
        code = server.run("save", **given, attempt=1, step=second, die_at=self.point)
        self.killed = code == -signal.SIGKILL
        self.demand(code in (0, -signal.SIGKILL), f"exit code {code}")
        self.problems += self.place.broken()
        self.demand(self.place.newest in (first, second), "neither the previous nor the new one is there")
        self.resume_is_whole()
        self.demand(server.run("save", **given, attempt=1, step=second) == 0, "it cannot be done again")
        self.demand([each.step for each in self.place.log.checkpoints()] == [second], "done again, it is not alone")
        self.problems += self.place.broken()
        self.demand(server.run("save", **given, attempt=2, step=second + 1) == 0, "nothing can follow")
        left = self.place.left()
        self.demand(left == [f"a002-step-{second + 1}"], f"what is left at the end: {left}")

    def resume_is_whole(self) -> None:
        folder = self.place.world / "resume"
        if folder.exists():
            wrong = [differs(folder, dict.fromkeys(range(NODES), step)) for step in (self.first, self.first + 1)]
            self.demand([] in wrong, f"half fetched: {wrong}")


def points_of(place: Place, first: int, server: Savers) -> list[str]:
    given, path = place.given, place.world.with_suffix(".json")
    assert server.run("save", **given, attempt=1, step=first) == 0, server.said
    assert server.run("save", **given, attempt=1, step=first + 1, points=str(path)) == 0, server.said
    return json.loads(path.read_text())


def moments(points: list[str]) -> list[str]:
    """Before every call, and after the last: between one call and the next nothing changes that outlives a process."""
    return [point for point in points[:-1] if point.startswith("before ")] + points[-1:]


# into a folder: every call to the disk; over HTTP: every call to the store, with a file that travels in pieces
@pytest.mark.timeout(1200)  # a minute on two quiet cores
@pytest.mark.parametrize(("kind", "first", "at"), [("file", 1, ""), ("versitygw", 3, r"store\.")], ids=["file", "http"])
def test_killed_anywhere_in_a_save_nothing_half_is_visible_and_it_converges(
    kind, first, at, places, savers, record_property, share
):
    make = places(kind)
    points = points_of(make("recorded"), first, savers())
    again = set(points_of(make("recorded-again"), first, savers()))
    points = [point for point in points if point in again]  # what threads do in one order or another is none
    assert len(points) == len(set(points)) >= FEWEST
    wanted = [point for point in moments(points) if re.search(os.environ.get("MGPU_SAVE_POINTS", at), point)]
    here = Path(__file__).parent
    known = here / f"points-{'file' if kind == 'file' else 'http'}.txt"
    if "MGPU_SAVE_POINTS" not in os.environ:
        harness = [here / name for name in ("judge.py", "points.py", "saver.py")]
        wanted = share.of(f"points to kill a save into {kind} at", wanted, known=known, sources=harness)
    local = threading.local()

    def tell(number: int) -> Story:
        local.server = getattr(local, "server", None) or savers()
        story = Story(make(f"p{number:03d}"), first, wanted[number])
        story.live(local.server)
        return story

    with ThreadPoolExecutor(AT_ONCE) as pool:
        stories = list(pool.map(tell, range(len(wanted))))
    calls = len({point.partition(" ")[2] for point in points})
    kills = sum(story.killed for story in stories)
    record_property("counted", f"{kills} kills at {len(wanted)} moments of a save into {kind}, of {calls} calls in all")
    wrong = [f"{story.point}: {story.problems}" for story in stories if story.problems]
    assert not wrong, "\n".join(wrong)
    assert kills >= 0.95 * len(wanted)
    share.know()
