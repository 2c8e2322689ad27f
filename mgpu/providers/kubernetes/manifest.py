"""A gang as Kubernetes is asked for it: one Indexed Job, whose pods begin with what `mgpu` needs on a node."""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Mapping
from importlib import resources
from typing import Any

from mgpu.plan.model import Offer
from mgpu.providers import kubernetes
from mgpu.providers.base import FleetRequest
from mgpu.providers.kubernetes.cluster import Json
from mgpu.providers.kubernetes.options import KubernetesOptions
from mgpu.providers.shipped import packed

DOMAIN = "mgpu.dev"
OWNER, TOKEN, ABOUT, DIGEST = f"{DOMAIN}/owner", f"{DOMAIN}/token", f"{DOMAIN}/about", f"{DOMAIN}/digest"
ENDED = f"{DOMAIN}/ended"
"""The finalizer of pods: one that is deleted, by force too, stays until its end has been seen."""
INDEX = "batch.kubernetes.io/job-completion-index"
QUEUE = "kueue.x-k8s.io/queue-name"
# what NVIDIA's and AMD's discovery, and the clouds, say of a node's GPUs
PRODUCTS = ("nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator")
CONTAINER = "node"
"""The one of a pod that is a node; a mesh may put others beside it."""
# a node that is moved ends the whole gang, and a mesh's container would outlive it
_LEFT_ALONE = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
    "sidecar.istio.io/inject": "false",
}
ANY = "node"
"""The type of nodes of which nothing is known, or that need no GPUs."""
KEPT_S = 3600  # that an ended Job stays: its name is the token, and no late request makes a second gang of it
_FOLDER, _SHM = "/mgpu", "/dev/shm"  # noqa: S108  in a pod
_BOOT = """import base64, io, os, sys, tarfile
tarfile.open(fileobj=io.BytesIO(base64.b64decode(sys.argv[1]))).extractall(sys.argv[3])
open(sys.argv[3] + "/asked.json", "w").write(sys.argv[2])
os.execv(sys.executable, [sys.executable, sys.argv[3] + "/pod.py"])"""


def name(token: str) -> str:
    """The Job's."""
    return f"mgpu-{token}"


def labelled(owner: str) -> str:
    """An owner as a label may say it."""
    return hashlib.sha256(owner.encode()).hexdigest()[:40]


def job(request: FleetRequest, offer: Offer, token: str, options: KubernetesOptions) -> Json:
    """The Job of a gang."""
    nodes = request.requirements.nodes
    spec = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,  # attempts are mgpu's
        "podReplacementPolicy": "Failed",
        "suspend": options.queue is not None,  # Kueue lets it go
        "activeDeadlineSeconds": _until(request, request.hard_cap_s + options.queue_s()),
        "ttlSecondsAfterFinished": KEPT_S,
        "template": {
            "metadata": _of_pods(about(request, offer, token, pooled=options.node_pool is not None)),
            "spec": _pod(request, offer, token, options),
        },
    }
    found = about(request, offer, token, pooled=options.node_pool is not None)
    found["annotations"][DIGEST] = request.digest(offer)
    if options.queue:
        found["labels"][QUEUE] = options.queue
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": found | {"name": name(token)}, "spec": spec}


def _of_pods(known: Json) -> Json:
    return {**known, "annotations": {**known["annotations"], **_LEFT_ALONE}, "finalizers": [ENDED]}


def stone(token: str, labels: Mapping[str, str], annotations: Mapping[str, str]) -> Json:
    """A Job without pods in a gang's place: from now on the token makes nothing. Kubernetes removes it."""
    pod = {"restartPolicy": "Never", "containers": [{"name": "none", "image": "none"}]}
    spec = {"completionMode": "Indexed", "completions": 0, "parallelism": 0, "backoffLimit": 0}
    meta = {"name": name(token), "labels": dict(labels), "annotations": dict(annotations)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": meta,
        "spec": {**spec, "ttlSecondsAfterFinished": KEPT_S, "template": {"spec": pod}},
    }


def about(request: FleetRequest, offer: Offer, token: str, *, pooled: bool) -> Json:
    """What Job, pods and a node pool carry: whose they are, what a pod's hour costs, and whether there is a pool."""
    said = {"owner": request.owner, "fleet": request.fleet, "generation": request.generation}
    said |= {"nodes": request.requirements.nodes, "ends_by": request.ends_by, "pooled": pooled}
    said["price_usd_per_hour"] = offer.price_usd_per_hour  # whoever looks later may have no run file
    labels = {"app.kubernetes.io/managed-by": "mgpu", OWNER: labelled(request.owner), TOKEN: token}
    return {"labels": labels, "annotations": {ABOUT: json.dumps(said)}}


def _until(request: FleetRequest, seconds: float) -> int:
    by_s = request.ends_by - time.time() if request.ends_by else seconds
    return max(1, math.ceil(min(seconds, by_s)))


def _pod(request: FleetRequest, offer: Offer, token: str, options: KubernetesOptions) -> Json:
    needed = request.requirements
    wanted = {
        options.gpu_resource: needed.gpus_per_node or None,
        "cpu": options.cpus_per_node,
        "memory": f"{options.memory_gib}Gi" if options.memory_gib else None,
        **options.resources,
    }
    amounts = {resource: str(amount) for resource, amount in wanted.items() if amount is not None}
    asked = {key: getattr(request, key) for key in ("lease_s", "hard_cap_s", "ends_by", "ssh_public_key")}
    asked |= {"token": token, "notice_s": options.notice_s}
    files = packed({"pod.py": resources.files(kubernetes).joinpath("pod.py").read_text(encoding="utf-8")})
    volumes = {"mgpu": (_FOLDER, {"emptyDir": {"sizeLimit": f"{needed.disk_gib}Gi"}}, False)}
    memory = {"medium": "Memory"} | ({"sizeLimit": f"{options.shm_gib}Gi"} if options.shm_gib else {})
    volumes["shm"] = (_SHM, {"emptyDir": memory}, False)
    for number, (path, claim) in enumerate(options.volumes.items()):
        claimed, _, mode = claim.partition(":")
        source = {"persistentVolumeClaim": {"claimName": claimed, "readOnly": mode == "ro"}}
        volumes[f"claim-{number}"] = (path, source, mode == "ro")
    container = {
        "name": CONTAINER,
        "image": request.image,
        "command": ["python3", "-c", _BOOT, files, json.dumps(asked), _FOLDER],
        "resources": {"limits": amounts, "requests": amounts},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": volume, "mountPath": path, "readOnly": read_only}
            for volume, (path, _, read_only) in volumes.items()
        ],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": _until(request, request.hard_cap_s),  # by the node's own clock, from its start
        "terminationGracePeriodSeconds": options.notice_s,
        "enableServiceLinks": False,
        "automountServiceAccountToken": options.service_account is not None,
        "nodeSelector": options.node_selector | ({TOKEN: token} if options.node_pool else {}),
        "tolerations": [toleration(each) for each in (*options.tolerations, *_of_pool(options))],
        "containers": [container],
        "volumes": [{"name": volume, **source} for volume, (_, source, _) in volumes.items()],
    }
    if offer.instance_type != ANY and not options.node_pool:
        values = [offer.instance_type]
        terms = [{"matchExpressions": [{"key": key, "operator": "In", "values": values}]} for key in PRODUCTS]
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        pod["affinity"] = {"nodeAffinity": required}
    if options.priority_class:
        pod["priorityClassName"] = options.priority_class
    if options.service_account:
        pod["serviceAccountName"] = options.service_account
    if options.image_pull_secret:
        pod["imagePullSecrets"] = [{"name": options.image_pull_secret}]
    if group := options.fs_group or options.run_as_user:
        # of a large volume only its root is looked at: nobody walks through a data set at each start
        pod["securityContext"] = {"fsGroup": group, "fsGroupChangePolicy": "OnRootMismatch"}
    if user := options.run_as_user:
        pod["securityContext"] |= {"runAsUser": user, "runAsGroup": user, "runAsNonRoot": True}
        pod["securityContext"]["seccompProfile"] = {"type": "RuntimeDefault"}
        container["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return pod


def _of_pool(options: KubernetesOptions) -> tuple[str, ...]:
    """The taint of CoreWeave's spot nodes."""
    spot = options.node_pool is not None and options.node_pool.market == "spot"
    return ("qos.coreweave.cloud/interruptable:NoExecute",) if spot else ()


def toleration(text: str) -> Json:
    """As kubectl writes a taint: `key=value:Effect`; without a value any, without an effect all; `*` is every taint."""
    if text == "*":
        return {"operator": "Exists"}
    found = re.fullmatch(r"([^=:]+)(?:=([^:]*))?(?::(\w+))?", text)
    key, value, effect = found.groups() if found else (text, None, None)
    same = {"operator": "Exists"} if value is None else {"operator": "Equal", "value": value}
    return {"key": key, **same, **({"effect": effect} if effect else {})}
