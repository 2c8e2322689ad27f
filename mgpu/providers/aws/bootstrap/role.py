"""A role of base, as IAM is asked for it.

Roles are global, bases are regional. So one role serves all regions, and each region's base gives it a policy of its
own, `mgpu-base-<region>`: the role is made by whichever base comes first, and goes with the last one.
"""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

from pydantic import Field

from mgpu.errors import CleanupFailed
from mgpu.providers.aws import names
from mgpu.providers.aws.bootstrap.resource import (
    Found,
    Resource,
    Site,
    base_tags,
    fixed,
    tags_of,
    tags_there,
)
from mgpu.providers.aws.failures import unless
from mgpu.providers.aws.iam import policies

NONE = ("NoSuchEntity",)
_BUSY = ("ConcurrentModification", "EntityTemporarilyUnmodifiable", "NoSuchEntity")
_SETTLE_S = 30.0  # until IAM knows everywhere what it has just made
_PREFIX = "mgpu-base-"


class Role(Resource):
    """What both roles have in common."""

    trust: str = fixed("", "who may take it on, JSON")
    policy: str = fixed("", "what it may do for this region, JSON")
    boundary: str = Field(default="", description="ARN of a policy of yours that bounds it, whatever it may do")
    other_policies: tuple[str, ...] = fixed((), "policies that others have given it")


R = TypeVar("R", bound=Role)


class RoleManager(Generic[R]):
    """Asks IAM for a role named `name`, which `service` may take on."""

    kind: ClassVar[str]
    name: str
    service: str
    description: ClassVar[str] = "made by `mgpu bootstrap aws`"

    def __init__(self, site: Site) -> None:
        self.site = site

    def expected(self, wanted: R) -> dict[str, str]:
        """All facts follow from the name."""
        return {"arn": wanted.existing or self.arn_of("role", self.name)}

    def look(self, wanted: R) -> Found[R] | None:
        """As it is, as far as this region goes."""
        answer = unless(NONE, self.iam.get_role, RoleName=self._named(wanted))
        return None if answer is None else self.found(answer["Role"], wanted)

    def make(self, wanted: R) -> Found[R]:
        """The role, which may do nothing yet, with our tag."""
        bound = {"PermissionsBoundary": wanted.boundary} if wanted.boundary else {}
        answer = self.iam.create_role(
            RoleName=self.name,
            AssumeRolePolicyDocument=wanted.trust,
            Tags=names.tag_list(base_tags(wanted)),
            Description=self.description,
            **bound,
        )
        bare = wanted.model_copy(update={"policy": ""})
        return Found(self.name, bare, {"arn": answer["Role"]["Arn"]})

    def align(self, found: Found[R], wanted: R) -> None:
        """Trust, this region's policy, tags, and nothing that others have added."""
        role = {"RoleName": self.name}
        if wanted.boundary != found.state.boundary:  # first: more than it is never given
            arn = wanted.boundary
            self.settled(self.iam.put_role_permissions_boundary, **role, PermissionsBoundary=arn)
        self.settled(self.iam.update_assume_role_policy, **role, PolicyDocument=wanted.trust)
        self.settled(self.iam.put_role_policy, **role, PolicyName=self._policy, PolicyDocument=wanted.policy)
        for each in found.state.other_policies:
            self._take_away(each)
        if wanted.tags:
            self.settled(self.iam.tag_role, **role, Tags=names.tag_list(base_tags(wanted)))

    def delete(self, wanted: R) -> None:
        """This region's policy; the role itself when no other region has one in it.

        Raises:
            CleanupFailed: machines of mgpu's live in this region, and need it.
        """
        answer = unless(NONE, self.iam.get_role, RoleName=self.name)
        if answer is None:
            return
        self._refuse_used()
        unless(NONE, self.iam.delete_role_policy, RoleName=self.name, PolicyName=self._policy)
        inline, attached = self._policies(self.name)
        if any(each.startswith(_PREFIX) and each != self._policy for each in inline):
            return
        for each in (*inline, *attached):
            self._take_away(each)
        self.settled(self.delete_role)
        if unless(NONE, self.iam.get_role, RoleName=self.name) is not None:
            raise CleanupFailed(f"role {self.name} is still there", "IAM accepted the request.", "Try again.")

    @property
    def iam(self) -> Any:
        """IAM's client; it has one region."""
        return self.site.client("iam")

    @property
    def _policy(self) -> str:
        return f"{_PREFIX}{self.site.region}"

    def _named(self, wanted: R) -> str:
        return wanted.existing.rpartition("/")[2] if wanted.existing else self.name

    def arn_of(self, what: str, name: str) -> str:
        """The ARN of a role or an instance profile without a path."""
        return f"arn:{policies.partition(self.site.region)}:iam::{self.site.account.id()}:{what}/{name}"

    def found(self, role: dict[str, Any], wanted: R) -> Found[R]:
        """A role that IAM has described."""
        name, trust = role["RoleName"], role["AssumeRolePolicyDocument"]
        facts, ours = {"arn": role["Arn"]}, names.BASE in tags_of(role.get("Tags"))
        if wanted.existing is not None:
            lacks = () if policies.trusts(trust, self.service) else (f"{self.service} may not take on role {name}",)
            return Found(wanted.existing, wanted.model_copy(update={"lacks": lacks}), facts, ours)
        inline, attached = self._policies(name)
        bound = role.get("PermissionsBoundary", {}).get("PermissionsBoundaryArn", "")
        state = {
            "boundary": bound if wanted.boundary else "",  # one that others have set is theirs
            "tags": tags_there(wanted, tags_of(role.get("Tags"))),
            "trust": policies.canonical(trust),
            "policy": self._document(name) if self._policy in inline else "",
            "other_policies": tuple(sorted(each for each in (*inline, *attached) if not each.startswith(_PREFIX))),
        }
        return Found(name, wanted.model_copy(update=state), facts, ours)

    def _document(self, name: str) -> str:
        answer = unless(NONE, self.iam.get_role_policy, RoleName=name, PolicyName=self._policy)
        return policies.canonical(answer["PolicyDocument"]) if answer else ""

    def _policies(self, name: str) -> tuple[list[str], list[str]]:
        """Names of the policies in the role, and ARNs of those attached to it."""
        pages, iam, role = self.site.account.pages, self.iam, {"RoleName": name}
        inline = list(pages(iam, "list_role_policies", "PolicyNames", **role))
        attached = pages(iam, "list_attached_role_policies", "AttachedPolicies", **role)
        return inline, [each["PolicyArn"] for each in attached]

    def _take_away(self, policy: str) -> None:
        """A policy that others have given the role."""
        if policy.startswith("arn:"):
            unless(NONE, self.iam.detach_role_policy, RoleName=self.name, PolicyArn=policy)
        else:
            unless(NONE, self.iam.delete_role_policy, RoleName=self.name, PolicyName=policy)

    def settled(self, call: Any, **arguments: Any) -> Any:
        """The answer, once IAM knows of what it was just asked for."""
        return self.site.patiently(lambda: call(**arguments), _BUSY, _SETTLE_S)

    def delete_role(self) -> None:
        """The role, when nothing is in it any more; absent is success."""
        unless(NONE, self.iam.delete_role, RoleName=self.name)

    def _refuse_used(self) -> None:
        used_by = users(self.site)
        if used_by:
            raise CleanupFailed(
                f"role {self.name} is in use in {self.site.region}, and stays",
                f"Machines of mgpu's live there: {', '.join(used_by)}.",
                "End them first: `mgpu ls` shows whose they are, `mgpu gc` finds those that nothing uses.",
            )


def users(site: Site) -> tuple[str, ...]:
    """Machines of mgpu's in this region, whoever's they are, that are not terminated."""
    states = ["pending", "running", "shutting-down", "stopping", "stopped"]
    found = site.account.pages(
        site.client("ec2"),
        "describe_instances",
        "Reservations",
        Filters=[{"Name": "tag-key", "Values": [names.OWNER]}, {"Name": "instance-state-name", "Values": states}],
    )
    return tuple(machine["InstanceId"] for reservation in found for machine in reservation["Instances"])
