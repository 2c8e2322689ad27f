"""What `mgpu check kubernetes` finds, without a cluster."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from fakes.kube.scripted import JOBS, PODS, Scripted, asked

from mgpu.errors import PermissionDenied, QuotaExceeded
from mgpu.providers.base import Finding, Offers
from mgpu.providers.kubernetes import findings
from mgpu.providers.kubernetes.cluster import Access
from mgpu.providers.kubernetes.offered import Place
from mgpu.providers.kubernetes.options import KubernetesOptions

REVIEWS = "POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def found(
    monkeypatch: pytest.MonkeyPatch,
    *,
    version: str = "v1.33.1",
    proxy: str = "",
    queue: str | None = None,
    **more: Any,
) -> dict[str, Finding]:
    """Findings by subject of a user who may do all; `more`: answers, by path."""
    monkeypatch.setattr(Access, "http_proxy", lambda _: proxy)
    answers: dict[str, Any] = {"/version": {"gitVersion": version}, REVIEWS: {"status": {"allowed": True}}}
    answers["/api/v1/namespaces/n/resourcequotas"] = {"items": []}
    scripted: Any = Scripted(answers | more)
    place = Place(scripted, "c", "n", "https://api.test:6443")
    request, offer = asked()
    sold = Offers(offers=(offer,), source="s")
    told = findings.look(
        lambda: place, KubernetesOptions.model_validate({"queue": queue}), request.requirements, lambda _: sold
    )
    return {each.subject: each for each in told}


@pytest.mark.parametrize(
    ("version", "status"),
    [("v1.28.15-eks-1", "warning"), ("v1.29.0", "ok"), ("v1.36.0-rc.1", "ok"), ("unknown", "ok")],
)
def test_a_cluster_that_is_too_old_is_told(monkeypatch, version: str, status: str):
    told = found(monkeypatch, version=version)["kubernetes c/n"]
    assert (told.status, version in told.detail) == (status, True)


def test_who_may_not_create_pods_hears_that_they_were_not_tried(monkeypatch):
    def review(body: dict[str, Any]) -> dict[str, Any]:
        asked = body["spec"]["resourceAttributes"]
        return {
            "status": {"allowed": (asked["verb"], asked["resource"], asked["subresource"]) != ("create", "pods", "")}
        }

    told = found(monkeypatch, **{REVIEWS: review})
    assert told["your rights in n"].status == "ok", "a run needs no such right"
    assert "were not tried" in told["the request"].detail
    assert "were not tried" not in found(monkeypatch)["the request"].detail
    denied = PermissionDenied("POST", 'pods "x" is forbidden: violates PodSecurity')
    assert found(monkeypatch, **{f"POST {PODS}": denied})["the request"].status == "failed"


def test_an_http_proxy_that_pods_are_not_reached_by_is_told_where_nothing_else_leads_there(monkeypatch):
    def refused(*_: Any) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refused)
    told = found(monkeypatch, proxy="proxy.test:3128")["connections to pods"]
    assert told.status == "failed"
    assert "proxy.test:3128" in told.detail
    assert "api.test:6443 is not reached without it: Network is unreachable" in told.detail
    assert "connections to pods" not in found(monkeypatch)
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(socket, "create_connection", lambda *_: ours)
    assert "connections to pods" not in found(monkeypatch, proxy="proxy.test:3128"), "it is reached directly, too"
    theirs.close()


@pytest.mark.parametrize(("requested", "status"), [(8, "warning"), (16, "failed")])
def test_a_quota_that_others_have_used_up_is_a_warning_as_a_launch_waits_for_it(
    monkeypatch, requested: int, status: str
):
    words = f"exceeded quota: q, requested: nvidia.com/gpu={requested}, used: nvidia.com/gpu=24, limited: "
    denied = QuotaExceeded("POST", f'pods "x" is forbidden: {words}nvidia.com/gpu=24', "Ask for less.")
    told = found(monkeypatch, **{f"POST {PODS}": denied})["the request"]
    assert (told.status, "a launch waits" in told.detail, words in told.detail) == (status, status == "warning", True)
    job = QuotaExceeded("POST", 'jobs "x" is forbidden: exceeded quota: q', "Ask for less.")
    assert found(monkeypatch, **{f"POST {JOBS}": job})["the request"].status == "failed", "a launch ends by it"


def test_a_queue_is_asked_for_by_the_version_that_kueue_prefers(monkeypatch):
    group = {"/apis/kueue.x-k8s.io": {"preferredVersion": {"version": "v1beta2"}}}
    path = "/apis/kueue.x-k8s.io/v1beta2/namespaces/n/localqueues/team-a"
    told = found(monkeypatch, queue="team-a", **group, **{path: {"status": {"pendingWorkloads": 3}}})["queue team-a"]
    assert (told.status, told.detail) == ("ok", "0 workloads run, 3 wait")
    for there in (group, {}):  # no such queue, no Kueue
        assert found(monkeypatch, queue="team-a", **there)["queue team-a"].status == "failed"
