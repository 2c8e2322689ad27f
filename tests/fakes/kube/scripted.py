"""A cluster in memory: what its API server says is what a test gives."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from mgpu.plan.model import Offer, Requirements
from mgpu.providers.base import FleetRequest, Handle
from mgpu.providers.kubernetes import manifest
from mgpu.providers.kubernetes.cluster import Access, Missing
from mgpu.providers.kubernetes.options import KubernetesOptions

Json = dict[str, Any]
TOKEN = "f0" * 20
NOW = 1_795_000_000.0
IMAGE = f"r.test/t@sha256:{'0' * 64}"
JOBS, PODS, EVENTS = "/apis/batch/v1/namespaces/n/jobs", "/api/v1/namespaces/n/pods", "/api/v1/namespaces/n/events"
REACHED = '{"mgpu": {"port": 1, "user": "u", "host_key": "k"}}'


def stamp(at: float) -> str:
    """A time as Kubernetes writes it."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


RUNNING: Json = {
    "phase": "Running",
    "startTime": stamp(NOW),
    "containerStatuses": [{"name": manifest.CONTAINER, "state": {"running": {}}}],
    "podIP": "10.0.0.1",
}
UNPLACED: Json = {
    "phase": "Pending",
    "conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2: Insufficient gpu"}
    ],
}


class Scripted:
    """Answers by path, and of a list those that have the labels; an exception is raised. What was sent is in `sent`."""

    def __init__(self, answers: dict[str, Any], ahead_s: float = 0.0) -> None:
        self.answers, self.access, self.ahead_s = answers, Access(), ahead_s
        self.sent: list[tuple[str, str, Any]] = []

    def get(self, path: str, **query: str) -> Any:
        answer = self.answers.get(path, Missing(path))
        if isinstance(answer, Callable):
            answer = answer()
        if isinstance(answer, Exception):
            raise answer
        labels = dict(each.split("=") for each in query.get("labelSelector", "").split(",") if each)
        if labels:
            answer = {
                "items": [each for each in answer["items"] if labels.items() <= each["metadata"]["labels"].items()]
            }
        return answer

    def text(self, path: str, **query: str) -> Any:
        return self.get(path)

    def post(self, path: str, body: Json, **query: Any) -> Any:
        self.sent.append(("POST", path, body))
        answer = self.answers.get(f"POST {path}", body)
        if isinstance(answer, Callable):
            answer = answer(body)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def patch(self, path: str, body: Json) -> Json:
        self.sent.append(("PATCH", path, body))
        return body

    def delete(self, path: str, body: Json) -> None:
        self.sent.append(("DELETE", path, body))
        if isinstance(answer := self.answers.get(f"DELETE {path}"), Exception):
            raise answer


def asked(product: str = manifest.ANY, **more: Any) -> tuple[FleetRequest, Offer]:
    """A request for three nodes of 8 GPUs, and the offer that it is made of."""
    needed = Requirements.model_validate(
        {"provider": "kubernetes", "nodes": 3, "gpus_per_node": 8, "max_price_usd_per_hour": 9, "max_hours": 1}
    )
    about = {
        "fleet": "f",
        "generation": 1,
        "owner": "someone@example.org (laptop)",
        "ssh_public_key": "ssh-ed25519 AAAA",
    }
    times = {"lease_s": 300, "hard_cap_s": 600, **more}
    offer = {"market": "on-demand", "price_usd_per_hour": 0, "region": "c/n", "fetched_at": 0}
    request = FleetRequest.model_validate({**about, **times, "requirements": needed, "image": IMAGE})
    return request, Offer.model_validate({"provider": "kubernetes", "instance_type": product, "gpus": 8, **offer})


def gang_of(pods: list[Json], options: KubernetesOptions | None = None, **offer: Any) -> tuple[dict[str, Any], Handle]:
    """The answers of a cluster that has this gang, and its handle: a pod's status for each rank that has one."""
    request, sold = asked()
    made = manifest.job(request, sold.model_copy(update=offer), TOKEN, options or KubernetesOptions())
    common = {"creationTimestamp": stamp(NOW), "resourceVersion": "1"}
    made["metadata"] |= {"uid": "j", **common}
    template, items = made["spec"]["template"], list[Json]()
    for rank, status in enumerate(pods):
        about = template["metadata"] | {"name": f"p-{rank}", "uid": f"u-{rank}", **common}
        about["annotations"] = {**about["annotations"], manifest.INDEX: str(rank)}
        spec = {**template["spec"], **({"nodeName": "n1"} if "startTime" in status else {})}
        items.append({"metadata": about, "spec": spec, "status": status})
    answers = {f"{JOBS}/mgpu-{TOKEN}": made, JOBS: {"items": [made]}, PODS: {"items": items}, EVENTS: {"items": []}}
    answers["/api/v1/nodes/n1"] = {}
    answers |= {f"{PODS}/p-{rank}/log": f"{REACHED}\n" for rank in range(len(pods))}
    ids = tuple(f"{TOKEN[:10]}-{rank}" for rank in range(3))
    return answers, Handle(provider="kubernetes", region="c/n", fleet="f", generation=1, token=TOKEN, ids=ids)
