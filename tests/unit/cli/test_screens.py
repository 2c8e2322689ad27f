"""What the commands' screens look like on terminals of 60, 80 and 120 columns, kept as text in screens/.

MGPU_SCREENS=write keeps them as they are now; look at the difference before you commit it.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path

import click
import pytest
from mgpu_train.agent.status.status import Phase
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.store import open_store

from mgpu.cli import cli, main
from mgpu.console import neutral
from mgpu.plan.model import Reservation
from mgpu.providers.base import Finding, ReservationOffer, ReservationOffers, Reservations
from mgpu.providers.local.provider import LocalProvider
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Check, Interruption, Spent, State
from mgpu.schedule import kept
from mgpu.schedule.model import DueTime, Outcome, Schedule

CHECKS = [
    Check("validation_loss", False, "1.346 > 1.321, the median of 7 runs + 2 %", 1.3456, 1.295, 7),
    Check("recoveries", True, "0 <= 3", 0.0),
]
WORSE = f"succeeded, but not as expected: validation_loss {CHECKS[0].said}"
# tmp_path and /home/you/mine are of one length
SCREENS = Path(__file__).with_name("screens")
NOW = 1_790_000_000.0
OLD, FAILED, RUNNING = (
    "bert-large-finetune-0918-k3m9x",
    "bert-large-finetune-0920-p7d2q",
    "bert-large-finetune-0921-w8f4z",
)
ON_SALE = ReservationOffer(
    id="cb-0a1b2c3d4e5f67890", kind="Capacity Block", instance_type="p5.48xlarge", gpu="H100-80GB", gpus=8, machines=4,
    region="us-east-1", zone="us-east-1a", begins_at=NOW + 7200, ends_at=NOW + 93600, machines_end_at=NOW + 91680,
    usd=31464,
)  # fmt: skip
BOUGHT = Reservation(
    id="cr-0a1b2c3d4e5f67890", kind="Capacity Block", prepaid=True, state="scheduled", instance_type="p5.48xlarge",
    region="us-east-1", zone="use1-az1", machines=4, free=4, begins_at=NOW + 7200, ends_at=NOW + 93600,
    machines_end_at=NOW + 91680,
)  # fmt: skip
RUN_FILE = """name: bert-large-finetune
provider: local
max_hours: 12
max_price_usd_per_hour: 4
nodes: 2
command: [train.py, --epochs, 3]
checkpoint: {to: "%s", keep_last: 2}
outputs: [runs/]
"""
COMMANDS = (
    ("--help",),
    ("plan",),
    ("plan", "--set", "nodes=none", "--set", "max_hour=3", "--set", "checkpoint.keep_last=0"),
    ("ls",),
    ("gc",),
    ("limits", "show"),
    ("limits", "set"),
    ("limits", "set", "--usd-per-month", "2000", "--usd-per-hour", "60", "--runs", "1"),
    ("limits", "show"),
    ("launch", "--yes"),
    ("limits", "unset"),
    ("costs",),
    ("costs", "--by", "run", "--since", "2026-09-01"),
    ("costs", "--by", "month", "--since", "2027"),
    ("status", OLD),
    ("status", FAILED),
    ("status", RUNNING),
    ("status", RUNNING, "--live"),
    ("status", "nightly"),
    ("logs", RUNNING, "--times"),
    ("logs", OLD),
    ("ssh", RUNNING, "--node", "7"),
    ("stop", OLD),
    ("attach", FAILED),
    ("checkpoints", "ls", OLD),
    ("checkpoints", "verify", OLD),
    ("checkpoints", "prune", OLD, "--dry-run"),
    ("checkpoints", "pull", OLD),
    ("outputs", OLD),
    ("rm", OLD, FAILED, "--dry-run"),
    ("rm", RUNNING),
    ("stop", ""),
    ("down", RUNNING),
    ("launch", "--yes"),
    ("offers", "local"),
    ("offers", "local", "--set", "nodes=2"),
    ("check", "local"),
    ("run", "--stack", "no-such-stack"),
    ("exec", RUNNING),
    ("exec", OLD, "--", "nvidia-smi"),
    ("ssh", OLD),
    ("checkpoints", "export", OLD, "--to", "weights"),
    ("image", "inspect"),
    ("image", "build"),
    ("local", "kill", "0"),
    ("policy", "aws", "--region", "nowhere"),
    ("completion", "csh"),
    ("launch", "--help"),
    ("init", "fresh"),
    ("spec", "recovery"),
    ("spec", "recovry"),
    ("bootstrap", "gcp"),
    ("launch", "--set", "nodes"),
    ("reservations", "find", "--provider", "local", "--hours", "20", "--gpu", "H100-80GB"),
    ("reservations", "buy", ON_SALE.id, "--yes", "--max-usd", "40000"),
    ("reservations", "buy", ON_SALE.id, "--yes"),
    ("reservations", "ls", "--provider", "local"),
    ("schedule", "ls"),
    ("schedule", "show", "nightly"),
    ("schedule", "add", "--cron", "0 2 * *"),
    ("schedule", "run-now", "nightly"),
    ("schedule", "rm", "weekly"),
    ("schedule", "install", "--kubernetes"),
    ("reconcile", "--dry-run"),
    ("submit",),
    ("queue", "ls"),
    ("queue", "mv", RUNNING, "--first"),
    ("backend", "show"),
    ("backend", "move", "s3://team/runs"),
)


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def tmp_path():
    """One whose name is as long on every machine: lines are broken alike."""
    path = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def user(world, tmp_path, monkeypatch):
    """A user with a run that succeeded, one that failed, and one that nobody looks after; the clock stands still."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setattr(time, "time", lambda: NOW)
    monkeypatch.chdir(world.folder)
    world.has_nodes(2)
    monkeypatch.setattr(world.cloud, "offers", LocalProvider().offers, raising=False)
    url = f"file://{tmp_path}/store"
    world.run_file.write_text(RUN_FILE % url)
    (world.folder / "train.py").write_text("pass\n")
    looked = (
        Finding(
            subject="this machine", status="ok", detail="its Python has torch; nodes lie in /home/you/.local/state/mgpu"
        ),
        Finding(subject="quota of g5.xlarge (L-DB2E81BA)", status="warning", detail="4 vCPUs of 64 are left", cure="x"),
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # what `find` remembers
    whole_days = "Capacity Blocks are sold by whole days, from 15 on by weeks: 24 h for 20"
    sells = {
        "find_reservations": ReservationOffers(offers=(ON_SALE,), notes=(whole_days,)),
        "buy_reservation": BOUGHT,
        "bought_reservation": None,
        "list_reservations": Reservations(reservations=(BOUGHT,), failed={"eu-west-1": "not allowed"}),
    }
    for name, answer in sells.items():
        monkeypatch.setattr(world.cloud, name, lambda *_, answer=answer: answer, raising=False)
    monkeypatch.setattr(world.cloud, "findings", lambda *_: looked, raising=False)
    monkeypatch.setattr("mgpu.iac.engine.install.find_engine", lambda: None)
    monkeypatch.setattr("mgpu.iac.engine.install.set_up", lambda *_: None)
    known = {"name": "bert-large-finetune", "price_usd_per_hour": 3.92, "max_hours": 12.0, "store": url, "attempt": 1}
    done = {"ended_at": NOW - 80_000, "teardown": "confirmed", "steps": 30_000}
    metrics = {"loss": 1.2345, "tokens_per_s": 51234.0}
    world.record(
        *(OLD,), state=State.SUCCEEDED, created_at=NOW - 140_000, step=30_000, checks=CHECKS, exit_code=6,
        metrics=metrics | {"validation_loss": 1.3456}, first_metrics={"validation_loss": 5.6789},
        checkpoint_id="a001-step-30000", checkpoint_step=30_000,
        phase_seconds={"provisioning": 71.3, "connecting": 12.1, "sending": 3.4, "running": 59000.0, "teardown": 44.0},
        spending=[Spent(1, 3.92, NOW - 139_900, NOW - 80_000, 0.041)],
        outputs={"folder": f"mgpu-runs/{OLD}/outputs", "files": 12, "bytes": 3 << 20, "missing": 0}, **known | done,
    )  # fmt: skip
    CommitLog(open_store(url), OLD).begin_attempt(1, "w")
    for step in (20_000, 30_000):
        world.commit(url, OLD, attempt=1, writer="w", step=step)
    lost = Interruption(
        1, "node 1 is gone: the provider ended it (spot interruption)", "provider", [1], 1234, NOW - 90_000,
        NOW - 89_998, NOW - 89_990, NOW - 89_900, NOW - 89_890, NOW - 89_880, 1200,
    )  # fmt: skip
    reason = "rank 3 on node 1: exit code 1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    more = known | done | {"state": State.FAILED, "fault": "user", "exit_code": 6, "recoveries": 1, "attempt": 2}
    more["spending"] = [Spent(1, 3.92, NOW - 99_000, NOW - 90_000), Spent(2, None, NOW - 89_900, NOW - 80_000)]
    world.record(FAILED, created_at=NOW - 100_000, step=2345, reason=reason, interruptions=[lost], **more)
    fleet = world.output(world.cloud.rent(f"mine-{RUNNING}", 2)).model_dump(mode="json")
    more = known | {"fleet": fleet, "state": State.RUNNING, "node_phases": ["training", "training"], "writer": "w"}
    world.record(
        *(RUNNING,), created_at=NOW - 7000, updated_at=NOW - 3, step=777, steps=30_000, hard_cap_at=NOW + 36_000, **more
    )
    for run_id in (OLD, FAILED, RUNNING):
        Folder(run_id).root.mkdir(parents=True, exist_ok=True)
        Folder(run_id).run_file.write_text(world.run_file.read_text())
    kept.add(nightly())
    for rank, node in enumerate(world.nodes):
        node.says(Phase.TRAINING, step=777, steps=30_000)
        log = Folder(RUNNING).log(rank, f"i-{rank}")
        log.parent.mkdir(exist_ok=True)
        log.write_text(f"epoch 1/3, step 777/30000, loss 1.9876, learning rate 3.0e-05, rank {rank} of 2\n" * 2)
        log.with_suffix(".times").write_text(f"{log.stat().st_size // 2} {NOW - 5}\n{log.stat().st_size} {NOW - 4}\n")
    yield world
    monkeypatch.undo()
    time.tzset()


def nightly():
    """A schedule with nights of all kinds; the newest still runs."""
    two, day = NOW - NOW % 86400 + 3600, 86400
    history = [
        DueTime(
            two - 6 * day, Outcome.SUCCEEDED, NOW, OLD.replace("0918", "0917"), ended_at=two - 6 * day + 7000,
            spent_usd=7.51, checks=[Check("validation_loss", True, "1.298 <= 1.4", 1.298)],
        ),
        DueTime(
            two - 5 * day, Outcome.SUCCEEDED, NOW, OLD, reason=f"run {OLD} {WORSE}", ended_at=two - 5 * day + 7300,
            spent_usd=7.84, exit_code=6, checks=CHECKS,
        ),
        DueTime(
            two - 4 * day, Outcome.FAILED, NOW, FAILED, reason="rank 3 on node 1: exit code 1",
            ended_at=two - 4 * day + 900,
        ),
        DueTime(two - 3 * day, Outcome.MISSED, NOW, reason="nobody looked until 7.2 h later; it starts within 4 h"),
        DueTime(two - 2 * day, Outcome.SKIPPED, NOW, reason=f"run {FAILED} was not over"),
        DueTime(two - day, Outcome.RUNNING, NOW, RUNNING),
    ]  # fmt: skip
    known = {"created_at": NOW - 9 * day, "created_by": "you@laptop", "decided_until": NOW, "history": history}
    expect = {"validation_loss": {"max": 1.4, "median_of": 7, "tolerance_percent": 2}}
    run = {"run_file": "/home/you/llm/mgpu.yaml", "name": "bert-large-finetune", "expect": expect}
    return Schedule("nightly", "u1", "30 2 * * *", "Europe/Berlin", run, **known)


def screen(columns, command, monkeypatch):
    """What a user sees who types the command."""
    shown = io.BytesIO()
    terminal = Terminal(shown, encoding="utf-8", write_through=True)
    with monkeypatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("LC_ALL", "C.UTF-8")
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "stderr", terminal)
        with pytest.raises(SystemExit) as end:
            main(list(command))
    code = f"[exit code {end.value.code}]\n" if end.value.code else ""
    words = " ".join(each or '""' for each in command)
    return f"$ mgpu {words}\n{neutral_lines(shown.getvalue().decode())}{code}\n"


def neutral_lines(text):
    return "".join(neutral(line).rstrip() + "\n" for line in text.split("\n")[:-1])


def steady(text, world):
    """Without what is different from run to run."""
    text = text.replace(str(world.folder.parent), "/home/you/mine")
    text = re.sub(r"\bo-[0-9a-f]{12}\b", "o-0123456789ab", text)
    text = re.sub(r"(?m)^wall time +0 s:.*\n(?: {13}.*\n)*", "wall time    0 s\n", text)
    text = re.sub(r"\b\d\d:\d\d:\d\d\b(?! \[)", "14:13:20", re.sub(r"\b20\d\d-\d\d-\d\d\b", "2026-09-21", text))
    text = text.replace("[1] trained\n[0] trained\n", "[0] trained\n[1] trained\n")  # two nodes at once
    text = re.sub(r"(?m)^.*━.*\n", "", text)  # bars that move
    text = re.sub(r"\b\d+\.\d s\b", "0.1 s", text)
    text = re.sub(r"\b\d+\.\d KiB\b", "60.0 KiB", text)  # the files name themselves by their folder
    return re.sub(
        r"\bbert-large-finetune-\d{4}-(?!k3m9x|p7d2q|w8f4z)[a-z0-9]{5}", "bert-large-finetune-0921-xxxxx", text
    )


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_screens_are_as_they_were(user, columns, monkeypatch):
    shown = steady("".join(screen(columns, command, monkeypatch) for command in COMMANDS), user)
    kept = SCREENS / f"{columns}.txt"
    if os.environ.get("MGPU_SCREENS") == "write":
        kept.write_text(shown)
    assert shown == kept.read_text()


def test_every_command_has_a_screen():
    assert {command[0] for command in COMMANDS} >= set(cli.list_commands(click.Context(cli)))


def test_what_comes_next_can_be_pasted():
    """Each command and option that a screen says to type is one that there is; RUN and the like stand for nothing."""
    lines = (SCREENS / "120.txt").read_text().splitlines()
    said = []
    for number, line in enumerate(lines):
        if line.startswith("next: "):
            said.append(line.removeprefix("next: "))
            while lines[number + 1].startswith("      mgpu"):
                number += 1
                said.append(lines[number].strip())
    assert len(said) >= 20
    for text in said:
        text = re.split(" {4,}", text)[0].rpartition("&& ")[2]
        words = shlex.split(text)
        assert words[0] == "mgpu", text
        assert not [word for word in words if word.isupper()], text
        group = cli
        while isinstance(group, click.Group):
            _, group, words = group.resolve_command(click.Context(group), words[1:] if words[0] == "mgpu" else words)
        group.make_context(group.name, words)
