"""A namespace of a cluster, as far as this user sees it, and what its nodes offer."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from mgpu.errors import PermissionDenied
from mgpu.plan.model import Offer, Requirements
from mgpu.providers.base import Offers
from mgpu.providers.kubernetes import manifest
from mgpu.providers.kubernetes.cluster import Access, Cluster, Json, Missing
from mgpu.providers.kubernetes.options import KubernetesOptions

HERE = "in-cluster"
"""Stands for the context where there is none: mgpu runs in a pod."""
_UNITS = {unit: 1000.0**power for power, unit in enumerate(["n", "u", "m", "", "k", "M", "G", "T", "P", "E"], -3)}
_UNITS |= {unit: 1024.0**power for power, unit in enumerate(["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"], 1)}
_SIZED = ("V100", "A100", "H100")  # those that come in several sizes have the size in their name
_LEFT_OUT = re.compile(
    r"NVIDIA|AMD|Instinct|GeForce|Tesla|Quadro|SXM\d*|PCIe|NVL|HBM\w*|OAM|Server|Workstation|Edition|\d+GB",
    re.IGNORECASE,
)


@functools.cache
def names(access: Access) -> tuple[str, str, str]:
    """Context, namespace and API server that kubectl uses; asked for once: all of a process speaks to one cluster."""
    return access.place()


@dataclass(frozen=True)
class Place:
    """Where pods are asked for."""

    cluster: Cluster
    context: str
    namespace: str
    server: str = ""

    @property
    def region(self) -> str:
        """As offers and handles say it."""
        return f"{self.context}/{self.namespace}"

    @property
    def jobs(self) -> str:
        """The path of all Jobs."""
        return f"/apis/batch/v1/namespaces/{self.namespace}/jobs"

    @property
    def pods(self) -> str:
        """The path of all pods."""
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def job(self, token: str) -> Json | None:
        """The Job of a token."""
        return self._one(f"{self.jobs}/{manifest.name(token)}")

    def node(self, name: str) -> Json | None:
        """A node; None: the cluster has it no more. Who may not see nodes is told of none that it is gone."""
        try:
            return self._one(f"/api/v1/nodes/{name}")
        except PermissionDenied:
            return {}

    def all(self, path: str, selector: str) -> list[Json]:
        """The objects that have these labels. Raises Transient: what answers is no API server, and nothing is known."""
        return self.cluster.get(path, labelSelector=selector)["items"]

    def events(self, job: Json | None) -> str:
        """What was last said of a Job whose pods cannot be made; empty: nothing, or this user may not see it."""
        if job is None:
            return ""
        path = f"/api/v1/namespaces/{self.namespace}/events"
        selector = f"involvedObject.uid={job['metadata']['uid']},type=Warning"
        try:
            found = self.cluster.get(path, fieldSelector=selector)["items"]
        except PermissionDenied:
            return ""
        newest = max(found, key=lambda each: each.get("lastTimestamp") or each.get("eventTime") or "", default=None)
        return f"Kubernetes: {newest['reason']}: {newest['message']}" if newest else ""

    def _one(self, path: str) -> Json | None:
        try:
            return self.cluster.get(path)
        except Missing as error:  # all clusters have these kinds of objects
            if not error.by_api:
                raise
            return None


def amount(text: object, unknown: float = 0.0) -> float:
    """A quantity of Kubernetes': `64`, `500m`, `256Gi`, `1E3`; `unknown`: what stands for one that cannot be read."""
    found = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]*)", str(text))
    return float(found[1]) * _UNITS[found[2]] if found and found[2] in _UNITS else unknown


def gpu_name(product: str) -> str:
    """As run files name it: `NVIDIA-H100-80GB-HBM3` is H100-80GB, `nvidia-l4` L4, `AMD_Instinct_MI300X_OAM` MI300X."""
    words = [word for word in re.split(r"[-_ ]", product) if word and not _LEFT_OUT.fullmatch(word)]
    named = [word.upper() if word[:1].islower() else word for word in words]
    size = re.search(r"\d+GB", product, re.IGNORECASE)
    sized = [size[0].upper()] if size and named[:1] and named[0] in _SIZED else []
    return "-".join(named + sized)


def offers(place: Place, options: KubernetesOptions, needed: Requirements, now: float) -> Offers:
    """One for each kind of GPU that nodes have; where nodes may not be seen, the request as it stands. `now`: UNIX
    seconds."""
    source = f"kubernetes {place.region}"
    common: dict[str, Any] = {
        "provider": options.block,
        "gpus": needed.gpus_per_node,
        "market": "on-demand",
        "price_usd_per_hour": options.price_usd_per_hour,
        "region": place.region,
        "fetched_at": now,
    }
    if options.node_pool:
        common |= {"market": options.node_pool.market}
        offer = Offer(instance_type=options.node_pool.instance_type, gpu=_asked(needed), vcpus=0, **common)
        note = "nodes come when CoreWeave has them: which GPUs the instance type has is not looked up"
        return Offers(offers=(offer,), source=source, notes=(note,))
    try:
        seen = place.cluster.get("/api/v1/nodes")["items"]
    except PermissionDenied:
        offer = Offer(instance_type=manifest.ANY, gpu=_asked(needed), vcpus=options.cpus_per_node or 0, **common)
        note = "nodes may not be listed: which GPUs there are is not known; `kubernetes.node_selector` says which nodes"
        return Offers(offers=(offer,), source=source, notes=(note,))
    usable = [node for node in seen if _usable(node, options)]
    groups: dict[str, list[Json]] = {}
    for node in usable:
        if amount(_has(node, options.gpu_resource)) >= needed.gpus_per_node:
            groups.setdefault(_product(node) if needed.gpus_per_node else manifest.ANY, []).append(node)
    found, notes = list[Offer](), list[str]()
    for product, nodes in groups.items():
        cpus, memory = (min(amount(_has(node, each)) for node in nodes) for each in ("cpu", "memory"))
        offer = Offer(
            instance_type=product,
            gpu=_gpu(product, options, needed),
            vcpus=options.cpus_per_node or int(cpus),
            memory_gib=round(options.memory_gib or memory / 2**30, 1),
            **common,
        )
        found.append(offer)
        if len(nodes) < needed.nodes:
            notes.append(
                f"{offer.gpu or product}: {len(nodes)} nodes now; {needed.nodes} come only if the cluster grows"
            )
    if not usable and seen:
        notes.append(f"none of {len(seen)} nodes is ready, has the labels of `node_selector`, and no other taint")
    if not found:
        found.append(Offer(instance_type=manifest.ANY, gpu=_asked(needed), vcpus=options.cpus_per_node or 0, **common))
        notes.append("no node has what is asked for now: pods come only if the cluster grows")
    return Offers(offers=tuple(found), source=source, notes=tuple(notes))


def _asked(needed: Requirements) -> str | None:
    return needed.gpu[0] if needed.gpu and needed.gpus_per_node else None


def _gpu(product: str, options: KubernetesOptions, needed: Requirements) -> str | None:
    """Nodes that no label names the GPUs of have those that are asked for, where the run file says which nodes."""
    if product == manifest.ANY or not needed.gpus_per_node:
        return _asked(needed) if options.node_selector else None
    return gpu_name(product)


def _has(node: Json, resource: str) -> object:
    return node.get("status", {}).get("allocatable", {}).get(resource, 0)


def _product(node: Json) -> str:
    labels = node["metadata"].get("labels", {})
    return next((labels[key] for key in manifest.PRODUCTS if labels.get(key)), manifest.ANY)


def _usable(node: Json, options: KubernetesOptions) -> bool:
    """Whether a pod may come to it: ready, with the labels, and no taint that the pod does not stand."""
    labels, spec = node["metadata"].get("labels", {}), node.get("spec", {})
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in node["status"].get("conditions", []))
    chosen = all(labels.get(key) == value for key, value in options.node_selector.items())
    hard = [each for each in spec.get("taints", []) if each["effect"] != "PreferNoSchedule"]
    stood = [manifest.toleration(each) for each in options.tolerations]
    return ready and chosen and all(any(_stands(each, taint) for each in stood) for taint in hard)


def _stands(toleration: Json, taint: Json) -> bool:
    same = toleration.get("key") in (None, taint["key"]) and toleration.get("effect") in (None, taint["effect"])
    return same and (toleration["operator"] == "Exists" or toleration.get("value") == taint.get("value", ""))
