"""How AWS is asked for what calls `mgpu reconcile`. Everything has one name, and is found by it.

The role of the task comes first and goes last: as long as it is there,
something of the rest may be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from mgpu.errors import CleanupFailed, InputError
from mgpu.providers.aws.bootstrap.resource import Found, Resource, Site
from mgpu.providers.aws.bootstrap.role import Role, RoleManager
from mgpu.providers.aws.failures import code_of, unless
from mgpu.providers.aws.iam import policies
from mgpu.providers.aws.passes import documents
from mgpu.providers.aws.passes.documents import Place
from mgpu.providers.aws.passes.resource import ROLES, Passes

_LOOK_S = 2.0
_SETTLE_S = 30.0  # until other services know a role that was just made
_NOT_YET = ("ClientException", "InvalidParameterException", "ValidationException")  # what they say until then
_NO_CLUSTER = ("ClusterNotFoundException",)
_AT_WORK = ("ClusterContainsTasksException", "UpdateInProgressException")
_ABSENT = ("ResourceNotFoundException",)
_AT_ONCE = 10  # task definitions, and parameters, that one call deletes


class _Roles(RoleManager[Role]):
    """Asks IAM for one of the three."""

    kind: ClassVar[str] = "role"
    resource: ClassVar[type[Resource]] = Role
    description: ClassVar[str] = "made by `mgpu schedule install --aws`"

    def __init__(self, site: Site, name: str, which: str) -> None:
        super().__init__(site)
        self.name, self.service = documents.role_name(name, which), ROLES[which]
        self._which = which

    def wanted(self, place: Place, passes: Passes) -> Role:
        """As it should be."""
        trust = policies.service_trust(self.service, place.account)
        policy = documents.policy(place, passes, self._which)
        return Role(boundary=passes.boundary, trust=policies.canonical(trust), policy=policies.canonical(policy))

    def _refuse_used(self) -> None:
        """No machine needs it."""


class PassesManager:
    """Asks ECS, EventBridge Scheduler, CloudWatch Logs, IAM and Parameter Store for it."""

    kind: ClassVar[str] = "caller of `mgpu reconcile`"
    resource: ClassVar[type[Resource]] = Passes

    def __init__(self, site: Site) -> None:
        self.site = site

    def complete(self, wanted: Passes) -> Passes:
        """Nothing follows from what was given."""
        return wanted

    def expected(self, wanted: Passes) -> dict[str, str]:
        """All facts follow from the name."""
        arn = self._place.arn
        return {
            "schedule": arn("scheduler", f"schedule/default/{wanted.name}"),
            "cluster": arn("ecs", f"cluster/{wanted.name}"),
        }

    def look(self, wanted: Passes) -> Found[Passes] | None:
        """As it is, part by part."""
        anchor = self._role(wanted, "task")
        found = anchor.look(anchor.wanted(self._place, wanted))
        if found is None:
            return None
        log = next(iter(self._logs(wanted)), {})
        state = {
            "cluster_there": self._has_cluster(wanted),
            "log_days": log.get("retentionInDays", 0),
            "secrets": tuple(each for each in wanted.secrets if each in self.secrets(wanted.name)),
            "roles": tuple(sorted(each for each in ROLES if self._in_line(wanted, each))),
            "task": self._task_in_line(wanted),
            "scheduled": self._schedule_in_line(wanted),
        }
        return Found(wanted.name, wanted.model_copy(update=state), self.expected(wanted), found.ours)

    def make(self, wanted: Passes) -> Found[Passes]:
        """The role of the task, by which the rest is found; the rest comes when it is brought in line."""
        role = self._role(wanted, "task")
        role.make(role.wanted(self._place, wanted))
        nothing = {"cluster_there": False, "log_days": 0, "secrets": wanted.secrets, "roles": ()}
        state = wanted.model_copy(update={**nothing, "task": False, "scheduled": False})
        return Found(wanted.name, state, self.expected(wanted))

    def align(self, found: Found[Passes], wanted: Passes) -> None:
        """What differs, the schedule last: what it starts is whole.

        Raises:
            InputError: a secret is not in Parameter Store; nothing here knows its value.
        """
        now = found.state
        if missing := set(wanted.secrets) - self.secrets(wanted.name):
            where = ", ".join(documents.parameter(wanted.name, each) for each in sorted(missing))
            why = "No pass could begin without it."
            raise InputError(f"there is no parameter {where}", why, "Run `mgpu schedule install --aws` again.")
        for which in ROLES:
            self._align_role(wanted, which)
        if not now.cluster_there:
            # an account's first cluster makes ECS's own role, which ECS itself may know of too late
            self.site.patiently(lambda: self._ecs.create_cluster(clusterName=wanted.name), _NOT_YET, _SETTLE_S)
        if now.log_days != wanted.log_days:
            self._align_log(wanted)
        if not now.task:
            task = documents.task_definition(self._place, wanted)
            self.site.patiently(lambda: self._ecs.register_task_definition(**task), _NOT_YET, _SETTLE_S)
            self._delete_tasks(wanted, keep=1)
        if not now.scheduled:
            self._put_schedule(documents.schedule(self._place, wanted))

    def delete(self, wanted: Passes) -> None:
        """The schedule first; then a pass that is at work comes to its end; the task's role last.

        Raises:
            CleanupFailed: a pass is at work; or a task definition is still there.
        """
        name = wanted.name
        unless(_ABSENT, self._scheduler.delete_schedule, Name=name)
        self._delete_cluster(name)
        self._end_tasks(wanted)
        self.forget_secrets(name, self.secrets(name))
        unless(_ABSENT, self._logs_client.delete_log_group, logGroupName=name)
        for which in reversed(ROLES):
            role = self._role(wanted, which)
            role.delete(role.wanted(self._place, wanted))

    # ---- secrets, whose values only whoever installs has

    def secrets(self, name: str) -> frozenset[str]:
        """The variables that Parameter Store has a value for."""
        found = self.site.account.pages(self._ssm, "get_parameters_by_path", "Parameters", Path=f"/{name}")
        return frozenset(each["Name"].rpartition("/")[2] for each in found)

    def keep_secret(self, name: str, variable: str, value: str) -> None:
        """Writes one, encrypted, over what is there."""
        where = documents.parameter(name, variable)
        self._ssm.put_parameter(Name=where, Value=value, Type="SecureString", Overwrite=True)

    def forget_secrets(self, name: str, variables: frozenset[str]) -> None:
        """Deletes these; absent is success."""
        for some in _several([documents.parameter(name, each) for each in sorted(variables)]):
            self._ssm.delete_parameters(Names=some)

    # ---- parts

    @property
    def _place(self) -> Place:
        return Place(self.site.account.id(), self.site.region)

    @property
    def _ecs(self) -> Any:
        return self.site.client("ecs")

    @property
    def _scheduler(self) -> Any:
        return self.site.client("scheduler")

    @property
    def _logs_client(self) -> Any:
        return self.site.client("logs")

    @property
    def _ssm(self) -> Any:
        return self.site.client("ssm")

    def _role(self, wanted: Passes, which: str) -> _Roles:
        return _Roles(self.site, wanted.name, which)

    def _in_line(self, wanted: Passes, which: str) -> bool:
        role = self._role(wanted, which)
        asked = role.wanted(self._place, wanted)
        found = role.look(asked)
        return found is not None and found.state == asked

    def _align_role(self, wanted: Passes, which: str) -> None:
        role = self._role(wanted, which)
        asked = role.wanted(self._place, wanted)
        found = role.look(asked) or role.make(asked)
        if found.state != asked:
            role.align(found, asked)

    def _has_cluster(self, wanted: Passes) -> bool:
        found = self._ecs.describe_clusters(clusters=[wanted.name])["clusters"]
        return any(each["status"] == "ACTIVE" for each in found)  # ECS shows one that is deleted for a while

    def _delete_cluster(self, name: str) -> None:
        from botocore.exceptions import ClientError

        try:
            self.site.patiently(lambda: unless(_NO_CLUSTER, self._ecs.delete_cluster, cluster=name), _AT_WORK)
        except ClientError as error:
            if code_of(error) not in _AT_WORK:
                raise
            raise CleanupFailed(
                f"cluster {name} has a pass at work, and stays with all that it needs",
                "No other begins. One may rent, and is never cut off: it has an hour at most.",
                "Run the same again later.",
            ) from error

    def _logs(self, wanted: Passes) -> Iterator[dict[str, Any]]:
        groups = {"logGroupNamePrefix": wanted.name}
        found = self.site.account.pages(self._logs_client, "describe_log_groups", "logGroups", **groups)
        return (each for each in found if each["logGroupName"] == wanted.name)

    def _align_log(self, wanted: Passes) -> None:
        unless(("ResourceAlreadyExistsException",), self._logs_client.create_log_group, logGroupName=wanted.name)
        self._logs_client.put_retention_policy(logGroupName=wanted.name, retentionInDays=wanted.log_days)

    def _revisions(self, wanted: Passes, status: str) -> list[str]:
        """ARNs, the newest first."""
        asked = {"familyPrefix": wanted.name, "status": status, "sort": "DESC"}
        found = self.site.account.pages(self._ecs, "list_task_definitions", "taskDefinitionArns", **asked)
        return sorted(found, key=lambda arn: int(arn.rpartition(":")[2]), reverse=True)

    def _task_in_line(self, wanted: Passes) -> bool:
        there = self._revisions(wanted, "ACTIVE")
        if len(there) != 1:
            return False
        found = self._ecs.describe_task_definition(taskDefinition=there[0])["taskDefinition"]
        return _says(found, documents.task_definition(self._place, wanted))

    def _delete_tasks(self, wanted: Passes, keep: int) -> None:
        """All revisions but the newest. One that a pass still runs goes with that pass."""
        for each in self._revisions(wanted, "ACTIVE")[keep:]:
            self._ecs.deregister_task_definition(taskDefinition=each)
        for some in _several(self._revisions(wanted, "INACTIVE")):
            self._ecs.delete_task_definitions(taskDefinitions=some)

    def _end_tasks(self, wanted: Passes) -> None:
        """All revisions, until ECS lists none."""
        deadline = self.site.clock() + self.site.limit_s
        while True:
            self._delete_tasks(wanted, keep=0)
            left = self._revisions(wanted, "INACTIVE")
            if not left:
                return
            if self.site.clock() >= deadline:
                raise CleanupFailed("task definitions are still there", ", ".join(left), "Run the same again later.")
            self.site.sleep(_LOOK_S)

    def _schedule_in_line(self, wanted: Passes) -> bool:
        found = unless(_ABSENT, self._scheduler.get_schedule, Name=wanted.name)
        return found is not None and _says(found, documents.schedule(self._place, wanted))

    def _put_schedule(self, wanted: dict[str, Any]) -> None:
        from botocore.exceptions import ClientError

        def put() -> None:
            try:
                self._scheduler.create_schedule(**wanted)
            except ClientError as error:
                if code_of(error) != "ConflictException":
                    raise
                self._scheduler.update_schedule(**wanted)

        self.site.patiently(put, _NOT_YET, _SETTLE_S)


def _says(found: Any, wanted: Any) -> bool:
    """Whether what AWS shows has all that it was told; it adds defaults, and lists what is named in its own order."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(_says(found.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list):
        ours, theirs = (sorted(each or (), key=_name) for each in (wanted, found))
        return len(ours) == len(theirs) and all(map(_says, theirs, ours))
    return found == wanted


def _name(value: Any) -> str:
    return str(value.get("name")) if isinstance(value, dict) else str(value)


def _several(names: list[str]) -> Iterator[list[str]]:
    """As many as one call takes."""
    return (names[first : first + _AT_ONCE] for first in range(0, len(names), _AT_ONCE))
