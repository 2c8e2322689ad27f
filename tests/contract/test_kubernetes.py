"""What is special about provider kubernetes, on a real control plane."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import yaml
from fakes.kube.cluster import IMAGE, Namespace, _there
from mgpu_train.agent.host.layout import LEASE
from mgpu_train.agent.machine import procs
from mgpu_train.timeouts import Timeouts
from waiting import until

from mgpu.errors import AmbiguousCreate, Conflict, PermissionDenied, Transient
from mgpu.plan.model import Offer, Requirements
from mgpu.providers.base import FleetRequest, Handle, Intent, NodePhase, NodeState, create_token
from mgpu.providers.kubernetes import node_pool
from mgpu.providers.kubernetes.cluster import Cluster, Json
from mgpu.providers.kubernetes.findings import roles
from mgpu.providers.kubernetes.provider import KubernetesProvider
from mgpu.remote.connection import load_key
from mgpu.remote.node import Node
from mgpu.remote.targets import ProxyCommand, Target, hop


@dataclass
class Asked:
    """A request, as this test has it: its own namespace and key."""

    kube: Namespace
    folder: Path
    options: dict[str, str]

    @property
    def provider(self) -> KubernetesProvider:
        return KubernetesProvider(self.options)

    def requirements(self, **more: object) -> Requirements:
        given = {"nodes": 2, "max_price_usd_per_hour": 9, "max_hours": 0.5, "provider_options": self.options, **more}
        return Requirements.model_validate({"provider": "kubernetes", **given})

    def request(self, **more: object) -> tuple[FleetRequest, Offer, str]:
        needed = self.requirements(**more)
        offer = self.provider.offers(needed).offers[0]
        key = (self.folder / "key.pub").read_text().strip()
        about = {"fleet": "f", "generation": 1, "owner": "o", "requirements": needed, "ssh_public_key": key}
        request = FleetRequest.model_validate({**about, "lease_s": 300, "hard_cap_s": 600, "image": IMAGE})
        return request, offer, create_token("o", self.kube.name, 1, offer, 0)

    def ready(self, handle: Handle) -> None:
        until(lambda: self.provider.describe(handle).ready, why=lambda: self.provider.describe(handle))

    def phases(self, handle: Handle) -> list[NodePhase]:
        return [node.phase for node in self.provider.describe(handle).nodes]

    def pod(self, handle: Handle, rank: int) -> str:
        mine = f"mgpu-{handle.token}-{rank}-"
        (name,) = [pod["metadata"]["name"] for pod in self.kube.pods() if pod["metadata"]["name"].startswith(mine)]
        return name

    def node(self, handle: Handle, rank: int) -> Node:
        seen = self.provider.describe(handle).nodes[rank]
        via = hop(seen.via.model_dump() if seen.via else None)
        target = Target(rank, seen.address, seen.port, seen.user, seen.host_key, via, seen.python)
        return Node(target, load_key(self.folder / "key"), Timeouts())


@pytest.fixture
def asked(kube: Namespace, tmp_path: Path) -> Asked:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    kube.grant(yaml.safe_dump_all(roles(kube.name)))
    return Asked(kube, tmp_path, {"kubeconfig": str(kube.kubeconfig), "notice_s": "5", "price_usd_per_hour": "0.05"})


class Losing(Cluster):
    """The API server does what it is asked to, and its answer is lost."""

    def post(self, path: str, body: Json, *, makes: bool = False, **query: str) -> Json:
        super().post(path, body, makes=makes, **query)
        raise AmbiguousCreate("no answer")


def intent(request: FleetRequest, offer: Offer, token: str) -> Intent:
    return Intent(fleet="f", generation=1, owner="o", token=token, offer=offer)


def test_an_answer_that_is_lost_makes_no_second_gang(asked: Asked):
    request, offer, token = asked.request()
    assert asked.provider.find(intent(request, offer, token)) is None
    with pytest.raises(AmbiguousCreate):
        KubernetesProvider(asked.options, cluster=Losing).create(request, offer, token)
    found = asked.provider.find(intent(request, offer, token))
    assert found is not None
    assert asked.provider.create(request, offer, token) == found
    assert asked.provider.recall(request, intent(request, offer, token), (0, 1)) == found
    assert asked.kube.jobs() == [f"mgpu-{token}"]


def test_a_token_that_was_given_up_makes_nothing_more(asked: Asked):
    request, offer, token = asked.request()
    assert asked.provider.recall(request, intent(request, offer, token), (0, 1)) is None
    with pytest.raises(Conflict):
        asked.provider.create(request, offer, token)  # one that was on its way until now
    assert asked.provider.find(intent(request, offer, token)) is None
    assert asked.provider.list_owned("o") == ()
    assert asked.kube.pods() == []


def test_a_pod_has_its_own_home_its_gpus_and_no_token_and_a_lease_ends_it(asked: Asked):
    asked.options |= {"shm_gib": "1"}
    handle = asked.provider.create(*asked.request(gpus_per_node=2, gpu=("H100-80GB",)))
    asked.ready(handle)
    with asked.node(handle, 1) as node:
        told = node.run(
            ["sh", "-c", "env; pwd; df -m /dev/shm; ls /var/run/secrets"], timeout=30, check=False
        ).stdout.decode()
        assert "HOME=/mgpu/node/home\n" in told
        assert "\n/mgpu/node/home\n" in told, "SSH begins in the node's own home"
        assert "NVIDIA_VISIBLE_DEVICES=GPU-0,GPU-1\n" in told
        assert " 1024 " in told, "of shared memory"
        assert "JOB_COMPLETION_INDEX" not in told
        assert "kubernetes.io" not in told, "no token of a service account"
        node.write("given", b"x")
        assert node.run(["cat", "/mgpu/node/home/given"], timeout=30).stdout == b"x"
        node.write(str(LEASE), f"{int(procs.uptime_s() + 1)}\n".encode())  # nobody renews it any more
    until(lambda: asked.phases(handle)[1] is NodePhase.TERMINATED, why=lambda: asked.provider.describe(handle))
    assert asked.kube.process(asked.pod(handle, 1)) is None
    assert asked.provider.destroy(handle) or until(lambda: asked.provider.destroy(handle))
    assert asked.kube.pods() == []


def test_a_pod_that_is_deleted_by_force_is_not_gone_while_its_process_lives(asked: Asked):
    handle = asked.provider.create(*asked.request())
    asked.ready(handle)
    name = asked.pod(handle, 1)
    node = asked.kube.pod(name)["spec"]["nodeName"]
    asked.kube.cluster.kill_kubelet(node)
    asked.kube.force_delete(name)
    later = KubernetesProvider(asked.options, clock=lambda: time.time() + 60)
    seen = later.describe(handle).nodes[1]
    assert seen.phase is NodePhase.ENDING
    assert "may live on" in seen.reason
    assert not later.destroy(handle)
    assert asked.kube.process(name) is not None
    assert asked.provider.list_owned("o") == (handle.model_copy(update={"made_at": 0.0}),)
    after = KubernetesProvider(asked.options, clock=lambda: time.time() + 700)
    assert after.describe(handle).nodes[1].phase is NodePhase.TERMINATED, "its own clocks have ended it"
    asked.kube.cluster.start_kubelet(node)
    until(lambda: asked.provider.destroy(handle), why=lambda: asked.provider.describe(handle))
    assert asked.kube.process(name) is None
    assert asked.kube.pods() == []


def test_a_node_that_is_silent_is_not_lost_and_one_that_is_removed_is(asked: Asked):
    cluster = asked.kube.cluster
    handle = asked.provider.create(*asked.request())
    asked.ready(handle)
    name = asked.pod(handle, 0)
    node = asked.kube.pod(name)["spec"]["nodeName"]
    cluster.kill_kubelet(node)
    until(lambda: not cluster.ready(node))
    assert asked.phases(handle) == [NodePhase.RUNNING] * 2, "what runs there goes on"
    assert asked.kube.process(name) is not None
    cluster.power_off(node)
    cluster.delete_node(node)
    until(lambda: asked.provider.destroy(handle), why=lambda: asked.provider.describe(handle))
    assert asked.kube.pods() == []


def test_what_waits_in_a_queue_costs_nothing_and_its_cap_counts_from_its_start(asked: Asked):
    asked.options |= {"queue": "team-queue", "queue_hours": "2"}
    request, offer, token = asked.request()
    handle = asked.provider.create(request, offer, token)
    assert asked.provider.queue_s() == 7200
    for node in asked.provider.describe(handle).nodes:
        assert (node.phase, node.queued, node.hard_cap_at) == (NodePhase.PENDING, True, 0)
        assert "team-queue" in node.reason
    path = asked.kube.path("jobs", f"mgpu-{token}", "batch/v1")
    assert asked.kube.api.get(path)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-queue"
    time.sleep(1.1)  # a start is told in whole seconds
    admitted = int(time.time())
    asked.kube.unsuspend(f"mgpu-{token}")
    asked.ready(handle)
    assert all(node.hard_cap_at >= admitted + 600 for node in asked.provider.describe(handle).nodes)
    asked.kube.api.patch(path, {"spec": {"suspend": True}})  # as Kueue does for a workload that is worth more
    until(lambda: asked.phases(handle) == [NodePhase.TERMINATED] * 2, why=lambda: asked.provider.describe(handle))
    asked.kube.unsuspend(f"mgpu-{token}")  # whose pods would be other machines
    until(lambda: len(asked.kube.pods()) == 4, why=asked.kube.pods)
    assert asked.phases(handle) == [NodePhase.STOPPING] * 2, "lost, and not all of it is gone"
    until(lambda: asked.provider.destroy(handle), why=lambda: asked.provider.describe(handle))
    assert asked.kube.pods() == []


def test_what_is_given_back_in_the_queue_never_begins(asked: Asked):
    asked.options |= {"queue": "team-queue"}
    request, offer, token = asked.request()
    handle = asked.provider.create(request, offer, token)
    until(lambda: asked.provider.destroy(handle))  # Kubernetes may be writing into the Job, too
    asked.kube.unsuspend(f"mgpu-{token}")
    assert asked.provider.create(request, offer, token) == handle.model_copy(update={"made_at": mock.ANY})
    assert asked.phases(handle) == [NodePhase.TERMINATED] * 2
    assert asked.provider.list_owned("o") == ()
    assert asked.kube.pods() == []


def test_a_quota_that_lets_no_pod_be_made_is_named(asked: Asked):
    asked.kube.quota(pods="1")
    handle = asked.provider.create(*asked.request())

    def waits() -> list[NodeState]:
        return [node for node in asked.provider.describe(handle).nodes if "exceeded quota" in node.reason]

    until(lambda: len(waits()) == 1, why=lambda: asked.provider.describe(handle))
    (node,) = waits()
    assert (node.phase, node.queued) == (NodePhase.PENDING, True)
    assert "no 2 such pods be at once" in node.cure, "nobody waits for hours"
    until(lambda: asked.provider.destroy(handle), why=lambda: asked.provider.describe(handle))


def test_what_no_node_has_room_for_waits_by_the_schedulers_own_word(asked: Asked):
    asked.options |= {"cpus_per_node": "65"}
    handle = asked.provider.create(*asked.request())
    until(lambda: "Insufficient cpu" in asked.provider.describe(handle).nodes[0].reason)
    node = asked.provider.describe(handle).nodes[0]
    assert (node.phase, node.queued) == (NodePhase.PENDING, True)
    until(lambda: asked.provider.destroy(handle), why=lambda: asked.provider.describe(handle))
    assert asked.phases(handle) == [NodePhase.TERMINATED] * 2


def test_an_image_that_cannot_be_pulled_is_told_with_a_cure(asked: Asked):
    request, offer, token = asked.request(nodes=1)
    handle = asked.provider.create(request.model_copy(update={"image": "registry.test/none@sha256:1"}), offer, token)
    until(lambda: asked.provider.describe(handle).nodes[0].cure, why=lambda: asked.provider.describe(handle))
    node = asked.provider.describe(handle).nodes[0]
    assert (node.phase, node.queued) == (NodePhase.PENDING, False)
    assert "image_pull_secret" in node.cure
    until(lambda: asked.provider.destroy(handle))


def test_an_eviction_is_a_notice_first(asked: Asked):
    asked.options |= {"notice_s": "600"}
    handle = asked.provider.create(*asked.request())
    asked.ready(handle)
    other, evicted = (asked.pod(handle, rank) for rank in range(2))
    with asked.node(handle, 1) as node:
        asked.kube.evict(evicted)
        until(lambda: node.run(["cat", ".mgpu/notice.json"], timeout=30, check=False).status == 0)
        assert asked.phases(handle)[1] is NodePhase.RUNNING, "there is time to save"
        notice = json.loads(node.run(["cat", ".mgpu/notice.json"], timeout=30).stdout)
        assert notice["action"] == "terminate"
    asked.kube.shorten(evicted, 1)
    until(lambda: "deletionTimestamp" in asked.kube.pod(other)["metadata"])
    asked.kube.shorten(other, 1)
    until(lambda: asked.phases(handle) == [NodePhase.TERMINATED] * 2, why=lambda: asked.provider.describe(handle))
    assert "EvictionByEvictionAPI" in asked.provider.describe(handle).nodes[1].reason
    assert asked.provider.list_owned("o") == (), "what has ended costs nothing, and is let go of"
    until(lambda: len(asked.kube.pods()) == 0, why=asked.kube.pods)
    assert asked.phases(handle) == [NodePhase.TERMINATED] * 2
    assert asked.provider.destroy(handle)


def test_forwards_that_drop_and_an_api_server_that_restarts_end_nothing(asked: Asked):
    handle = asked.provider.create(*asked.request())
    asked.ready(handle)
    with asked.node(handle, 0) as node:
        assert node.run(["echo", "there"], timeout=30).stdout == b"there\n"
        large = os.urandom(3_000_000)
        assert node.run(["cat"], stdin=large, timeout=60).stdout == large
        asked.kube.cluster.drop_forwards()
        until(lambda: node.closed)
    asked.ready(handle)
    with asked.node(handle, 0) as node:
        assert node.run(["echo", "again"], timeout=30).stdout == b"again\n"
        asked.kube.cluster.restart_apiserver()
        until(lambda: node.closed)
    asked.ready(handle)  # the node's own server is asked again, too
    with asked.node(handle, 0) as node:
        assert node.run(["echo", "again"], timeout=30).stdout == b"again\n"
    kubectl = [each for each in procs.descendants(os.getpid()) if "--unix-socket" in procs.command_line(each.pid)]
    for each in kubectl:
        each.send(signal.SIGKILL)
    until(lambda: answers(asked, handle))  # another one is started


def answers(asked: Asked, handle: Handle) -> bool:
    try:
        return asked.provider.describe(handle).ready
    except Transient:
        return False


def test_a_users_own_ssh_gets_there(asked: Asked):
    handle = asked.provider.create(*asked.request(nodes=1))
    asked.ready(handle)
    seen = asked.provider.describe(handle).nodes[0]
    via = hop(seen.via.model_dump() if seen.via else None)
    assert isinstance(via, ProxyCommand)
    options = [f"-oProxyCommand={shlex.join(via.argv)}", "-oStrictHostKeyChecking=no", "-oUserKnownHostsFile=/dev/null"]
    argv = ["ssh", "-F", "none", "-i", str(asked.folder / "key"), *options, f"{seen.user}@pod", "cat"]
    large = os.urandom(300_000)
    done = subprocess.run(argv, input=large, capture_output=True, timeout=60)
    assert done.stdout == large, done.stderr
    words = [*via.argv[:-3], "1", *via.argv[-2:]]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as refused:
        assert refused.wait(60) == 1
        assert refused.stderr is not None
        assert b"refused" in refused.stderr.read()


def test_check_says_what_is_allowed_with_the_least_role(asked: Asked):
    asked.kube.quota(**{"requests.nvidia.com/gpu": "8"})
    found = asked.provider.findings(asked.requirements(gpus_per_node=2), str)
    assert [each.status for each in found] == ["ok"] * len(found), found
    assert any("requests.nvidia.com/gpu: 0 of 8 used" in each.detail for each in found)
    assert "its pods were not tried" in found[-1].detail
    asked.options |= {"queue": "nowhere"}
    missing = [each for each in asked.provider.findings(None, str) if each.status == "failed"]
    assert [each.subject for each in missing] == ["queue nowhere"]
    none = asked.provider.findings(asked.requirements(gpus_per_node=2, gpu=("B300",)), str)
    assert none[-1].status == "failed"
    asked.kube.grant(yaml.safe_dump({"kind": "Role", "metadata": {"name": "none"}, "rules": []}))
    found = {each.subject: each for each in asked.provider.findings(None, str)}
    rights = found[f"your rights in {asked.kube.name}"]
    assert rights.status == "failed"
    assert rights.document == roles(asked.kube.name)[0]
    with pytest.raises(PermissionDenied):
        asked.provider.check()


def test_who_may_not_see_nodes_gets_what_is_asked_for(asked: Asked):
    asked.kube.grant(yaml.safe_dump(roles(asked.kube.name)[0]))
    asked.kube.api.delete("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/mgpu-sees-nodes")
    until(lambda: asked.provider.offers(asked.requirements()).notes)
    sold = asked.provider.offers(asked.requirements(gpus_per_node=1, gpu=("H100-80GB",)))
    assert [(offer.gpu, offer.instance_type) for offer in sold.offers] == [("H100-80GB", "node")]
    assert "may not be listed" in sold.notes[0]
    handle = asked.provider.create(*asked.request(gpus_per_node=1, nodes=1))
    asked.ready(handle)
    until(lambda: asked.provider.destroy(handle), why=lambda: asked.provider.describe(handle))


def test_a_namespace_that_wants_pods_without_privileges_gets_such_and_a_pod_that_fails_says_why(asked: Asked):
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    asked.kube.api.patch(f"/api/v1/namespaces/{asked.kube.name}", {"metadata": {"labels": labels}})
    request, offer, token = asked.request(nodes=1)
    refused = asked.provider.create(request, offer, token[::-1])
    until(lambda: asked.provider.describe(refused).nodes[0].cure, why=lambda: asked.provider.describe(refused))
    node = asked.provider.describe(refused).nodes[0]
    assert "violates PodSecurity" in node.reason
    assert "run_as_user" in node.cure
    until(lambda: asked.provider.destroy(refused), why=lambda: asked.provider.describe(refused))
    asked.options |= {"run_as_user": "65534"}
    handle = asked.provider.create(*asked.request(nodes=1))
    until(lambda: asked.phases(handle) == [NodePhase.TERMINATED], why=lambda: asked.provider.describe(handle))
    assert "user nobody of the image has no shell" in asked.provider.describe(handle).nodes[0].reason
    until(lambda: asked.provider.destroy(handle), why=lambda: asked.provider.describe(handle))


# names, types, the enumeration and what is required are those of docs.coreweave.com/products/cks/reference/node-pool
NODE_POOLS = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: nodepools.compute.coreweave.com}
spec:
  group: compute.coreweave.com
  scope: Cluster
  names: {kind: NodePool, plural: nodepools, singular: nodepool, listKind: NodePoolList}
  versions:
    - name: v1alpha1
      served: true
      storage: true
      schema:
        openAPIV3Schema:
          type: object
          properties:
            spec:
              type: object
              required: [instanceType]
              properties:
                computeClass: {type: string, enum: [default, spot]}
                instanceType: {type: string}
                autoscaling: {type: boolean}
                minNodes: {type: integer}
                maxNodes: {type: integer}
                targetNodes: {type: integer}
                nodeLabels: {type: object, additionalProperties: {type: string}}
            status: {type: object, x-kubernetes-preserve-unknown-fields: true}
"""


def test_a_node_pool_of_coreweaves_comes_with_a_gang_and_goes_with_it(asked: Asked):
    """The test is the pool's controller: it gives it nodes, and holds it until they are gone."""
    api, nodes = asked.kube.api, asked.kube.cluster.nodes
    asked.kube.cluster.kubectl("apply", "-f", "-", given=NODE_POOLS)
    until(lambda: _there(api, node_pool.PATH), why="the kind is not served")
    asked.kube.grant(yaml.safe_dump_all([*roles(asked.kube.name), node_pool.role()]))
    asked.options["node_pool"] = json.dumps({"instance_type": "gd-8xh100ib-i128", "compute_class": "spot"})
    found = asked.provider.findings(asked.requirements(market="spot"), str)
    assert [each.status for each in found] == ["ok"] * len(found), found
    assert api.items(node_pool.PATH) == []
    request, offer, token = asked.request(market="spot")
    handle = asked.provider.create(request, offer, token)
    assert asked.provider.create(request, offer, token) == handle
    path = f"{node_pool.PATH}/mgpu-{token}"
    made = api.get(path)
    about = {"instanceType": "gd-8xh100ib-i128", "computeClass": "spot", "nodeLabels": {"mgpu.dev/token": token}}
    assert made["spec"] == {"targetNodes": 2, "minNodes": 0, "maxNodes": 2, "autoscaling": True, **about}
    api.put(path, {**made, "metadata": {**made["metadata"], "finalizers": ["tests/nodes"]}})
    until(lambda: "node pool" in asked.provider.describe(handle).nodes[0].reason)
    assert all(node.queued for node in asked.provider.describe(handle).nodes), "no other node will do"
    for node in nodes:
        api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": {"mgpu.dev/token": token}}})
    asked.ready(handle)
    until(lambda: not asked.provider.destroy(handle) and not asked.kube.pods())
    assert not asked.provider.destroy(handle)
    assert asked.phases(handle) == [NodePhase.STOPPING] * 2, "its nodes are there"
    assert asked.provider.list_owned("o") == (handle.model_copy(update={"made_at": mock.ANY}),)
    gone = api.get(path)
    assert "deletionTimestamp" in gone["metadata"]
    for node in nodes:
        api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": {"mgpu.dev/token": None}}})
    api.put(path, {**gone, "metadata": {**gone["metadata"], "finalizers": []}})
    assert asked.provider.destroy(handle)
    assert asked.phases(handle) == [NodePhase.TERMINATED] * 2
    assert asked.provider.list_owned("o") == ()


def test_the_manifests_of_the_docs_are_what_an_api_server_takes(asked: Asked):
    text = (Path(__file__).parents[2] / "docs/kubernetes.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (manifests,) = [each for each in blocks if each.startswith("apiVersion")]
    kinds = [each["kind"] for each in yaml.safe_load_all(manifests)]
    create = ("-n", asked.kube.name, "create", "--dry-run=server", "-f", "-")
    told = asked.kube.cluster.kubectl(*create, given=manifests).splitlines()
    assert len(told) == len(kinds) == 4, told
    assert all("created (server dry run)" in line for line in told)
    with pytest.raises(AssertionError, match=r"unknown field.*mostReplicas"):  # it looks at each field
        asked.kube.cluster.kubectl(*create, given=manifests.replace("maxReplicas", "mostReplicas"))


def test_what_others_have_in_the_namespace_is_not_ours(asked: Asked):
    container = {"name": "c", "image": IMAGE, "command": ["sleep", "1000"]}
    spec = {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 1}
    asked.kube.api.post(asked.kube.path("pods"), {"metadata": {"name": "thesis"}, "spec": spec})
    handle = asked.provider.create(*asked.request())
    assert [each.token for each in asked.provider.list_owned("o")] == [handle.token]
    assert asked.provider.list_owned("another") == ()
    until(lambda: asked.provider.destroy(handle), why=lambda: asked.provider.describe(handle))
    assert [pod["metadata"]["name"] for pod in asked.kube.pods()] == ["thesis"]
