"""What an answer that failed, or none, says of a run's machines, before its hard cap and after it."""

from __future__ import annotations

import time

import pytest

from mgpu.errors import AuthError, InvalidRequest, ProviderError, Transient
from mgpu.providers.base import Handle, NodePhase
from mgpu.providers.hosts.provider import REGION, HostsProvider
from mgpu.providers.hosts.ssh import Client


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
