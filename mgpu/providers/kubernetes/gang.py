"""What the API says of one gang: the Job, its pods, and what follows from it. Nothing is asked here."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from mgpu.providers.base import NodePhase
from mgpu.providers.kubernetes import manifest
from mgpu.providers.kubernetes.cluster import Json
from mgpu.providers.kubernetes.offered import amount

Seen = tuple[NodePhase, str, str]  # a node's phase, why it is not running, and what would let it start
_OVER = ("Failed", "FailureTarget", "Complete")  # conditions of a Job
_SLACK_S = 30.0  # after a pod's time of grace, for its node's word
_PULLED = "Push the image, or name the secret that pulls it: `kubernetes.image_pull_secret`."
_NAMED = "Mend what the message names, in `kubernetes:` of the run file."
# the words of what waits for ever, and its cure; all else may come by itself
_NEVER = (
    (
        r"(ErrImagePull|ImagePullBackOff): .*(failed to resolve.*not found$|manifest unknown|pull access denied"
        r"|40[13] (Unauthorized|Forbidden)|insufficient_scope)",
        _PULLED,
    ),
    (r"InvalidImageName: ", "Name the image as repository@sha256:..."),
    (r"CreateContainerConfigError: .*(runAsNonRoot|(secret|configmap) .*not found|couldn't find key)", _NAMED),
    (r"persistentvolumeclaim \S+ not found", "Make the claim, or name another one: `kubernetes.volumes`."),
)
# the same of pods that cannot be made; who asks again is refused again
_REFUSED = (
    (r"violates PodSecurity", "Pods without privileges: `kubernetes: {run_as_user: 10001}`, for the trainer's image."),
    (r"must specify|(maximum|minimum) \S+ usage", "Say or change `kubernetes: {cpus_per_node: ..., memory_gib: ...}`."),
    (r"is forbidden|is invalid|denied the request", f"{_NAMED} `mgpu check kubernetes` asks without making anything."),
)
# beside them: who asks again may hear something else
_PASSES = (
    r"status unknown for quota|not yet ready|serviceaccount .default. not found|calling webhook|timed? ?out"
    r"|deadline exceeded|connection refused|leader changed|too ?many ?requests|token has expired"
    r"|\b5\d\d (Internal|Bad|Service|Gateway)|status( code)?:? 5\d\d"
)
_QUOTA = r"exceeded quota: (\S+), requested: (\S+), used: \S+, limited: (\S+)"


def stamp(text: str) -> float:
    """UNIX seconds of a time as Kubernetes writes it."""
    return datetime.fromisoformat(text).timestamp()


class Pod:
    """One pod, as the API has it."""

    def __init__(self, seen: Json) -> None:
        about, self._spec, self._status = seen["metadata"], seen["spec"], seen.get("status", {})
        self.name, self.uid, self.made_at = about["name"], about["uid"], stamp(about["creationTimestamp"])
        self.rank = int(about["annotations"][manifest.INDEX])
        told = json.loads(about["annotations"][manifest.ABOUT])
        self._ends_by: float = told["ends_by"]
        self.price_usd_per_hour: float | None = told.get("price_usd_per_hour")  # an older version's had none
        self.pooled: bool | None = told.get("pooled")
        self.version: str = about["resourceVersion"]
        self.finalizers: list[str] = about.get("finalizers", [])
        self.node: str = self._spec.get("nodeName", "")
        self.address: str = self._status.get("podIP", "")
        self.grace_s: float | None = about.get("deletionGracePeriodSeconds")
        self.ends_at = stamp(about["deletionTimestamp"]) if "deletionTimestamp" in about else None
        every: list[Json] = self._status.get("containerStatuses", [])
        self._containers = [each for each in every if each.get("name") == manifest.CONTAINER]  # others were put beside

    @property
    def going(self) -> bool:
        """Whether its deletion was asked for."""
        return self.ends_at is not None

    @property
    def failed(self) -> bool:
        """Whether somebody has said that it is over: its node, or a controller that has given its node up."""
        return self._status.get("phase") in ("Failed", "Succeeded")

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs, by the word of its node, or because it has never had one."""
        if not self.node:
            return self.going or self.failed
        states = [each.get("state", {}) for each in self._containers]
        over = bool(states) and all("terminated" in each for each in states)
        return over or (self.failed and not any("running" in each for each in states))

    @property
    def began_at(self) -> float:
        """UNIX seconds: since when it holds its node's GPUs; 0: it has not started."""
        return stamp(self._status["startTime"]) if self._status.get("startTime") else 0.0

    @property
    def hard_cap_at(self) -> float:
        """UNIX seconds; 0: it has not started. One that has waited long ends by the gang's own end."""
        own = self.began_at + self._spec["activeDeadlineSeconds"] if self.began_at else 0.0
        return min(own, self._ends_by or own)

    @property
    def latest_end(self) -> float:
        """UNIX seconds: by its own clock and its node's it is gone then, whatever the API says."""
        began = self.hard_cap_at or (float("inf") if self.node else 0.0)
        for each in self._containers:  # the node's own clock counts from here, after the image was pulled
            if at := each.get("state", {}).get("running", {}).get("startedAt"):
                own = stamp(at) + self._spec["activeDeadlineSeconds"]
                began = max(began, min(own, self._ends_by or own))
        return began + self._spec.get("terminationGracePeriodSeconds", 30) + _SLACK_S if began else float("inf")

    def phase(self, ended: bool, given_back: bool, now: float) -> Seen:
        """`ended`: nothing of it runs any more; `given_back`: by us; `now`: UNIX seconds."""
        if ended:
            return NodePhase.TERMINATED, self._why() or "its pod was deleted", ""
        if self.ends_at is not None:
            if now > self.ends_at + _SLACK_S:
                until = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.latest_end))
                silent = f"node {self.node} has not said that it ended: its processes may live on, until {until}"
                return NodePhase.ENDING, silent, ""
            if given_back or now > self.ends_at:
                return NodePhase.STOPPING, self._why() or "its pod is being deleted", ""
        if self.failed:  # by a controller's word; its node has said nothing of it
            return NodePhase.ENDING, self._why() or f"node {self.node} was given up: its processes may live on", ""
        if any("running" in each.get("state", {}) for each in self._containers):
            return NodePhase.RUNNING, self._why() if self.ends_at is not None else "", ""
        return NodePhase.PENDING, *self._waits()

    def _why(self) -> str:
        """Why it ends, as it was said: by whom it was evicted, what its container left, its own status."""
        conditions = {each["type"]: each for each in self._status.get("conditions", []) if each["status"] == "True"}
        disrupted = conditions.get("DisruptionTarget", {})
        said = [" ".join(filter(None, (disrupted.get("reason"), disrupted.get("message"))))]
        said.append(": ".join(filter(None, (self._status.get("reason"), self._status.get("message")))))
        for each in self._containers:
            done = each.get("state", {}).get("terminated", {})
            last = (done.get("message") or "").strip().splitlines()[-1:]
            code = f"its container ended with exit code {done['exitCode']}" if "exitCode" in done else ""
            said.append(": ".join(filter(None, (code, *last))))
        return "; ".join(filter(None, said))

    def _waits(self) -> tuple[str, str]:
        """Why it does not start yet, and the cure where it never will."""
        for each in self._containers:
            waiting = each.get("state", {}).get("waiting", {})
            if waiting.get("reason"):
                reason = f"Kubernetes: {waiting['reason']}: {waiting.get('message', '')}"
                return reason, _cure(reason, _NEVER)
        for each in self._status.get("conditions", []):
            if each["type"] == "PodScheduled" and each["status"] == "False":
                reason = f"Kubernetes: {each.get('reason', '')}: {each.get('message', '')}"
                return reason, _cure(reason, _NEVER)
        return "Kubernetes: its pod has not begun", ""


@dataclass(frozen=True)
class Gang:
    """A Job and the pods that it has made. `job` is None where the API has none of this name."""

    job: Json | None
    pods: tuple[Pod, ...]

    @property
    def over(self) -> bool:
        """Whether it makes no pod any more."""
        return self.job is None or self.given_up or any(map(self._condition, (*_OVER, "SuccessCriteriaMet")))

    @property
    def given_up(self) -> bool:
        """Whether it is an empty Job, in the place of one that has not begun."""
        return self.job is not None and self.job["spec"].get("completions") == 0

    @property
    def begun(self) -> bool:
        """Whether it may have made pods: Kueue, or nobody, holds it back."""
        spec, status = (self.job["spec"], self.job.get("status", {})) if self.job else ({}, {})
        return bool(self.pods) or not spec.get("suspend") or bool(status.get("active"))

    @property
    def pooled(self) -> bool | None:
        """Whether a node pool was made for it, by what its Job, the one in its place, or a pod carries; None: nobody
        knows."""
        if self.job is None:
            return next((pod.pooled for pod in self.pods), None)
        return json.loads(self.job["metadata"].get("annotations", {}).get(manifest.ABOUT, "{}")).get("pooled")

    @property
    def deadline_s(self) -> float | None:
        """Seconds from its start to its end."""
        return self.job["spec"].get("activeDeadlineSeconds") if self.job else None

    @property
    def given_back(self) -> bool:
        """Whether its end was asked for by mgpu."""
        return self.job is None or self.deadline_s == 1 or "deletionTimestamp" in self.job["metadata"]

    def of(self, rank: int) -> Pod | None:
        """The pod of this rank: the first that there was. One that comes after it is another machine."""
        return min((pod for pod in self.pods if pod.rank == rank), key=lambda pod: pod.made_at, default=None)

    def replaced(self, pod: Pod) -> bool:
        """Whether another pod of its rank lives: Kueue, or a controller, has put one in its place."""
        return any(each.rank == pod.rank and each.uid != pod.uid and not each.ended for each in self.pods)

    def without(self, events: Callable[[], str]) -> Seen:
        """What is to be said of a rank that has no pod."""
        if self.job is None:
            return NodePhase.TERMINATED, "the cluster has no Job of this name any more", ""
        if self.given_up:
            return NodePhase.TERMINATED, "it was given back before it began", ""
        for kind in _OVER:
            if said := self._condition(kind):
                why = ": ".join(filter(None, (said.get("reason"), said.get("message"))))
                return NodePhase.TERMINATED, why or "its Job has ended", ""
        if "deletionTimestamp" in self.job["metadata"]:
            return NodePhase.TERMINATED, "its Job was deleted", ""
        queue = self.job["metadata"]["labels"].get(manifest.QUEUE)
        if self.job["spec"].get("suspend"):
            return NodePhase.PENDING, f"Kueue: waits in queue {queue}" if queue else "its Job is suspended", ""
        said = events()
        cure = self._refused(said)
        return NodePhase.PENDING, said or "Kubernetes: its pod has not been made yet", cure

    def _refused(self, said: str) -> str:
        """What would let the pods be made that the API server refuses, where no time does; empty: they may come."""
        if "FailedCreate" not in said:
            return ""
        if "exceeded quota" in said:
            return too_small(said, self.job["spec"]["completions"] if self.job else 0)
        return _cure(said, _REFUSED)

    def _condition(self, kind: str) -> Json | None:
        found = self.job.get("status", {}).get("conditions", []) if self.job else []
        return next((each for each in found if each["type"] == kind and each["status"] == "True"), None)


def too_small(said: str, pods: int) -> str:
    """What would let so many pods be made that a quota refuses one of, where it has no room for them even when it is
    empty; empty: it has, or nobody knows."""
    found = re.search(_QUOTA, said)
    if not found:
        return ""
    wanted, most = (dict(re.findall(r"([^=,]+)=([^,]+)", found[key])) for key in (2, 3))
    over = any(amount(wanted.get(each, 0)) * pods > amount(most[each], unknown=math.inf) for each in most)
    return f"Ask for less, or have quota {found[1]} raised: it lets no {pods} such pods be at once." if over else ""


def _cure(said: str, cures: tuple[tuple[str, str], ...]) -> str:
    if re.search(_PASSES, said, re.IGNORECASE):
        return ""
    return next((cure for words, cure in cures if re.search(words, said)), "")
