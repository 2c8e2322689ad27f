"""Every policy document that mgpu puts into an AWS account. Pure functions, so that a test can read all of them.

What a node may do: pull from one repository, and take on the role of the run whose secret it was told. What that role
may do: read and write that run's checkpoints, and read the run's data; never replace or delete what was committed.
Neither may end anything or pass anything on; what is deleted is a version that the bucket keeps. What the reaper may
do: end machines of ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from mgpu.providers.aws import names
from mgpu.providers.aws.instances import session_manager

Document = dict[str, Any]

RUNS = "runs"
"""Under this prefix of the bucket lie the checkpoints: all that a node reads and writes."""

BACKEND = "backend"
"""Under this one operators may keep their records and the state of stacks: no node reads or writes there."""
TLS_ONLY = "MgpuTlsOnly"
COMMITTED_ONCE = "MgpuCommittedOnce"
"""The `Sid`s of our statements in a bucket's policy, which may hold others."""
BOUNDED = "Buckets"
"""The `Sid` in a run role's boundary that names the buckets."""

VERSION = "2012-10-17"


def partition(region: str) -> str:
    """The first word of every ARN there: `aws`, but in China and in GovCloud."""
    for prefix, found in (("cn-", "aws-cn"), ("us-gov-", "aws-us-gov")):
        if region.startswith(prefix):
            return found
    return "aws"


def bucket_arn(region: str, bucket: str) -> str:
    """The ARN of a bucket."""
    return f"arn:{partition(region)}:s3:::{bucket}"


def repository_arn(region: str, account: str, repository: str) -> str:
    """The ARN of an image repository."""
    return f"arn:{partition(region)}:ecr:{region}:{account}:repository/{repository}"


def role_arn(region: str, account: str, role: str) -> str:
    """The ARN of a role without a path."""
    return f"arn:{partition(region)}:iam::{account}:role/{role}"


def node_trust() -> Document:
    """Machines may take the nodes' role on."""
    return _document({"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"})


def reaper_trust(account: str) -> Document:
    """EventBridge Scheduler may take the reaper's role on, for schedules of this account alone."""
    return service_trust("scheduler.amazonaws.com", account)


def service_trust(service: str, account: str) -> Document:
    """A service of AWS's may take the role on, for what is this account's alone."""
    return _document(
        {
            "Effect": "Allow",
            "Principal": {"Service": service},
            "Action": "sts:AssumeRole",
            "Condition": {"StringEquals": {"aws:SourceAccount": account}},
        }
    )


def node(region: str, account: str, repository: str, *, ssm: bool = False) -> Document:
    """What a node may do by itself: images of the repository, and the role of its run; with `ssm` what its agent needs
    for Session Manager, too, of which AWS knows no narrower resource. No bucket opens to it."""
    agent = {"Sid": "SessionManager", "Effect": "Allow", "Action": sorted(session_manager.AGENT), "Resource": "*"}
    return _document(
        {
            "Sid": "Pull",
            "Effect": "Allow",
            "Action": ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"],
            "Resource": repository_arn(region, account, repository),
        },
        # AWS knows no narrower resource for it; a token opens only what `Pull` allows
        {"Sid": "PullToken", "Effect": "Allow", "Action": "ecr:GetAuthorizationToken", "Resource": "*"},
        # each of these roles asks for a secret that only the nodes of its run know
        {
            "Sid": "RoleOfRun",
            "Effect": "Allow",
            "Action": "sts:AssumeRole",
            "Resource": f"arn:{partition(region)}:iam::{account}:role{names.RUN_ROLES}*",
        },
        *([agent] if ssm else ()),
    )


def run_trust(region: str, account: str, secret: str) -> Document:
    """Machines may take a run's role on that know the run's secret: machines of all runs have the same role."""
    return _document(
        {
            "Effect": "Allow",
            "Principal": {"AWS": role_arn(region, account, names.NODE_ROLE)},
            "Action": "sts:AssumeRole",
            "Condition": {"StringEquals": {"sts:ExternalId": secret}},
        }
    )


def run(region: str, reads: Iterable[str], writes: Iterable[str]) -> Document:
    """What the nodes of one run may do. `reads`, `writes`: addresses `s3://bucket/prefix`; all below them counts, and
    what is written is checkpoints as `mgpu_train.checkpoint.log.keys` lays them out."""
    found = list[Document]()
    for number, (bucket, prefix) in enumerate(map(place, writes)):
        below = f"{bucket_arn(region, bucket)}/{prefix}"
        commits = f"{below}/commits/*"
        found += [
            _on("Write", number, ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"], f"{below}/*"),
            # what retention deletes; the bucket is versioned, and no version can be deleted from a node
            _on("Retain", number, ["s3:DeleteObject"], [f"{below}/checkpoints/*", f"{below}/index/*"]),
            {**_on("Once", number, ["s3:PutObject"], commits), "Effect": "Deny", "Condition": _OVERWRITES},
            _lists(number, "ListWritten", ["s3:ListBucket", "s3:ListBucketMultipartUploads"], region, bucket, prefix),
        ]
    for number, (bucket, prefix) in enumerate(map(place, reads)):
        below = f"{bucket_arn(region, bucket)}/{prefix}"
        objects = [f"{below}/*", below] if prefix else f"{below}*"
        found += [
            _on("Read", number, ["s3:GetObject"], objects),
            _lists(number, "ListRead", ["s3:ListBucket"], region, bucket, prefix),
        ]
    return _document(*found)


def run_boundary(region: str, account: str, buckets: Iterable[str] = ()) -> Document:
    """The most that any run's role may do: under `runs/` of the buckets of base in all regions, and in `buckets`, which
    are the user's. Whoever may write a policy into such a role can give it no more than that."""
    ours = bucket_arn(region, names.bucket(account, "*"))
    named = [bucket_arn(region, each) for each in sorted(buckets)]
    return _document(
        {
            "Sid": "Objects",
            "Effect": "Allow",
            "Action": ["s3:AbortMultipartUpload", "s3:DeleteObject", "s3:GetObject", "s3:PutObject"],
            "Resource": [f"{ours}/{RUNS}/*", *(f"{each}/*" for each in named)],
        },
        {
            "Sid": BOUNDED,
            "Effect": "Allow",
            "Action": ["s3:ListBucket", "s3:ListBucketMultipartUploads"],
            "Resource": [ours, *named],
        },
    )


def bounded(document: Document) -> set[str]:
    """The buckets of the user's that a boundary names."""
    found = next((each for each in statements(document) if each.get("Sid") == BOUNDED), {})
    buckets = {arn.rpartition(":")[2] for arn in _several(found.get("Resource", []))}
    return {bucket for bucket in buckets if "*" not in bucket}


def place(url: str) -> tuple[str, str]:
    """Bucket and prefix of an address `s3://bucket/prefix`."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return bucket, prefix.strip("/")


# a request that may replace what is there: of S3's writes only those that make an object can say that it must not be
_OVERWRITES = {"Null": {"s3:if-none-match": "true"}, "Bool": {"s3:ObjectCreationOperation": "true"}}


def _on(what: str, number: int, actions: list[str], resource: str | list[str]) -> Document:
    return {"Sid": f"{what}{number}", "Effect": "Allow", "Action": actions, "Resource": resource}


def _lists(number: int, what: str, actions: list[str], region: str, bucket: str, prefix: str) -> Document:
    """Listing below a prefix. IfExists: a look at one key names no prefix, and without the right to list, S3 says of a
    key that is not there "forbidden" instead of "not found"."""
    statement = _on(what, number, actions, bucket_arn(region, bucket))
    if not prefix:
        return statement
    return {**statement, "Condition": {"StringLikeIfExists": {"s3:prefix": [prefix, f"{prefix}/*"]}}}


def reaper(region: str, account: str) -> Document:
    """What the reaper may do: end machines, and release addresses, that carry an owner tag of mgpu's. In all regions: a
    fleet may be where the user named ids and no base was made, and its kill switch has to work there, too."""

    def ending(sid: str, action: str, kind: str) -> Document:
        return {
            "Sid": sid,
            "Effect": "Allow",
            "Action": action,
            "Resource": f"arn:{partition(region)}:ec2:*:{account}:{kind}/*",
            "Condition": {"Null": {f"aws:ResourceTag/{names.OWNER}": "false"}},
        }

    return _document(
        ending("EndMachines", "ec2:TerminateInstances", "instance"),
        ending("ReleaseAddresses", "ec2:ReleaseAddress", "elastic-ip"),
    )


def of_bucket(region: str, bucket: str) -> Document:
    """A bucket's policy: nothing without TLS, and what was committed is replaced by nobody."""
    store = bucket_arn(region, bucket)
    return _document(
        {
            "Sid": TLS_ONLY,
            "Effect": "Deny",
            "Principal": "*",
            "Action": "s3:*",
            "Resource": [store, f"{store}/*"],
            "Condition": {"Bool": {"aws:SecureTransport": "false"}},
        },
        {
            "Sid": COMMITTED_ONCE,
            "Effect": "Deny",
            "Principal": "*",
            "Action": "s3:PutObject",
            "Resource": f"{store}/{RUNS}/*/commits/*",
            "Condition": _OVERWRITES,
        },
    )


def merged(current: Document | None, ours: Document) -> Document:
    """`current` with our statements, by `Sid`, in place of older ones of ours; others' statements stay."""
    sids = {statement["Sid"] for statement in ours["Statement"]}
    kept = [each for each in statements(current or {}) if each.get("Sid") not in sids]
    return _document(*kept, *ours["Statement"])


def holds(current: Document | None, ours: Document) -> bool:
    """Whether all our statements are in `current`, as they should be."""
    there = [canonical(each) for each in statements(current or {})]
    return all(canonical(each) in there for each in ours["Statement"])


def statements(document: Document) -> list[Document]:
    """Its statements; AWS lets a single one stand without a list."""
    found = document.get("Statement") or []
    return found if isinstance(found, list) else [found]


def trusts(document: Document, service: str) -> bool:
    """Whether a role's trust policy lets this service take the role on."""
    return any(
        each.get("Effect") == "Allow"
        and service in _several((each.get("Principal") or {}).get("Service"))
        and "sts:AssumeRole" in _several(each.get("Action"))
        for each in statements(document)
        if isinstance(each.get("Principal"), dict)
    )


def canonical(document: Any) -> str:
    """One text for all ways to write the same document: order and lists of one do not count."""
    return json.dumps(_normal(document), sort_keys=True)


def _normal(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _normal(item) for key, item in value.items()}
    if isinstance(value, list):
        items = sorted((_normal(item) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
        return items[0] if len(items) == 1 else items
    return value


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _document(*found: Document) -> Document:
    return {"Version": VERSION, "Statement": list(found)}
