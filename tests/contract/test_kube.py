"""What tests rely on in the Kubernetes of their own: a kubelet that is too kind would hide a provider's mistakes."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from fakes.aws import world
from fakes.kube import manifest
from fakes.kube.api import Api, Refused
from fakes.kube.cluster import IMAGE, Cluster, Namespace, _there
from mgpu_train.agent.machine import ports, procs
from waiting import until

DEAF = "trap '' TERM; echo up; while :; do sleep 0.1; done"
CAREFUL = "trap 'echo asked; exit 3' TERM; echo up; while :; do sleep 0.1; done"
SHOUTS = """
import socket
with socket.create_server(("127.0.0.1", 22)) as server:
    print("up", flush=True)
    while True:
        peer = server.accept()[0]
        while heard := peer.recv(99):
            peer.sendall(heard.upper())
        peer.close()
"""
ROLE = """
kind: Role
metadata: {name: reads}
rules: [{apiGroups: [""], resources: [pods], verbs: [list]}]
"""


def manifested(name: str, *command: str, grace: int = 1, **more: object) -> dict:
    """A pod's manifest."""
    container = {"name": "node", "image": IMAGE, "command": command}
    spec = {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": grace, **more}
    return {"metadata": {"name": name}, "spec": spec}


def pod(kube: Namespace, name: str, *command: str, **more: object) -> None:
    """Makes a pod, and waits until it runs and says so."""
    kube.api.post(kube.path("pods"), manifested(name, *command, **more))
    until(lambda: phase(kube, name) == "Running" and "up" in kube.log(name), 60, lambda: told(kube, name))


def told(kube: Namespace, name: str) -> str:
    """All that is known of a pod that does not begin."""
    seen = kube.pod(name)
    node = seen["spec"].get("nodeName", "n1")
    said = (kube.cluster.log(f"kubelet-{node}"), str(kube.cluster.admin.get(f"/api/v1/nodes/{node}")["status"]))
    return "\n".join([str(seen["status"]), *said])


def phase(kube: Namespace, name: str) -> str:
    return kube.pod(name)["status"]["phase"]


def gone(kube: Namespace, name: str) -> bool:
    return not _there(kube.api, kube.path("pods", name))


def end(kube: Namespace, name: str) -> dict:
    """How a container has ended, once the API knows."""

    def state() -> dict:
        return kube.pod(name)["status"].get("containerStatuses", [{"state": {}}])[0]["state"]

    until(lambda: "terminated" in state(), 60)
    return state()["terminated"]


@contextmanager
def forwarded(kube: Namespace, name: str, port: int) -> Iterator[int]:
    """A port of loopback that leads to a pod's, by kubectl, and so through the API server."""
    near = ports.free(1)[0]
    argv = [kube.cluster.kube, "kubectl", f"--kubeconfig={kube.cluster.folder}/admin.kubeconfig", "-n", kube.name]
    process = subprocess.Popen([*argv, "port-forward", name, f"{near}:{port}"], stdout=subprocess.PIPE)
    try:
        assert process.stdout
        assert b"Forwarding" in process.stdout.readline()
        yield near
    finally:
        process.kill()
        process.wait()


def heard(connection: socket.socket, words: bytes) -> bytes:
    connection.sendall(words)
    return connection.recv(99)


def test_a_container_is_asked_and_then_ended_when_its_time_of_grace_is_over(kube: Namespace):
    pod(kube, "careful", "sh", "-c", CAREFUL, grace=60)
    pod(kube, "deaf", "sh", "-c", DEAF, grace=60)
    kept = {"metadata": {"finalizers": ["tests/kept"]}}
    for name in ("careful", "deaf"):
        kube.api.patch(kube.path("pods", name), kept)
        kube.api.delete(kube.path("pods", name))
    assert end(kube, "careful")["exitCode"] == 3
    assert kube.log("careful") == "up\nasked\n"
    assert kube.process("careful") is None
    assert kube.process("deaf"), "its grace is a minute"
    kube.api.delete(kube.path("pods", "deaf"), {"gracePeriodSeconds": 1})
    assert end(kube, "deaf")["exitCode"] == 137
    assert phase(kube, "deaf") == "Failed"
    assert kube.process("deaf") is None
    for name in ("careful", "deaf"):
        kube.api.patch(kube.path("pods", name), {"metadata": {"$deleteFromPrimitiveList/finalizers": ["tests/kept"]}})
        until(lambda name=name: gone(kube, name))


def test_a_deadline_ends_a_pod_whose_last_words_are_kept(kube: Namespace):
    late = manifested("late", "sh", "-c", CAREFUL, activeDeadlineSeconds=2)
    late["spec"]["containers"][0]["terminationMessagePolicy"] = "FallbackToLogsOnError"
    kube.api.post(kube.path("pods"), late)
    ended = end(kube, "late")
    assert (ended["exitCode"], ended["message"]) == (3, "up\nasked\n")
    assert (phase(kube, "late"), kube.pod("late")["status"]["reason"]) == ("Failed", "DeadlineExceeded")


def test_a_node_whose_kubelet_is_dead_runs_on_whatever_the_api_says(kube: Namespace):
    cluster = kube.cluster
    for name in ("held", "failed"):
        pod(kube, name, "sh", "-c", CAREFUL, nodeName="n2", grace=60)  # at load a second is too short to answer in
    cluster.kill_kubelet("n2")
    until(lambda: not cluster.ready("n2"), why=lambda: cluster.admin.get("/api/v1/nodes/n2"))
    assert phase(kube, "held") == "Running"
    kube.force_delete("held")
    assert gone(kube, "held")
    kube.api.patch(kube.path("pods", "failed/status"), {"status": {"phase": "Failed"}})  # as where its node is no more
    held, failed = kube.process("held"), kube.process("failed")
    assert held, "nobody has told it"
    assert failed
    cluster.start_kubelet("n2")
    until(lambda: not held.alive and not failed.alive, why=lambda: cluster.log("kubelet-n2"))
    assert kube.log("held").endswith("asked\n"), "what the API has forgotten the kubelet ends, when it is back"
    assert end(kube, "failed")["exitCode"] == 3
    until(lambda: cluster.ready("n2"))


def test_a_kubelet_that_restarts_takes_over_its_pods_and_one_without_power_loses_them(kube: Namespace):
    cluster = kube.cluster
    pod(kube, "held", "sh", "-c", CAREFUL, nodeName="n2")
    process = kube.process("held")
    cluster.kill_kubelet("n2")
    cluster.start_kubelet("n2")
    until(lambda: cluster.kubectl("-n", kube.name, "exec", "held", "--", "hostname") == "held\n")
    assert process
    assert kube.process("held") == process
    cluster.power_off("n2")
    until(lambda: not process.alive)
    assert phase(kube, "held") == "Running", "nobody tells"
    cluster.start_kubelet("n2")
    assert end(kube, "held")["exitCode"] == 137


def test_a_container_has_its_volumes_its_user_and_no_more_rights_than_were_given(kube: Namespace, tmp_path: Path):
    core = "/api/v1"
    kube.api.post(kube.path("configmaps"), {"metadata": {"name": "words"}, "data": {"a": "from a map"}})
    kube.api.post(kube.path("secrets"), {"metadata": {"name": "keys"}, "stringData": {"b": "from a secret"}})
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": ""}
    volume = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"], "hostPath": {"path": str(tmp_path)}}
    volume |= {"claimRef": {"namespace": kube.name, "name": "disk"}, "persistentVolumeReclaimPolicy": "Retain"}
    kube.api.post(f"{core}/persistentvolumes", {"metadata": {"name": f"disk-{kube.name}"}, "spec": volume})
    kube.api.post(
        kube.path("persistentvolumeclaims"),
        {"metadata": {"name": "disk"}, "spec": {**claim, "volumeName": f"disk-{kube.name}"}},
    )
    tmp_path.chmod(0o777)
    script = """
        echo "$(id -u):$(id -g):$(id -G) $HOME $POD $NVIDIA_VISIBLE_DEVICES $KEY"
        grep -E 'CapEff|NoNewPrivs' /proc/self/status; cat /words/a; echo; cat /keys/b; echo
        df -m /dev/shm | awk 'NR == 2 { print $2 }'
        cd /var/run/secrets/kubernetes.io/serviceaccount && test -s token && cat namespace && echo
        echo written >/disk/file; echo lost >/scratch/file && echo kept >/dev/termination-log; touch /words/c
    """
    about = manifested("all", "sh", "-c", script)
    (container,) = about["spec"]["containers"]
    container["resources"] = {"limits": {"nvidia.com/gpu": "2"}}
    container["env"] = [
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "b"}}},
    ]
    container["securityContext"] = {"capabilities": {"drop": ["ALL"]}, "allowPrivilegeEscalation": False}
    places = {"words": "/words", "keys": "/keys", "disk": "/disk", "scratch": "/scratch", "memory": "/dev/shm"}
    container["volumeMounts"] = [{"name": name, "mountPath": path} for name, path in places.items()]
    about["spec"]["securityContext"] = {"runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 7}
    about["spec"]["volumes"] = [
        {"name": "words", "configMap": {"name": "words"}},
        {"name": "keys", "secret": {"secretName": "keys", "defaultMode": 0o400}},
        {"name": "disk", "persistentVolumeClaim": {"claimName": "disk"}},
        {"name": "scratch", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "3Mi"}},
    ]
    kube.api.post(kube.path("pods"), about)
    ended = end(kube, "all")
    assert kube.log("all").splitlines() == [
        "10001:10001:10001 7 / all GPU-0,GPU-1 from a secret",
        "CapEff:\t0000000000000000",
        "NoNewPrivs:\t1",
        *("from a map", "from a secret", "3", kube.name),
        "touch: cannot touch '/words/c': Read-only file system",
    ]
    assert (ended["exitCode"], ended["message"]) == (1, "kept\n")
    assert (tmp_path / "file").read_text() == "written\n"


def test_what_a_container_ends_with_reaches_an_api_server_that_was_away(kube: Namespace):
    pod(kube, "quick", "sh", "-c", "echo up; while [ ! -e /tmp/go ]; do sleep 0.1; done; exit 5")
    process = kube.process("quick")
    assert process
    kube.cluster.stop_apiserver()
    Path(f"/proc/{process.pid}/root/tmp/go").touch()
    until(lambda: not process.alive)
    kube.cluster.start_apiserver()
    assert end(kube, "quick")["exitCode"] == 5


def test_each_pod_has_ports_of_its_own_and_a_forward_that_drops_can_be_had_again(kube: Namespace):
    for name, word in (("one", "up"), ("two", "two")):
        program = SHOUTS.replace("heard.upper()", f"heard.upper() + b'{word}'")
        pod(kube, name, "python3", "-c", program)
    address = kube.pod("two")["status"]["podIP"]
    reach = f"import socket; socket.create_connection(('{address}', 22), 5).sendall(b'x')"
    one = kube.process("one")
    assert one
    from_one = subprocess.run([*world.prefix(one.pid), sys.executable, "-c", reach], capture_output=True, text=True)
    assert "refused" in from_one.stderr, "there is a way from pod to pod, and who listens on loopback is not on it"
    with forwarded(kube, "one", 22) as near, socket.create_connection(("127.0.0.1", near)) as connection:
        assert heard(connection, b"a") == b"Aup"
        with forwarded(kube, "two", 22) as other, socket.create_connection(("127.0.0.1", other)) as second:
            assert heard(second, b"b") == b"Btwo"
        kube.cluster.drop_forwards()
        connection.settimeout(1)
        with suppress(TimeoutError):  # kubectl sees after 10 s that it has lost it
            assert heard(connection, b"a") == b""

    def again() -> bool:
        with forwarded(kube, "one", 22) as near, socket.create_connection(("127.0.0.1", near)) as connection:
            return heard(connection, b"c") == b"Cup"

    until(lambda: again())


def test_the_user_may_only_what_was_granted(kube: Namespace):
    user = Api(kube.cluster._access("user"))
    with pytest.raises(Refused) as refused:
        user.get(kube.path("pods"))
    assert refused.value.status == 403
    kube.grant(ROLE)
    until(lambda: _there(user, kube.path("pods")))
    with pytest.raises(Refused):
        user.post(kube.path("pods"), manifested("mine", "true"))
    with pytest.raises(Refused):
        user.get(kube.path("secrets"))  # of nodes, another test may have granted them


def test_what_the_kubelet_does_not_do_it_refuses_aloud(kube: Namespace):
    assert manifest.unknown(manifested("plain", "true")) == []
    probed = manifested("probed", "true", hostNetwork=True)
    probed["spec"]["containers"][0]["readinessProbe"] = {"tcpSocket": {"port": 22}}
    kube.api.post(kube.path("pods"), probed)
    until(lambda: phase(kube, "probed") == "Failed")
    assert kube.pod("probed")["status"]["message"].endswith("does not do this: hostNetwork, readinessProbe")
    assert kube.folder("probed") is None
    unknown = manifested("unknown", "true")
    unknown["spec"]["containers"][0]["image"] = "registry.test/other"
    kube.api.post(kube.path("pods"), unknown)
    until(lambda: "ImagePullBackOff" in str(kube.pod("unknown")["status"]))


def test_nothing_is_left_when_the_process_that_has_started_it_is_killed(tmp_path: Path):
    code = (
        "import os, sys; from pathlib import Path; from fakes.kube.cluster import Cluster\n"
        "cluster = Cluster(Path(sys.argv[1])); cluster.start_lifeline()\n"
        "cluster._run('one', 'sleep', 'infinity'); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env={"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == -signal.SIGKILL
    until(lambda: not procs.carrying(Cluster(tmp_path).mark))
