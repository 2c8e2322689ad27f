"""Run where the fake's machines are: rents a gang of provider `aws`, repairs it, and says what was seen, as JSON.

first_contact.py FOLDER PRIVATE_KEY_FILE ENDPOINT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mgpu_train.timeouts import Timeouts

from mgpu import acquire
from mgpu.errors import HostKeyMismatch
from mgpu.iac.types.contact import Contact
from mgpu.journal import Journal
from mgpu.plan.model import Offer, Requirements
from mgpu.providers import registry
from mgpu.providers.base import FleetRequest, FleetState, Handle, NodeState
from mgpu.remote.node import connect
from mgpu.remote.targets import Target

TIMEOUTS = Timeouts(provision_s=120)
OFFER = Offer(
    provider="aws",
    instance_type="g5.xlarge",
    gpu="A10G",
    gpus=1,
    market="spot",
    price_usd_per_hour=1,
    region="us-east-1",
    zone="us-east-1a",
    fetched_at=0,
)


def request(key: Path, generation: int) -> FleetRequest:
    needed = Requirements(
        provider="aws", nodes=2, market="spot", max_price_usd_per_hour=9, max_hours=1, gpus_per_node=1
    )
    return FleetRequest(
        fleet="met",
        generation=generation,
        owner="o-met",
        requirements=needed,
        ssh_public_key=key.with_suffix(".pub").read_text().strip(),
        lease_s=600,
        hard_cap_s=3600,
    )


def shows(node: NodeState, host_key: str, key: Path) -> bool:
    try:
        connect(Target(node.rank, node.address, node.port, node.user, host_key), key, TIMEOUTS).close()
    except HostKeyMismatch:
        return False
    return True


def main(folder: Path, key: Path, endpoint: str) -> None:
    provider = registry.get("aws", {"endpoint_url": endpoint})
    first: dict[str, str] = {}

    def meet(handle: Handle, state: FleetState) -> FleetState:
        for node in state.nodes:
            if node.one_use_key:
                first.setdefault(node.id, node.one_use_key)
        return contact.meet(handle, state)

    with Journal(folder / "journal") as journal:
        contact = Contact(provider, key, TIMEOUTS)
        made = acquire.acquire(provider, request(key, 1), [OFFER], journal, timeouts=TIMEOUTS, meet=meet)
        acquire.destroy(provider, made.handle, nodes=made.handle.ids[:1], timeouts=TIMEOUTS)
        whole = acquire.repair(
            provider, made.handle, (0,), request(key, 2), [OFFER], journal, timeouts=TIMEOUTS, meet=meet
        )
    seen = provider.describe(whole.handle)
    report = [
        {
            "id": node.id,
            "own": shows(node, node.host_key, key),
            "first": shows(node, first[node.id], key),
            "survived": node.id in made.handle.ids,
            "known": node.host_key == whole.state.nodes[node.rank].host_key,
            "one_use_key": node.one_use_key,
        }
        for node in seen.nodes
    ]
    acquire.destroy(provider, whole.handle, timeouts=TIMEOUTS)
    print(json.dumps(report))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
