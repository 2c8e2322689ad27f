"""`make demo-nightly`: two times of a schedule on this machine, with nobody awake between two passes.

What a user would type is run as it is, in a folder of its own: `mgpu schedule add` for a copy of examples/nightly, then
`mgpu reconcile` again and again, as cron would call it. While no operator lives, the machine of the first run is
killed: every process of it, and its disk. The next pass goes on from the newest checkpoint. At the end the history is
shown, the bill is read (it has to be 0), and all that the demo has made is removed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import demo

if TYPE_CHECKING:
    from mgpu.console import Console
    from mgpu.run.record.record import Record

ROOT = Path(__file__).resolve().parent
EXAMPLE = ROOT / "examples" / "nightly"
SCHEDULE = "nightly"
EVERY_S = 5.0  # between two passes; cron would have it every few minutes
TOO_NEAR_S = 10.0  # a minute that begins within this may have passed before the schedule is there
LONGEST_S = 600  # a demo that takes longer has gone wrong
END_S = 120.0  # for a run's machine to be given back
LEAVE_S = 60.0  # for what was begun to leave its run, after Ctrl-C


# of what commands say on the way, line by line, that which is the same in each pass, or what the demo does next anyway
DULL = re.compile(
    r" took \d| left running|nobody replaces|\[agent\]|▸ (conn|send|start|train)|creating |deleting |  code: "
    r"|^(next:|     ) mgpu "
)


class Shell:
    """Types commands into the demo's folder, and shows them."""

    def __init__(self, folder: Path, console: Console) -> None:
        self._folder, self._console = folder, console
        self._env = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}

    def run(self, *words: str) -> None:
        """Runs a command, and leaves DULL lines of its progress out; ends the demo with its exit code if it fails."""
        self._console.say(f"$ {shlex.join(words)}", "bold")
        # Ctrl-C is for the demo alone: a second signal would keep the command from what the first one has it do
        process = subprocess.Popen(
            words, cwd=self._folder, env=self._env, stderr=subprocess.PIPE, encoding="utf-8", start_new_session=True
        )
        try:
            for line in process.stderr or ():
                if not DULL.search(line):
                    self._console.say(line.rstrip())
            status = process.wait()
        except BaseException:  # it leaves its run as it is, to be ended later
            hear_nothing()
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=LEAVE_S)
            raise
        if status:
            raise SystemExit(status)

    def end(self, run_id: str) -> None:
        """Gives back what a run has; Ctrl-C does not reach that."""
        words = ["mgpu", "down", run_id]
        subprocess.run(words, cwd=self._folder, env=self._env, start_new_session=True, timeout=END_S, check=True)


def main() -> int:
    """Runs the demo; the exit code is 0 when both runs have succeeded and nothing is billed."""
    from mgpu.console import Console

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # as Ctrl-C: nothing is left behind
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LONGEST_S)
    console, folder = Console(), Path(tempfile.mkdtemp(prefix="mgpu-demo-nightly-"))
    isolate(folder)
    shell = Shell(folder / "project", console)
    try:
        shutil.copytree(EXAMPLE, folder / "project", ignore=shutil.ignore_patterns("__pycache__"))
        os.chdir(folder / "project")
        return nights(shell, console)
    except KeyboardInterrupt:
        console.say("interrupted: what is there is ended", "yellow")
        return 130
    finally:
        clean(shell, folder, console)


def isolate(folder: Path) -> None:
    """Has all that is begun from here on know this folder alone: no stack, run or account of the user's."""
    for name in [name for name in os.environ if name.startswith(("PULUMI_", "AWS_"))]:
        del os.environ[name]
    os.environ |= {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("STATE", "CONFIG", "DATA")}
    os.environ |= {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}


def nights(shell: Shell, console: Console) -> int:
    """Both times, from the schedule to the bill."""
    from mgpu.schedule import kept
    from mgpu.schedule.model import Outcome

    began = time.monotonic()
    minute = time.gmtime(time.time() + TOO_NEAR_S + 60).tm_min  # the next one that begins late enough
    options = ("--cron", f"{minute} * * * *", "--if-running", "queue", "--yes")
    console.say(f"a copy of examples/nightly in {Path.cwd()}, and an empty state folder beside it")
    shell.run("mgpu", "schedule", "add", "nightly.yaml", *options)
    console.say(
        f"minute {minute:02d} is one time; so that nobody has to wait for two of them, this moment is the other one"
    )
    shell.run("mgpu", "schedule", "run-now", SCHEDULE)
    console.say(f"from here on a pass every {EVERY_S:.0f} s, as cron would call it; what all of them say is left out")
    killed_at: float | None = None
    while True:
        shell.run("mgpu", "reconcile")
        history = kept.load(SCHEDULE).history
        if len(history) > 1 and all(due.outcome.final for due in history):
            break
        require_nobody()
        if killed_at is None and history[0].outcome is Outcome.RUNNING:
            killed_at = kill(history[0].run_id, console)
        console.say(f"nobody is awake for {EVERY_S:.0f} s", "dim")
        time.sleep(EVERY_S)
    return tell(shell, console, killed_at, began)


def require_nobody() -> None:
    """Between two passes no run has a supervisor. Raises SystemExit."""
    from mgpu.run.record.record import every, supervised

    if awake := [record.run_id for record in every() if supervised(record.run_id)]:
        raise SystemExit(f"somebody supervises {', '.join(awake)}, though no pass is under way")


def kill(run_id: str, console: Console) -> float:
    """Takes the run's machine after its first checkpoint; when that was, UNIX seconds."""
    from mgpu_train.checkpoint.log.commit_log import CommitLog
    from mgpu_train.store import open_store

    from mgpu.paths import data_dir, state_dir
    from mgpu.providers.local import bill, control
    from mgpu.providers.local.nodes import Instance

    log = CommitLog(open_store(f"file://{data_dir() / 'checkpoints'}", os.environ), run_id)
    while not (committed := log.checkpoints()):
        time.sleep(0.1)
    console.say(f"the machine has committed its checkpoint of step {committed[0].step}, with nobody awake", "dim")
    console.say("now it is killed: every process of it, and its disk (`mgpu local kill`)", "yellow")
    root = state_dir() / "local"
    (node,) = bill.read(root).alive
    at = time.time()
    control.kill(Instance(root, node.start.instance))
    return at


def tell(shell: Shell, console: Console, killed_at: float | None, began: float) -> int:
    """The history, the bill, and what the accident has cost; the exit code."""
    from mgpu.paths import state_dir
    from mgpu.providers.local import bill
    from mgpu.run.record.record import every
    from mgpu.schedule import kept

    shell.run("mgpu", "schedule", "show", SCHEDULE)
    shell.run("mgpu", "gc")
    history, ledger = kept.load(SCHEDULE).history, bill.read(state_dir() / "local")
    lost = every()[0]
    rows = [
        *(row for record in every() for row in night(record)),
        *demo.way_back(lost, killed_at, "the kill", demo.floor_s(lost)),
        ("wall time", f"{time.monotonic() - began:.1f} s"),
        ("simulated cost", f"${ledger.cost_usd:.5f}, {len(ledger.nodes)} machines"),
    ]
    console.table(("mgpu demo-nightly", ""), rows)
    console.text(f"still billed: {len(ledger.alive)} nodes, ${ledger.usd_per_hour:.2f} per hour")
    shell.run("mgpu", "schedule", "rm", SCHEDULE)
    if ledger.alive:
        return 7
    return max(due.exit_code or 0 for due in history)


def night(record: Record) -> list[tuple[str, str]]:
    """What became of a run, as rows of the table."""
    loss = record.metrics.get("validation_loss")
    return [
        ("run", f"{record.run_id}: {record.state}, step {record.step} of {record.steps}"),
        ("  validation loss", "not measured" if loss is None else f"{loss:.3f} nat/byte"),
    ]


def too_long(*_: object) -> None:
    """Ends the demo. Raises SystemExit."""
    raise SystemExit(f"the demo has not ended within {LONGEST_S} s")


def hear_nothing() -> None:
    """From here on no signal keeps the demo from removing what it has made."""
    signal.alarm(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def clean(shell: Shell, folder: Path, console: Console) -> None:
    """Ends what runs, and removes the demo's folder."""
    from mgpu.paths import state_dir
    from mgpu.providers.local import bill
    from mgpu.run.record.record import every

    hear_nothing()
    for record in every():
        if not record.settled:
            shell.end(record.run_id)
    if left := bill.read(state_dir() / "local").alive:
        names = ", ".join(node.start.instance for node in left)
        raise SystemExit(
            f"still there: {names}; {folder} stays, to end them: XDG_STATE_HOME={folder / 'state'} mgpu gc"
        )
    os.chdir(ROOT)
    shutil.rmtree(folder)
    console.say(f"removed: {folder}, with all that the demo has made")


if __name__ == "__main__":
    sys.exit(main())
