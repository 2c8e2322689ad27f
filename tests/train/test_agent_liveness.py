"""When an attempt counts as hung: every way in which healthy programs are quiet, told by a clock that the test sets;
what agents tell each other; and whole agents of two nodes. A healthy attempt is never ended; one that hangs is.
"""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable, Iterable

import pytest
from fakes.clock import Clock
from mgpu_train.agent.attempt.liveness import ALONE, Known, Liveness, Stage, deadline_s
from mgpu_train.agent.machine import ports, procs
from mgpu_train.agent.phases.peers import Peers
from mgpu_train.config import Job
from mgpu_train.timeouts import Timeouts

from mgpu.run.job.request import QUIET_S

MINUTE, HOUR = 60.0, 3600.0
TRAIN = Timeouts()
COMMAND = Timeouts(first_step_s=QUIET_S, stall_s=QUIET_S, validation_s=QUIET_S, save_s=QUIET_S)
MARGIN_S = 3 * TRAIN.heartbeat_s


def job(nodes: int = 1, rank: int = 0, *, train: bool = False, writer: str = "w", times: Timeouts | None = None) -> Job:
    program = {"train": {}} if train else {"command": ["train.py"]}
    return Job.model_validate(
        {
            "run_id": "r", "attempt": 1, "writer": writer, "node_rank": rank, "nodes": nodes, "processes_per_node": 1,
            "master_addr": "127.0.0.1", "master_port": 1, "timeouts": times or (TRAIN if train else COMMAND), **program,
        }
    )  # fmt: skip


Sign = tuple[float, str | None, bool]  # when, the stage that was named, whether a step was made


def first_hung(signs: Iterable[Sign], *, train: bool, until: float) -> float | None:
    """When a program of one node that gives these signs is taken for hung; None: not before `until`."""
    alive, due = Liveness(job(train=train), 0.0), sorted(signs)
    for now in range(0, int(until), 10):
        while due and due[0][0] <= now:
            at, said, stepped = due.pop(0)
            alive.sign(at, said, stepped=stepped)
        if alive.judge(now).hung:
            return float(now)
    return None


def line(minute: float) -> Sign:
    """Something that was printed."""
    return minute * MINUTE, None, False


def step(minute: float, said: str | None = "training") -> Sign:
    return minute * MINUTE, said, True


# --- programs of the user's own, one node, by the defaults ------------------------------------------------------------

QUIET = {
    "a line an hour": [line(60 * hour) for hour in range(12)],
    "a compile of 20 minutes after the first line": [line(0), line(21), line(22)],
    "nothing before a compile of 20 minutes": [line(20), line(21)],
    "a download of 100 minutes inside the program, before the first line": [line(100)],
    "a download of 100 minutes inside the program, after it": [line(0), line(101)],
    "validation of an hour without output": [line(0), line(1), line(61), line(62)],
    "a final save of 25 minutes": [line(0), line(1), line(26)],
    "a phase that it names": [line(0), (MINUTE, "validation", False), line(100), (101 * MINUTE, "saving", False)],
}


@pytest.mark.parametrize("signs", QUIET.values(), ids=QUIET)
def test_a_healthy_program_of_ones_own_is_not_hung(signs):
    assert first_hung(signs, train=False, until=signs[-1][0] + 100 * MINUTE) is None


@pytest.mark.parametrize("signs", [[], [line(0)], [line(0), line(50)]])
def test_one_that_hangs_is_found_after_two_hours_without_a_sign(signs):
    last = signs[-1][0] if signs else 0.0
    found = first_hung(signs, train=False, until=last + 3 * HOUR)
    assert found is not None
    assert 0 < found - (last + QUIET_S) <= 10


def test_the_run_file_says_how_long_each_stage_may_be_quiet():
    times = Timeouts(
        building_s=70, first_step_s=10, stall_s=20, validation_s=30, save_s=40, stop_grace_s=5, finishing_s=80
    )
    assert {stage.value: deadline_s(stage, times) for stage in Stage} == {
        "building": 70, "first_step": 10, "training": 20, "validation": 30, "saving": 45, "finishing": 80,
    }  # fmt: skip
    alive = Liveness(job(times=times), 0)
    assert (alive.until, "first step: timeouts.first_step_minutes" in alive.reason) == (10, True)
    alive.sign(1)
    assert (alive.until, "for 20 s (training: timeouts.training_minutes)" in alive.reason) == (21, True)
    alive.sign(2, "validation")
    assert (alive.until, "timeouts.validation_minutes" in alive.reason) == (32, True)
    alive.sign(3, "saving")
    assert (alive.until, "timeouts.saving_minutes" in alive.reason) == (48, True)
    alive.sign(4, "lunch")  # a word that nobody knows is a sign like any other
    assert alive.until == 49
    alive.sign(5, "training")
    assert alive.until == 25
    alive.sign(6, "building")
    assert (alive.until, "timeouts.building_minutes" in alive.reason) == (76, True)
    alive.sign(7, "finishing")
    assert (alive.until, "timeouts.finishing_minutes" in alive.reason) == (87, True)


# --- the bundled trainer ----------------------------------------------------------------------------------------------


def test_the_trainer_is_in_its_first_step_until_it_has_made_one():
    # it says that it has begun, validates, and compiles; then its steps come every 12 minutes
    signs = [line(0), line(2), step(28), step(40), step(52)]
    assert first_hung(signs, train=True, until=60 * MINUTE) is None
    assert first_hung(signs, train=True, until=80 * MINUTE) == (52 + 13) * MINUTE + 10


def test_the_trainers_validation_and_its_last_save_have_deadlines_of_their_own():
    signs = [step(1), step(2, "validation"), step(31), step(32, "saving"), step(59)]
    assert first_hung(signs, train=True, until=60 * MINUTE) is None
    saving = [step(1), step(2, "saving")]
    assert first_hung(saving, train=True, until=HOUR) == 2 * MINUTE + 1800 + 60 + 10


# --- several nodes ----------------------------------------------------------------------------------------------------


def test_a_silent_node_lives_by_its_peers_word():
    alive = Liveness(job(nodes=2, rank=1), 0)
    for now in range(0, 10 * int(HOUR), 10):
        assert not alive.judge(now, Known(until=now + 100)).hung
    assert not alive.judge(10 * HOUR + 110 + MARGIN_S - 20, Known(10 * HOUR + 100)).hung


def test_an_attempt_whose_nodes_are_all_silent_hangs():
    alive, known = Liveness(job(nodes=2, rank=1), 0), Known(until=QUIET_S + 500)
    over = [now for now in range(0, 12_000, 10) if alive.judge(now, known).hung]
    assert over[0] == QUIET_S + 500 + MARGIN_S + 10
    assert "on any of 2 nodes" in alive.reason


def test_silence_ends_nothing_while_a_node_was_never_heard():
    alive = Liveness(job(nodes=3, rank=1), 0)
    seen = [alive.judge(now, Known(heard=False)) for now in range(0, int(3 * HOUR), 10)]
    assert not any(quiet.hung for quiet in seen)
    assert [quiet.overdue for quiet in seen].index(True) * 10 == QUIET_S + MARGIN_S + 10, "whoever sees all is told"


def test_an_agent_that_stood_still_hears_its_peers_first():
    alive = Liveness(job(nodes=2, rank=1), 0)
    old = Known(until=QUIET_S)
    assert not alive.judge(10, old).hung
    assert not alive.judge(9 * HOUR, old).hung  # frozen until now; its peers' word is as old
    assert not alive.judge(9 * HOUR + MARGIN_S, old).hung
    assert alive.judge(9 * HOUR + MARGIN_S + 1, old).hung


def test_alone_nobody_else_is_waited_for():
    alive = Liveness(job(), 0)
    looks = {now: alive.judge(now, ALONE).hung for now in range(int(QUIET_S) + 2)}
    assert [now for now, hung in looks.items() if hung] == [QUIET_S + 1]


@pytest.mark.parametrize(("limit_s", "pause_s"), [(QUIET_S, 9 * HOUR), (QUIET_S, 61), (60, 45), (30, 20), (15, 16)])
def test_the_time_in_which_an_agent_alone_stood_still_is_nobodys_silence(limit_s, pause_s):
    """A machine was paused, or agent and ranks by SIGSTOP: they go on where they were."""
    alive, before = Liveness(job(times=Timeouts(first_step_s=limit_s)), 0), int(limit_s) // 2
    for now in range(before + 1):
        assert not alive.judge(now).hung
    woken = before + int(pause_s)
    looks = {now: alive.judge(now).hung for now in range(woken, woken + int(limit_s))}
    assert next(now for now, hung in looks.items() if hung) == woken + limit_s - before + 1


@pytest.mark.parametrize(("limit_s", "look_s"), [(QUIET_S, 60), (60, 30), (20, 14), (1, 14)])
def test_an_agent_whose_looks_take_long_has_not_stood_still(limit_s, look_s):
    """It asks ranks where they are, or its disk is slow."""
    alive = Liveness(job(times=Timeouts(first_step_s=limit_s)), 0)
    hung = next(now for now in range(0, 3 * int(QUIET_S), look_s) if alive.judge(now).hung)
    assert hung - limit_s <= look_s


def test_a_sign_that_was_seen_first_after_a_standstill_counts_from_then():
    alive = Liveness(job(), 0)
    alive.sign(9 * HOUR)
    assert alive.judge(9 * HOUR).until == 9 * HOUR + QUIET_S


# --- what the agents tell each other ----------------------------------------------------------------------------------


def agents(count: int = 3, **changes) -> list[tuple[Peers, Clock]]:
    """The agents' clocks have nothing in common."""
    clocks = [Clock(1000.0 * rank + 5) for rank in range(count)]
    return [(Peers(job(count, rank, **changes), print, clock), clock) for rank, clock in enumerate(clocks)]


def exchange(first: Peers, other: Peers) -> None:
    other.hear(first.answer(other.word()))


def test_every_agent_learns_until_when_any_of_them_vouches():
    (zero, at_zero), (one, at_one), (two, at_two) = agents()
    zero.vouch(at_zero.now + 10)
    one.vouch(at_one.now + 700)
    two.vouch(at_two.now - 50)
    assert [each.known.heard for each in (zero, one, two)] == [False] * 3
    exchange(zero, one)
    assert [each.known.heard for each in (zero, one)] == [False] * 2, "node 2 was not heard yet"
    exchange(zero, two)
    exchange(zero, one)
    assert [each.known.heard for each in (zero, one, two)] == [True] * 3
    assert zero.known.until == at_zero.now + 700
    assert two.known.until == at_two.now + 700
    assert one.known.until == at_one.now + 700
    # what was heard stands when they fall silent, and no longer than they vouched for
    for clock in (at_zero, at_one, at_two):
        clock.now += 600
    assert zero.known.until == at_zero.now + 100


def test_every_agent_learns_that_one_has_fallen_silent():
    """Which tells a lost machine from a program that hangs: the agents of a hanging program go on talking."""
    (zero, at_zero), (one, at_one), (two, _) = agents()
    assert not zero.known.silent, "who was never heard may be at work"
    for other in (one, two, one):
        exchange(zero, other)
    for _ in range(4):
        for clock in (at_zero, at_one):
            clock.now += MARGIN_S / 2
        exchange(zero, one)
    assert (zero.known.silent, one.known.silent) == (True, True), "node 2 is heard no more"
    exchange(zero, two)
    exchange(zero, one)
    assert (zero.known.silent, one.known.silent, two.known.silent) == (False, False, False)
    at_one.now += 2 * MARGIN_S
    assert one.known.silent, "node 0 is heard no more"


def test_no_node_vouches_for_longer_than_the_longest_deadline():
    (zero, at_zero), (one, at_one) = agents(2)
    one.vouch(at_one.now + 1e9)
    exchange(zero, one)
    assert zero.known.until == at_zero.now + deadline_s(Stage.SAVING, COMMAND)


def strange(first: Peers, other: Peers) -> dict[str, Callable[[], bytes]]:
    """Words that keep no attempt alive."""
    word = other.word()
    first.answer(word)
    impostor = Peers(job(3, 1, writer="another"), print)
    seal = other._seal

    good = {"rank": 1, "beat": 99, "left_s": 5.0}

    def said(**changes) -> bytes:
        return seal(b"word", {**good, **changes})

    return {
        "an old word": lambda: word,
        "another attempt's": lambda: impostor._seal(b"word", good),
        "its own answer": lambda: first._seal(b"answer", good),
        "changed on its way": lambda: other.word().replace(b'"beat": 2', b'"beat": 9'),
        "node 0's own": lambda: said(rank=0),
        "of a node that there is not": lambda: said(rank=3),
        "of no node": lambda: said(rank="1"),
        "without an end": lambda: seal(b"word", {"rank": 1, "beat": 99, "left_s": None}),
        "of for ever": lambda: said(left_s=10**400),
        "no object": lambda: other._mac(b"word", b"[1]") + b" [1]\n",
        "nothing": lambda: b"",
        "noise": lambda: b"\xff" * 4096,
    }


@pytest.mark.parametrize("kind", list(strange(*[each for each, _ in agents()][:2])))
def test_a_word_that_is_not_an_agents_changes_nothing(kind):
    (zero, at_zero), (one, at_one), _ = agents()
    one.vouch(at_one.now + 100)
    word = strange(zero, one)[kind]()
    before = zero.known
    at_zero.now += 50
    with pytest.raises((ValueError, OverflowError)):
        zero.answer(word)
    assert zero.known[:2] == before[:2]


def test_an_answer_to_an_older_word_is_not_taken():
    (zero, _), (one, _), _ = agents()
    answer = zero.answer(one.word())
    one.word()
    with pytest.raises(ValueError, match="another word"):
        one.hear(answer)


# --- whole agents -----------------------------------------------------------------------------------------------------

QUICK = {"first_step_s": 4, "stall_s": 4, "heartbeat_s": 0.2, "lease_renew_s": 0.1}
SPEAKS = """
import os, pathlib, sys, time
end = pathlib.Path(os.environ["END"])  # as in a collective, no rank ends before the others
if os.environ["RANK"] == "0":
    for number in range(int(sys.argv[1])):
        print(f"step {number}", flush=True)
        time.sleep(0.2)
    end.touch()
while not end.exists():
    time.sleep(0.05)
"""


def free_port() -> int:
    return ports.free(1)[0]


def two(nodes, text: str, *arguments: str, port: int | None = None, **times) -> list:
    pair, port = nodes(2), port or free_port()
    for node in pair:
        node.program(text)
        env = {"END": str(node.store / "end")}
        node.job(checkpoint=None, command=["prog.py", *arguments], peer_port=port, env=env, timeouts={**QUICK, **times})
        node.start()
    return pair


def test_a_run_in_which_only_rank_0_prints_lives_for_as_long_as_it_likes(nodes):
    """Three times as long as a node alone may be silent; nobody watches."""
    for node in two(nodes, SPEAKS, "60"):
        assert (node.ended()["phase"], node.said["reason"]) == ("done", None), node.log


def test_its_silent_node_renews_its_lease(nodes):
    _, silent = two(nodes, SPEAKS, "300")
    silent.until(lambda: silent.said["quiet_until"] or 0)
    first = int((silent.home / ".mgpu" / "lease").read_text())
    silent.until(lambda: int((silent.home / ".mgpu" / "lease").read_text()) > first + 5)
    assert silent.said["phase"] == "launching", "it has said nothing itself"


def test_a_whole_attempt_that_hangs_is_found_by_its_agents_alone(nodes):
    for node in two(nodes, "import time\nprint('begins', flush=True)\nwhile True: pass\n"):
        status = node.ended()
        assert (status["phase"], "on any of 2 nodes for 4 s" in status["reason"]) == ("failed", True), node.log


def test_a_node_that_never_hears_of_its_peer_ends_nothing_and_says_so(nodes):
    """The port is taken by another program: whoever is silent cannot know, and a healthy peer must not pay for it."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        loud, silent = two(nodes, SPEAKS, "300", port=other.getsockname()[1])
        silent.until(lambda: silent.said["overdue"])
        assert "never heard here" in silent.log
        assert "cannot be heard on port" in loud.log
        assert loud.said["phase"] == "training"
        lease = int((silent.home / ".mgpu" / "lease").read_text())
        silent.until(lambda: int((silent.home / ".mgpu" / "lease").read_text()) > lease)
        assert silent.said["phase"] == "launching"


def test_a_silent_node_whose_working_peer_is_gone_does_not_wait_for_ever(nodes):
    loud, silent = two(nodes, SPEAKS, "100000")
    silent.until(lambda: "never heard here" not in silent.log and silent.said["quiet_until"] is not None)
    loud.until(lambda: loud.said["phase"] == "training")
    silent.until(
        lambda: silent.said["quiet_until"] - silent.said["started_at"] > QUICK["stall_s"] + 1
    )  # by node 0's word
    process = procs.Process(**json.loads((loud.run / "agent.json").read_text())["process"])
    process.send(signal.SIGKILL)
    assert "on any of 2 nodes" in silent.ended()["reason"]


ALIVE = """
from saving import metric
import time
metric("phase", phase="building")
for number in range(80):
    metric("alive", phase="building", step=0, done={done})
    time.sleep(0.1)
"""


@pytest.mark.parametrize(("done", "phase"), [("number", "done"), ("1", "failed")])
def test_to_be_alive_is_no_progress(node, done, phase):
    node.program(ALIVE.format(done=done))
    node.job(checkpoint=None, timeouts={"first_step_s": 60, "building_s": 3})
    node.start()
    ended = node.ended()
    assert ended["phase"] == phase, node.log


def test_a_metrics_line_of_ones_own_is_a_sign_and_names_the_stage(node):
    node.program(
        "from saving import metric\nimport time\nmetric('phase', phase='validation')\ntime.sleep(3)\nprint('through')\n"
    )
    node.job(checkpoint=None, timeouts={"first_step_s": 20, "stall_s": 0.5, "validation_s": 60})
    node.start()
    assert node.ended()["phase"] == "done", node.log
