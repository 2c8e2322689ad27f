"""What an answer that failed, or none, says of a run's machines, before its hard cap and after it."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from fakes.clock import Clock
from mgpu_train.timeouts import Timeouts

from mgpu import acquire
from mgpu.errors import AuthError, InvalidRequest, ProviderError, TeardownIncomplete, Transient
from mgpu.plan.model import Requirements
from mgpu.providers.base import FleetRequest, Handle, NodePhase
from mgpu.providers.hosts import provider as module
from mgpu.providers.hosts.options import Host
from mgpu.providers.hosts.provider import REGION, HostsProvider
from mgpu.providers.hosts.ssh import Client, Mute


def failing(monkeypatch, kind: type[ProviderError], cap_in_s: float) -> tuple[HostsProvider, Handle]:
    """A host that answers with such an error, and what a run holds on it."""

    def ask(*_: object, **__: object) -> None:
        raise kind("host gpu1 does not do it")

    monkeypatch.setattr(Client, "ask", ask)
    node = f"gpu1/0f0f0f0f0f-0.{int(time.time() + cap_in_s)}"
    handle = Handle(provider="hosts", region=REGION, fleet="f", generation=1, token="0f" * 20, ids=(node,), made_at=0)
    return HostsProvider({"addresses": "gpu1"}), handle


@pytest.mark.parametrize("kind", [Transient, AuthError])
def test_a_host_that_nobody_can_ask_counts_as_gone_after_the_hard_cap(monkeypatch, kind):
    provider, handle = failing(monkeypatch, kind, -60)
    assert provider.destroy(handle)
    assert [node.phase for node in provider.describe(handle).nodes] == [NodePhase.TERMINATED]


@pytest.mark.parametrize("cap_in_s", [3600, -60])
def test_an_answer_that_failed_is_no_end_also_not_after_the_hard_cap(monkeypatch, cap_in_s):
    provider, handle = failing(monkeypatch, InvalidRequest, cap_in_s)
    for ask in (provider.destroy, provider.describe):
        with pytest.raises(InvalidRequest):
            ask(handle)


def test_a_host_without_its_python_is_told_once_after_the_hard_cap_and_then_given_up(monkeypatch, xdg):
    provider, handle = failing(monkeypatch, Mute, 3600)
    for _ in range(2):  # as long as its clock may still end it
        with pytest.raises(Mute):
            provider.destroy(handle)
    monkeypatch.setattr(module.time, "time", lambda at=time.time: at() + 3601)
    os.utime(module._asked_to_end(handle.ids[0]), (1, 1))
    with pytest.raises(Mute, match="gpu1") as caught:
        provider.describe(handle)
    with pytest.raises(Mute, match="gpu1") as caught:
        provider.destroy(handle)
    assert "by hand" in caught.value.next_step
    os.utime(module._asked_to_end(handle.ids[0]), (module.time.time(),) * 2)  # the clock of files goes on by itself
    assert provider.destroy(handle)
    (node,) = provider.describe(handle).nodes
    assert (node.phase, "given up" in node.reason) == (NodePhase.TERMINATED, True)
    assert provider.destroy(handle), "for good"


def test_each_of_several_hosts_without_their_python_is_named_before_it_is_given_up(monkeypatch, xdg):
    def ask(_: Client, host: Host, *__: object, **___: object) -> None:
        raise (Mute if host.address != "gpu0" else InvalidRequest)(f"host {host.address} does not do it", "no python3")

    monkeypatch.setattr(Client, "ask", ask)
    nodes = tuple(f"gpu{rank}/0f0f0f0f0f-{rank}.{int(time.time() - 60)}" for rank in range(3))
    handle = Handle(provider="hosts", region=REGION, fleet="f", generation=1, token="0f" * 20, ids=nodes, made_at=0)
    provider = HostsProvider({"addresses": "gpu0,gpu1,gpu2"})
    with pytest.raises(Mute) as caught:
        provider.destroy(handle)
    assert caught.value.what == "host gpu1 does not do it; host gpu2 does not do it"
    assert caught.value.why.count("no python3") == 1
    with pytest.raises(InvalidRequest, match="gpu0"):  # which is not given up
        provider.destroy(handle)
    assert provider.destroy(handle, nodes[1:])


def test_hosts_that_refuse_are_told_together_and_when_the_others_have_ended(monkeypatch, xdg):
    """A host that is silent for a moment, or whose programs take their time, holds the run until it is asked again."""
    answers: dict[str, list[Any]] = {
        "gpu0": [AuthError("host gpu0 shows another key", "", "Look at it.")],
        "gpu1": [Transient("host gpu1 does not answer"), {"gone": True}],
        "gpu2": [{"gone": False}, {"gone": False}, {"gone": True}],
        "gpu3": [InvalidRequest("host gpu3 cannot do it", "no docker")],
    }

    def ask(_: Client, host: Host, *__: object, **___: object) -> dict[str, Any]:
        left = answers[host.address]
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, ProviderError):
            raise answer
        return answer

    monkeypatch.setattr(Client, "ask", ask)
    nodes = tuple(f"gpu{rank}/0f0f0f0f0f-{rank}.{int(time.time() + 3600)}" for rank in range(4))
    handle = Handle(provider="hosts", region=REGION, fleet="f", generation=1, token="0f" * 20, ids=nodes, made_at=0)
    provider, clock = HostsProvider({"addresses": "gpu0,gpu1,gpu2,gpu3"}), Clock()
    with pytest.raises(TeardownIncomplete) as told:
        acquire.destroy(provider, handle, timeouts=Timeouts(), clock=clock, sleep=clock.sleep)
    assert [len(left) for left in answers.values()] == [1] * 4, "all were asked until they were free, or refused"
    assert told.value.why.splitlines()[:2] == ["host gpu0 shows another key", "host gpu3 cannot do it: no docker"]
    assert clock() < Timeouts().destroy_s
    answers["gpu1"] = [Transient("host gpu1 does not answer")]
    with pytest.raises(Transient, match="gpu1") as waits:
        provider.destroy(handle)
    assert "gpu0 shows another key" in waits.value.why
    with pytest.raises(AuthError) as part:  # of lost ones at once: the others wait for their replacement
        provider.destroy(handle, nodes[:2])
    assert "gpu1" not in str(part.value)


def test_a_user_without_a_name_takes_hosts_by_its_number(monkeypatch):
    def ask(_: Client, __: Host, asked: dict[str, Any], **___: object) -> dict[str, Any]:
        return {"held": asked["record"]}

    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.setattr(Client, "ask", ask)
    monkeypatch.setattr(module.getpass, "getuser", unknown)
    needed = Requirements(provider="hosts", max_price_usd_per_hour=1, max_hours=1)
    about = {"fleet": "f", "generation": 1, "owner": "o", "ssh_public_key": "k", "lease_s": 60, "hard_cap_s": 60}
    request = FleetRequest.model_validate({**about, "requirements": needed})
    taken = HostsProvider({"addresses": "gpu1"})._take(request, "0f" * 20, "", 0, (Host(address="gpu1"), {}))
    assert isinstance(taken, dict)
    assert taken["by"] == f"{os.getuid()}@{os.uname().nodename}"
