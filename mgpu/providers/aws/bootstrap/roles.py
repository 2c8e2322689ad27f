"""The two roles of base: the nodes' (with its instance profile), and the reaper's."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from mgpu.errors import CleanupFailed
from mgpu.providers.aws import names
from mgpu.providers.aws.bootstrap.resource import (
    Found,
    Resource,
    base_tags,
    fixed,
    tags_of,
    tags_there,
)
from mgpu.providers.aws.bootstrap.role import NONE, Role, RoleManager
from mgpu.providers.aws.failures import code_of, unless
from mgpu.providers.aws.iam import policies, run_role

_VERSIONS = 4  # of one policy beside the one that counts


class NodeRole(Role):
    """What nodes may do by themselves, in an instance profile of the same name, and what bounds the roles of runs."""

    facts: ClassVar[dict[str, str]] = {
        "arn": "ARN of the role",
        "profile": "name of the instance profile",
        "profileArn": "ARN of the instance profile",
    }
    identity: ClassVar[tuple[str, ...]] = ("existing",)

    existing: str | None = Field(
        default=None, description="an instance profile of yours instead: checked, never changed and never deleted"
    )
    bucket: str = Field(default="", description="name of the bucket that runs keep checkpoints in")
    buckets: tuple[str, ...] = Field(
        default=(), description="further ones, of the user's, that runs may read from and keep checkpoints in"
    )
    repository: str = Field(default="", description="name of the repository that nodes pull from")
    ssm: bool = Field(default=False, description="lets machines be reached through Session Manager")
    bounded: bool = fixed(True, "a policy bounds what the role of any run may do")
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
    name = names.REAPER_ROLE
    service = "scheduler.amazonaws.com"

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
    name = names.NODE_ROLE
    service = "ec2.amazonaws.com"

    def complete(self, wanted: NodeRole) -> NodeRole:
        """With its documents."""
        if wanted.existing is not None:
            return wanted
        document = policies.node(self.site.region, self.site.account.id(), wanted.repository, ssm=wanted.ssm)
        found = {"trust": policies.canonical(policies.node_trust()), "policy": policies.canonical(document)}
        ours = names.bucket(self.site.account.id(), "")  # the boundary has all of these
        named = {each for each in (wanted.bucket, *wanted.buckets) if each and not each.startswith(ours)}
        return wanted.model_copy(update={**found, "buckets": tuple(sorted(named))})

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
        bound = self._bound()
        named = policies.bounded(bound) if bound else set[str]()
        tagged = {*found.state.tags} & {*tags_there(wanted, tags_of((profile or {}).get("Tags")))}
        state = found.state.model_copy(
            update={
                "in_profile": self.name in holds,
                "tags": tuple(each for each in wanted.tags if each in tagged),
                "buckets": tuple(each for each in wanted.buckets if each in named),
                "bounded": bound is not None and policies.canonical(bound) == policies.canonical(self._boundary(named)),
            }
        )
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
        self._align_bound(wanted)
        profile = {"InstanceProfileName": self.name}
        if not found.raw["profile"]:
            self.iam.create_instance_profile(**profile, Tags=names.tag_list(base_tags(wanted)))
        elif wanted.tags:
            self.iam.tag_instance_profile(**profile, Tags=names.tag_list(base_tags(wanted)))
        if self.name not in found.raw["holds"]:
            for other in found.raw["holds"]:  # a profile holds one role
                self.settled(self.iam.remove_role_from_instance_profile, **profile, RoleName=other)
            self.settled(self.iam.add_role_to_instance_profile, **profile, RoleName=self.name)

    def delete_role(self) -> None:
        """The profile first: a role that is in one cannot be deleted."""
        profile = {"InstanceProfileName": self.name}
        unless(NONE, self.iam.remove_role_from_instance_profile, **profile, RoleName=self.name)
        unless(NONE, self.iam.delete_instance_profile, **profile)
        self._delete_bound()  # before the role, whose absence says that all is gone
        super().delete_role()

    def _align_bound(self, wanted: NodeRole) -> None:
        """The policy that bounds runs' roles; what other regions' bases have named in it stays."""
        bound, arn = self._bound(), self._bound_arn
        named = policies.bounded(bound) if bound else set[str]()
        document = self._boundary(named | set(wanted.buckets))
        if bound is None:
            about = {"Description": self.description, "Tags": names.tag_list(base_tags(wanted))}
            text = policies.canonical(document)
            self.iam.create_policy(PolicyName=names.RUN_BOUNDARY, PolicyDocument=text, **about)
        elif policies.canonical(bound) != policies.canonical(document):
            for each in self._versions()[_VERSIONS - 1 :]:  # IAM keeps so many
                self.iam.delete_policy_version(PolicyArn=arn, VersionId=each)
            text = policies.canonical(document)
            self.iam.create_policy_version(PolicyArn=arn, PolicyDocument=text, SetAsDefault=True)

    def _delete_bound(self) -> None:
        from botocore.exceptions import ClientError

        if self._bound() is None:
            return
        for each in self._versions():
            self.iam.delete_policy_version(PolicyArn=self._bound_arn, VersionId=each)
        try:
            unless(NONE, self.iam.delete_policy, PolicyArn=self._bound_arn)
        except ClientError as error:
            if code_of(error) != "DeleteConflict":
                raise
            raise CleanupFailed(
                f"policy {names.RUN_BOUNDARY} bounds roles of runs, and stays",
                "Roles below `/mgpu/run/` are left of runs that nobody has ended.",
                "End them: `mgpu ls`, `mgpu down`; then try again.",
            ) from error

    def _bound(self) -> policies.Document | None:
        return run_role.boundary(self.site.account)

    def _versions(self) -> list[str]:
        """Those that do not count, the newest first."""
        found = self.site.account.pages(self.iam, "list_policy_versions", "Versions", PolicyArn=self._bound_arn)
        old = [each for each in found if not each["IsDefaultVersion"]]
        return [each["VersionId"] for each in sorted(old, key=lambda each: each["CreateDate"], reverse=True)]

    def _boundary(self, named: set[str]) -> policies.Document:
        return policies.run_boundary(self.site.region, self.site.account.id(), named)

    @property
    def _bound_arn(self) -> str:
        return run_role.boundary_arn(self.site.account)

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
