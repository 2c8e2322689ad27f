"""A real cron and a real systemd call what `mgpu schedule install` has put there, and `uninstall` ends it.

Each runs in namespaces of its own, with a crontab or a user's manager that is nobody else's; of the machine's own
nothing is changed. That a pass was made is seen by what it has done: somebody was to be told that a run is over.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from mgpu.run.record import record
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Record, State

RUN = "night-1125-abcde"
RUN_FILE = """
name: night
provider: local
max_price_usd_per_hour: 1
max_hours: 1
command: [train.py]
sinks: {command: {run: [sh, tell.sh], secrets: [PIN]}}
"""
LIMIT_S = 120
MANAGER = "/lib/systemd/systemd"
# its files lie in $1, which only this one reads; what others schedule is not there
_CRON = """
folder=$1; shift
mount -t tmpfs tmpfs /var/spool/cron && mkdir -m 1730 /var/spool/cron/crontabs
mount -t tmpfs tmpfs /run
: > "$folder/empty"; mkdir "$folder/none"
if [ -e /etc/crontab ]; then mount --bind "$folder/empty" /etc/crontab; fi
mount --bind "$folder/none" /etc/cron.d
"$@" install --cron --every 1m --yes
cron
until [ -s "$folder/said" ]; do sleep 0.2; done
"$@" uninstall --cron
crontab -l > "$folder/left"
"""
_SYSTEMD = """
folder=$1; shift
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system /run/user/0
chmod 700 /run/user/0
export XDG_RUNTIME_DIR=/run/user/0
MANAGER --user --log-target=null &
until systemctl --user is-system-running >/dev/null 2>&1; do sleep 0.1; done
"$@" install --systemd --yes
until [ -s "$folder/said" ]; do sleep 0.2; done
until systemctl --user show --property=ActiveState mgpu-reconcile.service | grep -q inactive; do sleep 0.2; done
systemctl --user show --property=Result --property=ExecMainStatus mgpu-reconcile.service > "$folder/ended"
systemctl --user list-timers --output=json > "$folder/waits"
"$@" uninstall --systemd
systemctl --user list-timers --output=json > "$folder/left"
""".replace("MANAGER", MANAGER)
# control groups are no namespace's: a manager has one of its own, and what it makes goes with it
_AROUND = """
set -e
hierarchy=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts)
own=$hierarchy/$1; shift
mkdir "$own"; echo $$ > "$own/cgroup.procs"
apart="unshare --mount --propagation private --cgroup --pid --fork --kill-child --mount-proc"
timeout --kill-after=5 LIMIT $apart sh -euc "$@" && rc=0 || rc=$?
echo $$ > "$hierarchy/cgroup.procs"
until find "$own" -depth -type d -exec rmdir {} + 2>/dev/null; do sleep 0.1; done
exit $rc
""".replace("LIMIT", str(LIMIT_S))


@dataclass(frozen=True)
class Machine:
    """A user whose backend has a run of whose end nobody was told; `tell.sh` writes down who tells it."""

    folder: Path
    environ: dict[str, str]

    def runs(self, script: str) -> subprocess.CompletedProcess[str]:
        """A script in namespaces of its own, as root there; it gets the folder, and `mgpu schedule`."""
        words = [str(self.folder), sys.executable, "-m", "mgpu", "schedule"]
        done = subprocess.run(
            ["sh", "-c", _AROUND, "sh", f"mgpu-callers-{os.getpid()}", script, "sh", *words],
            cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=LIMIT_S + 30, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def said(self, name: str = "said") -> str:
        return (self.folder / name).read_text()


@pytest.fixture
def machine(tmp_path: Path, xdg: Path) -> Machine:
    (tmp_path / "mgpu.yaml").write_text(RUN_FILE)
    (tmp_path / "tell.sh").write_text(f'echo "$MGPU_EVENT $MGPU_RUN $PIN" >> {tmp_path}/said\n')
    known = Record(
        RUN, "night", "p", str(tmp_path), str(tmp_path / "mgpu.yaml"), "s", True, "f", "local", 1, has_sinks=True,
        state=State.FAILED, reason="no disk", ended_at=1.0, exit_code=6, teardown="confirmed",
    )  # fmt: skip
    record.save(known)
    Folder(RUN).run_file.write_text(RUN_FILE)
    secrets = xdg / "config" / "mgpu" / "mgpu-reconcile.env"
    secrets.parent.mkdir(parents=True)
    secrets.write_text("PIN='4 2'\n")  # what the user has filled
    given = {name: os.environ[name] for name in os.environ if name.startswith("XDG_")}
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return Machine(tmp_path, {**given, "HOME": str(tmp_path), "PATH": path, "USER": "root", "LOGNAME": "root"})


def needs(require, name: str, program: str) -> None:
    probe = ["unshare", "--mount", "--pid", "--cgroup", "--fork", "--mount-proc", "true"]
    is_root = os.geteuid() == 0 and subprocess.run(probe, capture_output=True, check=False).returncode == 0
    require(name, is_root, "only root may make namespaces")
    require(name, "cgroup2" in Path("/proc/mounts").read_text(), "there are no control groups of the second version")
    require(name, shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is not None, f"apt install {name}")


def test_cron_makes_a_pass_within_its_minute(machine: Machine, require):
    needs(require, "cron", "cron")
    machine.runs(_CRON)
    assert machine.said() == f"ended {RUN} 4 2\n"
    (log,) = machine.folder.rglob("mgpu-reconcile.log")
    assert "who ended it has not told it" in log.read_text()
    assert machine.said("left") == ""


def test_a_users_timer_of_systemds_makes_passes_again_and_again(machine: Machine, require):
    needs(require, "systemd", MANAGER)
    machine.runs(_SYSTEMD)
    assert machine.said() == f"ended {RUN} 4 2\n"
    assert sorted(machine.said("ended").split()) == ["ExecMainStatus=0", "Result=success"]
    (timer,) = json.loads(machine.said("waits"))
    assert (timer["unit"], timer["activates"]) == ("mgpu-reconcile.timer", "mgpu-reconcile.service")
    assert timer["next"] > timer["last"] > 0, "and the next pass comes"
    assert json.loads(machine.said("left")) == []
