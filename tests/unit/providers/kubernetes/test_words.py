"""What is asked of Kubernetes, and what its words mean, without one."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import kubernetes_validate
import pytest
from fakes.kube.scripted import IMAGE, NOW, TOKEN, asked, stamp

from mgpu.errors import (
    AmbiguousCreate,
    AuthError,
    InputError,
    InvalidRequest,
    PermissionDenied,
    QuotaExceeded,
    RateLimited,
    SpecError,
    Transient,
)
from mgpu.plan.model import Requirements
from mgpu.providers.base import Handle, NodePhase
from mgpu.providers.kubernetes import manifest, offered
from mgpu.providers.kubernetes.cluster import Access, Exists, Missing, refused
from mgpu.providers.kubernetes.findings import roles
from mgpu.providers.kubernetes.gang import Gang, Pod
from mgpu.providers.kubernetes.options import KubernetesOptions
from mgpu.providers.kubernetes.provider import KubernetesProvider
from mgpu.spec.load import loads

RUN_FILE = """
name: a
provider: kubernetes
max_hours: 1
max_price_usd_per_hour: 1
command: [train.py]
checkpoint: none
"""


def pod_of(options: KubernetesOptions, product: str = manifest.ANY) -> dict[str, Any]:
    return manifest.job(*asked(product), TOKEN, options)["spec"]["template"]["spec"]


EVERYTHING = KubernetesOptions.model_validate(
    {
        "gpu_resource": "amd.com/gpu",
        "resources": {"rdma/ib": "1"},
        "cpus_per_node": 64,
        "memory_gib": 512,
        "shm_gib": 64,
        "node_selector": {"pool": "gpu"},
        "tolerations": ["amd.com/gpu:NoSchedule", "team=a:NoExecute", "spot", "*"],
        "priority_class": "low",
        "service_account": "trainer",
        "image_pull_secret": "registry",
        "run_as_user": 10001,
        "volumes": {"/data": "corpus:ro", "/scratch": "work"},
        "queue": "team-a",
        "notice_s": 90,
    }
)


@pytest.mark.parametrize("options", [KubernetesOptions(), EVERYTHING])
@pytest.mark.parametrize("version", ["1.29", "1.36"])
def test_what_is_asked_for_is_what_kubernetes_takes(options: KubernetesOptions, version: str):
    job = manifest.job(*asked("NVIDIA-H100-80GB-HBM3"), TOKEN, options)
    for each in (job, manifest.stone(TOKEN, {}, {}), *roles("team")):
        kubernetes_validate.validate(each, version, strict=True)
    assert len(json.dumps(job)) < 100_000
    assert all(len(value) <= 63 for value in job["metadata"]["labels"].values())


def test_every_key_reaches_the_pods():
    job = manifest.job(*asked(), TOKEN, EVERYTHING)
    assert job["metadata"]["labels"][manifest.QUEUE] == "team-a"
    assert job["spec"]["suspend"] is True
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    amounts = {"amd.com/gpu": "8", "rdma/ib": "1", "cpu": "64", "memory": "512Gi"}
    assert container["resources"] == {"limits": amounts, "requests": amounts}
    assert pod["nodeSelector"] == {"pool": "gpu"}
    assert pod["tolerations"] == [
        {"key": "amd.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "a", "effect": "NoExecute"},
        {"key": "spot", "operator": "Exists"},
        {"operator": "Exists"},
    ]
    assert (pod["priorityClassName"], pod["serviceAccountName"]) == ("low", "trainer")
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["terminationGracePeriodSeconds"] == 90
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes[mounts["/data"]["name"]]["persistentVolumeClaim"] == {"claimName": "corpus", "readOnly": True}
    assert volumes[mounts["/scratch"]["name"]]["persistentVolumeClaim"] == {"claimName": "work", "readOnly": False}
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert pod["securityContext"]["runAsUser"] == 10001


def test_a_pod_gets_no_more_than_it_needs_by_itself():
    pod = pod_of(KubernetesOptions())
    assert pod["automountServiceAccountToken"] is False
    assert "affinity" not in pod
    assert "suspend" not in pod
    terms = pod_of(KubernetesOptions(), "B300")["affinity"]["nodeAffinity"]
    terms = terms["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [term["matchExpressions"][0]["values"] for term in terms] == [["B300"]] * len(manifest.PRODUCTS)


def test_volumes_are_given_to_a_group_whoever_the_images_user_is():
    assert "securityContext" not in pod_of(KubernetesOptions())
    ours = {"fsGroup": 7, "fsGroupChangePolicy": "OnRootMismatch"}
    assert pod_of(KubernetesOptions(fs_group=7))["securityContext"] == ours
    both = pod_of(KubernetesOptions(fs_group=7, run_as_user=10001))["securityContext"]
    assert (both["fsGroup"], both["runAsUser"], both["runAsGroup"]) == (7, 10001, 10001)
    assert pod_of(KubernetesOptions(run_as_user=10001))["securityContext"]["fsGroup"] == 10001


def test_a_pods_own_clock_is_the_hard_cap_and_the_jobs_has_room_for_the_queue():
    spec = manifest.job(*asked(), TOKEN, KubernetesOptions(queue_hours=2))["spec"]
    assert spec["template"]["spec"]["activeDeadlineSeconds"] == 600
    assert spec["activeDeadlineSeconds"] == 7800
    assert manifest.job(*asked(ends_by=1), TOKEN, KubernetesOptions())["spec"]["activeDeadlineSeconds"] == 1


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("namespace", "Team A", "a name of Kubernetes'"),
        ("gpu_resource", "nvidia.com/gpu/8", "a key of Kubernetes'"),
        ("tolerations", "[gpu:Sometimes]", "key=value:Effect"),
        ("volumes", "{data: corpus}", "an absolute path"),
        ("volumes", "{/data: 'corpus:rw'}", "name:ro where it is only read"),
        ("node_selector", "{pool: 'a b'}", "a label's value"),
        ("run_as_user", "0", "1"),
        ("kube", "1", "unknown key"),
    ],
)
def test_a_mistake_in_the_block_is_named(key: str, value: str, words: str):
    with pytest.raises(SpecError) as caught:
        loads(RUN_FILE + f"image: {{reference: '{IMAGE}'}}\nkubernetes: {{{key}: {value}}}\n", "f")
    assert f"kubernetes.{key}" in str(caught.value)
    assert words in str(caught.value)


def test_an_image_is_required_and_gpus_are_counted_once():
    with pytest.raises(SpecError) as caught:
        loads(RUN_FILE + "kubernetes: {resources: {nvidia.com/gpu: '8'}}\n", "f")
    assert "image: needed: machines of kubernetes are containers of an image" in str(caught.value)
    assert "gpus_per_node: says how many of nvidia.com/gpu" in str(caught.value)


def test_a_cluster_is_in_no_region_of_a_clouds():
    """Its own name is none that `regions` takes: no offer would ever fit."""
    text = RUN_FILE + f"image: {{reference: '{IMAGE}'}}\nregions: [us-east-1]\n"
    with pytest.raises(SpecError) as caught:
        loads(text, "f")
    (problem,) = caught.value.problems
    assert (problem.field, "leave it out" in problem.message) == ("regions", True)


def test_a_wrong_block_says_nothing_of_the_files_that_its_nodes_see():
    text = RUN_FILE.replace("checkpoint: none", "checkpoint: {to: 'file:///ckpt/runs'}")
    block = "{same_paths: true, volumes: {/ckpt: c}, queue: q, node_pool: {instance_type: t}}"
    with pytest.raises(SpecError) as caught:
        loads(f"{text}image: {{reference: '{IMAGE}'}}\nkubernetes: {block}\n", "f")
    assert [problem.field for problem in caught.value.problems] == ["kubernetes"]


def test_files_of_this_machine_are_for_volumes_that_it_sees_at_the_same_paths():
    text = RUN_FILE.replace("checkpoint: none", "checkpoint: {to: 'file:///ckpt/runs'}")
    text += f"image: {{reference: '{IMAGE}'}}\n"
    with pytest.raises(SpecError, match="do not see this machine's files"):
        loads(text + "kubernetes: {volumes: {/ckpt: claim}}\n", "f")
    assert loads(text + "kubernetes: {volumes: {/ckpt: claim}, same_paths: true}\n", "f").checkpoint


def test_the_options_survive_being_kept():
    assert KubernetesOptions.of(EVERYTHING.flat()) == EVERYTHING
    with pytest.raises(InputError, match=r"kubernetes\.queue_hours"):
        KubernetesOptions.of({"queue_hours": "-1"})


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (404, 'jobs.batch "x" not found', Missing),
        (404, 'namespaces "x" not found', InvalidRequest),
        (409, 'jobs.batch "x" already exists', Exists),
        (401, "Unauthorized", AuthError),
        (403, 'pods "x" is forbidden: exceeded quota: q, requested: pods=1', QuotaExceeded),
        (403, 'jobs.batch is forbidden: User "u" cannot create resource', PermissionDenied),
        (422, "spec.completions: Invalid value", InvalidRequest),
        (429, "too many requests", RateLimited),
        (500, "etcdserver: request timed out", AmbiguousCreate),
        (502, "dial tcp 127.0.0.1:1: connect: connection refused", AmbiguousCreate),
        (502, "getting credentials: exec: executable aws not found", AuthError),
    ],
)
def test_what_an_answer_means(status: int, message: str, kind: type[Exception]):
    said = json.dumps({"kind": "Status", "message": message})
    for text in (said, message):
        assert type(refused("what", status, text, "7", AmbiguousCreate)) is kind
    if kind is AmbiguousCreate:
        assert type(refused("what", status, said)) is Transient


def test_a_context_and_a_kubeconfig_are_kubectls_own_flags(monkeypatch, tmp_path):
    (tmp_path / "kubectl").write_text("#!/bin/sh\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    argv = Access("/k", "c").kubectl("proxy")
    assert argv == [f"{tmp_path}/kubectl", "--kubeconfig=/k", "--context=c", "proxy"]
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InvalidRequest, match="no kubectl on PATH"):
        Access().kubectl("proxy")


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA-H100-80GB-HBM3", "H100-80GB"),
        ("NVIDIA-A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA-A100-PCIE-80GB", "A100-80GB"),
        ("NVIDIA-H200", "H200"),
        ("NVIDIA-B200", "B200"),
        ("Tesla-T4", "T4"),
        ("NVIDIA-L40S", "L40S"),
        ("nvidia-l4", "L4"),
        ("nvidia-h100-80gb", "H100-80GB"),
        ("nvidia-tesla-t4", "T4"),
        ("AMD_Instinct_MI300X_OAM", "MI300X"),
    ],
)
def test_gpus_are_called_as_run_files_call_them(product: str, name: str):
    assert offered.gpu_name(product) == name


def test_quantities():
    assert [offered.amount(each) for each in ("8", 8, "500m", "2Ki", "1.5G", "", "x")] == [8, 8, 0.5, 2048, 1.5e9, 0, 0]
    large = {"2P": 2e15, "2Pi": 2**51, "1E": 1e18, "1Ei": 2**60, "1E3": 1e3, "2e-1": 0.2, "5n": 5e-9, "5u": 5e-6}
    assert {each: offered.amount(each) for each in large} == pytest.approx(large)
    assert [offered.amount(each, 7) for each in ("1X", "x", "3")] == [7, 7, 3]


# --- phases


def seen(*, began: bool = True, node: str = "n1", going: float | None = None, ends_by: float = 0, **status: Any) -> Pod:
    """A pod that was deleted `going` seconds ago, its grace of 60 s included."""
    about: dict[str, Any] = {"name": "p", "uid": "u", "creationTimestamp": stamp(NOW), "resourceVersion": "1"}
    about |= {
        "annotations": {manifest.INDEX: "0", manifest.ABOUT: json.dumps({"ends_by": ends_by})},
        "finalizers": [manifest.ENDED],
    }
    if going is not None:
        about |= {"deletionTimestamp": stamp(NOW + 60 - going), "deletionGracePeriodSeconds": 60}
    spec = {"nodeName": node, "activeDeadlineSeconds": 600, "terminationGracePeriodSeconds": 60}
    return Pod({"metadata": about, "spec": spec, "status": {**({"startTime": stamp(NOW)} if began else {}), **status}})


def container(**state: Any) -> list[dict[str, Any]]:
    return [{"name": "node", "state": state}]


RUNS, OVER = container(running={}), container(terminated={"exitCode": 1, "message": "one\nmgpu: why\n"})
MADE = container(waiting={"reason": "ContainerCreating"})
EVICTED = [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "room"}]


@pytest.mark.parametrize(
    ("pod", "phase", "reason"),
    [
        (seen(phase="Running", containerStatuses=RUNS), NodePhase.RUNNING, ""),
        (seen(phase="Running", containerStatuses=RUNS, going=1, conditions=EVICTED), NodePhase.RUNNING, "Preemption"),
        (seen(phase="Running", containerStatuses=RUNS, going=61), NodePhase.STOPPING, "being deleted"),
        (seen(phase="Running", containerStatuses=RUNS, going=100), NodePhase.ENDING, "may live on, until"),
        (seen(phase="Failed", containerStatuses=OVER), NodePhase.TERMINATED, "exit code 1: mgpu: why"),
        (seen(phase="Succeeded", containerStatuses=container(terminated={"exitCode": 0})), NodePhase.TERMINATED, "0"),
        (seen(phase="Failed", reason="OutOfcpu", message="no room"), NodePhase.TERMINATED, "OutOfcpu: no room"),
        # by a controller, whose word on a node that is silent proves nothing
        (seen(phase="Failed", containerStatuses=RUNS, reason="NodeLost"), NodePhase.ENDING, "NodeLost"),
        (seen(phase="Pending", node="", began=False), NodePhase.PENDING, "has not begun"),
        (seen(phase="Pending", node="", began=False, going=0), NodePhase.TERMINATED, "deleted"),
        (
            seen(phase="Pending", containerStatuses=container(waiting={"reason": "ContainerCreating"})),
            NodePhase.PENDING,
            "Creating",
        ),
    ],
)
def test_what_a_pod_is(pod: Pod, phase: NodePhase, reason: str):
    found, why, _ = pod.phase(pod.ended, given_back=False, now=NOW)
    assert found is phase
    assert reason in why


def test_what_is_given_back_has_no_time_left():
    pod = seen(phase="Running", containerStatuses=RUNS, going=1)
    assert pod.phase(pod.ended, given_back=True, now=NOW)[0] is NodePhase.STOPPING


def test_a_pods_clocks_begin_with_it():
    assert seen(phase="Running").hard_cap_at == NOW + 600
    assert seen(phase="Running").latest_end == NOW + 600 + 60 + 30
    assert seen(began=False).hard_cap_at == 0
    assert seen(ends_by=NOW + 100).hard_cap_at == NOW + 100, "it has waited, and the run ends all the same"
    assert seen(began=False).latest_end == float("inf"), "its node may begin with it at any time"


def job(**more: Any) -> dict[str, Any]:
    spec = {"completions": 2, "suspend": False, "activeDeadlineSeconds": 4200, **more.pop("spec", {})}
    return {"metadata": {"uid": "j", "labels": {}}, "spec": spec, **more}


def ended(kind: str) -> dict[str, Any]:
    return job(status={"conditions": [{"type": kind, "status": "True", "reason": "BackoffLimitExceeded"}]})


@pytest.mark.parametrize(
    ("gang", "over", "phase", "reason"),
    [
        (Gang(None, ()), True, NodePhase.TERMINATED, "no Job"),
        (Gang(job(), ()), False, NodePhase.PENDING, "said by events"),
        (Gang(job(spec={"suspend": True}), ()), False, NodePhase.PENDING, "suspended"),
        (Gang(ended("Failed"), ()), True, NodePhase.TERMINATED, "BackoffLimitExceeded"),
        (Gang(ended("FailureTarget"), ()), True, NodePhase.TERMINATED, "BackoffLimitExceeded"),
        (Gang(job(spec={"completions": 0}), ()), True, NodePhase.TERMINATED, "before it began"),
    ],
)
def test_what_a_rank_without_a_pod_is(gang: Gang, over: bool, phase: NodePhase, reason: str):
    assert gang.over is over
    found, why, _ = gang.without(lambda: "said by events")
    assert found is phase
    assert reason in why


FORBIDDEN = 'Kubernetes: FailedCreate: Error creating: pods "x-0-" is forbidden: '
QUOTA = "exceeded quota: q, requested: pods=1,nvidia.com/gpu=8, used: pods=3,nvidia.com/gpu=24, limited: "


@pytest.mark.parametrize(
    ("said", "cure"),
    [
        (FORBIDDEN + 'violates PodSecurity "restricted:latest": runAsNonRoot != true', "run_as_user"),
        (FORBIDDEN + "maximum cpu usage per Container is 2, but limit is 64", "cpus_per_node"),
        (FORBIDDEN + "failed quota: q: must specify limits.memory for: node", "memory_gib"),
        (FORBIDDEN + "no PriorityClass with name low was found", "Mend what the message names"),
        (FORBIDDEN + 'error looking up service account n/t: serviceaccount "t" not found', "Mend what"),
        ('Kubernetes: FailedCreate: Error creating: Pod "x" is invalid: spec.volumes: Invalid value', "Mend what"),
        ('Kubernetes: FailedCreate: Error creating: admission webhook "w.org" denied the request: no', "Mend what"),
        (FORBIDDEN + QUOTA + "pods=40,nvidia.com/gpu=8", "no 2 such pods be at once"),
        (FORBIDDEN + "exceeded quota: q, requested: memory=2Ti, used: memory=0, limited: memory=3Ti", "no 2 such pods"),
        (FORBIDDEN + "exceeded quota: q, requested: memory=2Ti, used: memory=9Pi, limited: memory=9Pi", ""),
        (FORBIDDEN + "exceeded quota: q, requested: pods=1, used: pods=1E3, limited: pods=1E3", ""),
        (FORBIDDEN + "exceeded quota: q, requested: pods=1, used: pods=9, limited: pods=9Xi", ""),  # who knows
        (FORBIDDEN + "exceeded quota: q, requested: pods=500, used: pods=500, limited: pods=500", "no 2 such pods"),
        *(
            (f'Kubernetes: FailedCreate: Error creating: admission webhook "w.org" denied the request: {passing}', "")
            for passing in (
                "context deadline exceeded",
                "dial tcp 10.0.0.1:443: connect: connection refused",
                "Post https://r.test: net/http: TLS handshake timeout",
                "etcdserver: leader changed",
                "GET https://r.test/v2/: TOOMANYREQUESTS: rate",
                "registry answers 503 Service Unavailable",
                "unexpected status code: 502",
            )
        ),
        # what others give back, or a controller that is not up yet, may let pods come
        (FORBIDDEN + QUOTA + "pods=4,nvidia.com/gpu=24", ""),
        (FORBIDDEN + "exceeded quota: q, requested: pods=1", ""),  # an event's message is cut off
        (FORBIDDEN + QUOTA + "pods=4,nvid", ""),
        (FORBIDDEN + "status unknown for quota: q, resources: pods", ""),
        (FORBIDDEN + 'error looking up service account n/default: serviceaccount "default" not found', ""),
        ('Kubernetes: FailedCreate: Error creating: Internal error: failed calling webhook "w": denied', ""),
        ("Kubernetes: SuspendedByAnnotation: is forbidden", ""),
    ],
)
def test_pods_that_can_never_be_made_are_told_from_those_that_wait(said: str, cure: str):
    phase, why, found = Gang(job(), ()).without(lambda: said)
    assert (phase, why) == (NodePhase.PENDING, said)
    assert (cure in found) if cure else (found == "")


@pytest.mark.parametrize(
    ("reason", "message", "cure"),
    [
        (
            "ErrImagePull",
            "rpc error: code = NotFound desc = failed to resolve r.test/t: not found",
            "secret",
        ),
        ("ErrImagePull", "pull access denied, repository does not exist or may require authorization", "secret"),
        ("ErrImagePull", "reading manifest x in r.test/t: manifest unknown", "secret"),
        (
            "ImagePullBackOff",
            "Back-off: ErrImagePull: failed to authorize: GET https://r.test: 401 Unauthorized",
            "secret",
        ),
        ("ErrImagePull", "failed to fetch oauth token: unexpected status: 403 Forbidden", "secret"),
        ("ErrImagePull", "authorization failed: insufficient_scope: authorization failed", "secret"),
        ("InvalidImageName", "couldn't parse image", "sha256"),
        ("ErrImagePull", "rpc error: dial tcp: lookup r.test: i/o timeout", ""),
        ("ErrImagePull", "GET https://r.test: 403 Forbidden: Your authorization token has expired", ""),
        (
            "ErrImagePull",
            "failed to prepare extraction snapshot: parent snapshot sha256:0 does not exist: not found",
            "",
        ),
        ("ErrImagePull", "failed to resolve reference r.test/t: unexpected status: 503 Service Unavailable", ""),
        ("ErrImagePull", "denied: quota of downloads for this hour", ""),
        ("ImagePullBackOff", 'Back-off pulling image "r.test/t"', ""),
        ("CreateContainerConfigError", "container has runAsNonRoot and image will run as root", "kubernetes:"),
        ("CreateContainerConfigError", 'secret "token" not found', "kubernetes:"),
        ("CreateContainerConfigError", "couldn't find key a in ConfigMap n/c", "kubernetes:"),
        ("CreateContainerConfigError", "failed to prepare subPath for volumeMount", ""),
        ("CreateContainerConfigError", "failed to sync secret cache: timed out waiting for the condition", ""),
    ],
)
def test_a_container_that_can_never_start_is_told_from_one_that_waits(reason: str, message: str, cure: str):
    waits = container(waiting={"reason": reason, "message": message})
    phase, why, found = seen(phase="Pending", containerStatuses=waits).phase(False, given_back=False, now=NOW)
    assert (phase, message in why) == (NodePhase.PENDING, True)
    assert (cure in found) if cure else (found == "")


def test_a_claim_that_nobody_has_made_is_not_waited_for():
    message = '0/2 nodes are available: persistentvolumeclaim "corpus" not found. preemption: 0/2'
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]
    pod = seen(phase="Pending", node="", began=False, conditions=conditions)
    assert "Make the claim" in pod.phase(False, given_back=False, now=NOW)[2]


def test_of_two_pods_of_a_rank_the_first_counts():
    first, second = seen(phase="Failed", containerStatuses=OVER), seen(phase="Running", containerStatuses=RUNS)
    second.made_at += 5
    assert Gang(job(), (second, first)).of(0) is first
    assert Gang(job(), (first,)).of(1) is None


def test_the_program_of_a_pod_is_python_that_needs_nothing():
    compile(textwrap.dedent(pod_of(KubernetesOptions())["containers"][0]["command"][2]), "boot", "exec")


def test_a_webhooks_certificate_is_no_log_in():
    assert type(refused("what", 500, json.dumps({"message": "webhook: x509: unknown authority"}))) is Transient


@pytest.mark.parametrize("beside", [[], [{"name": "istio-proxy", "state": {"running": {}}}]])
def test_a_pod_is_what_its_own_container_is_whatever_was_put_beside_it(beside):
    over = [{"name": manifest.CONTAINER, "state": {"terminated": {"exitCode": 0}}}]
    assert seen(phase="Running" if beside else "Succeeded", containerStatuses=[*over, *beside]).ended


def test_a_nodes_own_clock_counts_from_its_container_which_comes_after_the_image():
    late = [{"name": manifest.CONTAINER, "state": {"running": {"startedAt": stamp(NOW + 540)}}}]
    at_once = [{"name": manifest.CONTAINER, "state": {"running": {"startedAt": stamp(NOW)}}}]
    pulled, there = (seen(containerStatuses=each).latest_end for each in (late, at_once))
    assert pulled - there == 540


def test_another_cluster_with_the_contexts_name_is_not_believed(monkeypatch):
    """Of k3s every context is called `default`; one that has no such pods would say that they are gone."""
    monkeypatch.setattr(offered, "names", lambda access: ("default", "n", "https://second"))
    provider = KubernetesProvider({}, cluster=lambda access: pytest.fail("it was asked"))
    made = {"provider": "kubernetes", "region": "default/n", "fleet": "f", "generation": 1, "token": TOKEN}
    handle = Handle(**made, ids=("f0f0f0f0f0-0",), account="https://first")
    for call in (provider.describe, provider.destroy):
        with pytest.raises(AuthError, match="another cluster"):
            call(handle)
    inside = handle.model_copy(update={"region": f"{offered.HERE}/n"})
    with pytest.raises(AuthError, match="in no cluster"):
        provider.describe(inside)


def test_a_cluster_that_has_to_grow_first_makes_an_offer():
    class Empty:
        def get(self, path, **_):
            return {"items": []}

    needed = Requirements.model_validate(
        {"provider": "kubernetes", "gpus_per_node": 8, "gpu": ["H100"], "max_price_usd_per_hour": 9, "max_hours": 1}
    )
    found = offered.offers(offered.Place(Empty(), "c", "n"), KubernetesOptions(), needed, NOW)
    assert [(each.gpu, each.gpus) for each in found.offers] == [("H100", 8)]
    assert any("grows" in note for note in found.notes)
