"""What provider kubernetes says of a gang, by what its API server does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.kube.scripted import EVENTS, JOBS, NOW, PODS, RUNNING, TOKEN, UNPLACED, Scripted, asked, gang_of, stamp

from mgpu.errors import PermissionDenied, Transient
from mgpu.providers.base import Intent, NodePhase
from mgpu.providers.kubernetes import manifest, offered
from mgpu.providers.kubernetes.cluster import refused
from mgpu.providers.kubernetes.provider import KubernetesProvider


@pytest.fixture(autouse=True)
def no_kubectl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offered, "names", lambda access: ("c", "n", "https://s"))


def provider(answers: dict[str, Any], *, now: float = NOW, ahead_s: float = 0.0, **options: str) -> KubernetesProvider:
    scripted: Any = Scripted(answers, ahead_s)
    return KubernetesProvider(options, cluster=lambda access: scripted, clock=lambda: now)


def test_the_price_is_that_of_the_offer_whoever_looks():
    """`mgpu ls` knows a cluster by what leads to it, and no run file."""
    answers, _ = gang_of([RUNNING] * 3, price_usd_per_hour=2.5)
    looks = provider(answers)
    (found,) = looks.list_owned("someone@example.org (laptop)")
    assert [node.price_usd_per_hour for node in looks.describe(found).nodes] == [2.5] * 3
    for item in answers[PODS]["items"]:  # an older version's
        told = json.loads(item["metadata"]["annotations"][manifest.ABOUT])
        del told["price_usd_per_hour"]
        item["metadata"]["annotations"][manifest.ABOUT] = json.dumps(told)
    older = provider(answers, price_usd_per_hour="1.5")
    assert [node.price_usd_per_hour for node in older.describe(found).nodes] == [1.5] * 3


def test_pods_that_wait_beside_others_that_run_say_how_many_do():
    answers, handle = gang_of([RUNNING, UNPLACED, RUNNING])
    first, second, _ = provider(answers).describe(handle).nodes
    assert second.reason == "2 of 3 pods run; waiting for: Kubernetes: Unschedulable: 0/2: Insufficient gpu"
    assert first.reason == ""
    answers, handle = gang_of([UNPLACED] * 3)
    assert not any("pods run" in node.reason for node in provider(answers).describe(handle).nodes)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (Transient("GET /log", "dial tcp 10.0.0.9:10250: i/o timeout"), "10.0.0.9:10250: i/o timeout"),
        ("", "does not say yet how it is reached"),
    ],
)
def test_a_pod_whose_log_says_nothing_tells_why_it_is_not_reached(log: Any, words: str):
    answers, handle = gang_of([RUNNING] * 3)
    answers[f"{PODS}/p-1/log"] = log
    first, second, _ = provider(answers).describe(handle).nodes
    assert (second.phase, second.host_key, words in second.reason) == (NodePhase.RUNNING, "", True), second
    assert (first.host_key, first.reason) == ("k", "")


def test_who_may_not_read_logs_is_told_so_at_once():
    answers, handle = gang_of([RUNNING] * 3)
    answers[f"{PODS}/p-1/log"] = PermissionDenied("GET /log", "cannot get resource pods/log")
    with pytest.raises(PermissionDenied):
        provider(answers).describe(handle)


def test_a_notice_is_as_long_as_the_clusters_clock_says_whatever_this_machines_does():
    answers, handle = gang_of([RUNNING] * 3)
    about = answers[PODS]["items"][1]["metadata"]
    about |= {"deletionTimestamp": stamp(NOW + 60), "deletionGracePeriodSeconds": 60}
    hour_ahead = provider(answers, now=NOW + 3600, ahead_s=3600)
    assert hour_ahead.describe(handle).nodes[1].phase is NodePhase.RUNNING
    assert provider(answers, now=NOW + 61).describe(handle).nodes[1].phase is NodePhase.STOPPING


def test_a_gang_that_can_never_be_made_says_so_with_a_cure():
    answers, handle = gang_of([])
    denied = {"reason": "FailedCreate", "message": 'pods "x" is forbidden: violates PodSecurity "restricted:latest"'}
    answers[EVENTS] = {"items": [{**denied, "lastTimestamp": stamp(NOW)}]}
    for node in provider(answers).describe(handle).nodes:
        assert (node.phase, node.queued) == (NodePhase.PENDING, True)
        assert "violates PodSecurity" in node.reason
        assert "run_as_user" in node.cure


@pytest.mark.parametrize("page", ["<h1>no backend for /apis/batch/v1/namespaces/n/jobs</h1>", "404 page not found"])
def test_a_404_of_whoever_stands_before_the_api_says_nothing_of_a_gang(page: str):
    """It comes from a gateway that is restarted, say: neither the launch ends by it, nor the look at what there is."""
    answers, handle = gang_of([])
    answers[f"POST {JOBS}"] = answers[EVENTS] = refused("kubernetes: POST jobs", 404, page)
    for call in (lambda: provider(answers).create(*asked(), TOKEN), lambda: provider(answers).describe(handle)):
        with pytest.raises(Transient) as caught:
            call()
        assert caught.value.why == page
        assert "API server" in caught.value.next_step


@pytest.mark.parametrize("page", ["<h1>no backend</h1>", "404 page not found", '{"message": "no route"}'])
def test_a_404_of_whoever_stands_before_the_api_ends_no_gang(page: str):
    """A job that waits in a queue has no pods: nothing else shows that it is there."""
    answers, handle = gang_of([])
    answers[f"{JOBS}/mgpu-{TOKEN}"] = refused("kubernetes: GET job", 404, page)
    intent = Intent(fleet="f", generation=1, owner="o", token=TOKEN, offer=asked()[1])
    for call in (lambda: provider(answers).destroy(handle), lambda: provider(answers).find(intent)):
        with pytest.raises(Transient):
            call()
    said = {"kind": "Status", "reason": "NotFound", "message": f'jobs.batch "mgpu-{TOKEN}" not found'}
    answers[f"{JOBS}/mgpu-{TOKEN}"] = refused("kubernetes: GET job", 404, json.dumps(said))
    assert provider(answers).destroy(handle)
    assert provider(answers).find(intent) is None


@pytest.mark.parametrize("newest_first", [True, False])
def test_the_newest_event_counts_wherever_it_stands(newest_first: bool):
    answers, handle = gang_of([])
    old = {
        "reason": "FailedCreate",
        "message": 'pods "x" is forbidden: violates PodSecurity',
        "lastTimestamp": stamp(NOW),
    }
    new = {"reason": "FailedCreate", "message": "exceeded quota", "eventTime": stamp(NOW + 60)}
    answers[EVENTS] = {"items": [new, old] if newest_first else [old, new]}
    node = provider(answers).describe(handle).nodes[0]
    assert (node.reason, node.cure) == ("Kubernetes: FailedCreate: exceeded quota", "")


def test_an_empty_kubeconfig_variable_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path):
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube/config").touch()
    (tmp_path / "kubectl").touch(mode=0o755)
    for name, value in (("HOME", tmp_path), ("PATH", tmp_path), ("KUBECONFIG", "")):
        monkeypatch.setenv(name, str(value))
    assert KubernetesProvider().configured()
