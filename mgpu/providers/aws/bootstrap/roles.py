"""The two roles of base: the nodes' (with its instance profile), and the reaper's."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from mgpu.providers.aws import names
from mgpu.providers.aws.bootstrap.resource import (
    Found,
    Resource,
    base_tags,
    fixed,
    tag_list,
    tags_of,
    tags_there,
    unless,
)
from mgpu.providers.aws.bootstrap.role import NONE, Role, RoleManager
from mgpu.providers.aws.iam import policies


class NodeRole(Role):
    """What nodes may do. Its instance profile has the same name."""

    facts: ClassVar[dict[str, str]] = {
        "arn": "ARN of the role",
        "profile": "name of the instance profile",
        "profileArn": "ARN of the instance profile",
    }
    identity: ClassVar[tuple[str, ...]] = ("existing",)

    existing: str | None = Field(
        default=None, description="an instance profile of yours instead: checked, never changed and never deleted"
    )
    bucket: str = Field(default="", description="name of the bucket that nodes keep checkpoints in")
    repository: str = Field(default="", description="name of the repository that nodes pull from")
    in_profile: bool = fixed(True, "an instance profile holds it")


class ReaperRole(Role):
    """What EventBridge Scheduler takes on to end machines at their hard cap."""

    facts: ClassVar[dict[str, str]] = {"arn": "ARN of the role"}
    identity: ClassVar[tuple[str, ...]] = ("existing",)

    existing: str | None = Field(
        default=None, description="ARN of a role of yours instead: checked, never changed and never deleted"
    )


class ReaperRoleManager(RoleManager[ReaperRole]):
    """Asks IAM for the reaper's role."""

    kind: ClassVar[str] = "reaper's role"
    resource: ClassVar[type[Resource]] = ReaperRole
    name: ClassVar[str] = names.REAPER_ROLE
    service: ClassVar[str] = "scheduler.amazonaws.com"

    def complete(self, wanted: ReaperRole) -> ReaperRole:
        """With its documents."""
        if wanted.existing is not None:
            return wanted
        region, account = self.site.region, self.site.account.id()
        trust, policy = policies.reaper_trust(account), policies.reaper(region, account)
        found = {"trust": policies.canonical(trust), "policy": policies.canonical(policy)}
        return wanted.model_copy(update=found)


class NodeRoleManager(RoleManager[NodeRole]):
    """Asks IAM for the nodes' role, and for the instance profile that holds it."""

    kind: ClassVar[str] = "nodes' role"
    resource: ClassVar[type[Resource]] = NodeRole
    name: ClassVar[str] = names.NODE_ROLE
    service: ClassVar[str] = "ec2.amazonaws.com"

    def complete(self, wanted: NodeRole) -> NodeRole:
        """With its documents."""
        if wanted.existing is not None:
            return wanted
        document = policies.node(self.site.region, self.site.account.id(), wanted.bucket, wanted.repository)
        found = {"trust": policies.canonical(policies.node_trust()), "policy": policies.canonical(document)}
        return wanted.model_copy(update=found)

    def expected(self, wanted: NodeRole) -> dict[str, str]:
        """Of one of the user's, the role is not known before it was looked at."""
        profile = wanted.existing or self.name
        known = {} if wanted.existing else super().expected(wanted)
        return {**known, "profile": profile, "profileArn": self.arn_of("instance-profile", profile)}

    def look(self, wanted: NodeRole) -> Found[NodeRole] | None:
        """The role and its profile; of one of the user's, the profile and its role."""
        profile = self._profile(wanted.existing or self.name)
        holds = [role["RoleName"] for role in (profile or {}).get("Roles", ())]
        if wanted.existing is not None:
            return self._theirs(profile, wanted) if profile else None
        found = super().look(wanted)
        if found is None:
            return None
        tagged = {*found.state.tags} & {*tags_there(wanted, tags_of((profile or {}).get("Tags")))}
        tags = tuple(each for each in wanted.tags if each in tagged)
        state = found.state.model_copy(update={"in_profile": self.name in holds, "tags": tags})
        facts = {**self.expected(wanted), **found.facts}
        return Found(found.id, state, facts, found.ours, {"profile": profile is not None, "holds": holds})

    def make(self, wanted: NodeRole) -> Found[NodeRole]:
        """The role; its profile comes when it is brought in line."""
        found = super().make(wanted)
        profile = self._profile(self.name)  # it may have outlived a role
        raw = {"profile": profile is not None, "holds": [r["RoleName"] for r in (profile or {}).get("Roles", ())]}
        return Found(found.id, found.state, {**self.expected(wanted), **found.facts}, raw=raw)

    def align(self, found: Found[NodeRole], wanted: NodeRole) -> None:
        """As any role, and the profile that holds it."""
        super().align(found, wanted)
        profile = {"InstanceProfileName": self.name}
        if not found.raw["profile"]:
            self.iam.create_instance_profile(**profile, Tags=tag_list(base_tags(wanted)))
        elif wanted.tags:
            self.iam.tag_instance_profile(**profile, Tags=tag_list(base_tags(wanted)))
        if self.name not in found.raw["holds"]:
            for other in found.raw["holds"]:  # a profile holds one role
                self.settled(self.iam.remove_role_from_instance_profile, **profile, RoleName=other)
            self.settled(self.iam.add_role_to_instance_profile, **profile, RoleName=self.name)

    def delete_role(self) -> None:
        """The profile first: a role that is in one cannot be deleted."""
        profile = {"InstanceProfileName": self.name}
        unless(NONE, self.iam.remove_role_from_instance_profile, **profile, RoleName=self.name)
        unless(NONE, self.iam.delete_instance_profile, **profile)
        super().delete_role()

    def _profile(self, name: str) -> dict[str, Any] | None:
        answer = unless(NONE, self.iam.get_instance_profile, InstanceProfileName=name)
        return answer["InstanceProfile"] if answer else None

    def _theirs(self, profile: dict[str, Any], wanted: NodeRole) -> Found[NodeRole]:
        facts = {"profile": profile["InstanceProfileName"], "profileArn": profile["Arn"]}
        if not profile["Roles"]:
            state = wanted.model_copy(update={"lacks": ("there is no role in it",)})
            return Found(facts["profile"], state, facts, ours=False)
        found = self.found(profile["Roles"][0], wanted)
        return Found(facts["profile"], found.state, {**facts, **found.facts}, ours=False)
