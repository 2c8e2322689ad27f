"""The provider contract over Kubernetes: a gang is one Indexed Job, whose name is the token. Nothing is remembered but
in the cluster.

A pod that is deleted stays, by a finalizer, until its end was seen (`gang.Pod.ended`); whoever gives the gang back
takes the finalizer away. The Job is not deleted but ends by its deadline, and stays for an hour, so that its name makes
no second gang; one that has not begun gives way to an empty Job.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from mgpu.errors import (
    AmbiguousCreate,
    AuthError,
    CleanupFailed,
    Conflict,
    InvalidRequest,
    NoOffer,
    PermissionDenied,
    ProviderError,
    RateLimited,
    Transient,
)
from mgpu.paths import expanded
from mgpu.plan.model import Offer, Requirements
from mgpu.providers.base import (
    UNBILLED,
    Finding,
    FleetRequest,
    FleetState,
    Handle,
    Intent,
    NodePhase,
    NodeState,
    Offers,
    Provider,
    ProxyCommand,
    of_each,
)
from mgpu.providers.kubernetes import manifest, node_pool, offered
from mgpu.providers.kubernetes.cluster import Access, Changed, Cluster, Exists, Json, Missing, in_cluster
from mgpu.providers.kubernetes.gang import Gang, Pod, stamp
from mgpu.providers.kubernetes.options import ENTRY, KubernetesOptions

_FORWARD = "mgpu.providers.kubernetes.forward"
_PODS_END_S = 120.0  # where no nodes go with them
_AT_ONCE_S = 1  # of grace: what is given back has nothing to save


class KubernetesProvider(Provider):
    """Asks a cluster for pods, waits in its queue, and gives them back."""

    name = KubernetesOptions.block
    capabilities = ENTRY.capabilities

    def __init__(
        self,
        options: Mapping[str, str] | None = None,
        *,
        cluster: Callable[[Access], Cluster] = Cluster,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`cluster` and `clock` (UNIX seconds) are for tests."""
        self._options = KubernetesOptions.of(options or {})
        self._cluster, self._clock = cluster, clock
        if not self._options.node_pool:
            self.capabilities = ENTRY.capabilities.model_copy(update={"end_s": _PODS_END_S})
        self._told: dict[str, Json] = {}  # by a pod's uid: how it is reached, which never changes

    def check(self) -> None:
        """The API answers, and shows this user's pods. Raises what is missing."""
        self._require()
        place = self._place()
        place.all(place.pods, f"{manifest.OWNER}=none")

    def configured(self) -> bool:
        """kubectl is there, and has somewhere to go."""
        named = self._options.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
        there = any(expanded(each).exists() for each in named.split(os.pathsep) if each)
        return shutil.which("kubectl") is not None and (there or in_cluster())

    def findings(self, requirements: Requirements | None, here: Callable[[], str]) -> tuple[Finding, ...]:
        """What this user may do in the namespace, its quotas and queue, and the request itself, without making it."""
        from mgpu.providers.kubernetes import findings

        wanted = self._of(requirements) if requirements else self._options
        try:
            self._require()
        except NoOffer as error:
            return (Finding.of(self.name, error),)
        return findings.look(self._place, wanted, requirements, self.offers)

    def queue_s(self) -> float:
        """As `kubernetes.queue_hours` allows."""
        return self._options.queue_s()

    def offers(self, requirements: Requirements) -> Offers:
        """The nodes by their GPUs; where this user may not see nodes, what is asked for, as it stands."""
        self._require()
        return offered.offers(self._place(), self._of(requirements), requirements, self._clock())

    def create(self, request: FleetRequest, offer: Offer, token: str) -> Handle:
        """Makes one Job, or finds the one that this token has made; its pods wait for room, and `describe` says so.

        Raises:
            Conflict: the token was used with other parameters, or given up.
            AmbiguousCreate: the answer was lost; `find` knows.
            QuotaExceeded, PermissionDenied, InvalidRequest: the API server refused.
            CleanupFailed: it refused the Job, and its node pool is there.
        """
        place = self._place(offer.region)
        if not request.image:
            raise InvalidRequest("kubernetes: no image is named", "Pods are containers of one.", "Name it: `image:`.")
        options = self._of(request.requirements)
        wanted = manifest.job(request, offer, token, options)
        pool = options.node_pool
        if pool:
            node_pool.make(place, node_pool.pool(place, request, offer, token, pool))
        try:
            made = self._made(place, wanted, token, request.digest(offer))
        except (Transient, AmbiguousCreate, RateLimited):
            raise
        except ProviderError as error:
            theirs = isinstance(error, Conflict) and not Gang(place.job(token), ()).over
            if pool and not theirs:
                what = f"kubernetes: node pool {manifest.name(token)} was made for a gang that is refused"
                raise CleanupFailed(what, str(error), f"`kubectl delete nodepool {manifest.name(token)}`") from error
            raise
        return self._handle(place, token, _about(made), stamp(made["metadata"]["creationTimestamp"]))

    def _made(self, place: offered.Place, wanted: Json, token: str, digest: str) -> Json:
        try:
            return place.cluster.post(place.jobs, wanted, makes=True)
        except Exists:
            made = place.job(token)
            said = made["metadata"]["annotations"].get(manifest.DIGEST) if made else None
            if made is None or said != digest:
                what = f"kubernetes: token {token} was used with other parameters, or given up"
                raise Conflict(what, scope="offer") from None
            return made

    def find(self, intent: Intent) -> Handle | None:
        """The gang whose Job, or whose node pool, has this token as its name."""
        place = self._place(intent.offer.region)
        made = place.job(intent.token)
        if made is None or manifest.DIGEST not in made["metadata"]["annotations"]:
            made = node_pool.find(place, intent.token, known=self._options.node_pool is not None)
        if made is None:
            return None
        return self._handle(place, intent.token, _about(made), stamp(made["metadata"]["creationTimestamp"]))

    def recall(self, request: FleetRequest, intent: Intent, ranks: tuple[int, ...]) -> Handle | None:
        """The same; and where there is none, none comes: an empty Job has the name from now on."""
        place = self._place(intent.offer.region)
        pooled = self._of(request.requirements).node_pool is not None
        about = manifest.about(request, intent.offer, intent.token, pooled=pooled)
        try:
            place.cluster.post(place.jobs, manifest.stone(intent.token, about["labels"], about["annotations"]))
        except Exists:
            pass
        return self.find(intent)

    def describe(self, handle: Handle) -> FleetState:
        """The Job and its pods as the API has them. A pod is gone when its container is said to have ended, or its node
        is no more; one that was deleted by force, or whose node is silent, may go on working."""
        place = self._place(handle.region, handle.account)
        gang = self._gang(place, handle.token)
        nodes = [self._node(place, gang, rank, name) for rank, name in enumerate(handle.ids)]
        if pool := self._pool(place, gang, handle.token):
            nodes = [_in_pool(node, pool) for node in nodes]
        up = sum(node.phase is NodePhase.RUNNING for node in nodes)
        for node in nodes if up else ():  # that wait beside those that hold their GPUs
            if node.queued:
                said = {"reason": f"{up} of {len(nodes)} pods run; waiting for: {node.reason}"}
                nodes[node.rank] = node.model_copy(update=said)
        return FleetState(nodes=tuple(nodes))

    def list_owned(self, owner: str) -> tuple[Handle, ...]:
        """All gangs of this owner in the namespace that have not ended. Pods of those that have are let go of."""
        place, selector = self._place(), f"{manifest.OWNER}={manifest.labelled(owner)}"
        jobs = {_token(job): job for job in place.all(place.jobs, selector)}
        pods = place.all(place.pods, selector)
        known = self._options.node_pool is not None or any(
            _about(each).get("pooled") for each in (*jobs.values(), *pods)
        )
        pools = {_token(pool): pool for pool in node_pool.owned(place, owner, known=known)}
        found = list[Handle]()
        for token, one in sorted({**pools, **{_token(pod): pod for pod in pods}, **jobs}.items()):
            gang = Gang(jobs.get(token), tuple(Pod(pod) for pod in pods if _token(pod) == token))
            if gang.over and all(pod.ended for pod in gang.pods) and token not in pools:
                for pod in gang.pods:
                    with suppress(Exists, PermissionDenied):  # who may only look leaves it
                        self._let_go(place, pod)
            else:
                found.append(self._handle(place, token, _about(one)))
        return tuple(found)

    def destroy(self, handle: Handle, nodes: tuple[str, ...] | None = None) -> bool:
        """Ends the Job and its pods: a gang ends as one. True when each pod's end has been seen."""
        if nodes is not None and not any(nodes):
            return True
        place = self._place(handle.region, handle.account)
        gang = self._gang(place, handle.token)

        def end_pool() -> None:
            if self._pool(place, gang, handle.token):
                node_pool.delete(place, handle.token)

        ends = [] if gang.over else [partial(self._end_job, place, handle.token, gang)]
        ends += [partial(self._end_pod, place, pod) for pod in gang.pods]
        if not all(of_each([*ends, end_pool], _unless_changed)):
            return False
        left = self._gang(place, handle.token)
        return left.over and not left.pods and self._pool(place, left, handle.token) is None

    def _end_job(self, place: offered.Place, token: str, gang: Gang) -> None:
        about = gang.job["metadata"] if gang.job else {}
        path = f"{place.jobs}/{manifest.name(token)}"
        if not gang.begun:
            same = {"uid": about["uid"], "resourceVersion": about["resourceVersion"]}
            place.cluster.delete(path, {"propagationPolicy": "Background", "preconditions": same})
            place.cluster.post(place.jobs, manifest.stone(token, about["labels"], about["annotations"]))
        elif gang.deadline_s != _AT_ONCE_S:
            place.cluster.patch(path, {"spec": {"activeDeadlineSeconds": _AT_ONCE_S}})

    def _end_pod(self, place: offered.Place, pod: Pod) -> None:
        grace_s = _AT_ONCE_S
        if self._ended(place, pod):
            self._let_go(place, pod)
            grace_s = 0  # of a node that is gone, nobody else would say that it has ended
        if pod.grace_s is None or pod.grace_s > grace_s:
            body = {"gracePeriodSeconds": grace_s, "preconditions": {"uid": pod.uid}}
            with suppress(Missing):
                place.cluster.delete(f"{place.pods}/{pod.name}", body)

    def _let_go(self, place: offered.Place, pod: Pod) -> None:
        """Takes the finalizer away: the API may forget the pod. Raises Changed: it was changed meanwhile."""
        others = [each for each in pod.finalizers if each != manifest.ENDED]
        if others != pod.finalizers:
            meta = {"resourceVersion": pod.version, "finalizers": others}
            with suppress(Missing):
                place.cluster.patch(f"{place.pods}/{pod.name}", {"metadata": meta})

    def _ended(self, place: offered.Place, pod: Pod) -> bool:
        """Whether nothing of the pod runs any more, by its node's word, or because its node is gone or its own clock
        has run out."""
        if pod.ended or self._now(place) > pod.latest_end:
            return True
        return (pod.going or pod.failed) and place.node(pod.node) is None

    def _pool(self, place: offered.Place, gang: Gang, token: str) -> Json | None:
        known = self._options.node_pool is not None if gang.pooled is None else gang.pooled
        return None if gang.pooled is False else node_pool.find(place, token, known=known)

    def _now(self, place: offered.Place) -> float:
        """UNIX seconds of the cluster's clock: pods' times are by it."""
        return self._clock() - place.cluster.ahead_s

    def _require(self) -> None:
        if not self.configured():
            why = "kubectl is not on PATH, or has no kubeconfig"
            raise NoOffer("no Kubernetes is known here", why, "Install kubectl, and log in to your cluster.")

    def _place(self, region: str = "", account: str = "") -> offered.Place:
        """Where pods are asked for. `region`: of an offer or a handle, which keeps its cluster whatever kubectl's
        current context is by now; `account`: the API server that it was at. Raises AuthError: it is another one now."""
        context, _, namespace = region.rpartition("/")
        options = self._options
        access = Access(options.kubeconfig or "", options.context or (context if context != offered.HERE else ""))
        if context == offered.HERE and not in_cluster():
            why = "It was asked for by an mgpu that ran in a pod of its cluster, without a kubeconfig."
            raise AuthError("kubernetes: this process is in no cluster", why, "Name its context: `kubernetes.context`.")
        known, usual, server = offered.names(access)
        if not namespace:
            context, namespace = known, options.namespace or usual
            access = Access(access.kubeconfig, context)
        if account and server and account != server:
            why = f"Context {context} is that of {server} now, the pods are at {account}."
            raise AuthError("kubernetes: another cluster has the context's name", why, "Name the first one's context.")
        return offered.Place(self._cluster(access), context or offered.HERE, namespace, server)

    def _of(self, requirements: Requirements) -> KubernetesOptions:
        return KubernetesOptions.of({**self._options.flat(), **requirements.provider_options})

    def _gang(self, place: offered.Place, token: str) -> Gang:
        pods = place.all(place.pods, f"{manifest.TOKEN}={token}")
        return Gang(place.job(token), tuple(map(Pod, pods)))

    def _handle(self, place: offered.Place, token: str, about: Mapping[str, Any], made_at: float = 0.0) -> Handle:
        return Handle(
            provider=self.name,
            region=place.region,
            fleet=about["fleet"],
            generation=about["generation"],
            token=token,
            ids=tuple(f"{token[:10]}-{rank}" for rank in range(about["nodes"])),
            made_at=made_at,
            account=place.server,
        )

    def _node(self, place: offered.Place, gang: Gang, rank: int, name: str) -> NodeState:
        if not name:
            return NodeState(rank=rank, id="", phase=NodePhase.TERMINATED, reason="no machine was made for this rank")
        pod = gang.of(int(name.rpartition("-")[2]))  # a handle may name a part of them
        if pod is None:
            phase, reason, cure = gang.without(lambda: place.events(gang.job))
            return NodeState(
                rank=rank, id=name, phase=phase, queued=phase is NodePhase.PENDING, reason=reason, cure=cure
            )
        ended = pod.ended or ((pod.going or pod.failed) and self._ended(place, pod))
        phase, reason, cure = pod.phase(ended, gang.given_back, self._now(place))
        if phase is NodePhase.TERMINATED and gang.replaced(pod):
            phase, reason = NodePhase.STOPPING, f"{reason}; another pod is in its place, which is given back, too"
        told, silent = self._reached(place, pod) if phase is NodePhase.RUNNING else ({}, "")
        price = pod.price_usd_per_hour
        return NodeState(
            rank=rank,
            id=name,
            phase=phase,
            queued=phase is NodePhase.PENDING and not pod.node,
            address=pod.address or "127.0.0.1",
            port=told.get("port", 22),
            user=told.get("user", ""),
            host_key=told.get("host_key", ""),
            via=self._via(place, pod, told["port"]) if told else None,
            private_address=pod.address,
            price_usd_per_hour=self._options.price_usd_per_hour if price is None else price,
            began_at=pod.began_at,
            hard_cap_at=pod.hard_cap_at,
            reason=reason or silent,
            cure=cure,
        )

    def _reached(self, place: offered.Place, pod: Pod) -> tuple[Json, str]:
        """How the pod's SSH server is reached, as its log says; or nothing, and why not yet."""
        if pod.uid not in self._told:
            try:
                log = place.cluster.text(f"{place.pods}/{pod.name}/log", limitBytes="8192", container="node")
            except (InvalidRequest, Transient) as error:  # the container is being made, or its node is silent
                return {}, f"Kubernetes: its log, which says how it is reached, cannot be read: {error.why}"
            told = next((line for line in log.splitlines() if line.startswith('{"mgpu"')), "")
            if not told:
                return {}, "Kubernetes: its log does not say yet how it is reached"
            self._told[pod.uid] = json.loads(told)["mgpu"]
        return self._told[pod.uid], ""

    def _via(self, place: offered.Place, pod: Pod, port: int) -> ProxyCommand:
        access = place.cluster.access
        words = (
            "{python}",
            "-P",
            "-m",
            _FORWARD,
            place.namespace,
            pod.name,
            str(port),
            access.kubeconfig,
            access.context,
        )
        return ProxyCommand(command=words, in_process=True)


def _unless_changed(end: Callable[[], None]) -> bool:
    """False: somebody else has written into it meanwhile, who may do so at any time; what it is now the next look
    shows."""
    try:
        end()
    except Changed:
        return False
    return True


def _token(seen: Json) -> str:
    return seen["metadata"]["labels"][manifest.TOKEN]


def _about(seen: Json) -> Json:
    return json.loads(seen["metadata"]["annotations"][manifest.ABOUT])


def _in_pool(node: NodeState, pool: Json) -> NodeState:
    """A node whose pod waits for its pool says why; one whose pod is gone stays until the pool is."""
    if node.phase in UNBILLED:
        why = f"{node.reason}; its node pool {pool['metadata']['name']} is there"
        return node.model_copy(update={"phase": NodePhase.STOPPING, "reason": why})
    if node.queued and not node.cure:
        return node.model_copy(update={"reason": f"{node_pool.said(pool)}; {node.reason}"})
    return node
