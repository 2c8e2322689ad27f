"""Every policy document that mgpu puts into an AWS account. Pure functions, so that a test can read all of them.

What a node may do: read and write under `runs/` of one bucket, and pull from one repository. It may end nothing and
pass nothing on; what it deletes is a version that the bucket keeps. What the reaper may do: end machines of ours.
"""

from __future__ import annotations

import json
from typing import Any

from mgpu.providers.aws import names

Document = dict[str, Any]

RUNS = "runs"
"""Under this prefix of the bucket lie the checkpoints: all that a node reads and writes."""
TLS_ONLY = "MgpuTlsOnly"
"""The `Sid` of our statement in a bucket's policy, which may hold others."""

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
    return _document(
        {
            "Effect": "Allow",
            "Principal": {"Service": "scheduler.amazonaws.com"},
            "Action": "sts:AssumeRole",
            "Condition": {"StringEquals": {"aws:SourceAccount": account}},
        }
    )


def node(region: str, account: str, bucket: str, repository: str) -> Document:
    """What a node may do: checkpoints under `runs/` of the bucket, images of the repository."""
    store = bucket_arn(region, bucket)
    return _document(
        {
            "Sid": "Checkpoints",
            "Effect": "Allow",
            # Deleting is retention's: the bucket is versioned, and no version can be deleted from a node
            "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
            "Resource": f"{store}/{RUNS}/*",
        },
        {
            "Sid": "ListCheckpoints",
            "Effect": "Allow",
            "Action": "s3:ListBucket",
            "Resource": store,
            # IfExists: a look at one key names no prefix, and without the right to list, S3 says of a key that is
            # not there "forbidden" instead of "not found"
            "Condition": {"StringLikeIfExists": {"s3:prefix": [RUNS, f"{RUNS}/*"]}},
        },
        {"Sid": "ListUploads", "Effect": "Allow", "Action": "s3:ListBucketMultipartUploads", "Resource": store},
        {
            "Sid": "Pull",
            "Effect": "Allow",
            "Action": ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"],
            "Resource": repository_arn(region, account, repository),
        },
        # AWS knows no narrower resource for it; a token opens only what `Pull` allows
        {"Sid": "PullToken", "Effect": "Allow", "Action": "ecr:GetAuthorizationToken", "Resource": "*"},
    )


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


def tls_only(region: str, bucket: str) -> Document:
    """A bucket's policy: nothing without TLS."""
    store = bucket_arn(region, bucket)
    return _document(
        {
            "Sid": TLS_ONLY,
            "Effect": "Deny",
            "Principal": "*",
            "Action": "s3:*",
            "Resource": [store, f"{store}/*"],
            "Condition": {"Bool": {"aws:SecureTransport": "false"}},
        }
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
