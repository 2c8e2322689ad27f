"""A run belongs to its backend: the machine that launched it dies, and another one, which has only the bucket and the
passphrase, goes on with it. The other one is another host: it sees neither the first one's files nor its processes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from fakes.aws.operator import BUCKET, MGPU, Operator, left_behind
from waiting import until

ELSEWHERE = (
    *("unshare", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"),
    *("/bin/sh", "-c", 'hostname elsewhere && exec "$@"', "sh", MGPU),
)
STEPS = 60


@dataclass
class Team:
    """One user at two machines."""

    first: Operator
    variables: dict[str, str]

    def second(self) -> Operator:
        """The other machine, which the user has given the passphrase."""
        root = self.first.root.with_name("second")
        kept = root / "config" / "mgpu"
        kept.mkdir(parents=True)
        shutil.copy(self.first.root / "config" / "mgpu" / "passphrase", kept)
        return Operator(self.first.aws, root, **self.variables)

    def die(self) -> None:
        """The first machine loses its power: of whatever it had begun nothing goes on."""
        for pid in self.first.processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.first.root / "state")
        shutil.rmtree(self.first.folder)


def team(user: Operator) -> Team:
    url = f"s3://{BUCKET}/team?region={user.env['AWS_REGION']}&endpoint={user.aws.endpoint}&s3ForcePathStyle=true"
    variables = {"PULUMI_BACKEND_URL": url, "MGPU_TIMEOUTS": json.dumps({"lock_s": 4})}
    user.env |= variables
    user.write(command=["count.py", str(STEPS), "0.2"])
    return Team(user, variables)


def attached(there: Operator) -> dict[str, Any]:
    done = there.mgpu("attach", "--json", program=ELSEWHERE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def while_it_trains(user: Operator) -> dict[str, Any]:
    both = team(user)
    user.start("launch", "--yes")
    there = both.second()

    def seen() -> dict[str, Any]:
        done = there.mgpu("status", "--json", program=ELSEWHERE)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    until(lambda: seen().get("state") == "running", 120)
    both.die()
    run = attached(there)
    logs = there.mgpu("logs", "--node", "1", program=ELSEWHERE).stdout
    listed = there.mgpu("checkpoints", "ls", "--json", program=ELSEWHERE)
    assert listed.returncode == 0, listed.stderr
    saved = [each["step"] for each in json.loads(listed.stdout)["checkpoints"]]
    return {"run": run, "logs": logs, "saved": saved, "machines": len(user.aws.bill()), "left": left_behind(user.aws)}


def while_it_rents(user: Operator) -> dict[str, Any]:
    both = team(user)
    user.start("launch", "--yes")
    until(lambda: len(user.aws.bill()) == 2, 120)
    both.die()
    there = both.second()
    run = attached(there)
    return {"run": run, "machines": len(user.aws.bill()), "left": left_behind(user.aws)}


def while_it_reconciles(user: Operator) -> dict[str, Any]:
    """A night whose pass dies while it rents; from then on the other machine's passes are all there is."""
    both = team(user)
    for command in (("add", "--cron", "0 2 29 2 *", "--name", "nightly", "--yes"), ("run-now", "nightly")):
        done = user.mgpu("schedule", *command)
        assert done.returncode == 0, done.stderr
    user.start("reconcile")
    until(lambda: len(user.aws.bill()) == 2, 120)
    both.die()
    there = both.second()

    def night() -> dict[str, Any]:
        done = there.mgpu("reconcile", program=ELSEWHERE)
        assert done.returncode == 0, done.stderr
        (due,) = json.loads(there.mgpu("schedule", "show", "nightly", "--json", program=ELSEWHERE).stdout)["history"]
        return due

    until(lambda: night()["outcome"] != "running", 200)
    runs = json.loads(there.mgpu("ls", "--json", program=ELSEWHERE).stdout)["runs"]
    return {"night": night(), "runs": runs, "machines": len(user.aws.bill()), "left": left_behind(user.aws)}


STORIES = {"trains": while_it_trains, "rents": while_it_rents, "reconciles": while_it_reconciles}


@pytest.mark.story("trains")
def test_another_machine_goes_on_with_a_run_that_trains(told):
    found = told("trains")
    assert (found["run"]["state"], found["run"]["checkpoint_step"]) == ("succeeded", STEPS)
    assert found["machines"] == 2, "nothing was rented twice"
    assert not any(found["left"].values())
    assert f"step {STEPS}" in found["logs"]
    assert found["saved"][0] == STEPS, "of a run that this machine has not launched"


@pytest.mark.story("rents")
def test_another_machine_takes_on_what_was_half_rented(told):
    found = told("rents")
    assert (found["run"]["state"], found["run"]["checkpoint_step"]) == ("succeeded", STEPS)
    assert found["machines"] == 2, "what the first one had asked for is adopted"
    assert not any(found["left"].values())


@pytest.mark.story("reconciles")
def test_passes_of_another_machine_bring_a_night_to_its_end(told):
    found = told("reconciles")
    (run,) = found["runs"]
    assert (found["night"]["outcome"], run["state"], run["checkpoint_step"]) == ("succeeded", "succeeded", STEPS)
    assert found["machines"] == 2, "nothing was rented twice"
    assert not any(found["left"].values())
