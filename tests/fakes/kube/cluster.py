"""A real Kubernetes of two nodes on loopback, as a test starts and ends it: etcd, API server, controllers, scheduler.

scripts/setup-kube.sh builds the program; kubelet.py is the tests' own. Each node has 8 GPUs, so to speak. Nothing of a
Kubernetes that this machine may have is touched: ports, certificates and folders are the cluster's own.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml
from mgpu_train.agent.machine import ports, procs
from waiting import until, until_it_serves

from fakes.aws import world
from fakes.aws.blueprint import CHECKOUT, COVERED, interpreters
from fakes.kube.api import SILENT, Access, Api, Refused
from fakes.kube.pki import Authority

Json = dict[str, Any]

IMAGE = f"registry.test/trainer@sha256:{'0' * 64}"
"""The image that nodes can pull: this machine's programs, and the tests' Python, with torch; it runs as root."""

SCRIPT = Path(__file__).parents[3] / "scripts" / "setup-kube.sh"
START_S, KILL_S, END_S = 60.0, 10.0, 60.0
GATEWAY, SUBNET, PREFIX = "10.244.0.1", "10.244", 16
CAPACITY = {"cpu": "64", "memory": "256Gi", "pods": "110", "ephemeral-storage": "1Ti", "nvidia.com/gpu": "8"}
LABELS = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "topology.kubernetes.io/zone": "zone-1"}
UNREACHABLE_S = 8  # after so long without a word of its kubelet a node is NotReady
CONTROLLERS = (
    *("job-controller", "namespace-controller", "serviceaccount-controller", "garbage-collector-controller"),
    *("ttl-after-finished-controller", "pod-garbage-collector-controller", "node-lifecycle-controller"),
    *("taint-eviction-controller", "disruption-controller", "resourcequota-controller", "endpointslice-controller"),
    *("persistentvolume-binder-controller", "root-ca-certificate-publisher-controller"),
)
FABRIC = (
    f"ip link set lo up && ip link add pods type bridge && ip addr add {GATEWAY}/{PREFIX} dev pods"
    " && ip link set pods up && exec sleep infinity"
)


def program() -> str | None:
    """The program that scripts/setup-kube.sh has built; None: it is not here."""
    built = subprocess.run(["sh", SCRIPT, "--kept"], capture_output=True, text=True, check=False)
    return built.stdout.strip() or None


def missing() -> str | None:
    """Why there can be no cluster here; None: there can."""
    if program() is None:
        return "Kubernetes is not built; scripts/setup-kube.sh builds it, in 10 minutes"
    return world.missing()


@dataclass
class Cluster:
    """A cluster that runs. `admin` may do all."""

    folder: Path
    nodes: tuple[str, ...] = ("n1", "n2")
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _namespaces: int = 0

    @cached_property
    def kube(self) -> str:
        """The program that all of it is."""
        found = program()
        assert found
        return found

    @cached_property
    def admin(self) -> Api:
        return Api(self._access("admin"))

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self._ports[0]}"

    # --- what it runs

    def start(self) -> None:
        """Starts all of it, and waits until the nodes are ready."""
        authority = Authority(self.folder / "pki")
        for file, user, group in (
            ("apiserver", "kube-apiserver", ""),
            ("kubelet-client", "kube-apiserver-kubelet-client", ""),
            ("admin", "admin", "system:masters"),
            ("scheduler", "system:kube-scheduler", ""),
            ("user", "trainer", ""),
            *((node, f"system:node:{node}", "system:nodes") for node in self.nodes),
        ):
            authority.sign(file, user, group)
        self._ports = ports.free(5 + len(self.nodes))
        self.start_lifeline()
        self._run("fabric", "unshare", "--net", "sh", "-c", FABRIC)
        self._start_etcd()
        self.start_apiserver()
        self.kubeconfig("admin")
        self.kubeconfig("scheduler")
        common = {"kubeconfig": self._kubeconfig("admin"), "leader-elect": "false", "bind-address": "127.0.0.1"}
        self._program(
            "kube-controller-manager",
            **common,
            secure_port=self._ports[3],
            service_account_private_key_file=self._pki("apiserver.key"),
            root_ca_file=self._pki("ca.crt"),
            use_service_account_credentials="false",
            controllers=",".join(CONTROLLERS),
            node_monitor_period="1s",
            node_monitor_grace_period=f"{UNREACHABLE_S}s",
        )
        common["kubeconfig"] = self._kubeconfig("scheduler")
        self._program("kube-scheduler", **common, secure_port=self._ports[4])
        self.images({IMAGE: host_image(self.folder)})
        for node in self.nodes:
            self._start_kubelet(node)
        until(self._up, START_S, lambda: "\n".join(self.log(each) for each in self._processes))

    def _up(self) -> bool:
        if not all(self.ready(node) and self._serves(node) for node in self.nodes):
            return False
        with suppress(Refused):
            self.admin.get("/api/v1/namespaces/default/serviceaccounts/default")
            return True
        return False

    def _start_etcd(self) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in self._ports[1:3])
        flags = {"data_dir": self.folder / "etcd", "unsafe_no_fsync": "true", "log_level": "warn"}
        flags |= {"listen_client_urls": client, "advertise_client_urls": client, "listen_peer_urls": peer}
        flags |= {"initial_advertise_peer_urls": peer, "initial_cluster": f"default={peer}"}
        self._program("etcd", **flags)

    def start_apiserver(self) -> None:
        """Starts one; returns when it answers."""
        self._program(
            "kube-apiserver",
            etcd_servers=f"http://127.0.0.1:{self._ports[1]}",
            bind_address="127.0.0.1",
            advertise_address="127.0.0.1",
            secure_port=self._ports[0],
            cert_dir=self.folder / "pki",
            tls_cert_file=self._pki("apiserver.crt"),
            tls_private_key_file=self._pki("apiserver.key"),
            client_ca_file=self._pki("ca.crt"),
            kubelet_certificate_authority=self._pki("ca.crt"),
            kubelet_client_certificate=self._pki("kubelet-client.crt"),
            kubelet_client_key=self._pki("kubelet-client.key"),
            kubelet_preferred_address_types="InternalIP",
            authorization_mode="Node,RBAC",
            enable_admission_plugins="NodeRestriction",
            disable_admission_plugins="StorageObjectInUseProtection",
            service_cluster_ip_range="10.96.0.0/16",
            service_account_key_file=self._pki("apiserver.crt"),
            service_account_signing_key_file=self._pki("apiserver.key"),
            service_account_issuer="https://tests.invalid",
            endpoint_reconciler_type="none",
            enable_priority_and_fairness="false",
            profiling="false",
        )
        process = self._processes["kube-apiserver"]
        until_it_serves(process, self.answers, START_S, lambda: self.log("kube-apiserver"))

    def _program(self, name: str, **flags: object) -> None:
        given = (f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items())
        self._run(name, self.kube, name, *given)

    def _run(self, name: str, *argv: str) -> None:
        """Starts a process of the cluster's, whose name is `name` from now on."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                argv,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "MGPU_KUBE": str(self.folder)},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self, name: str) -> str:
        """The end of what a process has printed."""
        return f"--- {name}\n{(self.folder / f'{name}.log').read_text(errors='replace')[-2000:]}"

    def _end(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process:
            process.kill()  # an API server without etcd would not end otherwise
            process.wait()

    def answers(self) -> bool:
        """Whether the API server is ready."""
        try:
            return b"ok" in self.admin.raw("/readyz")
        except (Refused, *SILENT):
            return False

    def stop_apiserver(self) -> None:
        """Nobody answers any more; what runs runs on."""
        self._end("kube-apiserver")

    def restart_apiserver(self) -> None:
        """Ends it with all of its connections; returns when a new one answers."""
        self.stop_apiserver()
        self.start_apiserver()

    def stop(self) -> None:
        """Ends all of it at once, pods too."""
        procs.kill_all(lambda: procs.carrying(self.mark), KILL_S)
        for name in list(self._processes):
            self._end(name)
        self._lifeline.communicate()

    @property
    def mark(self) -> str:
        """What all that belongs to it has in its environment; pods end with those that have."""
        return f"MGPU_KUBE={self.folder}"

    def start_lifeline(self) -> None:
        """Starts what ends all of it when this process has ended, by whatever signal: only this one holds the pipe."""
        code = "import sys; from mgpu_train.agent.machine import procs; sys.stdin.read(); "
        code += f"procs.kill_all(lambda: procs.carrying(sys.argv[1]), {KILL_S})"
        argv = [sys.executable, "-c", code, self.mark]
        self._lifeline = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)

    # --- nodes

    def start_kubelet(self, node: str) -> None:
        """Starts a node's kubelet, which takes over what runs there; one that runs stays. Returns when it serves."""
        if f"kubelet-{node}" not in self._processes:
            self._start_kubelet(node)
            until(lambda: self._serves(node), START_S, lambda: self.log(f"kubelet-{node}"))

    def _serves(self, node: str) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._ports[5 + self.nodes.index(node)])) == 0

    def _start_kubelet(self, node: str) -> None:
        number = self.nodes.index(node)
        folder = self.folder / node
        folder.mkdir(exist_ok=True)
        told = {
            "server": self.server,
            "kube": self.kube,
            "version": Path(self.kube).name.split("-")[1],
            "port": self._ports[5 + number],
            "subnet": f"{SUBNET}.{number + 1}",
            "capacity": CAPACITY,
            "labels": {"kubernetes.io/hostname": node, **LABELS},
            "network": {
                "fabric": self._processes["fabric"].pid,
                "bridge": "pods",
                "gateway": GATEWAY,
                "prefix": PREFIX,
            },
        }
        (folder / "kubelet.json").write_text(json.dumps(told))
        self._run(f"kubelet-{node}", sys.executable, "-m", "fakes.kube.kubelet", str(self.folder), node)

    def kill_kubelet(self, node: str) -> None:
        """The node hears and says nothing more; what runs on it runs on."""
        self._end(f"kubelet-{node}")
        until(lambda: not self._serves(node))  # that half of it ends a moment later

    def power_off(self, node: str) -> None:
        """The node's kubelet and all of its pods end at once, and nobody tells."""
        self.kill_kubelet(node)
        for pod in (self.folder / node / "pods").iterdir():
            for shim in procs.carrying(self.mark):
                if str(pod) in procs.command_line(shim.pid):
                    os.killpg(shim.pid, signal.SIGKILL)

    def ready(self, node: str) -> bool:
        """What the API says of a node."""
        try:
            conditions = self.admin.get(f"/api/v1/nodes/{node}")["status"].get("conditions", [])
        except Refused:
            return False
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    def drop_forwards(self) -> None:
        """Ends every connection of port-forward and exec; returns when new ones are taken."""
        for node in self.nodes:
            if kubelet := self._processes.get(f"kubelet-{node}"):
                before = self._streams(kubelet.pid)
                kubelet.send_signal(signal.SIGUSR1)
                until(lambda pid=kubelet.pid, before=before: self._streams(pid) - before)
                until(lambda node=node: self._serves(node), START_S, lambda node=node: self.log(f"kubelet-{node}"))

    def _streams(self, kubelet: int) -> set[procs.Process]:
        """What serves for a kubelet: another one starts when all of this one has ended, its port included."""
        below = procs.descendants(kubelet)
        return {each for each in below if f"{self.kube} streams" in procs.command_line(each.pid)}

    def delete_node(self, node: str) -> None:
        """The API forgets a node, as when its machine is gone for good, until its kubelet is started again."""
        self.admin.delete(f"/api/v1/nodes/{node}")

    def images(self, images: Json) -> None:
        """What pods can be made from, by reference."""
        (self.folder / "images.json").write_text(json.dumps(images))

    # --- users

    @cached_property
    def bin(self) -> Path:
        """A folder for PATH, with `kubectl`."""
        folder = self.folder / "bin"
        folder.mkdir()
        kubectl = folder / "kubectl"
        kubectl.write_text(f'#!/bin/sh\nexec {self.kube} kubectl "$@"\n')
        kubectl.chmod(0o755)
        return folder

    def kubeconfig(self, user: str, namespace: str = "default") -> Path:
        """A file for kubectl and other clients: `admin`, or `user`, who may only what is granted."""
        access = self._access(user)
        cluster = {"server": access.server, "certificate-authority": str(access.ca)}
        who = {"client-certificate": str(access.cert), "client-key": str(access.key)}
        context = {"cluster": "tests", "user": user, "namespace": namespace}
        path = self._kubeconfig(user if namespace == "default" else f"{user}-{namespace}")
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": user, "user": who}],
            "contexts": [{"name": "tests", "context": context}],
            "current-context": "tests",
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def _kubeconfig(self, name: str) -> Path:
        return self.folder / f"{name}.kubeconfig"

    def _pki(self, name: str) -> Path:
        return self.folder / "pki" / name

    def _access(self, user: str) -> Access:
        return Access(self.server, self._pki("ca.crt"), self._pki(f"{user}.crt"), self._pki(f"{user}.key"))

    def kubectl(self, *words: str, given: str = "", user: str = "admin") -> str:
        """What kubectl prints. AssertionError: it failed."""
        argv = [self.kube, "kubectl", f"--kubeconfig={self._kubeconfig(user)}", *words]
        done = subprocess.run(argv, input=given, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def namespace(self) -> Namespace:
        """A new one, empty."""
        self._namespaces += 1
        name = f"team-{self._namespaces}"
        self.admin.post("/api/v1/namespaces", {"metadata": {"name": name}})
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        until(lambda: _there(self.admin, account), START_S)
        return Namespace(self, name)


@dataclass
class Namespace:
    """A namespace of a test's own, and what happens in it."""

    cluster: Cluster
    name: str

    @property
    def api(self) -> Api:
        """As the administrator."""
        return self.cluster.admin

    @cached_property
    def kubeconfig(self) -> Path:
        """Of the user, who may only what `grant` gives; this is the namespace that is meant without a name."""
        return self.cluster.kubeconfig("user", self.name)

    def path(self, kind: str, name: str = "", group: str = "") -> str:
        """Where the API has objects of this namespace: `path("jobs", "train", "batch/v1")`."""
        above = f"/apis/{group}" if group else "/api/v1"
        return f"{above}/namespaces/{self.name}/{kind}" + (f"/{name}" if name else "")

    def grant(self, roles: str) -> None:
        """Gives the user these roles, manifests in YAML, and takes back what was given before."""
        for kind in ("rolebindings", "roles"):
            self.api.delete(self.path(kind, group="rbac.authorization.k8s.io/v1"))
        for role in filter(None, yaml.safe_load_all(roles)):
            whole = role["kind"] == "ClusterRole"
            above = "/apis/rbac.authorization.k8s.io/v1"
            above += "" if whole else f"/namespaces/{self.name}"
            name = role["metadata"]["name"]
            role["metadata"] = {"name": name}
            binding = {
                "metadata": {"name": name},
                "subjects": [{"kind": "User", "name": "trainer", "apiGroup": "rbac.authorization.k8s.io"}],
                "roleRef": {"kind": role["kind"], "name": name, "apiGroup": "rbac.authorization.k8s.io"},
            }
            for kind, body in ((f"{role['kind'].lower()}s", role), (f"{role['kind'].lower()}bindings", binding)):
                with suppress(Refused):  # one for the whole cluster may be there already
                    self.api.delete(f"{above}/{kind}/{name}")
                self.api.post(f"{above}/{kind}", body)

    # --- pods

    def pods(self) -> list[Json]:
        """All of them, by name."""
        return sorted(self.api.items(self.path("pods")), key=lambda pod: pod["metadata"]["name"])

    def pod(self, name: str) -> Json:
        return self.api.get(self.path("pods", name))

    def folder(self, name: str) -> Path | None:
        """A pod's, on whatever node: also of one that the API has forgotten. The newest of that name."""
        found = self.cluster.folder.glob(f"n*/pods/{self.name}_{name}_*")
        return max(found, key=lambda each: each.stat().st_mtime, default=None)

    def process(self, name: str) -> procs.Process | None:
        """The first process of a pod's container: what is left of it, whatever the API says. None: it has ended."""
        folder = self.folder(name)
        if folder is None or not (folder / "pid").exists() or (folder / "exit").exists():
            return None
        found = procs.of(int((folder / "pid").read_text()))
        return found if found and found.alive else None

    def log(self, name: str) -> str:
        """What a pod has printed."""
        folder = self.folder(name)
        return (folder / "log").read_text() if folder and (folder / "log").exists() else ""

    def evict(self, name: str) -> None:
        """As `kubectl drain` does."""
        about = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": self.name}}
        self.api.post(self.path("pods", f"{name}/eviction"), about)

    def shorten(self, name: str, grace_s: int) -> None:
        """What a pod that has been told to end has left is no longer than this from now on."""
        self.api.delete(self.path("pods", name), {"gracePeriodSeconds": grace_s})

    def force_delete(self, name: str) -> None:
        """The API forgets the pod at once, whatever becomes of it."""
        self.api.delete(self.path("pods", name), {"gracePeriodSeconds": 0})

    def preempt(self, name: str) -> None:
        """A pod that is worth more wants all GPUs of this one's node: the scheduler makes room for it."""
        node = self.pod(name)["spec"]["nodeName"]
        urgent = {"metadata": {"name": "urgent"}, "value": 1000000}
        with suppress(Refused):
            self.api.post("/apis/scheduling.k8s.io/v1/priorityclasses", urgent)
        gpus = {"limits": {"nvidia.com/gpu": CAPACITY["nvidia.com/gpu"]}}
        container = {"name": "urgent", "image": IMAGE, "command": ["sleep", "infinity"], "resources": gpus}
        spec = {"containers": [container], "restartPolicy": "Never", "priorityClassName": "urgent"}
        spec |= {"nodeSelector": {"kubernetes.io/hostname": node}, "terminationGracePeriodSeconds": 1}
        self.api.post(self.path("pods"), {"metadata": {"generateName": "urgent-"}, "spec": spec})

    # --- jobs and limits

    def jobs(self) -> list[str]:
        """Their names."""
        return [job["metadata"]["name"] for job in self.api.items(self.path("jobs", group="batch/v1"))]

    def unsuspend(self, name: str) -> None:
        """Admits a Job, as Kueue does."""
        self.api.patch(self.path("jobs", name, "batch/v1"), {"spec": {"suspend": False}})

    def quota(self, **hard: str) -> None:
        """What may be used in all: `quota(**{"requests.nvidia.com/gpu": "8"})`; the API keeps to it at once."""
        self.api.post(self.path("resourcequotas"), {"metadata": {"name": "quota"}, "spec": {"hard": hard}})
        until(lambda: "hard" in self.api.get(self.path("resourcequotas", "quota")).get("status", {}), START_S)

    def end(self) -> None:
        """Ends all that is in it."""
        jobs = self.path("jobs", group="batch/v1")
        self.api.delete(jobs, {"propagationPolicy": "Background"})
        until(lambda: not self._left(), END_S, lambda: [pod["status"] for pod in self.pods()])
        self.api.delete(f"/api/v1/namespaces/{self.name}")

    def _left(self) -> Iterable[Json]:
        self.api.delete(self.path("pods"), {"gracePeriodSeconds": 1})
        left = self.pods()
        for pod in left:
            if pod["metadata"].get("finalizers") and pod["status"]["phase"] in ("Failed", "Succeeded"):
                with suppress(Refused):  # it is gone
                    name = pod["metadata"]["name"]
                    self.api.patch(self.path("pods", name), {"metadata": {"finalizers": None}})
        return left


def host_image(folder: Path) -> Json:
    """An image that is this machine, without what is a user's own."""
    masked = {*COVERED, str(Path.home()), str(CHECKOUT), str(folder.parent)}
    path = f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    about = {"root": "/", "masked": sorted(masked), "shared": interpreters(masked)}
    return {**about, "environment": {"PATH": path, "LANG": "C.UTF-8"}, "user": 0, "command": ["python3"]}


def _there(api: Api, path: str) -> bool:
    try:
        api.get(path)
        return True
    except Refused:
        return False


RUNNING = pytest.StashKey[Cluster]()


@pytest.fixture
def kube_cluster(require, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Cluster:
    """The one that runs, or a new one; its nodes are shared by many gangs at a time. `end_cluster` ends it."""
    reason = missing()
    require("kube", reason is None, reason or "")
    if RUNNING not in pytestconfig.stash:
        cluster = Cluster(tmp_path_factory.mktemp("kube"))
        cluster.start()
        pytestconfig.stash[RUNNING] = cluster
    return pytestconfig.stash[RUNNING]


def end_cluster(config: pytest.Config) -> None:
    """Ends the one that runs: a twentieth of a core, and 400 MiB, as long as nobody asks anything of it."""
    if RUNNING in config.stash:
        config.stash[RUNNING].stop()
        del config.stash[RUNNING]


@pytest.fixture
def kube(kube_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    """A namespace of this test's own, which its environment means by Kubernetes; nothing stays on the nodes."""
    namespace = kube_cluster.namespace()
    monkeypatch.setenv("KUBECONFIG", str(namespace.kubeconfig))
    monkeypatch.setenv("PATH", f"{kube_cluster.bin}{os.pathsep}{os.environ['PATH']}")
    yield namespace
    for node in kube_cluster.nodes:
        kube_cluster.start_kubelet(node)
    namespace.end()
