"""A node pool of CoreWeave's is made with a gang and goes with it, whatever comes between."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.clock import Clock
from fakes.kube.scripted import EVENTS, JOBS, NOW, PODS, RUNNING, TOKEN, UNPLACED, Scripted, asked, gang_of, stamp
from mgpu_train.timeouts import Timeouts

from mgpu import acquire
from mgpu.errors import (
    AmbiguousCreate,
    CleanupFailed,
    Conflict,
    InvalidRequest,
    PermissionDenied,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    SpecError,
    Transient,
)
from mgpu.journal import Journal
from mgpu.plan.model import Offer
from mgpu.providers.base import FleetRequest, Intent, NodePhase
from mgpu.providers.kubernetes import manifest, node_pool, offered
from mgpu.providers.kubernetes.cluster import Exists, refused
from mgpu.providers.kubernetes.offered import Place
from mgpu.providers.kubernetes.options import KubernetesOptions
from mgpu.providers.kubernetes.provider import KubernetesProvider
from mgpu.spec.load import loads

KIND = "gd-8xh100ib-i128"
OPTIONS = KubernetesOptions.model_validate({"node_pool": {"instance_type": KIND, "compute_class": "spot"}})
POOL = f"{node_pool.PATH}/mgpu-{TOKEN}"
OWNER = "someone@example.org (laptop)"


@pytest.fixture(autouse=True)
def no_kubectl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offered, "names", lambda access: ("c", "n", "https://s"))


def provider(answers: dict[str, Any]) -> tuple[KubernetesProvider, Scripted]:
    """A provider, and its cluster."""
    scripted: Any = Scripted(answers)
    return KubernetesProvider(OPTIONS.flat(), cluster=lambda _: scripted, clock=lambda: NOW), scripted


def pooled() -> tuple[FleetRequest, Offer]:
    request, offer = asked(KIND)
    needed = request.requirements.model_copy(update={"provider_options": OPTIONS.flat()})
    return request.model_copy(update={"requirements": needed}), offer


def pool() -> dict[str, Any]:
    scripted: Any = Scripted({})
    assert OPTIONS.node_pool
    made = node_pool.pool(Place(scripted, "c", "n"), *pooled(), TOKEN, OPTIONS.node_pool)
    return {**made, "metadata": made["metadata"] | {"creationTimestamp": stamp(NOW)}}


def intent() -> Intent:
    return Intent(fleet="f", generation=1, owner=OWNER, token=TOKEN, offer=pooled()[1])


def answered(job: Any = None) -> dict[str, Any]:
    """What the API server answers to a gang's Job: `job`, or that it was made."""
    made = {"metadata": {"creationTimestamp": stamp(NOW)}}
    return {f"POST {JOBS}": job or (lambda body: {**body, "metadata": body["metadata"] | made["metadata"]})}


def test_a_pool_is_made_first_and_the_gangs_pods_come_to_its_nodes_alone():
    scripted: Any = Scripted(answered())
    KubernetesProvider(OPTIONS.flat(), cluster=lambda _: scripted).create(*pooled(), TOKEN)
    (_, path, made), (_, _, job) = scripted.sent
    assert path == node_pool.PATH
    assert made["apiVersion"] == "compute.coreweave.com/v1alpha1"
    assert (made["kind"], made["metadata"]["name"]) == ("NodePool", f"mgpu-{TOKEN}")
    nodes = {"targetNodes": 3, "maxNodes": 3, "minNodes": 0, "autoscaling": True}
    about = {"instanceType": KIND, "computeClass": "spot", "nodeLabels": {manifest.TOKEN: TOKEN}}
    assert made["spec"] == nodes | about
    pod = job["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {manifest.TOKEN: TOKEN}
    assert "affinity" not in pod, "an instance type is no product of NVIDIA's"
    spot = {"key": "qos.coreweave.cloud/interruptable", "operator": "Exists", "effect": "NoExecute"}
    assert pod["tolerations"] == [spot]


@pytest.mark.parametrize(("kind", "scales"), [("gb200-4x", False), ("GB300-4x", False), (KIND, True)])
def test_a_pool_on_demand_has_no_taint_of_spots_and_racks_are_not_scaled(kind: str, scales: bool):
    options = KubernetesOptions.model_validate({"node_pool": {"instance_type": kind}})
    cluster: Any = Scripted(answered())
    KubernetesProvider(options.flat(), cluster=lambda _: cluster).create(*asked(kind), TOKEN)
    (_, _, made), (_, _, job) = cluster.sent
    assert job["spec"]["template"]["spec"]["tolerations"] == []
    assert made["spec"]["targetNodes"] == 3
    assert [made["spec"].get(each) for each in ("autoscaling", "minNodes")] == ([True, 0] if scales else [None, None])


def living(answers: dict[str, Any]) -> Scripted:
    """A cluster that keeps the pool that is made, until it is deleted; the first two DELETEs get no answer."""

    class Living(Scripted):
        lost = 2

        def post(self, path: str, body: Any, **query: Any) -> Any:
            if path == node_pool.PATH:
                self.answers[f"{path}/{body['metadata']['name']}"] = {
                    **body,
                    "metadata": body["metadata"] | {"creationTimestamp": stamp(NOW)},
                }
            return super().post(path, body, **query)

        def delete(self, path: str, body: Any) -> None:
            super().delete(path, body)
            self.lost -= 1
            if self.lost >= 0:
                raise Transient("no answer")
            del self.answers[path]

    return Living({PODS: {"items": []}, EVENTS: {"items": []}, **answers})


@pytest.mark.parametrize(
    "refusal", [PermissionDenied("POST", "cannot create jobs"), QuotaExceeded("POST", "count/jobs.batch=1")]
)
def test_a_gang_that_is_refused_leaves_no_pool_whatever_answers_are_lost(tmp_path, refusal: ProviderError):
    cluster: Any = living(answered(refusal))
    clock = Clock()
    looks = KubernetesProvider(OPTIONS.flat(), cluster=lambda _: cluster, clock=lambda: NOW)
    request, offer = pooled()
    with Journal(tmp_path / "journal") as entries, pytest.raises(type(refusal)):
        acquire.acquire(looks, request, (offer,), entries, timeouts=Timeouts(), clock=clock, sleep=clock.sleep)
    deleted = [path for verb, path, _ in cluster.sent if verb == "DELETE"]
    assert deleted == [f"{node_pool.PATH}/{cluster.sent[0][2]['metadata']['name']}"] * 3


@pytest.mark.parametrize("passing", [Transient("no answer"), AmbiguousCreate("no answer"), RateLimited("429")])
def test_a_gang_whose_job_may_come_yet_keeps_its_pool(passing: ProviderError):
    looks, cluster = provider(answered(passing))
    with pytest.raises(type(passing)):  # the same call comes again
        looks.create(*pooled(), TOKEN)
    assert [path for _, path, _ in cluster.sent] == [node_pool.PATH, JOBS]


def test_the_pool_of_another_gang_with_this_token_is_left_alone():
    others = manifest.job(*pooled(), TOKEN, OPTIONS)
    others["metadata"]["annotations"][manifest.DIGEST] = "another"
    answers = {**answered(Exists("there")), f"{JOBS}/mgpu-{TOKEN}": others}
    with pytest.raises(Conflict):
        provider(answers)[0].create(*pooled(), TOKEN)
    answers[f"{JOBS}/mgpu-{TOKEN}"] = manifest.stone(TOKEN, {}, {})  # it was given up, and this call was late
    with pytest.raises(CleanupFailed, match="node pool"):
        provider(answers)[0].create(*pooled(), TOKEN)


def test_a_pool_without_a_job_is_found_listed_and_given_back():
    answers: dict[str, Any] = {
        POOL: pool(),
        node_pool.PATH: {"items": [pool()]},
        JOBS: {"items": []},
        PODS: {"items": []},
    }
    looks, cluster = provider(answers)
    found = looks.find(intent())
    assert found is not None
    assert found.made_at == NOW
    assert looks.list_owned(OWNER) == (found.model_copy(update={"made_at": 0.0}),)
    nodes = looks.describe(found).nodes
    assert [node.phase for node in nodes] == [NodePhase.STOPPING] * 3, "it may be billed"
    assert not looks.destroy(found)
    assert ("DELETE", POOL, {}) in cluster.sent
    del answers[POOL]
    assert looks.destroy(found)


def test_pools_of_other_owners_and_namespaces_are_not_listed():
    ours, elsewhere = pool(), pool()
    elsewhere["metadata"]["labels"][node_pool.NAMESPACE] = "other"
    elsewhere["metadata"]["labels"][manifest.TOKEN] = "e" * 40
    answers = {node_pool.PATH: {"items": [ours, elsewhere]}, JOBS: {"items": []}, PODS: {"items": []}}
    looks, _ = provider(answers)
    assert [each.token for each in looks.list_owned(OWNER)] == [TOKEN]
    assert looks.list_owned("another") == ()


@pytest.mark.parametrize("begun", [True, False])
def test_a_gang_is_gone_when_its_pool_is(begun: bool):
    answers, handle = gang_of([], OPTIONS)
    answers[POOL] = pool()
    if begun:
        conditions = [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]
        answers[f"{JOBS}/mgpu-{TOKEN}"]["status"] = {"conditions": conditions}
    else:  # and an empty Job is in its place
        given_up = answers[f"{JOBS}/mgpu-{TOKEN}"]["metadata"]
        answers[f"{JOBS}/mgpu-{TOKEN}"] = manifest.stone(TOKEN, given_up["labels"], given_up["annotations"])
    looks, cluster = provider(answers)
    assert not looks.destroy(handle)
    assert ("DELETE", POOL, {}) in cluster.sent
    assert looks.describe(handle).nodes[0].phase is NodePhase.STOPPING
    del answers[POOL]
    assert looks.destroy(handle)
    assert looks.describe(handle).nodes[0].phase is NodePhase.TERMINATED


DENIED = PermissionDenied("DELETE p-1", "pods is forbidden")
CHANGED = refused("DELETE p-0", 409, '{"message": "the UID in the precondition is another", "reason": "Conflict"}')
THERE = refused("DELETE p-0", 409, '{"message": "pods p-0 is being migrated", "reason": "AlreadyExists"}')


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (DENIED, DENIED, [PermissionDenied, "pods is forbidden"]),
        (CHANGED, DENIED, [PermissionDenied, "pods is forbidden"]),
        (THERE, DENIED, [Transient, "p-0 is being migrated", "pods is forbidden"]),  # the same call is made again
        (CHANGED, None, None),
    ],
    ids=["denied", "changed, denied", "there, denied", "changed"],
)
def test_a_pool_goes_though_the_pods_on_it_cannot_be_ended(first: Exception, second: Any, told: Any):
    """Its nodes are what costs money."""
    answers, handle = gang_of([RUNNING] * 2, OPTIONS)
    answers |= {POOL: pool(), f"DELETE {PODS}/p-0": first, f"DELETE {PODS}/p-1": second}
    looks, cluster = provider(answers)
    if told:
        with pytest.raises(told[0]) as caught:
            looks.destroy(handle)
        assert [words for words in told[1:] if words not in str(caught.value)] == []
    else:  # whoever else writes into a pod is no trouble: the next look shows what it has written
        assert not looks.destroy(handle)
    deleted = [path for verb, path, _ in cluster.sent if verb == "DELETE"]
    assert deleted == [f"{PODS}/p-0", f"{PODS}/p-1", POOL]


def test_pods_that_wait_for_the_pools_nodes_say_so_in_its_words():
    answers, handle = gang_of([UNPLACED, RUNNING, UNPLACED], OPTIONS)
    conditions = [
        {"type": "Valid", "status": "True", "message": "it is"},
        {"type": "Quota", "status": "False", "message": "2 of 3 are over it"},
    ]
    answers[POOL] = {**pool(), "status": {"conditions": conditions}}
    first, second, _ = provider(answers)[0].describe(handle).nodes
    assert "waits for the nodes of node pool" in first.reason
    assert "Quota: 2 of 3 are over it" in first.reason
    assert "it is" not in first.reason
    assert (second.phase, second.reason) == (NodePhase.RUNNING, "")


def test_a_pool_that_nobody_may_see_any_more_is_not_taken_for_gone():
    answers, handle = gang_of([], OPTIONS)
    answers[POOL] = PermissionDenied("GET", "nodepools is forbidden")
    with pytest.raises(PermissionDenied):
        provider(answers)[0].destroy(handle)
    denied = {POOL: answers[POOL], node_pool.PATH: answers[POOL]}

    def both(there: dict[str, Any], **options: str) -> KubernetesProvider:
        cluster: Any = Scripted(there | denied)
        return KubernetesProvider(options, cluster=lambda _: cluster, clock=lambda: NOW)

    meta = answers[f"{JOBS}/mgpu-{TOKEN}"]["metadata"]
    given_up = {f"{JOBS}/mgpu-{TOKEN}": manifest.stone(TOKEN, {}, meta["annotations"])}
    pods_alone, _ = gang_of([RUNNING] * 3, OPTIONS)
    del pods_alone[f"{JOBS}/mgpu-{TOKEN}"]
    pods_alone[JOBS] = {"items": []}
    for whoever in map(both, (answers, answers | given_up, pods_alone)):  # that have no run file: `mgpu ls`
        for call, what in ((whoever.describe, handle), (whoever.destroy, handle), (whoever.list_owned, OWNER)):
            with pytest.raises(PermissionDenied):
                call(what)
    nothing = {JOBS: {"items": []}, PODS: {"items": []}}  # is known any more but the run file
    asks = both(nothing, **OPTIONS.flat())
    for call in (lambda: asks.find(intent()), lambda: asks.describe(handle), lambda: asks.list_owned(OWNER)):
        with pytest.raises(PermissionDenied):
            call()
    assert both(nothing).list_owned(OWNER) == ()
    unpooled, handle = gang_of([])
    looks = both(unpooled)
    assert [each.token for each in looks.list_owned(OWNER)] == [TOKEN], "most clusters have none, and no right to them"
    assert looks.describe(handle).nodes[0].phase is NodePhase.PENDING


@pytest.mark.parametrize("groups", [[{"name": "apps"}, {"name": node_pool.GROUP}], None], ids=["served", "no answer"])
def test_a_gateways_404_does_not_say_that_a_pool_is_gone(groups: list[dict[str, str]] | None):
    """A load balancer without a backend answers with a page: the pool may be there, and be billed."""
    page = refused("GET", 404, "<html><title>404 Not Found</title></html>")
    answers, handle = gang_of([], OPTIONS)
    answers |= {POOL: page, node_pool.PATH: page, "/apis": {"groups": groups} if groups else page}
    looks, _ = provider(answers)
    for call in (lambda: looks.destroy(handle), lambda: looks.describe(handle), lambda: looks.list_owned(OWNER)):
        with pytest.raises(Transient, match="404"):
            call()


def test_where_the_cluster_has_no_such_thing_nothing_is_left():
    page = refused("GET", 404, "404 page not found")  # as an API server says it of what it does not serve
    answers, handle = gang_of([], OPTIONS)
    answers |= {POOL: page, node_pool.PATH: page, "/apis": {"groups": [{"name": "apps"}]}}
    conditions = [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]
    answers[f"{JOBS}/mgpu-{TOKEN}"]["status"] = {"conditions": conditions}
    looks, _ = provider(answers)
    assert looks.destroy(handle)
    assert looks.list_owned(OWNER) == ()


def test_a_gang_whose_pods_are_on_their_way_out_is_billed_as_long_as_its_pool_is_there():
    silent = {**RUNNING, "phase": "Failed", "reason": "NodeLost"}  # by a controller's word
    answers, handle = gang_of([silent] * 3, OPTIONS)
    assert [node.phase for node in provider(answers)[0].describe(handle).nodes] == [NodePhase.ENDING] * 3
    nodes = provider({**answers, POOL: pool()})[0].describe(handle).nodes
    assert [(node.phase, "NodeLost" in node.reason) for node in nodes] == [(NodePhase.STOPPING, True)] * 3


def test_only_nodes_that_go_with_the_gang_are_waited_for_so_long():
    assert provider({})[0].capabilities.end_s == 900
    assert KubernetesProvider({}).capabilities.end_s == 120


def test_the_offer_is_the_instance_type_as_it_is_bought():
    scripted: Any = Scripted({})
    needed = pooled()[0].requirements.model_copy(update={"gpu": ("H100-80GB",)})
    (offer,) = offered.offers(Place(scripted, "c", "n"), OPTIONS, needed, NOW).offers
    assert (offer.instance_type, offer.gpu, offer.market) == (KIND, "H100-80GB", "spot")
    reserved = KubernetesOptions.model_validate({"node_pool": {"instance_type": KIND}})
    (offer,) = offered.offers(Place(scripted, "c", "n"), reserved, needed, NOW).offers
    assert offer.market == "on-demand"


def test_a_cluster_that_has_no_such_thing_is_named():
    scripted: Any = Scripted({f"POST {node_pool.PATH}": node_pool.Missing("404 page not found")})
    with pytest.raises(InvalidRequest, match="none of CoreWeave's"):
        KubernetesProvider(OPTIONS.flat(), cluster=lambda _: scripted).create(*pooled(), TOKEN)
    assert [path for _, path, _ in scripted.sent] == [node_pool.PATH]


def test_the_block_is_checked():
    assert KubernetesOptions.of(OPTIONS.flat()) == OPTIONS
    text = "name: a\nprovider: kubernetes\nmax_hours: 1\nmax_price_usd_per_hour: 1\ncommand: [t.py]\ncheckpoint: none\n"
    text += "image: {reference: 'r.test/t@sha256:" + "0" * 64 + "'}\n"
    with pytest.raises(SpecError, match="node_pool"):
        loads(text + "kubernetes: {node_pool: {compute_class: cheap}}\n", "f")
    spot = "kubernetes: {node_pool: {instance_type: x, compute_class: spot}}\n"
    with pytest.raises(SpecError, match="market: is spot with"):
        loads(text + spot, "f")
    assert loads(text + spot + "market: spot\n", "f").market == "spot"
    with pytest.raises(SpecError, match="cost money while `queue` holds the pods back"):
        loads(text + "kubernetes: {queue: team-a, node_pool: {instance_type: x}}\n", "f")
