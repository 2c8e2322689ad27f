"""What `mgpu check kubernetes` looks at: rights, quotas, queue, and the request itself, without making it."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from mgpu.errors import MgpuError, NoOffer, QuotaExceeded
from mgpu.plan.model import Requirements
from mgpu.providers.base import Finding, FleetRequest, Offers
from mgpu.providers.kubernetes import manifest, node_pool
from mgpu.providers.kubernetes.cluster import Exists, Json, Missing
from mgpu.providers.kubernetes.gang import too_small
from mgpu.providers.kubernetes.offered import Place
from mgpu.providers.kubernetes.options import KubernetesOptions

# group, resource, subresource, verbs: what a run needs in its namespace
NEEDED: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("batch", "jobs", "", ("create", "get", "list", "patch", "delete")),
    ("", "pods", "", ("get", "list", "patch", "delete")),
    ("", "pods", "log", ("get",)),
    ("", "pods", "portforward", ("get", "create")),  # since Kubernetes 1.35 a WebSocket needs both
    ("", "events", "", ("list",)),
)
# what a check tells besides
_KUEUE = "kueue.x-k8s.io"
_USEFUL = (("", "resourcequotas", "", ("list",)), (_KUEUE, "localqueues", "", ("get",)))
_NODES = ("list", "get")  # of the cluster: what is on sale, and whether a node that is silent is gone
_OLDEST = 29  # the version of Kubernetes 1 that has `podReplacementPolicy` switched on
_CONNECT_S = 5.0
_ANY_IMAGE = f"none@sha256:{'0' * 64}"


def roles(namespace: str) -> tuple[Json, Json]:
    """The least role that has all of `NEEDED`, and sees what bounds it; and the one that shows the cluster's nodes."""
    rules = [
        {"apiGroups": [group], "resources": [f"{resource}/{sub}" if sub else resource], "verbs": list(verbs)}
        for group, resource, sub, verbs in (*NEEDED, *_USEFUL)
    ]
    common = {"apiVersion": "rbac.authorization.k8s.io/v1"}
    nodes = [{"apiGroups": [""], "resources": ["nodes"], "verbs": list(_NODES)}]
    return (
        {**common, "kind": "Role", "metadata": {"name": "mgpu", "namespace": namespace}, "rules": rules},
        {**common, "kind": "ClusterRole", "metadata": {"name": "mgpu-sees-nodes"}, "rules": nodes},
    )


def look(
    where: Callable[[], Place],
    options: KubernetesOptions,
    needed: Requirements | None,
    offers: Callable[[Requirements], Offers],
) -> tuple[Finding, ...]:
    """One line for each thing that renting needs."""
    try:
        place = where()
        found = [_server(place), *_direct(place), _rights(place), _nodes(place), *_quotas(place)]
        if options.node_pool:
            lacks = [each for each in node_pool.VERBS if not _may(place, each, node_pool.GROUP, node_pool.PLURAL)]
            found.append(node_pool.finding(lacks))
        if options.queue:
            found.append(_queue(place, options.queue))
    except MgpuError as error:
        return (Finding.of("kubernetes", error),)
    if needed:
        found.append(_request(place, options, needed, offers))
    return tuple(found)


def _server(place: Place) -> Finding:
    told = place.cluster.get("/version")
    found = re.match(r"v1\.(\d+)", told["gitVersion"])
    if found and int(found[1]) < _OLDEST:
        detail = f"{told['gitVersion']} answers: older than 1.{_OLDEST}, which mgpu is tried with"
        cure = "Expect mistakes, or have the cluster upgraded."
        return Finding(subject=f"kubernetes {place.region}", status="warning", detail=detail, cure=cure)
    return Finding(subject=f"kubernetes {place.region}", status="ok", detail=f"{told['gitVersion']} answers")


def _direct(place: Place) -> list[Finding]:
    """What kubectl's calls go through and connections to pods do not, where this machine gets nowhere without it."""
    proxy, server = place.cluster.access.http_proxy(), urlsplit(place.server)
    if not proxy:
        return []
    try:
        socket.create_connection((server.hostname or "", server.port or 443), _CONNECT_S).close()
    except OSError as error:
        detail = f"they do not go through HTTP proxy {proxy}, and {server.netloc} is not reached without it: {error}"
        cure = "Start mgpu where it is reached directly (a login node, a pod of the cluster), or through a VPN."
        return [Finding(subject="connections to pods", status="failed", detail=detail, cure=cure)]
    return []


def _may(place: Place, verb: str, group: str, resource: str, sub: str = "", namespace: str = "") -> bool:
    asked = {"verb": verb, "group": group, "resource": resource, "subresource": sub, "namespace": namespace}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    answer = place.cluster.post(path, {**review, "spec": {"resourceAttributes": asked}})
    return bool(answer["status"]["allowed"])


def _rights(place: Place) -> Finding:
    lacks = [
        f"{verb} {resource}{f'/{sub}' if sub else ''}"
        for group, resource, sub, verbs in NEEDED
        for verb in verbs
        if not _may(place, verb, group, resource, sub, place.namespace)
    ]
    subject = f"your rights in {place.namespace}"
    if not lacks:
        return Finding(subject=subject, status="ok", detail="all that a run needs")
    cure = "Have an administrator apply this role, and bind it to you."
    detail = f"you may not {', '.join(lacks)}"
    return Finding(subject=subject, status="failed", detail=detail, cure=cure, document=roles(place.namespace)[0])


def _nodes(place: Place) -> Finding:
    subject = "nodes"
    lacks = [verb for verb in _NODES if not _may(place, verb, "", "nodes")]
    if not lacks:
        return Finding(subject=subject, status="ok", detail="you may see them: offers name their GPUs")
    detail = f"you may not {' or '.join(lacks)} them: the request is an offer as it stands"
    cure = "Name their labels in `kubernetes.node_selector`, or have an administrator bind you to this role."
    document = roles(place.namespace)[1]
    return Finding(subject=subject, status="warning", detail=detail, cure=cure, document=document)


def _quotas(place: Place) -> list[Finding]:
    path = f"/api/v1/namespaces/{place.namespace}/resourcequotas"
    try:
        quotas = place.cluster.get(path)["items"]
    except MgpuError:
        return []  # who may not see them is told by the request
    found = []
    for quota in quotas:
        hard, used = (quota.get("status", {}).get(key, {}) for key in ("hard", "used"))
        detail = ", ".join(f"{name}: {used.get(name, '0')} of {most} used" for name, most in sorted(hard.items()))
        found.append(Finding(subject=f"quota {quota['metadata']['name']}", status="ok", detail=detail))
    return found


def _queue(place: Place, queue: str) -> Finding:
    subject = f"queue {queue}"
    try:
        version = place.cluster.get(f"/apis/{_KUEUE}")["preferredVersion"]["version"]
        path = f"/apis/{_KUEUE}/{version}/namespaces/{place.namespace}/localqueues/{queue}"
        told: dict[str, Any] = place.cluster.get(path).get("status", {})
    except Missing:
        cure = "`kubectl get localqueues` lists them; without Kueue leave `kubernetes.queue` out."
        return Finding(
            subject=subject, status="failed", detail=f"{place.namespace} has no such queue of Kueue's", cure=cure
        )
    except MgpuError as error:
        return Finding(subject=subject, status="warning", detail=f"not seen: {error.why or error.what}")
    waits, runs = told.get("pendingWorkloads", 0), told.get("admittedWorkloads", 0)
    return Finding(subject=subject, status="ok", detail=f"{runs} workloads run, {waits} wait")


def _request(
    place: Place, options: KubernetesOptions, needed: Requirements, offers: Callable[[Requirements], Offers]
) -> Finding:
    """What the API server says to the Job, and to one of its pods: quotas of pods hold only there."""
    subject, image, tried = "the request", _ANY_IMAGE, True
    try:
        wanted = {gpu.casefold() for gpu in needed.gpu}
        fits = [each for each in offers(needed).offers if not wanted or (each.gpu or "").casefold() in wanted]
        if not fits:
            raise NoOffer("no node that you may use has such GPUs", "", "`mgpu offers` lists all.")
        job = manifest.job(_asked(needed, image), fits[0], "0" * 40, options)
        if pool := options.node_pool:
            node_pool.make(place, node_pool.pool(place, _asked(needed, image), fits[0], "0" * 40, pool), dry=True)
        place.cluster.post(place.jobs, job, dryRun="All")
        tried = _may(place, "create", "", "pods", "", place.namespace)
        if tried:
            template = job["spec"]["template"]
            meta = {**template["metadata"], "name": job["metadata"]["name"], "finalizers": []}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]}
            try:
                place.cluster.post(place.pods, pod, dryRun="All")
            except QuotaExceeded as error:
                if too_small(error.why, needed.nodes):
                    raise
                waits = f"a launch waits, for {options.queue_hours:g} h at most: {error.why}"
                return Finding(subject=subject, status="warning", detail=waits, cure=error.next_step)
    except Exists:
        pass  # of this name, which no gang has
    except MgpuError as error:
        return Finding.of(subject, error)
    # a run needs no right to it: no warning
    why = "the Job; its pods were not tried, as you may not create pods: limits and pod security a launch tells"
    return Finding(subject=subject, status="ok", detail=f"the API server would take {'it' if tried else why}")


def _asked(needed: Requirements, image: str) -> FleetRequest:
    return FleetRequest(
        fleet="check",
        generation=1,
        owner="check",
        requirements=needed,
        ssh_public_key="none",
        lease_s=60,
        hard_cap_s=needed.max_hours * 3600,
        image=image,
    )
