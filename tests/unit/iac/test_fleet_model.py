"""What a fleet's outputs say of its bill."""

from __future__ import annotations

import pytest

from mgpu.acquire.terms import Acquired
from mgpu.iac.types import fleet_model
from mgpu.iac.types.fleet_model import FleetInputs, bought
from mgpu.plan.model import Offer
from mgpu.providers.base import FleetState, Handle, NodePhase, NodeState

ABOUT = {"instance_type": "m", "market": "on-demand", "price_usd_per_hour": 2, "fetched_at": 0, "region": "r"}
OFFER = Offer.model_validate({**ABOUT, "provider": "aws"})


def state(*phases: NodePhase) -> FleetState:
    return FleetState(nodes=tuple(NodeState(rank=rank, id=f"i-{rank}", phase=each) for rank, each in enumerate(phases)))


def test_what_machines_have_beside_them_costs_what_it_did_when_they_were_bought(monkeypatch: pytest.MonkeyPatch):
    """A look at the fleet from where the machine image cannot be asked for makes its disks no cheaper."""
    per_machine = [0.5]
    monkeypatch.setattr(fleet_model, "other_usd_per_hour", lambda *_: per_machine[0])
    needs = {"nodes": 2, "max_price_usd_per_hour": 9, "max_hours": 1}
    about = {"name": "f", "owner": "o", "provider": "aws", "ssh_public_key": "k", "ssh_private_key_file": "/k"}
    handle = Handle(provider="aws", region="r", fleet="f", generation=1, token="t", ids=("i-0", "i-1"))
    both = state(NodePhase.RUNNING, NodePhase.RUNNING)
    fleet = bought(FleetInputs.model_validate({**about, **needs}), Acquired(handle, OFFER, both), (OFFER,), 0.0)
    assert fleet.other_usd_per_hour == 1.0
    per_machine[0] = 0.1
    one = fleet.seen(handle, state(NodePhase.RUNNING, NodePhase.TERMINATED))
    assert (one.nodes, one.other_usd_per_hour) == (1, 0.5)
    assert one.seen(handle, both).other_usd_per_hour == 1.0
    elsewhere = OFFER.model_copy(update={"region": "s"})
    assert one.seen(handle, both, offer=elsewhere).other_usd_per_hour == 0.2
    none = one.seen(handle, state(NodePhase.TERMINATED, NodePhase.TERMINATED))
    assert (none.other_usd_per_hour, none.seen(handle, both).other_usd_per_hour) == (0, 0.2)
