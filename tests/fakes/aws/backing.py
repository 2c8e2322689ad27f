"""The Linux machines behind the instances, as the lives of instances want them: begun at once, done in threads."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moto.iam.models import iam_backends

from fakes.aws import ecr, launch, permissions, world
from fakes.aws.cloud import Cloud
from fakes.aws.life import STARTED_NOT, Life
from fakes.aws.machines import Machine, Machines

AT_ONCE = 4  # boots side by side; more only slow each other down


class Backing:
    """`cloud.machines` where there are some."""

    real = True

    def __init__(self, cloud: Cloud, folder: Path, port: int, engines: bool = False) -> None:
        environment = {"AWS_ENDPOINT_URL": f"http://{world.GATEWAY}:{port}", "AWS_REGION": "us-east-1"}
        self._cloud = cloud
        engine = {"hosts": ecr.entry(), "ca": ecr.ca_file(folder).read_text()} if engines else None
        self._machines = Machines(
            folder, self._powered_off, environment=environment, credentials=self._credentials, engine=engine
        )
        self._pool = ThreadPoolExecutor(AT_ONCE, "machines")
        self._lock = threading.Lock()  # of `_ending`
        self._ending: set[str] = set()
        self._started: dict[str, threading.Event] = {}

    def start(self, life: Life) -> None:
        """Begins to boot."""
        self._started[life.instance.id] = threading.Event()
        self._pool.submit(self._start, life, machine(life))

    def _start(self, life: Life, wanted: Machine) -> None:
        stands = life.state not in ("pending", "running") or self._boots(wanted)
        self._started[wanted.id].set()
        if not stands:  # EC2's own end so too
            with self._cloud.lock:
                self._cloud.lives.end(life, STARTED_NOT)

    def _boots(self, wanted: Machine) -> bool:
        try:
            self._machines.start(wanted)
        except Exception as error:  # noqa: BLE001  whatever it is, it goes into the fake's log
            print(f"{wanted.id}: {error}", file=sys.stderr, flush=True)  # noqa: T201
            return False
        return True

    def end(self, life: Life) -> None:
        """Begins to take it down."""
        with self._lock:
            self._ending.add(life.instance.id)
        threading.Thread(target=self._end, args=(life.instance.id,), daemon=True).start()

    def _end(self, instance_id: str) -> None:
        self._started[instance_id].wait()
        try:
            self._machines.end(instance_id)
        finally:
            with self._lock:
                self._ending.discard(instance_id)

    def busy(self, life: Life) -> bool:
        """Whether something of it is left."""
        with self._lock:
            return life.instance.id in self._ending

    def notice(self, life: Life, kind: str, body: dict[str, Any] | None) -> None:
        """Puts a notice where the machine can read it."""
        self._machines.notice(life.instance.id, kind, json.dumps(body) if body else None)

    def address(self, instance_id: str, public: str | None) -> None:
        """Its public address has changed."""
        if instance_id in self._machines.running():
            self._machines.address(instance_id, public)

    def trouble(self, life: Life, what: str, value: Any) -> None:
        """Something that a machine alone can have; one that boots is waited for."""
        self._started[life.instance.id].wait(60)
        if what == "wire":
            self._machines.connect(life.instance.id, value)
        elif what == "hang":
            self._machines.hang(life.instance.id)
        else:
            self._machines.trouble(life.instance.id, value)

    def _credentials(self, wanted: Machine) -> Mapping[str, str]:
        with self._cloud.lock:
            return permissions.credentials(wanted)

    def _powered_off(self, instance_id: str) -> None:
        with self._cloud.lock:
            self._cloud.lives.powered_off(instance_id)

    def clear(self) -> None:
        """Ends all; returns when nothing is left."""
        deadline = time.monotonic() + 60
        for started in self._started.values():
            started.wait(max(0.0, deadline - time.monotonic()))
        self._machines.clear()

    def close(self) -> None:
        """Ends all, and what serves them."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._machines.close()


def machine(life: Life) -> Machine:
    """What EC2 knows of an instance."""
    instance = life.instance
    return Machine(
        id=instance.id,
        private_address=instance.private_ip_address,
        public_address=instance.public_ip_address,
        user_data=launch.user_data(instance),
        region=life.pool.region,
        zone=life.pool.zone,
        instance_type=life.pool.instance_type,
        account=instance.owner_id,
        role=_role(instance),
        market=life.pool.market,
        hop_limit=instance.metadata_options.http_put_response_hop_limit,
    )


def _role(instance: Any) -> str | None:
    arn = (instance.iam_instance_profile or {}).get("Arn")
    for profile in iam_backends[instance.owner_id][instance.ec2_backend.partition].instance_profiles.values():
        if profile.arn == arn:
            return profile.roles[0].name if profile.roles else None
    return None
