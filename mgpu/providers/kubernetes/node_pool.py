"""A node pool of CoreWeave's that is made for one gang and deleted with it.

Kind, fields and classes are those of CoreWeave's reference (docs.coreweave.com/products/cks/reference/node-pool). A
pool is in no namespace. Its nodes carry the gang's token as a label, which its pods select. CoreWeave's autoscaler is
on, down to no node, except for racks: where nobody is left to delete the pool, its nodes go once the pods have ended by
their own clocks.
"""

from __future__ import annotations

from contextlib import suppress

from mgpu.errors import InvalidRequest, PermissionDenied
from mgpu.plan.model import Offer
from mgpu.providers.base import Finding, FleetRequest
from mgpu.providers.kubernetes import manifest
from mgpu.providers.kubernetes.cluster import Exists, Json, Missing
from mgpu.providers.kubernetes.offered import Place
from mgpu.providers.kubernetes.options import NodePool

GROUP, PLURAL = "compute.coreweave.com", "nodepools"
PATH = f"/apis/{GROUP}/v1alpha1/{PLURAL}"
NAMESPACE = f"{manifest.DOMAIN}/namespace"
_RACKS = ("gb200", "gb300")  # instance types that come as racks: CoreWeave scales none of them by itself
VERBS = ("create", "get", "list", "delete")


def role() -> Json:
    """The least role that makes pools; of the whole cluster."""
    rules = [{"apiGroups": [GROUP], "resources": [PLURAL], "verbs": list(VERBS)}]
    about = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole"}
    return {**about, "metadata": {"name": "mgpu-node-pools"}, "rules": rules}


def pool(place: Place, request: FleetRequest, offer: Offer, token: str, wanted: NodePool) -> Json:
    """The pool of a gang."""
    nodes, meta = request.requirements.nodes, manifest.about(request, offer, token, pooled=True)
    meta["labels"][NAMESPACE] = place.namespace
    spec: Json = {
        "computeClass": wanted.compute_class,
        "instanceType": wanted.instance_type,
        "targetNodes": nodes,
        "nodeLabels": {manifest.TOKEN: token},
    }
    if not wanted.instance_type.casefold().startswith(_RACKS):
        spec |= {"autoscaling": True, "minNodes": 0, "maxNodes": nodes}
    about = {"apiVersion": f"{GROUP}/v1alpha1", "kind": "NodePool"}
    return {**about, "metadata": meta | {"name": manifest.name(token)}, "spec": spec}


def make(place: Place, wanted: Json, *, dry: bool = False) -> None:
    """Makes it, if there is none. Raises ProviderError; after Transient the same call comes again."""
    try:
        with suppress(Exists):
            _ = place.cluster.post(PATH, wanted, dryRun="All") if dry else place.cluster.post(PATH, wanted)
    except Missing as error:
        cure = "Leave `kubernetes.node_pool` out: `kubernetes.node_selector` says which nodes."
        raise InvalidRequest("kubernetes: this cluster is none of CoreWeave's", str(error), cure) from error


def find(place: Place, token: str, *, known: bool = False) -> Json | None:
    """The pool of a token; None: there is none, as far as this user may see. `known`: one was made, so that who may not
    see it is told: PermissionDenied."""
    try:
        return _asked(place, f"{PATH}/{manifest.name(token)}")
    except PermissionDenied:
        if known:
            raise
        return None


def owned(place: Place, owner: str, *, known: bool) -> list[Json]:
    """All pools of an owner's gangs in this namespace; none where the cluster has no such thing, or this user may see
    none. `known`: as in `find`."""
    selector = f"{manifest.OWNER}={manifest.labelled(owner)},{NAMESPACE}={place.namespace}"
    try:
        return (_asked(place, PATH, labelSelector=selector) or {"items": []})["items"]
    except PermissionDenied:
        if known:
            raise
        return []


def _asked(place: Place, path: str, **query: str) -> Json | None:
    """What there is; None: nothing, by the API server's word. Of a kind that it does not know its 404 gives no reason,
    as one of a gateway before it: then it is asked for its groups. Raises Missing: it is none of its words."""
    try:
        return place.cluster.get(path, **query)
    except Missing as error:
        if not error.by_api and any(each["name"] == GROUP for each in place.cluster.get("/apis")["groups"]):
            raise
        return None


def delete(place: Place, token: str) -> None:
    """Asks for its end; absent is success."""
    with suppress(Missing):
        place.cluster.delete(f"{PATH}/{manifest.name(token)}", {})


def said(found: Json) -> str:
    """What stands between a pool and its nodes, in CoreWeave's words."""
    conditions = found.get("status", {}).get("conditions", [])
    waits = [each for each in conditions if each.get("status") == "False"]
    told = [f"{each['type']}: {each.get('message') or each.get('reason', '')}" for each in waits]
    return "; ".join([f"waits for the nodes of node pool {found['metadata']['name']}", *told])


def finding(lacks: list[str]) -> Finding:
    """Whether this user may make pools; `lacks`: the verbs that are not allowed."""
    if not lacks:
        return Finding(subject="node pools", status="ok", detail="you may make them")
    cure = "Have an administrator bind you to this role."
    detail = f"you may not {', '.join(lacks)} {PLURAL}"
    return Finding(subject="node pools", status="failed", detail=detail, cure=cure, document=role())
