"""What the operator may do: the least policies under which mgpu works, as documents to paste.

    machines       rents, watches and ends machines, keeps checkpoints and images, reads prices and quotas
    sessions       beyond that, reaches them through Session Manager (`aws: {address: ssm}`)
    base           makes what machines stand on, once for each account and region (`mgpu bootstrap aws`)
    reservations   beyond machines: buys Capacity Blocks (`mgpu reservations buy`), which nobody can give back
    passes         beyond machines: has `mgpu reconcile` called in the account (`mgpu schedule install --aws`)

One managed policy has no room for the first two. `base` and `passes` are apart because they write policies into roles:
who may do that may do everything these roles could ever do, which is everything, unless a boundary that somebody else
keeps is demanded of each role. `machines` writes into roles of runs alone, which have such a boundary: `mgpu-run`, made
by `base`.
What ends, deletes or changes something asks for a tag or a name of ours. What only looks has `*` for its resource,
because EC2's Describe calls, prices and quotas know no narrower one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mgpu.providers.aws import names
from mgpu.providers.aws.iam.policies import BACKEND, RUNS, VERSION, Document, partition
from mgpu.providers.aws.instances import session_manager

MOST_CHARACTERS = 6144
"""What a managed policy of a customer may have, white space not counted."""

_IMAGES = [
    "ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:CompleteLayerUpload", "ecr:GetDownloadUrlForLayer",
    "ecr:InitiateLayerUpload", "ecr:PutImage", "ecr:UploadLayerPart",
]  # fmt: skip
CHECKED_WITH = {
    **dict.fromkeys(_IMAGES, "ecr:GetAuthorizationToken"),
    "ec2:RunInstances": "ec2:CreateFleet",
    "ec2:CreateTags": "ec2:CreateLaunchTemplate",
    "ecr:TagResource": "ecr:CreateRepository",
    "iam:CreateServiceLinkedRole": "ec2:CreateFleet",
    "iam:PassRole": "scheduler:CreateSchedule",
    "iam:TagInstanceProfile": "iam:CreateInstanceProfile",
    "iam:TagPolicy": "iam:CreatePolicy",
    "iam:TagRole": "iam:CreateRole",
    "ssm:ResumeSession": names.START_SESSION,
    "ssmmessages:OpenDataChannel": names.START_SESSION,
}
"""Actions that nobody calls by themselves: AWS asks for them when the other one is called, or what it gave is used."""

_OURS = {"Null": {f"aws:ResourceTag/{names.OWNER}": "false"}}
_AS_OURS = {"Null": {f"aws:RequestTag/{names.OWNER}": "false"}}
_BASES = {"Null": {f"aws:ResourceTag/{names.BASE}": "false"}}
_AS_BASES = {"Null": {f"aws:RequestTag/{names.BASE}": "false"}}
# the calls that tag what they make
_TAGGING = ["AllocateAddress", "CreateFleet", "CreateLaunchTemplate", "CreatePlacementGroup", "RunInstances"]
# EC2 makes these roles at an account's first fleet, for itself
_LINKED = {"ec2fleet.amazonaws.com": "AWSServiceRoleForEC2Fleet", "spot.amazonaws.com": "AWSServiceRoleForEC2Spot"}


@dataclass(frozen=True)
class Where:
    """An account, and the regions that a policy is for (none: all of the partition that `home` is in)."""

    account: str
    regions: tuple[str, ...] = ()
    home: str = ""

    def arn(self, service: str, resource: str, *, account: str | None = None) -> str:
        """The ARN of something regional, in all regions: what was rented in another one has to be ended there, too.
        `account` is empty for what AWS itself publishes."""
        return f"{self._start(service)}:*:{self.account if account is None else account}:{resource}"

    def iam(self, resource: str) -> str:
        """The ARN of something of IAM, which has no regions."""
        return f"{self._start('iam')}::{self.account}:{resource}"

    def s3(self, resource: str) -> str:
        """The ARN of a bucket of base, or of something in it."""
        return f"{self._start('s3')}:::{names.bucket(self.account, '*')}{resource}"

    def _start(self, service: str) -> str:
        return f"arn:{partition(self.regions[0] if self.regions else self.home)}:{service}"

    def within(self, condition: Document) -> Document:
        """The condition, and that the call is made in one of the regions."""
        if not self.regions:
            return condition
        return {**condition, "StringEquals": {"aws:RequestedRegion": list(self.regions)}}


def documents(account: str, regions: Iterable[str] = (), boundary: str = "", home: str = "") -> dict[str, Document]:
    """The policies by name. `regions`: where machines may be; none: anywhere in the partition of region `home` (empty:
    AWS's commercial regions). `boundary`: the ARN of a policy that every role of base has to be bounded by."""
    where = Where(account, tuple(regions), home)
    made = {
        "machines": machines(where),
        "sessions": sessions(where),
        "base": base(where, boundary),
        "reservations": reservations(where),
        "passes": passes(where, boundary),
    }
    return {name: {"Version": VERSION, "Statement": list(statements)} for name, statements in made.items()}


def is_region(text: str) -> bool:
    """Whether it is written as regions are."""
    return re.fullmatch(r"[a-z]{2,4}(-[a-z]+)+-[0-9]{1,2}", text) is not None


def actions(document: Document) -> set[str]:
    """All actions that a document allows."""
    found = [statement["Action"] for statement in document["Statement"]]
    return {action for each in found for action in ([each] if isinstance(each, str) else each)}


def narrowed(document: Document, wanted: Iterable[str]) -> Document:
    """The document with these actions alone: what somebody who has the rest lacks."""
    keep = set(wanted)
    kept = [
        {**each, "Action": [action for action in each["Action"] if action in keep]} for each in document["Statement"]
    ]
    return {**document, "Statement": [each for each in kept if each["Action"]]}


def machines(where: Where) -> Iterator[Document]:
    """What it takes to rent, watch and end machines."""
    ec2 = lambda *kinds: [where.arn("ec2", f"{kind}/*") for kind in kinds]  # noqa: E731
    yield _allow("Look", [*LOOKS, "ecr:GetAuthorizationToken"], ["*"])  # which knows no narrower resource
    yield _allow("Image", ["ssm:GetParameters"], [where.arn("ssm", "parameter/aws/service/deeplearning/*", account="")])
    yield _allow("DiskKey", ["kms:GetKeyPolicy"], [where.arn("kms", "key/*")])
    # of roles; and what the operator may do
    asks = ["iam:GetInstanceProfile", "iam:GetRole", "iam:SimulatePrincipalPolicy"]
    yield _allow("Roles", asks, [where.iam(f"{kind}/*") for kind in ("instance-profile", "role", "user")])
    yield _allow(
        "Rent",
        ["ec2:AllocateAddress", "ec2:CreateFleet", "ec2:CreateLaunchTemplate", "ec2:CreatePlacementGroup"],
        ec2("elastic-ip", "fleet", "launch-template", "placement-group"),
        where.within(_AS_OURS),
    )
    # CreateFleet starts them in the caller's name; machines and disks carry the owner's tag from the first moment on
    start = ["ec2:CreateFleet", "ec2:RunInstances"]
    yield _allow("Start", start, ec2("instance", "volume"), where.within(_AS_OURS))
    on = ec2(*_TAKEN)
    image = [where.arn("ec2", "image/*", account=""), where.arn("ec2", "image/*")]
    yield _allow("StartOn", start, [*on, *image], where.within({}))
    yield _allow("TagNew", ["ec2:CreateTags"], ec2(*_TAGGED), {"StringEquals": {"ec2:CreateAction": _TAGGING}})
    yield _allow("TagOurs", ["ec2:CreateTags", "ec2:DeleteTags"], ec2("instance"), _OURS)
    yield _allow(
        "Addresses",
        ["ec2:AssociateAddress", "ec2:DisassociateAddress", "ec2:ReleaseAddress"],
        ec2("elastic-ip", "instance", "network-interface"),
        _OURS,
    )
    yield _allow(
        "End",
        ["ec2:DeleteLaunchTemplate", "ec2:DeleteVolume", "ec2:TerminateInstances"],
        ec2("instance", "launch-template", "volume"),
        _OURS,
    )
    # by its name: most fleets have none, and of a tag that cannot be there EC2 would say "forbidden", not "not found"
    yield _allow("EndGroup", ["ec2:DeletePlacementGroup"], [where.arn("ec2", "placement-group/mgpu-*")])
    yield _allow(
        "HardCap",
        ["scheduler:CreateSchedule", "scheduler:DeleteSchedule", "scheduler:UpdateSchedule"],
        [where.arn("scheduler", "schedule/default/mgpu-*")],
    )
    yield _allow("Pass", ["iam:PassRole"], [where.iam(f"role/{role}") for role in _PASSED], _passed_to(_PASSED))
    runs = [where.iam(f"role{names.RUN_ROLES}*")]
    bound = where.iam(f"policy/{names.RUN_BOUNDARY}")
    yield _allow(
        "RunRoles", ["iam:CreateRole", "iam:PutRolePolicy"], runs, {"StringEquals": {"iam:PermissionsBoundary": bound}}
    )
    yield _allow("RunRolesEnd", ["iam:DeleteRole", "iam:DeleteRolePolicy", "iam:TagRole"], runs)
    yield _allow("RunRolesMost", ["iam:GetPolicy", "iam:GetPolicyVersion"], [bound])
    linked = [where.iam(f"role/aws-service-role/{service}/{role}") for service, role in _LINKED.items()]
    yield _allow("FirstFleet", ["iam:CreateServiceLinkedRole"], linked)  # their names say whose they are
    yield _allow("Objects", ["s3:GetObject", "s3:PutObject"], [where.s3(f"/{RUNS}/*"), where.s3(f"/{BACKEND}/*")])
    # of runs what retention removes; the bucket is versioned
    removed = [where.s3(f"/{BACKEND}/*"), where.s3(f"/{RUNS}/*/checkpoints/*")]
    yield _allow("Remove", ["s3:AbortMultipartUpload", "s3:DeleteObject"], removed)
    yield _allow("List", ["s3:ListBucket", "s3:ListBucketMultipartUploads"], [where.s3("")])
    yield _allow("Images", _IMAGES, [where.arn("ecr", f"repository/{names.REPOSITORY}")])


def sessions(where: Where) -> Iterator[Document]:
    """What it takes to reach machines of ours through Session Manager, by SSH and in no other way. AWS's program goes
    on with a session that it has lost; whose it is, AWS says by a tag."""
    yield _allow("SessionLooks", list(names.SESSION_LOOKS), ["*"])
    ours = {"Null": {f"ssm:resourceTag/{names.OWNER}": "false"}}
    yield _allow("Sessions", [names.START_SESSION], [where.arn("ec2", "instance/*")], ours)
    document = where.arn("ssm", f"document/{session_manager.DOCUMENT}", account="*")  # AWS's own, named in either way
    yield _allow("SessionsOfSsh", [names.START_SESSION], [document])
    any_session = [where.arn("ssm", "session/*")]  # whoever joins one needs its token
    yield _allow("SessionChannel", ["ssmmessages:OpenDataChannel"], any_session)
    own = {"StringLike": {"ssm:resourceTag/aws:ssmmessages:session-id": "${aws:userid}"}}
    yield _allow("OwnSessions", ["ssm:ResumeSession"], any_session, own)


def reservations(where: Where) -> Iterator[Document]:
    """What it takes to buy a Capacity Block, beyond `machines`. They carry the owner's tag."""
    reservation = [where.arn("ec2", "capacity-reservation/*")]
    yield _allow("Buy", ["ec2:PurchaseCapacityBlock"], reservation, where.within(_AS_OURS))
    # of which the reservation is a part, and which has no tags
    yield _allow("BuyBlock", ["ec2:PurchaseCapacityBlock"], [where.arn("ec2", "capacity-block/*")], where.within({}))
    tagging = {"StringEquals": {"ec2:CreateAction": "PurchaseCapacityBlock"}}
    yield _allow("TagBought", ["ec2:CreateTags"], reservation, tagging)


def base(where: Where, boundary: str = "") -> Iterator[Document]:
    """What it takes to make, mend and take down stack `base`; with a boundary, its roles have to have that one."""
    groups = where.arn("ec2", "security-group/*")
    roles = [where.iam(f"role/{role}") for role in _PASSED]
    profile = where.iam(f"instance-profile/{names.NODE_ROLE}")
    yield _allow("Look", _BASE_LOOKS, ["*"])
    yield _allow("Bucket", _BUCKET, [where.s3("")])
    yield _allow("Repository", _REPOSITORY, [where.arn("ecr", f"repository/{names.REPOSITORY}")])
    yield from _roles(roles, boundary)
    yield _allow("Profile", _PROFILE, [profile])
    yield _allow("RunRolesMost", _BOUNDARY, [where.iam(f"policy/{names.RUN_BOUNDARY}")])
    passed = {names.NODE_ROLE: _PASSED[names.NODE_ROLE]}
    yield _allow("Pass", ["iam:PassRole"], [where.iam(f"role/{names.NODE_ROLE}")], _passed_to(passed))
    yield _allow("NewGroup", ["ec2:CreateSecurityGroup"], [groups], where.within(_AS_BASES))
    yield _allow("NewGroupIn", ["ec2:CreateSecurityGroup"], [where.arn("ec2", "vpc/*")], where.within({}))
    tagging = {"StringEquals": {"ec2:CreateAction": "CreateSecurityGroup"}}
    yield _allow("TagNewGroup", ["ec2:CreateTags"], [groups], tagging)
    yield _allow("Group", _GROUP, [groups], _BASES)


def passes(where: Where, boundary: str = "") -> Iterator[Document]:
    """What it takes to have `mgpu reconcile` called in the account, to change that, and to take it back."""
    named = f"{names.CALLER}*"
    clusters, roles = where.arn("ecs", f"cluster/{named}"), [where.iam(f"role/{named}")]
    yield _allow("Tasks", _TASKS, ["*"], where.within({}))  # ECS knows no narrower resource for these
    yield _allow("TasksEnd", ["ecs:DeleteTaskDefinitions"], [where.arn("ecs", f"task-definition/{named}")])
    yield _allow("Cluster", ["ecs:CreateCluster", "ecs:DeleteCluster", "ecs:DescribeClusters"], [clusters])
    yield _allow("Image", ["ecr:BatchGetImage"], [where.arn("ecr", "repository/*")])
    yield _allow("LogLook", ["logs:DescribeLogGroups"], [where.arn("logs", "log-group:*")])
    logs = ["logs:CreateLogGroup", "logs:DeleteLogGroup", "logs:PutRetentionPolicy"]
    yield _allow("Log", logs, [where.arn("logs", f"log-group:{named}")])
    secrets = ["ssm:DeleteParameters", "ssm:GetParametersByPath", "ssm:PutParameter"]
    yield _allow("Secrets", secrets, [where.arn("ssm", f"parameter/{named}")])
    calls = [f"scheduler:{call}Schedule" for call in ("Create", "Delete", "Get", "Update")]
    yield _allow("Schedule", calls, [where.arn("scheduler", f"schedule/default/{named}")])
    yield from _roles(roles, boundary)
    yield _allow("Pass", ["iam:PassRole"], roles, _passed_to(_OF_PASSES))
    linked = where.iam("role/aws-service-role/ecs.amazonaws.com/AWSServiceRoleForECS")  # at an account's first cluster
    first = {"StringEquals": {"iam:AWSServiceName": "ecs.amazonaws.com"}}
    yield _allow("FirstCluster", ["iam:CreateServiceLinkedRole"], [linked], first)


def _roles(roles: list[str], boundary: str) -> Iterator[Document]:
    """Making, mending and deleting these roles; with a boundary they have to have that one."""
    if boundary:
        bounded = {"StringEquals": {"iam:PermissionsBoundary": boundary}}
        yield _allow("BoundedRoles", [*_GIVING, "iam:PutRolePermissionsBoundary"], roles, bounded)
        yield _allow("Roles", [each for each in _ROLES if each not in _GIVING], roles)
    else:
        yield _allow("Roles", _ROLES, roles)


_PASSED = {names.NODE_ROLE: "ec2.amazonaws.com", names.REAPER_ROLE: "scheduler.amazonaws.com"}
_OF_PASSES = {"tasks": "ecs-tasks.amazonaws.com", "schedule": "scheduler.amazonaws.com"}
_TASKS = [
    f"ecs:{call}" for call in (
        "DeregisterTaskDefinition", "DescribeTaskDefinition", "ListTaskDefinitions", "RegisterTaskDefinition",
    )
]  # fmt: skip
# a spot request is made by EC2 itself on the way, and has no tags
_TAKEN = (
    "capacity-reservation", "launch-template", "network-interface", "placement-group", "security-group",
    "spot-instances-request", "subnet",
)  # fmt: skip
_TAGGED = ("elastic-ip", "fleet", "instance", "launch-template", "network-interface", "placement-group", "volume")
LOOKS = [
    *(f"ec2:Describe{what}" for what in (
        "Addresses", "AvailabilityZones", "CapacityBlockOfferings", "CapacityReservations", "Images",
        "InstanceTypeOfferings", "InstanceTypes", "Instances", "LaunchTemplates", "Regions", "SecurityGroups",
        "SpotPriceHistory", "Subnets", "Volumes", "Vpcs",
    )),
    "ec2:GetEbsDefaultKmsKeyId",
    "pricing:GetProducts",
    "servicequotas:ListServiceQuotas",
]  # fmt: skip
_BASE_LOOKS = [
    *(f"ec2:Describe{what}" for what in ("Instances", "NetworkInterfaces", "Regions", "SecurityGroups", "Vpcs")),
]
_BUCKET = [
    "s3:CreateBucket", "s3:DeleteBucket", "s3:GetBucketPolicy", "s3:GetBucketPublicAccessBlock", "s3:GetBucketTagging",
    "s3:GetBucketVersioning", "s3:GetEncryptionConfiguration", "s3:GetLifecycleConfiguration", "s3:ListBucket",
    "s3:ListBucketVersions", "s3:PutBucketPolicy", "s3:PutBucketPublicAccessBlock", "s3:PutBucketTagging",
    "s3:PutBucketVersioning", "s3:PutEncryptionConfiguration", "s3:PutLifecycleConfiguration",
]  # fmt: skip
_REPOSITORY = [
    "ecr:CreateRepository", "ecr:DeleteRepository", "ecr:DescribeRepositories", "ecr:GetLifecyclePolicy",
    "ecr:ListTagsForResource", "ecr:PutImageScanningConfiguration", "ecr:PutImageTagMutability",
    "ecr:PutLifecyclePolicy", "ecr:TagResource",
]  # fmt: skip
_ROLES = [
    "iam:CreateRole", "iam:DeleteRole", "iam:DeleteRolePolicy", "iam:DetachRolePolicy", "iam:GetRole",
    "iam:GetRolePolicy", "iam:ListAttachedRolePolicies", "iam:ListRolePolicies", "iam:PutRolePolicy", "iam:TagRole",
    "iam:UpdateAssumeRolePolicy",
]  # fmt: skip
_GIVING = ("iam:CreateRole", "iam:PutRolePolicy")
_BOUNDARY = [
    "iam:CreatePolicy", "iam:CreatePolicyVersion", "iam:DeletePolicy", "iam:DeletePolicyVersion", "iam:GetPolicy",
    "iam:GetPolicyVersion", "iam:ListPolicyVersions", "iam:TagPolicy",
]  # fmt: skip
_PROFILE = [
    "iam:AddRoleToInstanceProfile", "iam:CreateInstanceProfile", "iam:DeleteInstanceProfile", "iam:GetInstanceProfile",
    "iam:RemoveRoleFromInstanceProfile", "iam:TagInstanceProfile",
]  # fmt: skip
_GROUP = [
    "ec2:AuthorizeSecurityGroupEgress", "ec2:AuthorizeSecurityGroupIngress", "ec2:DeleteSecurityGroup",
    "ec2:CreateTags", "ec2:RevokeSecurityGroupIngress",
]  # fmt: skip


def _allow(sid: str, action: list[str], resource: list[str], condition: Document | None = None) -> Document:
    statement: dict[str, Any] = {"Sid": sid, "Effect": "Allow", "Action": sorted(action), "Resource": resource}
    return {**statement, "Condition": condition} if condition else statement


def _passed_to(roles: dict[str, str]) -> Document:
    return {"StringEquals": {"iam:PassedToService": list(roles.values())}}
