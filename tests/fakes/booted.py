"""A machine at its boot: a script that runs as root, in namespaces and on an overlay of this system's root.

Programs that would switch a machine off are replaced by ones that write down how they were called.
"""

from __future__ import annotations

import subprocess
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes.aws import world
from mgpu.plan.model import Requirements
from mgpu.providers.aws.instances.user_data import user_data
from mgpu.providers.base import FleetRequest
from mgpu.providers.start import HostKey

HOST_KEY = HostKey.make()
LOGIN = HostKey.make().public + " it's $(touch /tmp/hacked) mine"
LEASE_S, HARD_CAP_S = 300, 3600

_BUILD = """\
set -e
mount -t tmpfs none "$1"
cp -a "$2" "$1/given"
cd "$1"
mkdir u w r
mount -t overlay overlay -o lowerdir=/,upperdir=u,workdir=w r
for folder in run home root tmp mnt; do mount -t tmpfs none r/$folder; done
mount -t proc proc r/proc
mount --rbind /dev r/dev
rm -f r/etc/ssh/sshd_config.d/*
for name in systemctl poweroff shutdown; do
    printf '#!/bin/sh\\necho "%s $*" >>/tmp/called\\n' $name >r/usr/local/sbin/$name
    chmod 755 r/usr/local/sbin/$name
done
cp given r/tmp/user-data
printf '%s\\n' "$4" "$3" >r/tmp/steps
exec chroot r /bin/sh -eu /tmp/steps
"""
_HELPERS = """\
clocks() { # the number of the process that keeps them, as soon as it does
    tries=100
    until grep -qs lease.sh "/proc/$(cat /run/mgpu/lease.pid 2>/dev/null)/cmdline"; do
        [ $((tries -= 1)) -gt 0 ] && sleep 0.1
    done
    cat /run/mgpu/lease.pid
}
left() { # seconds that a clock has: `/run/mgpu/hard-cap`, or a lease
    read -r up _ </proc/uptime
    echo $(($(cat "$1") - ${up%%.*}))
}
reboot() { # all that the clocks are is gone
    kill -KILL "-$(clocks)"
    rm -r /run/mgpu
}
"""

Boot = Callable[..., str]


def request(**changed: object) -> FleetRequest:
    needed = Requirements(provider="aws", max_price_usd_per_hour=1, max_hours=1)
    return FleetRequest(
        fleet="demo", generation=1, owner="o-1", requirements=needed,
        **{"ssh_public_key": LOGIN, "lease_s": LEASE_S, "hard_cap_s": HARD_CAP_S, **changed},
    )  # fmt: skip


def script(hard_cap_at: float | None = None, **changed: float) -> str:
    """What a machine of EC2 is given."""
    at = time.time() + HARD_CAP_S if hard_cap_at is None else hard_cap_at
    return user_data(request(**changed), "ubuntu", HOST_KEY, int(at))


@pytest.fixture
def boot(namespaces: None, tmp_path: Path) -> Boot:
    """Runs shell steps on a machine of its own, whose user data is `/tmp/user-data`; what they print."""

    def run(steps: str, given: str | None = None) -> str:
        (tmp_path / "root").mkdir(exist_ok=True)
        (tmp_path / "given").write_text(given if given is not None else script())
        command = [*world.NAMESPACES, "sh", "-c", _BUILD, "sh", tmp_path / "root", tmp_path / "given"]
        steps = textwrap.dedent(steps)
        done = subprocess.run([*command, steps, _HELPERS], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
