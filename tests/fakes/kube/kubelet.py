"""The kubelet of one node: runs the container of each pod that is bound to it as processes of this host.

    python -m fakes.kube.kubelet FOLDER NODE      FOLDER is the cluster's; see cluster.py

A pod has namespaces of its own (files, processes, network, host name) and ends as a container does: SIGTERM to its
first process, SIGKILL after its time of grace. Pods outlive the kubelet, which takes them over when it starts again.
What the API server wants of pods (port-forward, exec, logs) `kube streams` serves, which ends with the kubelet.

    SIGUSR1     ends all connections of port-forward and exec, as a load balancer would
"""

from __future__ import annotations

import ctypes
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mgpu_train.agent.machine import procs

from fakes.kube import manifest
from fakes.kube.api import SILENT, Access, Api, Refused, passing
from fakes.kube.manifest import Json, NotYet
from fakes.kube.shim import write

BEAT_S = 1.0
POLL_S = 0.05
AGAIN_S = 0.5  # what is not there yet is looked for again
_SHIM = Path(__file__).with_name("shim.py")
_CONDITIONS = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady")
_LATE, _TOO_LONG = "DeadlineExceeded", "Pod was active on the node longer than the specified deadline"


def stamp(seconds: float | None = None) -> str:
    """A time as Kubernetes writes it; without one, now."""
    at = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: str | None) -> float:
    """Since the epoch, of a time that Kubernetes has written; without one, now."""
    return datetime.fromisoformat(text).timestamp() if text else time.time()


class Pod:
    """A pod of this node, from when it was bound to it until nothing of it is left. Its thread is `live`."""

    def __init__(self, kubelet: Kubelet, seen: Json) -> None:
        self._kubelet, self._api = kubelet, kubelet.api
        about = seen["metadata"]
        self.uid, self.name, self.namespace = about["uid"], about["name"], about["namespace"]
        self.path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"
        self.folder = kubelet.pods_folder / f"{self.namespace}_{self.name}_{self.uid}"
        self.seen, self.gone = seen, False
        self.woken = threading.Event()
        self._taken = seconds(seen["status"].get("startTime"))  # when a kubelet saw it first, since the epoch
        self._began = 0.0  # the container
        self._first: procs.Process | None = None
        self._shim: subprocess.Popen[bytes] | None = None  # where this kubelet has started it

    def tell(self, seen: Json, gone: bool = False) -> None:
        """What the API says of it now; `gone`: that it is no more."""
        self.seen, self.gone = seen, gone
        self.woken.set()

    def live(self) -> None:
        """From its start, or from where an earlier kubelet has left it, to its end."""
        try:
            process = self._process()
            if not self._over or (process and process.alive):
                if not (self.folder / "started").exists() and not self._start():
                    return
                self._watch()
            self._wait_for_deletion()
        finally:
            self._forget()

    # --- its beginning

    @property
    def _unwanted(self) -> bool:
        return self.gone or "deletionTimestamp" in self.seen["metadata"]

    @property
    def _over(self) -> bool:
        """Whether the API has it that it has ended."""
        return self.seen["status"].get("phase") in ("Succeeded", "Failed")

    def _start(self) -> bool:
        """Starts the container; False where it was not wanted any more, or can never be."""
        refused = manifest.unknown(self.seen)
        if refused:
            words = f"the tests' kubelet does not do this: {', '.join(refused)}"
            self._kubelet.say(f"{self.namespace}/{self.name}: {words}")
            self._report(phase="Failed", reason="Unsupported", message=words)
            self._wait_for_deletion()
            return False
        waits = ""
        while not self._unwanted and not self._late:
            try:
                self._run()
                return True
            except NotYet as reason:
                if str(reason) != waits:
                    waits = str(reason)
                    self._event(reason.reason, waits)
                    self._report_state(waiting={"reason": reason.reason, "message": waits}, phase="Pending")
            except (Refused, *SILENT) as error:
                if not passing(error):
                    raise
                self._kubelet.say(f"{self.name}: {error}")
            self.woken.wait(AGAIN_S)
            self.woken.clear()
        over = {} if self._unwanted else {"reason": _LATE, "message": _TOO_LONG}
        self._report(phase="Failed", **over)
        self._wait_for_deletion()
        return False

    def _run(self) -> None:
        reference = self.seen["spec"]["containers"][0].get("image", "")
        image = self._kubelet.images().get(reference)
        if image is None:
            # as containerd says it
            why = f'failed to pull and unpack image "{reference}": failed to resolve reference "{reference}"'
            raise NotYet("ImagePullBackOff", f'Back-off pulling image "{reference}": ErrImagePull: {why}: not found')
        address = self._kubelet.address(self)
        known = manifest.facts(self.seen, self._kubelet.node, address)
        env = manifest.environment(self._api, self.seen, known, image)
        user, group, groups = manifest.identity(self.seen, image)
        self.folder.mkdir(parents=True, exist_ok=True)
        message = self.folder / "message"
        message.touch()
        message.chmod(0o666)
        volumes = manifest.mounts(self._api, self.seen, known, self.folder / "volumes")
        hostname = env["HOSTNAME"]
        config = {
            **self._kubelet.network,
            **manifest.rights(self.seen),
            "link": f"p{self.uid.replace('-', '')[:12]}",
            "address": address,
            "hostname": hostname,
            "hosts": f"127.0.0.1\tlocalhost\n{address}\t{hostname}\n",
            "image": image,
            "scratch": str(self.folder / "disk"),
            "disk_mib": 2048,
            "mounts": [*volumes, manifest.message_file(message)],
            "argv": manifest.argv(self.seen, env, image),
            "environment": env,
            "directory": self.seen["spec"]["containers"][0].get("workingDir") or "/",
            "user": user,
            "group": group,
            "groups": groups,
        }
        write(self.folder / "pod.json", json.dumps(self.seen))
        write(self.folder / "config.json", json.dumps(config))
        self._shim = subprocess.Popen(
            [sys.executable, "-E", "-s", "-S", "-B", str(_SHIM), str(self.folder)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        write(self.folder / "shim", str(self._shim.pid))
        write(self.folder / "started", address)

    # --- its life and its end

    def _watch(self) -> None:
        """Until the container has ended, and that is told."""
        while not self._pid_file.exists() and self._ended() is None:
            self._pause()
        self._began = (self._pid_file if self._pid_file.exists() else self.folder / "started").stat().st_mtime
        if self._ended() is None and not self._over:
            self._report_state(running={"startedAt": stamp(self._began)}, phase="Running")
        process = self._process()
        over, kill_at = "", float("inf")
        while (ended := self._ended()) is None:
            ending = self._unwanted or self._over  # which while it runs others alone can have said
            if kill_at == float("inf") and (self._late or ending):
                over = "" if ending else _LATE
                kill_at = time.monotonic() + self._grace()
                if process:
                    process.send(signal.SIGTERM)
            elif self._unwanted and "deletionGracePeriodSeconds" in self.seen["metadata"]:
                kill_at = min(kill_at, time.monotonic() + self._grace())  # a second deletion may shorten it
            if time.monotonic() > kill_at and process:
                process.send(signal.SIGKILL)
            self._pause()
        self._tell_end(ended, over)

    @property
    def _late(self) -> bool:
        """Whether it has been on the node for longer than it may."""
        return time.time() > self._taken + self.seen["spec"].get("activeDeadlineSeconds", float("inf"))

    def _grace(self) -> float:
        grace = self.seen["spec"].get("terminationGracePeriodSeconds", 30)
        if not self.gone:
            grace = self.seen["metadata"].get("deletionGracePeriodSeconds", grace)
        return max(1.0, grace)

    def _tell_end(self, ended: Json, over: str) -> None:
        code = ended["code"]
        about = {"exitCode": code, "startedAt": stamp(self._began), "finishedAt": stamp(ended["at"])}
        about["reason"] = "StartError" if ended["trouble"] else "Completed" if code == 0 else "Error"
        words = ended["trouble"] or manifest.message(self.seen, self.folder, code)
        about |= {"message": words} if words else {}
        told = {"reason": over, "message": _TOO_LONG} if over else {}
        self._report_state(terminated=about, phase="Failed" if code or over else "Succeeded", **told)

    def _wait_for_deletion(self) -> None:
        while not self._unwanted:
            self.woken.wait()
            self.woken.clear()
        self._remove()

    def _remove(self) -> None:
        """From the API: nothing of it runs any more."""
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        self._persist(lambda: self._api.delete(self.path, body))

    def _persist(self, call: Callable[[], object]) -> None:
        """Until the API has heard it, or the pod is no more, or another one."""
        while not self.gone:
            try:
                call()
                return
            except (Refused, *SILENT) as error:
                if isinstance(error, Refused) and error.status in (404, 409):
                    return
                if not passing(error):
                    raise
                self._kubelet.say(f"{self.name}: {error}")
                time.sleep(POLL_S)

    def _forget(self) -> None:
        self._kubelet.forget(self)
        for name in ("disk", "volumes"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    @property
    def _pid_file(self) -> Path:
        return self.folder / "pid"

    def _process(self) -> procs.Process | None:
        """The container's first process, once it runs."""
        if self._first is None:
            with suppress(FileNotFoundError):
                self._first = procs.of(int(self._pid_file.read_text()))
        return self._first

    def _ended(self) -> Json | None:
        """How the container has ended. One that is gone without a word of its shim's was killed together with it."""
        process = self._process()
        lost = not self._shim_lives() and not (process and process.alive)  # asked first: its last word comes before
        with suppress(FileNotFoundError):
            return json.loads((self.folder / "exit").read_text())
        return {"code": 137, "at": time.time(), "trouble": ""} if lost else None

    def _shim_lives(self) -> bool:
        if self._shim:
            return self._shim.poll() is None
        pid = int((self.folder / "shim").read_text())
        return str(self.folder) in procs.command_line(pid)

    def _pause(self) -> None:
        self.woken.wait(POLL_S)
        self.woken.clear()

    # --- what the API is told

    def _report_state(self, phase: str, reason: str = "", message: str = "", **state: Json) -> None:
        container, running = self.seen["spec"]["containers"][0], "running" in state
        about = {"name": container["name"], "image": container.get("image", ""), "imageID": container.get("image", "")}
        about |= {"restartCount": 0, "ready": running, "started": running, "state": state}
        about |= {"containerID": f"tests://{self.uid}"} if "waiting" not in state else {}
        more: Json = {"reason": reason, "message": message} if reason else {}
        self._report(phase, containerStatuses=[about], **more)

    def _report(self, phase: str, **more: Any) -> None:
        done = phase in ("Succeeded", "Failed")
        status: Json = {"phase": phase, "hostIP": "127.0.0.1", **more}
        if (self.folder / "started").exists():
            address = (self.folder / "started").read_text()
            status |= {"podIP": address, "podIPs": [{"ip": address}]}
        status["startTime"] = stamp(self._taken)
        why = {"reason": f"Pod{'Completed' if phase == 'Succeeded' else 'Failed'}"} if done else {}
        up = str(phase == "Running")
        status["conditions"] = [
            {"type": name, "status": "True" if name == "Initialized" else up, "lastTransitionTime": stamp(), **why}
            for name in _CONDITIONS
        ]
        body = {"metadata": {"uid": self.uid}, "status": status}
        self._persist(lambda: self._api.patch(f"{self.path}/status", body))

    def _event(self, reason: str, message: str) -> None:
        kind = {"ImagePullBackOff": "Failed", "ContainerCreating": "FailedMount"}.get(reason, "Failed")
        about = {"kind": "Pod", "apiVersion": "v1", "name": self.name, "namespace": self.namespace, "uid": self.uid}
        event = {
            "metadata": {"generateName": f"{self.name[:40]}.", "namespace": self.namespace},
            "involvedObject": about,
            "reason": kind,
            "message": message,
            "type": "Warning",
            "source": {"component": "kubelet", "host": self._kubelet.node},
            "firstTimestamp": stamp(),
            "lastTimestamp": stamp(),
            "count": 1,
        }
        with suppress(Refused, *SILENT):
            self._api.post(f"/api/v1/namespaces/{self.namespace}/events", event)


class Kubelet:
    """One node. `told` is what cluster.py has written for it."""

    def __init__(self, folder: Path, node: str) -> None:
        self.folder, self.node = folder / node, node
        told = json.loads((self.folder / "kubelet.json").read_text())
        self.pods_folder = self.folder / "pods"
        self.pods_folder.mkdir(exist_ok=True)
        self.network: Json = told["network"]
        self._told, self._images = told, folder / "images.json"
        keys = (folder / "pki" / name for name in ("ca.crt", f"{node}.crt", f"{node}.key"))
        self.api = Api(Access(told["server"], *keys))
        self._pods: dict[str, Pod] = {}
        self._addresses: dict[str, str] = {}
        self._lock = threading.Lock()
        self._streams: subprocess.Popen[bytes] | None = None

    def say(self, words: str) -> None:
        """Writes a line into the kubelet's own log."""
        sys.stderr.write(f"{stamp()} {self.node}: {words}\n")
        sys.stderr.flush()

    def images(self) -> dict[str, Json]:
        """By reference: what lies in a registry, so to speak. It is read anew each time."""
        return json.loads(self._images.read_text())

    def address(self, pod: Pod) -> str:
        """A pod's address: one that no other of this node has."""
        with self._lock:
            mine = self._addresses.get(pod.uid)
            free = (f"{self._told['subnet']}.{each}" for each in range(2, 255))
            taken = set(self._addresses.values())
            self._addresses[pod.uid] = mine or next(each for each in free if each not in taken)
            return self._addresses[pod.uid]

    def forget(self, pod: Pod) -> None:
        """A pod of which nothing is left."""
        with self._lock:
            self._addresses.pop(pod.uid, None)
            self._pods.pop(pod.uid, None)

    def run(self) -> None:
        """Until it is killed."""
        self._addresses = {
            folder.name.rpartition("_")[2]: (folder / "started").read_text()
            for folder in self.pods_folder.iterdir()
            if (folder / "started").exists() and (folder / "disk").exists()
        }
        signal.signal(signal.SIGUSR1, lambda *_: self._streams and self._streams.kill())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._start_streams()
        threading.Thread(target=self._register, daemon=True).start()
        threading.Thread(target=self._follow, daemon=True).start()
        while True:
            assert self._streams
            self._streams.wait()
            self.say("streams have ended")
            self._start_streams()

    def _start_streams(self) -> None:
        pki = self.folder.parent / "pki"
        flags = {"listen": f"127.0.0.1:{self._told['port']}", "pods": self.pods_folder, "client-ca": pki / "ca.crt"}
        flags |= {"cert": pki / f"{self.node}.crt", "key": pki / f"{self.node}.key"}
        self._streams = subprocess.Popen(
            [self._told["kube"], "streams", *(f"--{name}={value}" for name, value in flags.items())],
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),  # it ends with this process's main thread
        )

    def _register(self) -> None:
        """Tells of the node, then that it lives, for ever."""
        lease = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        spec = {"holderIdentity": self.node, "leaseDurationSeconds": 40}
        node = {"metadata": {"name": self.node, "labels": self._told["labels"]}}
        for path, body in (("/api/v1/nodes", node), (lease, {"metadata": {"name": self.node}, "spec": spec})):
            self._persist(lambda path=path, body=body: self.api.post(path, body))
        while True:
            at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            self._persist(lambda: self.api.patch(f"/api/v1/nodes/{self.node}/status", {"status": self._status()}))
            self._persist(lambda at=at: self.api.patch(f"{lease}/{self.node}", {"spec": {**spec, "renewTime": at}}))
            time.sleep(BEAT_S)

    def _persist(self, call: Callable[[], object]) -> None:
        while True:
            try:
                call()
                return
            except (Refused, *SILENT) as error:
                if isinstance(error, Refused) and error.status in (404, 409):
                    return  # it is there; or the node was deleted, and is registered again when the kubelet starts
                self.say(str(error))
            time.sleep(POLL_S)

    def _status(self) -> Json:
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "kubelet is posting ready status",
        }
        return {
            "capacity": self._told["capacity"],
            "allocatable": self._told["capacity"],
            "conditions": [{**ready, "lastHeartbeatTime": stamp(), "lastTransitionTime": stamp()}],
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": self.node}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._told["port"]}},
            "nodeInfo": {"kubeletVersion": self._told["version"], "operatingSystem": "linux", "architecture": "amd64"},
        }

    def _follow(self) -> None:
        """Lists the node's pods, and hears of all changes, for ever."""
        mine = {"fieldSelector": f"spec.nodeName={self.node}"}
        while True:
            try:
                listed = self.api.get("/api/v1/pods", **mine)
                there = {each["metadata"]["uid"]: each for each in listed["items"]}
                with self._lock:
                    lost = [pod for uid, pod in self._pods.items() if uid not in there]
                for pod in lost:
                    pod.tell(pod.seen, gone=True)
                self._sweep(set(there))
                for each in there.values():
                    self._see("MODIFIED", each)
                version = listed["metadata"]["resourceVersion"]
                for event in self.api.watch("/api/v1/pods", resourceVersion=version, **mine):
                    if event["type"] not in ("ADDED", "MODIFIED", "DELETED"):
                        break
                    self._see(event["type"], event["object"])
            except (Refused, ValueError, *SILENT) as error:  # ValueError: a line that was cut off
                self.say(f"pods: {error}")
                time.sleep(POLL_S * 4)

    def _see(self, what: str, seen: Json) -> None:
        uid = seen["metadata"]["uid"]
        with self._lock:
            pod = self._pods.get(uid)
            fresh = pod is None and what != "DELETED"
            if fresh:
                self._pods[uid] = pod = Pod(self, seen)
        if fresh and pod:
            threading.Thread(target=pod.live, name=pod.name, daemon=True).start()
        elif pod:
            pod.tell(seen, gone=what == "DELETED")

    def _sweep(self, there: set[str]) -> None:
        """Ends what an earlier kubelet has left of pods that are no more."""
        for folder in self.pods_folder.iterdir():
            uid = folder.name.rpartition("_")[2]
            with self._lock:
                known = uid in there or uid in self._pods
            if known or (folder / "exit").exists() or not (folder / "pid").exists():
                continue
            left = json.loads((folder / "pod.json").read_text())
            self._see("ADDED", left)
            self._see("DELETED", left)


if __name__ == "__main__":
    Kubelet(Path(sys.argv[1]), sys.argv[2]).run()
