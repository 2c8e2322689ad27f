"""F1: the operator is killed at every point of `launch`. Nobody comes: the machines end. Somebody comes: it converges.

The points are generated: a recording run of the same program writes down every journal write and every external call of
the operator's process (operator.py beside this file, which says what counts as one moment). Real engine, real machines
of provider `local`, real clocks. `make test` draws among the moments; one with a point that points.txt beside this file
lacks is new. MGPU_CRASH_POINTS=REGEX replays those whose name it fits.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest
from fakes import gateway
from fakes.command import FORKS
from fakes.relay import Relay

from mgpu.iac.engine import operations

OPERATOR, ELSEWHERE, KNOWN, KNOWN_ELSEWHERE = (
    Path(__file__).with_name(name) for name in ("operator.py", "elsewhere.py", "points.txt", "points-elsewhere.txt")
)
LEASE_S, RUN_LEASE_S = 24, 12
NODES, STEPS = 1, 20
LEFT_S = LEASE_S + 60  # I1: within the lease and a minute
AT_ONCE = 3  # that work; any number waits for its machines to end
FEWEST = 25
TIMEOUTS = json.dumps({"lease_s": RUN_LEASE_S, "lease_renew_s": 2, "silence_s": 20})
# of two machines: the second one may take its time until the first one's machines end by themselves
WITHIN_S, LOCK_S, PASS_EVERY_S = 240, 6, 2
SHARED = json.dumps({"lease_s": WITHIN_S, "lock_s": LOCK_S, "silence_s": 20})
CUT = ", but it lives on, cut off from the bucket"
LEFT_IT = (4, 130)  # exit codes: the backend could not be reached; the run was taken over
POWER = ", and its machine loses power"  # else the engine that it had at work goes on
ENGINE_AT_WORK = re.compile(r"(while it runs:|machines touched by) pulumi (up|destroy|stack rm)")
DEAR = 64  # one in so many is drawn: each takes two machines and two engines
# what another host does not have of the first one's: its project, its configuration, its state but the rented machines
NOT_HERE = ("mine", "config", "state/mgpu/backends")


@dataclass
class Story:
    """One world whose operator died at a moment, and what became of it."""

    names: list[str]
    killed: bool = False
    left_s: float = 0.0  # until nothing of it ran any more, with nobody there
    code: int | None = None
    problems: list[str] = field(default_factory=list)

    def demand(self, true: object, problem: str) -> None:
        if not true:
            self.problems.append(problem)

    def __str__(self) -> str:
        told = "; ".join(self.problems) or "ok"
        same = "".join(f"\n        = {name}" for name in self.names[1:])
        return f"alone {self.left_s:5.1f} s  again: exit {self.code}  {told}\n        {self.names[0]}{same}"


def world_of(new_world, name, lease_s=LEASE_S, **variables):
    world = new_world(name, **{"MGPU_TIMEOUTS": TIMEOUTS, **variables})
    world.write(
        name="crash",
        nodes=NODES,
        lease_minutes=lease_s / 60,
        command=["train.py", str(STEPS), "0.15"],
        checkpoint={"every_steps": 10, "keep_last": 3},
        recovery={"attempts": 3, "wait_minutes": 1},
    )
    return world


def launch(world, option, value):
    words = (option, value, "--", "launch", "--yes")
    done = FORKS.run(OPERATOR, words, world.env, cwd=world.project, timeout=600)
    return done.returncode, done.stderr


def moments_of_launch(world) -> list[list[str]]:
    """The points of a launch by moment, in order: of each one the names, the first of which is the one to die at."""
    path = world.root / "points.jsonl"
    code, err = launch(world, "--points", path)
    assert code == 0, err
    moments: dict[int, list[str]] = {}
    for point in map(json.loads, path.read_text().splitlines()):
        moments.setdefault(point["moment"], []).append(point["name"])
    return list(moments.values())


@pytest.mark.timeout(1200)  # 3 minutes on two quiet cores
def test_killed_anywhere_it_ends_alone_and_converges_when_it_is_gone_on_with(
    new_world, tmp_path, record_property, share
):
    began = time.monotonic()
    moments = moments_of_launch(world_of(new_world, "recorded"))
    points = sum(map(len, moments))
    assert len(moments) >= FEWEST
    wanted = [names for names in moments if re.search(os.environ.get("MGPU_CRASH_POINTS", ""), " ".join(names))]
    if "MGPU_CRASH_POINTS" not in os.environ:
        named = {names[0]: names for names in moments}
        drawn = share.of("moments to kill a launch at", named, known=KNOWN, sources=[OPERATOR])
        wanted = [named[name] for name in drawn]
    worlds, working = [world_of(new_world, f"p{number:03d}") for number in range(len(wanted))], Semaphore(AT_ONCE)
    with ThreadPoolExecutor(16) as pool:
        stories = list(pool.map(lambda world, names: live(world, Story(names), working), worlds, wanted))
    table = "\n".join(map(str, stories))
    (tmp_path / "points.txt").write_text(table)
    longest = max(story.left_s for story in stories)
    told = f"{points} crash points of launch at {len(moments)} moments; killed at {len(stories)}; alone, nothing lived"
    record_property("counted", f"{told} longer than {longest:.0f} s; {time.monotonic() - began:.0f} s in all")
    sys.stdout.write(table)
    found = worlds[-1].mgpu("gc", "--json")  # in all others its own question to the provider was asked, `owned`
    assert json.loads(found.stdout)["fleets"] == [], found.stdout + found.stderr
    wrong = [str(story) for story in stories if story.problems]
    assert not wrong, "\n".join(wrong)
    share.know()


def live(world, story: Story, working: Semaphore) -> Story:
    with working:
        code, err = launch(world, "--die-at", story.names[0])
    story.killed = code == -signal.SIGKILL
    story.demand(story.killed, f"it was not passed: exit {code}: {err[-500:]}")
    if story.killed:
        alone(world, story)
        with working:
            again(world, story)
    return story


def alone(world, story: Story) -> None:
    """Nobody comes. Only the clocks go on."""
    began = time.monotonic()
    # a process that is ending shows no environment any more, and is alive, and billed, for a moment longer
    while (left := world.processes() or world.alive()) and time.monotonic() - began < LEFT_S:
        time.sleep(1)
    story.left_s = time.monotonic() - began
    story.demand(not left, f"still there, or billed, after {LEFT_S} s: {left}")


def again(world, story: Story) -> None:
    """Somebody comes back: the run goes on, or, where it was never written down, is asked for again."""
    over = [entry for run in world.runs() for entry in world.commits(run["run_id"]) if entry["kind"] == "end"]
    rented = len(world.bill().nodes)
    command = ["attach", "--json"] if world.runs() else ["launch", "--yes", "--json"]
    try:
        done = world.mgpu(*command)
    except subprocess.TimeoutExpired as late:
        story.problems.append(f"{command[0]} hangs: {late}")
        return
    story.code, run = done.returncode, world.run()
    story.demand(done.returncode == 0, f"{command[0]}: {done.stderr[-700:]}")
    story.demand((run["state"], run["teardown"]) == ("succeeded", "confirmed"), f"the record says {run['state']}")
    steps = world.steps(run["run_id"])
    story.demand(steps == sorted(steps), f"I5: {steps}")
    story.demand(steps[-1:] == [STEPS], f"not trained to its end: {steps}")
    story.demand(world.most_alive() <= NODES, f"I2: {world.most_alive()} machines at once")
    story.demand(not over or len(world.bill().nodes) == rented, "a machine was rented for a run that was over")
    nothing_left(world, story)


def nothing_left(world, story: Story) -> None:
    story.demand(not world.owned(), f"gc would find {world.owned()}")
    story.demand(world.alive() == 0, "I1: billed at the end")
    story.demand(not world.stacks(), f"the engine keeps {world.stacks()}")
    try:
        world.wait(lambda: not world.processes(), 10)
    except AssertionError:
        story.problems.append(f"processes are left: {world.processes()}")


# --- on another machine


@dataclass
class Bucket:
    """The backend of all worlds, each with a prefix of its own; the bucket is a folder."""

    folder: Path
    env: Mapping[str, str]

    def world(self, new_world, name: str):
        url = gateway.backend(self.env, self.folder.name, name)
        return world_of(new_world, name, WITHIN_S, **self.env, PULUMI_BACKEND_URL=url, MGPU_TIMEOUTS=SHARED)

    def cut_off(self, world) -> tuple[Relay, dict[str, str]]:
        """A way to the bucket that can be cut, and the environment of whoever has no other."""
        here = self.env["AWS_ENDPOINT_URL"]
        relay = Relay(int(here.rpartition(":")[2]))
        there = f"http://127.0.0.1:{relay.port}"
        return relay, {name: value.replace(here, there) for name, value in world.env.items() if here in value}

    def records(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in (self.folder / name / "mgpu" / "records").glob("*.json")]

    def stacks(self, name: str) -> list[str]:
        there = self.folder / name / ".pulumi"
        return [path.name for kind in ("stacks/*/*.json*", "locks/**/*.json") for path in there.glob(kind)]


@pytest.fixture
def bucket(namespaces, require, tmp_path) -> Iterator[Bucket]:
    program = gateway.program()
    require("versitygw", program is not None, "it is not built: scripts/setup-go-tools.sh versitygw")
    folder = tmp_path / "buckets"
    folder.mkdir()
    with gateway.serving(str(program), folder) as env:
        yield Bucket(folder / gateway.make_bucket(env), env)


@pytest.mark.timeout(1800)
def test_killed_or_cut_off_anywhere_another_machine_brings_it_to_its_end(
    new_world, bucket, tmp_path, record_property, share
):
    """It has the bucket and the passphrase: of the first machine it sees neither the files nor the processes."""
    began = time.monotonic()
    moments = moments_of_launch(bucket.world(new_world, "recorded"))
    # where it has no engine at work, to the others it is the same whether it died or cannot be heard
    named = {f"{names[0]}{CUT}": names for names in moments}
    at_work = {names[0]: names for names in moments if ENGINE_AT_WORK.search(names[0])}
    named |= {f"{name}{how}": names for name, names in at_work.items() for how in ("", POWER)}
    wanted = [
        name for name, names in named.items() if re.search(os.environ.get("MGPU_CRASH_POINTS", ""), f"{name} {names}")
    ]
    if "MGPU_CRASH_POINTS" not in os.environ:
        label = "moments to kill a launch at that another machine goes on with"
        wanted = share.of(label, named, known=KNOWN_ELSEWHERE, sources=[OPERATOR, ELSEWHERE], share=DEAR)

    def story(number: int) -> Story:
        name, point = f"p{number:03d}", wanted[number]
        tell = cut_off if point.endswith(CUT) else taken_on
        return tell(bucket.world(new_world, name), Story([point, *named[point][1:]]), bucket)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        stories = list(pool.map(story, range(len(wanted))))
    table = "\n".join(map(str, stories))
    (tmp_path / "points.txt").write_text(table)
    sys.stdout.write(table)
    points = sum(map(len, moments))
    told = f"{points} crash points of launch at {len(moments)} moments; at {len(stories)} killed or cut off"
    record_property("counted", f"{told}; {time.monotonic() - began:.0f} s in all")
    wrong = [str(story) for story in stories if story.problems]
    assert not wrong, "\n".join(wrong)
    share.know()


def test_killed_on_two_machines_the_third_one_brings_it_to_its_end(new_world, bucket):
    """The second one takes the run, and dies before it has looked what the first one's engine has left."""
    world = bucket.world(new_world, "thrice")
    story = Story([f"up > machines touched by pulumi up{POWER}"])
    second = another_machine(world, "second")

    def dies() -> None:
        code = elsewhere(world, second, "attach", die_at="nothing > after record.save").returncode
        story.demand(code == -signal.SIGKILL, f"the second one did not die: exit {code}")

    taken_on(world, story, bucket, dies)
    assert not story.problems, str(story)


def taken_on(world, story: Story, bucket: Bucket, meanwhile: Callable[[], None] = lambda: None) -> Story:
    """The operator dies; another machine passes until nothing is left to do."""
    there = another_machine(world, "another")
    code, err = launch(world, "--die-at", story.names[0].removesuffix(POWER))
    story.demand(code == -signal.SIGKILL, f"it was not passed: exit {code}: {err[-500:]}")
    if story.names[0].endswith(POWER):
        end_engines(world)
    meanwhile()
    passed(world, there, story, bucket)
    return judged(world, story, bucket)


def passed(world, there: Path, story: Story, bucket: Bucket) -> None:
    """Another machine passes until nothing is left to do."""
    name = world.root.name
    began, over = time.monotonic(), False
    while not over and not story.problems and time.monotonic() - began < WITHIN_S:
        done = elsewhere(world, there, "reconcile", "--json")
        story.code, found = done.returncode, json.loads(done.stdout or "{}")
        story.demand(story.code == 0, f"reconcile: exit {story.code}: {done.stderr[-700:]}")
        over = not found.get("runs") and all(each["teardown"] == "confirmed" for each in bucket.records(name))
        time.sleep(0 if over else PASS_EVERY_S)
    story.left_s = time.monotonic() - began


def judged(world, story: Story, bucket: Bucket) -> Story:
    """What became of it, by the bucket and the bill."""
    name = world.root.name
    records = bucket.records(name)
    if not records:  # nobody was promised anything yet
        story.demand(not world.bill().nodes, "rented without a record")
        return story
    (run,) = records
    story.demand((run["state"], run["teardown"]) == ("succeeded", "confirmed"), f"{run['state']}: {run['reason']}")
    steps = world.steps(run["run_id"])
    story.demand(steps == sorted(steps) and steps[-1:] == [STEPS], f"I5, or not trained to its end: {steps}")
    story.demand(len(world.bill().nodes) == NODES, f"I2: rented {len(world.bill().nodes)} in all")
    story.demand(world.alive() == 0, "I1: billed at the end")
    story.demand(not bucket.stacks(name), f"the engine keeps {bucket.stacks(name)}")
    try:
        world.wait(lambda: not world.processes(), 10)
    except AssertionError:
        story.problems.append(f"processes are left: {world.processes()}")
    return story


def cut_off(world, story: Story, bucket: Bucket) -> Story:
    """The operator lives on, and reaches the bucket again only when another machine has passed and nothing is left."""
    relay, theirs = bucket.cut_off(world)
    there, stopped, said = another_machine(world, "another"), world.root / "stopped", world.root / "said"
    point = story.names[0].removesuffix(CUT)
    words = ("--stop-at", point, "--", "launch", "--yes")
    environment = {**world.env, **theirs, "MGPU_STOPPED": str(stopped)}
    with said.open("w") as quiet, closing(relay):
        process = FORKS.start(
            OPERATOR, words, environment, stdout=quiet.fileno(), stderr=quiet.fileno(), cwd=world.project
        )
        try:
            world.wait(lambda: stopped.exists() or process.poll() is not None, 120)
            relay.cut()
            stopped.unlink()
            passed(world, there, story, bucket)
            relay.mend()
            code = process.wait(LEFT_S)
            over = code == 0 and "succeeded" in said.read_text()  # it had nothing to do any more but to say so
            story.demand(over or code in LEFT_IT, f"whoever was cut off ends with {code}: {said.read_text()[-900:]}")
            if any(each["teardown"] != "confirmed" for each in bucket.records(world.root.name)):
                passed(world, there, story, bucket)  # a record whose write was under way, which nobody had seen before
        except (OSError, subprocess.TimeoutExpired) as error:
            story.problems.append(f"{error}: {said.read_text()[-900:]}")
        finally:
            process.kill()
    return judged(world, story, bucket)


def end_engines(world) -> None:
    """All that the operator had started on its own machine dies with that; what it has rented does not."""
    for pid in world.processes():
        with suppress(OSError):
            if f"{operations.MARK}=".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGKILL)


def elsewhere(world, there: Path, *words: str, die_at: str = "") -> subprocess.CompletedProcess[str]:
    """A command on another machine, to its end."""
    folders = {f"XDG_{kind.upper()}_HOME": str(there / kind) for kind in ("state", "config")}
    host = {"MGPU_HOST": there.name, "MGPU_NOT_HERE": os.pathsep.join(str(world.root / own) for own in NOT_HERE)}
    env = world.env | folders | host
    env |= {"MGPU_DIE_AT": die_at} if die_at else {}
    return FORKS.run(ELSEWHERE, words, env, cwd=there, timeout=600)


def another_machine(world, name: str) -> Path:
    """Its folders; its name is the folder's. The machines of provider `local`, and their bill, belong to no operator:
    they are where they are."""
    there = world.root / name
    (there / "state" / "mgpu").mkdir(parents=True)
    rented = world.state / "local"
    rented.mkdir(parents=True, exist_ok=True)
    (there / "state" / "mgpu" / "local").symlink_to(rented)
    for root in (world.root, there):
        (root / "config" / "mgpu").mkdir(parents=True, exist_ok=True)
        (root / "config" / "mgpu" / "passphrase").write_text("between the two\n")
    return there
