"""F2: SIGINT once and twice, SIGTERM and SIGHUP, to the real command while machines come, train and go: I1 and I7.

SIGTERM while machines come is in tests/e2e. The stories that are drawn are played at once, three at a time; each test
judges one.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM

import pytest

TIMEOUTS = json.dumps({"lease_s": 30, "lease_renew_s": 2, "silence_s": 20})
AT_ONCE = 3
APART_S = 0.4  # a second signal comes so long after the first was heard; nearer ones are one, passed on twice
HEARD = {"made": "undoing what was begun", "training": "stopping: "}  # what the first one makes the command say

MOMENTS = {
    "made": lambda world: world.alive() and world.run()["state"] == "provisioning",
    "training": lambda world: world.run().get("checkpoint_step", -1) >= 10,
    "destroyed": lambda world: world.run().get("state") == "teardown" and destroys(world),
}


@dataclass(frozen=True)
class Story:
    """What is sent when, and how the command ends; `told`: what it says to type next, and that command's exit code."""

    when: str
    signals: tuple[signal.Signals, ...]
    code: int
    state: str
    told: tuple[str, int] | None = None
    steps: str = "20"

    def __str__(self) -> str:
        return f"{'-'.join(each.name for each in self.signals)}-while-{self.when}"


STORIES = (
    Story("made", (SIGINT,), 130, "stopped"),
    Story("made", (SIGINT, SIGINT), 130, "stopped", told=("down", 0)),
    Story("made", (SIGHUP,), 130, "stopped"),
    Story("training", (SIGINT,), 130, "stopped", steps="5000"),
    Story("training", (SIGINT, SIGINT), 130, "stopped", told=("attach", 130), steps="5000"),
    Story("training", (SIGTERM,), 130, "stopped", steps="5000"),
    Story("training", (SIGHUP,), 130, "succeeded", told=("attach", 0), steps="60"),
    Story("destroyed", (SIGINT,), 0, "succeeded"),
    Story("destroyed", (SIGINT, SIGINT), 130, "succeeded", told=("down", 0)),
    Story("destroyed", (SIGTERM, SIGHUP), 0, "succeeded"),
)


@pytest.fixture(scope="module")
def played(worlds, wanted_stories):
    pool = ThreadPoolExecutor(AT_ONCE)
    yield {story: pool.submit(play, worlds(str(story), MGPU_TIMEOUTS=TIMEOUTS), story) for story in wanted_stories}
    pool.shutdown(cancel_futures=True)


def play(world, story):
    """The command's exit code and words, then those of the command that it says to type next."""
    slow_save = "4" if len(story.signals) > 1 else "0"  # a second signal finds the run still stopping
    may_end = world.root / "may-end"  # a run that is left does not end before that
    world.write(
        command=["train.py", story.steps, "0.05", slow_save],
        checkpoint={"every_steps": 10},
        env={"COUNT_UNTIL": str(may_end)} if story.when == "training" else {},
    )
    launch = world.start("mgpu", "launch", "--yes")
    try:
        world.wait(lambda: world.run() and MOMENTS[story.when](world), 90, f"never {story.when}")
        with world.told(launch) as lines:
            first, *more = story.signals
            launch.send_signal(first)
            for number in more:
                word = HEARD.get(story.when, "")
                world.wait(lambda: any(word in line for line in lines), 60, f"no word of {first.name}")  # noqa: B023
                time.sleep(APART_S)
                launch.send_signal(number)
            launch.wait(timeout=600)
        err = "".join(lines)
    finally:
        launch.kill()
    left = world.alive()
    may_end.touch()
    if story.when == "destroyed" and story.told:  # who leaves has left the engine to it
        world.wait(lambda: not any(map(is_engine, world.processes().values())), 60)
        assert not resources(world), err
    again = None
    if story.told:
        word, _ = story.told
        said = re.search(rf"^next: mgpu ({word} .*?)(    |$)", err, re.MULTILINE)
        assert said, err
        again = world.mgpu(*shlex.split(said[1]))
    return world, launch.returncode, err, left, again


def is_engine(command_line):
    return Path(command_line.split(" ")[0]).name == "pulumi"


def destroys(world):
    """Whether the engine is there that whoever leaves leaves it to."""
    return any(is_engine(line) and " destroy " in line for line in world.processes().values())


def resources(world):
    """What the engine still knows of."""
    states = (world.state / "pulumi" / ".pulumi" / "stacks").glob("*/*.json")
    latest = [json.loads(path.read_text())["checkpoint"]["latest"] or {} for path in states]
    return [each["urn"] for deployment in latest for each in deployment.get("resources") or ()]


@pytest.mark.drawn("signals at moments of a launch")
@pytest.mark.parametrize("story", STORIES, ids=str)
def test_a_signal_ends_what_it_has_to_and_the_bill_agrees(played, story):
    world, code, err, left, again = played[story].result()
    assert code == story.code, err
    assert "Traceback" not in err
    if story.told is None:
        assert left == 0, "whoever does not say that it leaves has given everything back"
    else:
        assert again.returncode == story.told[1], again.stderr
        assert "at the latest" in err
        assert "per hour" in err or "price shown above" in err
    assert world.alive() == 0
    assert not world.stacks()
    run = world.run()
    assert (run["state"], run["teardown"]) == (story.state, "confirmed")
    assert world.most_alive() <= 1
    if story.when == "training":
        steps = world.steps(run["run_id"])
        assert steps == sorted(steps)
        assert steps[-1] == run["checkpoint_step"], "the newest commit is the one that the record names"
        assert f"step {steps[-1]}\n" == printed(world, run)[-1], "what it did last was saved and committed"


def printed(world, run):
    """The program's own lines, `step N`, as the operator has them."""
    (log,) = (world.state / "runs" / run["run_id"] / "logs").glob("*.log")
    return re.findall(r"^step \d+\n", log.read_text(), re.MULTILINE)
