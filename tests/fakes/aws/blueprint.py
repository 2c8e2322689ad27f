"""What a fake machine is, and what its process 1 is told about it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fakes.aws import metadata, world

INSIDE = Path(__file__).with_name("inside")
DISK_MIB = 2048  # a limit, in memory; what is not written costs nothing
ENGINE_MIB = 4096  # the same, of Docker's data root
CHECKOUT = Path(__file__).parents[3]
COVERED = ("/root", "/home", "/tmp", "/run", "/var/tmp", "/mnt", "/media")


@dataclass(frozen=True)
class Machine:
    """What a machine is, as EC2 knows it."""

    id: str
    private_address: str
    public_address: str | None
    user_data: bytes
    region: str
    zone: str
    instance_type: str
    account: str
    role: str | None
    market: str  # "spot" or "on-demand"
    hop_limit: int


def blueprint(
    machine: Machine, folder: Path, environment: Mapping[str, str], engine: Mapping[str, str] | None = None
) -> str:
    """The configuration of a machine whose things lie in `folder`/<id>, as a line of JSON for inside/init.py."""
    masked = {*COVERED, str(Path.home()), str(CHECKOUT), str(folder.parent)}
    known = asdict(machine)
    config = {
        **{name: known[name] for name in ("id", "private_address", "public_address")},
        "hostname": metadata.hostname(machine.private_address),
        "gateway": world.GATEWAY,
        "scratch": str(folder / machine.id / "disk"),
        "console": str(folder / machine.id / "console.log"),
        "disk_mib": DISK_MIB,
        "masked": sorted(masked),
        "shared": interpreters(masked),
        "python": sys.executable,
        "environment": dict(environment),
        "cloud_init": (INSIDE / "cloudinit.py").read_text(),
        "cgroup": cgroup(machine.id),
        "engine_mib": ENGINE_MIB,
        "engine": engine and {**engine, "toolkit": (INSIDE / "toolkit.py").read_text()},
    }
    return json.dumps(config) + "\n"


def cgroup(machine_id: str) -> str:
    """The control group, of the host's, that the machine's containers have theirs in."""
    return f"fake-{machine_id}"


def interpreters(masked: Iterable[str]) -> list[tuple[str, str]]:
    """(folder, where a machine sees it): this environment as the image's, and what of it is covered otherwise."""
    covered = tuple(masked)
    base = os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))  # noqa: PTH120
    own = [folder for folder in (sys.prefix, base) if any(Path(folder).is_relative_to(mask) for mask in covered)]
    return [(folder, folder) for folder in dict.fromkeys(own)] + [(sys.prefix, "/opt/pytorch")]
