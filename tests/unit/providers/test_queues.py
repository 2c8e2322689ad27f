"""What has waited in a cluster's queue costs from its start on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.kube.scripted import NOW, RUNNING, Scripted, asked, gang_of, stamp

from mgpu.acquire.terms import Acquired
from mgpu.iac.types.fleet_model import FleetInputs, bought
from mgpu.plan.model import Offer
from mgpu.providers.base import FleetState, Handle, Intent, NodeState
from mgpu.providers.kubernetes import offered
from mgpu.providers.kubernetes.provider import KubernetesProvider
from mgpu.providers.slurm.login import Login
from mgpu.providers.slurm.provider import SlurmProvider

BEGAN = NOW + 36_000.0  # ten hours after it was asked for
TOKEN = "f0" * 20


def since(provider: str, made: Acquired) -> float:
    """UNIX seconds: since when the machines of a fleet that is made of these cost, by its output."""
    about = {"name": "f", "owner": "o", "ssh_public_key": "ssh-ed25519 AAAA", "ssh_private_key_file": "/k"}
    needs = {"nodes": len(made.state.nodes), "max_price_usd_per_hour": 100, "max_hours": 1}
    inputs = FleetInputs.model_validate({**about, **needs, "provider": provider})
    return bought(inputs, made, (made.offer,), BEGAN + 60).handle.made_at


def test_a_job_of_slurms_costs_from_its_start(monkeypatch: pytest.MonkeyPatch):
    reached = {"address": "n1", "port": 1, "user": "u", "host_key": "k", "node": "n1", "hard_cap_at": BEGAN + 3600}
    files = [f"file|node-{rank}.json|0|{json.dumps({**reached, 'began_at': BEGAN + rank})}" for rank in (0, 1)]
    said = {"look": [f"7 {NOW:.0f} 2"], "tell": ["job|7|RUNNING|None|n[1-2]", *files]}
    monkeypatch.setattr(Login, "said", lambda _, script, *words, **__: said[script.split()[0]])
    about = {"instance_type": "main/8cpu", "market": "on-demand", "price_usd_per_hour": 20, "fetched_at": 0}
    offer = Offer.model_validate({**about, "provider": "slurm", "region": "here"})
    provider = SlurmProvider()
    handle = provider.find(Intent(fleet="f", generation=1, owner="o", token=TOKEN, offer=offer))
    assert handle is not None
    assert since("slurm", Acquired(handle, offer, provider.describe(handle))) == BEGAN


def test_pods_cost_from_the_start_of_the_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offered, "names", lambda access: ("c", "n", "https://s"))
    late = [{**RUNNING, "startTime": stamp(BEGAN + seconds)} for seconds in (40, 0, 20)]
    answers, handle = gang_of(late)
    scripted: Any = Scripted(answers)
    provider = KubernetesProvider(cluster=lambda access: scripted, clock=lambda: BEGAN + 60)
    asked_for = handle.model_copy(update={"made_at": NOW})
    assert since("kubernetes", Acquired(asked_for, asked()[1], provider.describe(handle))) == BEGAN


def test_machines_that_no_queue_holds_cost_from_their_create():
    handle = Handle(provider="local", region="", fleet="f", generation=1, token=TOKEN, ids=("m",), made_at=NOW)
    state = FleetState(nodes=(NodeState.model_validate({"rank": 0, "id": "m", "phase": "running"}),))
    about = {"instance_type": "cpu", "market": "on-demand", "price_usd_per_hour": 1, "fetched_at": 0}
    offer = Offer.model_validate({**about, "provider": "local", "region": ""})
    assert since("local", Acquired(handle, offer, state)) == NOW
