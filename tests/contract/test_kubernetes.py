"""What is special about provider kubernetes, on a real control plane."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from fakes.kube.cluster import IMAGE, Namespace
from mgpu_train.timeouts import Timeouts
from waiting import until

from mgpu.plan.model import Offer, Requirements
from mgpu.providers.base import FleetRequest, Handle, NodePhase, create_token
from mgpu.providers.kubernetes.findings import roles
from mgpu.providers.kubernetes.provider import KubernetesProvider
from mgpu.remote.connection import load_key
from mgpu.remote.node import Node
from mgpu.remote.targets import Target, hop


@dataclass
class Asked:
    """A request, as this test has it: its own namespace and key."""

    kube: Namespace
    folder: Path
    options: dict[str, str]

    @property
    def provider(self) -> KubernetesProvider:
        return KubernetesProvider(self.options)

    def requirements(self, **more: object) -> Requirements:
        given = {"nodes": 2, "max_price_usd_per_hour": 9, "max_hours": 0.5, "provider_options": self.options, **more}
        return Requirements.model_validate({"provider": "kubernetes", **given})

    def request(self, **more: object) -> tuple[FleetRequest, Offer, str]:
        needed = self.requirements(**more)
        offer = self.provider.offers(needed).offers[0]
        key = (self.folder / "key.pub").read_text().strip()
        about = {"fleet": "f", "generation": 1, "owner": "o", "requirements": needed, "ssh_public_key": key}
        request = FleetRequest.model_validate({**about, "lease_s": 300, "hard_cap_s": 600, "image": IMAGE})
        return request, offer, create_token("o", self.kube.name, 1, offer, 0)

    def ready(self, handle: Handle) -> None:
        until(lambda: self.provider.describe(handle).ready, why=lambda: self.provider.describe(handle))

    def phases(self, handle: Handle) -> list[NodePhase]:
        return [node.phase for node in self.provider.describe(handle).nodes]

    def node(self, handle: Handle, rank: int) -> Node:
        seen = self.provider.describe(handle).nodes[rank]
        via = hop(seen.via.model_dump() if seen.via else None)
        target = Target(rank, seen.address, seen.port, seen.user, seen.host_key, via, seen.python)
        return Node(target, load_key(self.folder / "key"), Timeouts())


@pytest.fixture
def asked(kube: Namespace, tmp_path: Path) -> Asked:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    kube.grant(yaml.safe_dump_all(roles(kube.name)))
    return Asked(kube, tmp_path, {"kubeconfig": str(kube.kubeconfig), "notice_s": "5", "price_usd_per_hour": "0.05"})


def test_first(asked: Asked):
    t = time.time()
    print(asked.provider.offers(asked.requirements(gpus_per_node=2)))
    handle = asked.provider.create(*asked.request(gpus_per_node=2))
    print("created", time.time() - t)
    asked.ready(handle)
    print("ready", time.time() - t)
    print(asked.provider.describe(handle))
    with asked.node(handle, 1) as node:
        print(node.run(["sh", "-c", "env; pwd; id; df -h /dev/shm"], timeout=30).stdout.decode())
    print("ssh", time.time() - t)
    until(lambda: asked.provider.destroy(handle), why=lambda: (asked.provider.describe(handle), asked.kube.pods()))
    print("gone", time.time() - t)
    assert asked.phases(handle) == [NodePhase.TERMINATED] * 2
    print(asked.kube.pods(), asked.kube.jobs())
