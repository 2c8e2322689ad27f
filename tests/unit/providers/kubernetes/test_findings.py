"""What `mgpu check kubernetes` finds, without a cluster."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from fakes.kube.scripted import PODS, Scripted, asked

from mgpu.errors import PermissionDenied
from mgpu.providers.base import Finding, Offers
from mgpu.providers.kubernetes import findings
from mgpu.providers.kubernetes.cluster import Access
from mgpu.providers.kubernetes.offered import Place
from mgpu.providers.kubernetes.options import KubernetesOptions

REVIEWS = "POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def found(
    monkeypatch: pytest.MonkeyPatch, *, version: str = "v1.33.1", proxy: str = "", **more: Any
) -> dict[str, Finding]:
    """Findings by subject of a user who may do all; `more`: answers, by path."""
    monkeypatch.setattr(Access, "http_proxy", lambda _: proxy)
    answers: dict[str, Any] = {"/version": {"gitVersion": version}, REVIEWS: {"status": {"allowed": True}}}
    answers["/api/v1/namespaces/n/resourcequotas"] = {"items": []}
    scripted: Any = Scripted(answers | more)
    place = Place(scripted, "c", "n", "https://api.test:6443")
    request, offer = asked()
    sold = Offers(offers=(offer,), source="s")
    told = findings.look(lambda: place, KubernetesOptions(), request.requirements, lambda _: sold)
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
