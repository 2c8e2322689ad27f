"""What a pod's manifest asks of a kubelet: what to run, with which environment, files and rights.

What the tests' kubelet does not do it refuses aloud; it never passes over it.
"""

from __future__ import annotations

import base64
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fakes.kube.api import Api, Refused

Json = dict[str, Any]

_REFUSED = {  # fields of a container that change what it does
    *("livenessProbe", "readinessProbe", "startupProbe", "lifecycle", "envFrom", "volumeDevices", "tty", "stdin"),
    *("terminationMessagePath", "restartPolicy"),
}
_REFUSED_OF_PODS = ("initContainers", "ephemeralContainers", "hostNetwork", "hostPID", "hostIPC", "hostAliases")
MESSAGE = "/dev/termination-log"
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class NotYet(Exception):
    """The container cannot be made now. `reason` is what a kubelet writes into its status."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def unknown(pod: Json) -> list[str]:
    """What of it this kubelet does not do."""
    spec = pod["spec"]
    found = [name for name in _REFUSED_OF_PODS if spec.get(name)]
    if len(spec["containers"]) != 1:
        found.append("more than one container")
    if spec.get("restartPolicy") != "Never":
        found.append(f"restartPolicy {spec.get('restartPolicy')}")
    container = spec["containers"][0]
    return found + sorted(n for n in _REFUSED & container.keys() if container[n] not in (None, False, [], {}, MESSAGE))


def number(quantity: str) -> int:
    """A quantity of Kubernetes, as `16Gi`, in units of one."""
    found = re.fullmatch(r"([0-9.]+)([kMGT]i?)?", quantity)
    if found is None:
        raise ValueError(f"{quantity}: not a quantity that is known here")
    return int(float(found[1]) * _UNITS[found[2] or ""])


def facts(pod: Json, node: str, address: str) -> dict[str, str]:
    """What fieldRef can name."""
    about = pod["metadata"]
    known = {f"metadata.{name}": about[name] for name in ("name", "namespace", "uid")}
    known |= {"spec.nodeName": node, "status.podIP": address, "status.hostIP": "127.0.0.1"}
    known["spec.serviceAccountName"] = pod["spec"].get("serviceAccountName", "")
    for kind in ("labels", "annotations"):
        known |= {f"metadata.{kind}['{key}']": value for key, value in about.get(kind, {}).items()}
    return known


def environment(api: Api, pod: Json, known: dict[str, str], image: Json) -> dict[str, str]:
    """The container's. Raises NotYet: it names what is not there."""
    container, spec = pod["spec"]["containers"][0], pod["spec"]
    user = identity(pod, image)[0]
    env = {"HOME": "/root" if user == 0 else "/", **image["environment"]}
    env["HOSTNAME"] = spec.get("hostname") or pod["metadata"]["name"][:63]
    gpus = [value for name, value in container.get("resources", {}).get("limits", {}).items() if name.endswith("/gpu")]
    if gpus:
        env["NVIDIA_VISIBLE_DEVICES"] = ",".join(f"GPU-{each}" for each in range(int(gpus[0])))  # the device plug-in
    for each in container.get("env", ()):
        value = _value(api, pod, each, known)
        if value is not None:
            env[each["name"]] = value if "valueFrom" in each else expand(value, env)
    return env


def _value(api: Api, pod: Json, entry: Json, known: dict[str, str]) -> str | None:
    source = entry.get("valueFrom")
    if source is None:
        return entry.get("value", "")
    if "fieldRef" in source:
        return known.get(source["fieldRef"]["fieldPath"], "")
    for name, kind in (("configMapKeyRef", "configmaps"), ("secretKeyRef", "secrets")):
        if name in source:
            reference = source[name]
            data = _data(api, pod["metadata"]["namespace"], kind, reference["name"])
            if data is not None and reference["key"] in data:
                return data[reference["key"]].decode()
            if reference.get("optional"):
                return None
            raise NotYet("CreateContainerConfigError", f'{kind[:-1]} "{reference["name"]}" has no {reference["key"]}')
    raise NotYet("CreateContainerConfigError", f"the tests' kubelet knows no {', '.join(source)}")


def expand(text: str, env: dict[str, str]) -> str:
    """Fills in `$(NAME)`, as Kubernetes does it; `$$(NAME)` stays `$(NAME)`."""
    found = re.compile(r"\$\$\(|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
    return found.sub(lambda at: "$(" if at[1] is None else env.get(at[1], at[0]), text)


def argv(pod: Json, env: dict[str, str], image: Json) -> list[str]:
    """The container's command; without one, the image's."""
    container = pod["spec"]["containers"][0]
    words = container.get("command") or image["command"]
    return [expand(each, env) for each in [*words, *container.get("args", ())]]


def identity(pod: Json, image: Json) -> tuple[int, int, list[int]]:
    """User, group and further groups. Raises NotYet where it has to be another one than root, and is not."""
    of_pod, own = (each.get("securityContext") or {} for each in (pod["spec"], pod["spec"]["containers"][0]))
    both = {**of_pod, **own}
    user, group = both.get("runAsUser", image["user"]), both.get("runAsGroup", image["user"])
    if both.get("runAsNonRoot") and user == 0:
        raise NotYet("CreateContainerConfigError", "container has runAsNonRoot and image will run as root")
    extra = [*both.get("supplementalGroups", ()), *([both["fsGroup"]] if "fsGroup" in both else ())]
    return user, group, extra


def rights(pod: Json) -> Json:
    """Of the container's process: its capabilities, and whether it may get more."""
    own = pod["spec"]["containers"][0].get("securityContext") or {}
    given = own.get("capabilities") or {}
    dropped = given.get("drop", [])
    if dropped not in ([], ["ALL"]):
        raise NotYet("CreateContainerConfigError", f"the tests' kubelet drops all capabilities or none, not {dropped}")
    about = {"capabilities": given.get("add", []), "usual_capabilities": not dropped}
    return {**about, "no_new_privileges": own.get("allowPrivilegeEscalation") is False}


def message_file(path: Path) -> Json:
    """Where a container may write why it ends."""
    return {"source": str(path), "target": MESSAGE, "bytes": 0, "read_only": False}


def message(pod: Json, folder: Path, code: int) -> str:
    """What a container has left: in the file for it, or else, if that is asked for, the end of what it has printed."""
    left = folder / "message"
    if left.exists() and (said := left.read_text(errors="replace")[:4096]):
        return said
    log = folder / "log"
    policy = pod["spec"]["containers"][0].get("terminationMessagePolicy")
    if code == 0 or policy != "FallbackToLogsOnError" or not log.exists():
        return ""
    with log.open("rb") as text:
        text.seek(max(0, log.stat().st_size - 2048))  # the kubelet's own limits
        return "".join(text.read().decode(errors="replace").splitlines(keepends=True)[-80:])


def mounts(api: Api, pod: Json, known: dict[str, str], folder: Path) -> list[Json]:
    """What is mounted where, with the volumes made below `folder`. Raises NotYet: something is not there."""
    made = {volume["name"]: _volume(api, pod, volume, known, folder) for volume in pod["spec"].get("volumes", ())}
    found = []
    for each in pod["spec"]["containers"][0].get("volumeMounts", ()):
        source, size, read_only = made[each["name"]]
        if source and each.get("subPath"):
            source = source / each["subPath"]
            source.mkdir(parents=True, exist_ok=True)
        about = {"source": str(source) if source else "", "bytes": size, "target": each["mountPath"]}
        found.append({**about, "read_only": read_only or each.get("readOnly", False)})
    return sorted(found, key=lambda each: each["target"])


def _volume(api: Api, pod: Json, volume: Json, known: dict[str, str], above: Path) -> tuple[Path | None, int, bool]:
    """(the folder, None: memory; how much; whether it is read-only)."""
    folder = above / volume["name"]
    if "emptyDir" in volume:
        limit = volume["emptyDir"].get("sizeLimit")
        if volume["emptyDir"].get("medium") == "Memory":
            return None, number(limit) if limit else 0, False
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)
        return folder, 0, False
    if "hostPath" in volume:
        return Path(volume["hostPath"]["path"]), 0, False
    if "persistentVolumeClaim" in volume:
        claim = volume["persistentVolumeClaim"]
        return _claimed(api, pod, claim["claimName"]), 0, claim.get("readOnly", False)
    for mode, files in _projected(api, pod, volume, known):
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
            path.chmod(mode)
            group = (pod["spec"].get("securityContext") or {}).get("fsGroup")
            if group is not None:
                shutil.chown(path, group=group)
                path.chmod(mode | 0o040)
    folder.mkdir(parents=True, exist_ok=True)
    return folder, 0, True


def _claimed(api: Api, pod: Json, name: str) -> Path:
    try:
        claim = api.get(f"/api/v1/namespaces/{pod['metadata']['namespace']}/persistentvolumeclaims/{name}")
        volume = api.get(f"/api/v1/persistentvolumes/{claim['spec']['volumeName']}")
    except (Refused, KeyError) as error:
        raise NotYet("ContainerCreating", f"MountVolume failed: {name}: {error}") from error
    return Path(volume["spec"]["hostPath"]["path"])


def _projected(api: Api, pod: Json, volume: Json, known: dict[str, str]) -> Iterator[tuple[int, dict[str, bytes]]]:
    """Modes and files of a volume that is made of objects of the API."""
    kinds: dict[str, Callable[[Json], dict[str, bytes]]] = {
        "configMap": lambda of: _items(api, pod, "configmaps", of.get("name", ""), of),
        "secret": lambda of: _items(api, pod, "secrets", of.get("secretName") or of.get("name", ""), of),
        "downwardAPI": lambda of: {
            each["path"]: known.get(each["fieldRef"]["fieldPath"], "").encode() for each in of.get("items", ())
        },
        "serviceAccountToken": lambda of: {of["path"]: _token(api, pod, of)},
    }
    projected = volume.get("projected")
    mode = (projected or next((volume[kind] for kind in kinds if kind in volume), {})).get("defaultMode", 0o644)
    for source in projected["sources"] if projected else [volume]:
        known_kinds = [kind for kind in kinds if kind in source]
        if not known_kinds:
            raise NotYet("ContainerCreating", f"the tests' kubelet has no volume such as {volume}")
        for kind in known_kinds:
            yield mode, kinds[kind](source[kind])


def _items(api: Api, pod: Json, kind: str, name: str, of: Json) -> dict[str, bytes]:
    data = _data(api, pod["metadata"]["namespace"], kind, name)
    if data is None:
        if of.get("optional"):
            return {}
        raise NotYet("ContainerCreating", f'MountVolume.SetUp failed: {kind[:-1]} "{name}" not found')
    chosen = of.get("items")
    return {each["path"]: data[each["key"]] for each in chosen} if chosen else data


def _data(api: Api, namespace: str, kind: str, name: str) -> dict[str, bytes] | None:
    try:
        found = api.get(f"/api/v1/namespaces/{namespace}/{kind}/{name}")
    except Refused as error:
        if error.status in (403, 404):  # a node may read only what its pods name, and nothing that is not there
            return None
        raise
    plain = {key: text.encode() for key, text in found.get("data", {}).items()} if kind == "configmaps" else {}
    coded = found.get("binaryData" if kind == "configmaps" else "data", {})
    return plain | {key: base64.b64decode(text) for key, text in coded.items()}


def _token(api: Api, pod: Json, of: Json) -> bytes:
    about = pod["metadata"]
    account = pod["spec"].get("serviceAccountName") or "default"
    bound = {"kind": "Pod", "apiVersion": "v1", "name": about["name"], "uid": about["uid"]}
    wanted = {"boundObjectRef": bound, "expirationSeconds": of.get("expirationSeconds", 3600)}
    if of.get("audience"):
        wanted["audiences"] = [of["audience"]]
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": wanted}
    path = f"/api/v1/namespaces/{about['namespace']}/serviceaccounts/{account}/token"
    return api.post(path, request)["status"]["token"].encode()
