"""A CronJob that calls `mgpu reconcile`: the manifest, and how kubectl takes it.

The pod is what the Pod Security Standard `restricted` asks for, and more: an ordinary user, no privileges, and a root
file system that is read-only but for the user's home and /tmp, which go with the pod. What outlives a pass is in the
backend's bucket. Values of secrets are in a Secret that the user makes; the manifest has their names.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from mgpu.backend import location, settings
from mgpu.errors import InputError, StackError
from mgpu.iac import environment
from mgpu.schedule import callers
from mgpu.schedule.callers import Caller, Command
from mgpu.spec import image as images
from mgpu.spec.values import refusal

_PATH = Path("kubernetes/mgpu.yaml")
_HOME, _USER = "/home/mgpu", 10001  # as images/operator/Dockerfile has them
_PASS_S = 3600  # a pass that lasts longer is ended, and the next one goes on with its runs
_GRACE_S = 60  # supervisors take 20 s of it to save what they know
_NAME = "app.kubernetes.io/instance"  # a label
_FOR = "# For kubectl's context "
# of memory: a pass, and eight supervisors with an engine each
_RESOURCES = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "3Gi"}}
_ROOM = {"home": (_HOME, "8Gi"), "tmp": ("/tmp", "2Gi")}  # noqa: S108  a mount of the pod's own
_COMMAND = f"{callers.PUT_IN_PLACE}; unset {callers.PASSPHRASE}; exec mgpu reconcile"


@dataclass(frozen=True)
class _Place:
    """Where a CronJob is. `cluster`: as kubectl's context; empty: kubectl is not here, or knows none."""

    cluster: str
    namespace: str
    name: str

    def kubectl(self, *words: str) -> tuple[tuple[Command, ...], tuple[str, ...]]:
        """What kubectl is to do, as a command; else as words for the user. It is bound to the cluster that is shown and
        agreed to."""
        if not self.cluster:
            return (), (shlex.join(("kubectl", *words)),)
        return (Command(("kubectl", f"--context={self.cluster}", "--request-timeout=20s", *words)),), ()


def caller(every_s: float, namespace: str | None, image: str) -> Caller:
    """A CronJob of the cluster that kubectl means now, with an image that has mgpu (`require`).

    Raises:
        InputError: the period is none of cron's; the manifest that is there is of another one, which would go on.
    """
    place, there = _Place(_current(), namespace or "default", callers.caller_name()), _there()
    if there not in (None, place):
        why = f"It has cronjob/{there.name} in namespace {there.namespace}, which would go on."
        raise InputError(f"{_PATH} is of another place", why, "Run `mgpu schedule uninstall --kubernetes` first.")
    text = f"{_FOR}{place.cluster}\n" if place.cluster else ""
    text += callers.as_yaml("--kubernetes", *_manifest(place, image, every_s))
    begin, by_hand = place.kubectl("apply", f"--filename={_PATH}")
    here, keys = f"--namespace={place.namespace}", " and ".join(callers.AWS_KEYS[:2])
    return Caller(
        files={_PATH: text},
        begin=begin,
        by_hand=(
            f"{_secret(place)}    once: what passes need",
            f"at AWS: a role for service account {place.namespace}/{place.name}, or in there {keys}",
            *by_hand,
            f"kubectl logs {here} --selector={_NAME}={place.name}    what the passes said",
        ),
    )


def installed(namespace: str | None) -> Caller:
    """What there is to take back: of the manifest that is there; where none is, by the names it would have."""
    place = _there() or _Place(_current(), "default", callers.caller_name())
    place = replace(place, namespace=namespace or place.namespace)
    things = (f"cronjob/{place.name}", f"serviceaccount/{place.name}")
    here = f"--namespace={place.namespace}"
    end, by_hand = place.kubectl("delete", *things, here, "--ignore-not-found")
    secret = f"kubectl delete secret {place.name} {here}    the Secret, which is yours"
    text = _PATH.read_text(encoding="utf-8") if _PATH.is_file() else ""
    return Caller(files={_PATH: text}, end=end, by_hand_after=(*by_hand, secret))


def require(image: str | None) -> str:
    """The image. Raises InputError where no pod could work: the backend is a folder, no image was named, or it does not
    say which one."""
    callers.require_bucket("--kubernetes")
    cure = "Make one: `mgpu image operator registry/name` prints what to give."
    if image is None:
        raise InputError("--kubernetes: which image has mgpu?", "A pod runs one that was built before.", cure)
    try:
        images.ImageSpec.model_validate({"reference": image})
    except ValidationError as error:
        why = images.no_reference(image) or refusal(error.errors()[0], image)
        raise InputError(f"--image {image}", f"It {why}.", cure) from error
    return image


def _manifest(place: _Place, image: str, every_s: float) -> Iterator[dict[str, Any]]:
    name = place.name
    labels = {"app.kubernetes.io/name": "mgpu", "app.kubernetes.io/component": "reconcile", _NAME: name}
    metadata = {"name": name, "namespace": place.namespace, "labels": labels}
    # a pass asks nothing of the cluster; what AWS gives a service account comes by another token
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}
    yield {**account, "automountServiceAccountToken": False}
    yield {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": metadata,
        "spec": {
            "schedule": callers.fields(every_s),
            "timeZone": "Etc/UTC",
            "concurrencyPolicy": "Forbid",  # two would share the work, and cost twice
            "startingDeadlineSeconds": round(every_s),
            "successfulJobsHistoryLimit": 1,
            "failedJobsHistoryLimit": 3,
            "jobTemplate": {
                "metadata": {"labels": labels},
                "spec": {
                    "backoffLimit": 0,  # the next pass tries again
                    "activeDeadlineSeconds": _PASS_S,
                    "template": {"metadata": {"labels": labels}, "spec": _pod(name, image)},
                },
            },
        },
    }


def _pod(name: str, image: str) -> dict[str, Any]:
    return {
        "serviceAccountName": name,
        "automountServiceAccountToken": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_S,
        "shareProcessNamespace": True,  # so that somebody buries what an engine that is ended leaves behind
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": "mgpu",
                "image": image,
                "command": ["/bin/sh", "-ec", _COMMAND],
                "workingDir": _HOME,
                "env": [*_environment(name)],
                "resources": _RESOURCES,
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [{"name": each, "mountPath": path} for each, (path, _) in _ROOM.items()],
            }
        ],
        "volumes": [{"name": each, "emptyDir": {"sizeLimit": size}} for each, (_, size) in _ROOM.items()],
    }


def _environment(name: str) -> Iterator[Mapping[str, Any]]:
    yield {"name": "HOME", "value": _HOME}
    yield {"name": location.VARIABLE, "value": callers.url_elsewhere()}
    if callers.at_aws():
        yield {"name": "AWS_REGION", "value": callers.region()}
    # a pass without its passphrase would make one of its own, which no other machine has: no pod begins without
    if needed := _passphrase():
        yield _from_secret(name, needed, optional=False)
    # a run whose secret is missing waits for a pass that has it
    for key in dict.fromkeys((*callers.AWS_KEYS, *callers.variable_names())):
        yield _from_secret(name, key, optional=True)


def _from_secret(secret: str, key: str, *, optional: bool) -> Mapping[str, Any]:
    return {"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": key, "optional": optional}}}


def _passphrase() -> str:
    """The key that it has in the Secret; "": a key of KMS encrypts instead."""
    return callers.PASSPHRASE if settings.secrets_provider() == settings.PASSPHRASE else ""


def _secret(place: _Place) -> str:
    """How the user makes the Secret: the values come from files and this shell."""
    given = [f'--from-literal={key}="${key}"' for key in callers.variable_names()]
    if needed := _passphrase():
        given.insert(0, f"--from-file={needed}={shlex.quote(str(environment.passphrase_file()))}")
    return " ".join(("kubectl create secret generic", place.name, f"--namespace={place.namespace}", *given))


def _current() -> str:
    """kubectl's context now; empty: it is not here, or has none."""
    try:
        return Command(("kubectl", "config", "current-context")).run().strip()
    except StackError:
        return ""


def _there() -> _Place | None:
    """Where the manifest that is there was applied; None: there is none, or it is not as mgpu has written it."""
    try:
        text = _PATH.read_text(encoding="utf-8")
        job = list(yaml.safe_load_all(text))[-1]["metadata"]
        said = text.partition("\n")[0]
        cluster = said.removeprefix(_FOR) if said.startswith(_FOR) else _current()
        return _Place(cluster, str(job["namespace"]), str(job["name"]))
    except (OSError, yaml.YAMLError, LookupError, TypeError):
        return None
