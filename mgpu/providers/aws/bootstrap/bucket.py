"""The bucket of base: checkpoints of all runs. Versioned, closed to the public, reached by TLS alone, and kept."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import Field

from mgpu.errors import CleanupFailed, InputError, PermissionDenied
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

_ABORT, _EXPIRE, _EXPIRE_PARTS = "mgpu-abort-uploads", "mgpu-expire-old-versions", "mgpu-expire-old-parts"
_EVERYWHERE = {"Prefix": ""}
# Parts and commits of a run lie under its id, so no prefix tells them apart; their sizes do. Small ones cost nothing,
# and say what there was. Where two rules meet the shorter one holds:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/lifecycle-conflicts.html
_PARTS = {"And": {"Prefix": f"{policies.RUNS}/", "ObjectSizeGreaterThan": 2**20}}
_UPLOADS = ("AbortIncompleteMultipartUpload", "DaysAfterInitiation")
_VERSIONS = ("NoncurrentVersionExpiration", "NoncurrentDays")
_BLOCKS = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")
_NO_BUCKET = ("404", "NoSuchBucket", "NotFound")
_FRESH_S = 60.0


class Bucket(Resource):
    """A bucket. With `keep` its resource's end leaves it as it is."""

    facts: ClassVar[dict[str, str]] = {"arn": "its ARN", "url": "s3://..., where runs keep their checkpoints"}

    name: str = Field(default="", description="name (default: mgpu-<account>-<region>)")
    keep: bool = Field(default=True, description="stays when the stack is destroyed")
    abort_uploads_days: int = Field(default=3, ge=1, description="days after which an upload that hangs is dropped")
    old_versions_days: int = Field(
        default=30, ge=1, description="days after which what was deleted or overwritten expires"
    )
    old_parts_days: int = Field(
        default=names.OLD_PARTS_DAYS,
        ge=1,
        description="the same, for what has more than 1 MiB and lies under `runs/`: checkpoints' parts",
    )
    public_access_blocked: bool = fixed(True, "nobody outside the account gets in, whatever a policy says")
    guarded: bool = fixed(True, "nothing is sent or read in plain text, and no commit of a run is ever replaced")
    versioned: bool = fixed(True, "what a node deletes can be brought back")
    encryption: str = fixed("AES256", "how it is encrypted")

    @property
    def stays(self) -> bool:
        """With `keep`, or one of the user's."""
        return self.keep or super().stays


class BucketManager:
    """Asks S3 for it."""

    kind: ClassVar[str] = "bucket"
    resource: ClassVar[type[Resource]] = Bucket

    def __init__(self, site: Site) -> None:
        self.site = site

    def complete(self, wanted: Bucket) -> Bucket:
        """With its name."""
        name = wanted.existing or wanted.name or names.bucket(self.site.account.id(), self.site.region)
        return wanted.model_copy(update={"name": name})

    def expected(self, wanted: Bucket) -> dict[str, str]:
        """All facts follow from the name."""
        return {
            "arn": policies.bucket_arn(self.site.region, wanted.name),
            "url": f"s3://{wanted.name}/{policies.RUNS}",
        }

    def look(self, wanted: Bucket) -> Found[Bucket] | None:
        """As it is, with whatever others have set on it."""
        if not self._there(wanted.name):
            return None
        raw = self._raw(wanted.name)
        found = {
            "tags": tags_there(wanted, raw["tags"]),
            "public_access_blocked": all((raw["block"] or {}).get(key) for key in _BLOCKS),
            "guarded": policies.holds(raw["policy"], policies.of_bucket(self.site.region, wanted.name)),
            "versioned": raw["versioning"] == "Enabled",
            "encryption": raw["encryption"],
            "abort_uploads_days": _days(raw["rules"], _ABORT, _EVERYWHERE, _UPLOADS),
            "old_versions_days": _days(raw["rules"], _EXPIRE, _EVERYWHERE, _VERSIONS),
            "old_parts_days": _days(raw["rules"], _EXPIRE_PARTS, _PARTS, _VERSIONS),
        }
        if wanted.existing is not None:
            open_to = "" if found["public_access_blocked"] else "it does not block public access (all four settings)"
            found = {"lacks": tuple(filter(None, [open_to]))}
        # one without any tag is what a crash left between making and tagging it, if nothing lies in it
        ours = names.BASE in raw["tags"] or (not raw["tags"] and self._empty(wanted.name))
        return Found(wanted.name, wanted.model_copy(update=found), self.expected(wanted), ours, raw)

    def make(self, wanted: Bucket) -> Found[Bucket]:
        """An empty one, with our tag."""
        from botocore.exceptions import ClientError

        region = self.site.region
        # the first region of all has no name here
        place = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        try:
            unless(("BucketAlreadyOwnedByYou",), self._s3.create_bucket, Bucket=wanted.name, **place)
        except ClientError as error:
            if error.response["Error"]["Code"] == "BucketAlreadyExists":
                raise _anothers(wanted.name) from error
            raise
        raw = self.site.patiently(lambda: self._raw(wanted.name), _NO_BUCKET, _FRESH_S)
        self._tag(wanted, {})
        bare = wanted.model_copy(update={"public_access_blocked": False, "encryption": "", "old_versions_days": 0})
        return Found(wanted.name, bare, self.expected(wanted), raw=raw)

    def align(self, found: Found[Bucket], wanted: Bucket) -> None:
        """Sets everything again: it is the same whatever was there, and others' statements and rules stay."""
        s3, bucket = self._s3, {"Bucket": wanted.name}
        s3.put_public_access_block(**bucket, PublicAccessBlockConfiguration=dict.fromkeys(_BLOCKS, True))
        s3.put_bucket_versioning(**bucket, VersioningConfiguration={"Status": "Enabled"})
        document = policies.merged(found.raw["policy"], policies.of_bucket(self.site.region, wanted.name))
        s3.put_bucket_policy(**bucket, Policy=json.dumps(document))
        by_default = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": wanted.encryption}}
        s3.put_bucket_encryption(**bucket, ServerSideEncryptionConfiguration={"Rules": [by_default]})
        s3.put_bucket_lifecycle_configuration(
            **bucket, LifecycleConfiguration={"Rules": _rules(found.raw["rules"], wanted)}
        )
        self._tag(wanted, found.raw["tags"])

    def delete(self, wanted: Bucket) -> None:
        """Only an empty one: checkpoints are deleted by nobody but their owner."""
        if not self._there(wanted.name):
            return
        self.require_empty(wanted)
        unless(_NO_BUCKET, self._s3.delete_bucket, Bucket=wanted.name)
        if self._there(wanted.name):
            raise CleanupFailed(f"bucket {wanted.name} is still there", "S3 accepted the request.", "Try again.")

    def require_empty(self, wanted: Bucket) -> None:
        """Raises CleanupFailed when something lies in it, be it an old version; absent is empty."""
        if self._there(wanted.name) and not self._empty(wanted.name):
            raise CleanupFailed(
                f"bucket {wanted.name} is not empty, and stays",
                "Checkpoints, or old versions of them, lie in it: mgpu deletes no bucket that holds anything.",
                f"`aws s3 ls s3://{wanted.name}` shows what is there; the S3 console empties it, versions too.",
            )

    @property
    def _s3(self) -> Any:
        return self.site.client("s3")

    def _there(self, name: str) -> bool:
        from botocore.exceptions import ClientError

        try:
            answer = unless(_NO_BUCKET, self._s3.head_bucket, Bucket=name, ExpectedBucketOwner=self.site.account.id())
        except ClientError as error:
            if error.response["Error"]["Code"] in ("403", "AccessDenied", "Forbidden"):
                raise _closed(name) from error
            raise
        return answer is not None

    def _empty(self, name: str) -> bool:
        answer = self._s3.list_object_versions(Bucket=name, MaxKeys=1)
        return not answer.get("Versions") and not answer.get("DeleteMarkers")

    def _raw(self, name: str) -> dict[str, Any]:
        s3, bucket = self._s3, {"Bucket": name}
        tags = unless(("NoSuchTagSet",), s3.get_bucket_tagging, **bucket) or {}
        block = unless(("NoSuchPublicAccessBlockConfiguration",), s3.get_public_access_block, **bucket) or {}
        policy = unless(("NoSuchBucketPolicy",), s3.get_bucket_policy, **bucket)
        rules = unless(("NoSuchLifecycleConfiguration",), s3.get_bucket_lifecycle_configuration, **bucket) or {}
        return {
            "tags": tags_of(tags.get("TagSet")),
            "block": block.get("PublicAccessBlockConfiguration"),
            "policy": json.loads(policy["Policy"]) if policy else None,
            "versioning": s3.get_bucket_versioning(**bucket).get("Status"),
            "rules": rules.get("Rules", []),
            "encryption": self._encryption(name),
        }

    def _encryption(self, name: str) -> str:
        codes = ("ServerSideEncryptionConfigurationNotFoundError",)
        found = unless(codes, self._s3.get_bucket_encryption, Bucket=name) or {}
        rules = found.get("ServerSideEncryptionConfiguration", {}).get("Rules") or [{}]
        return rules[0].get("ApplyServerSideEncryptionByDefault", {}).get("SSEAlgorithm", "")

    def _tag(self, wanted: Bucket, found: dict[str, str]) -> None:
        tags = {**found, **base_tags(wanted)}  # S3 puts them in place of all that were there
        if tags != found:
            self._s3.put_bucket_tagging(Bucket=wanted.name, Tagging={"TagSet": names.tag_list(tags)})


def _anothers(name: str) -> InputError:
    why = "Names of buckets are taken for all accounts of AWS."
    return InputError(f"the bucket {name} belongs to another account", why, "Name a bucket of yours: `--bucket NAME`.")


def _closed(name: str) -> PermissionDenied:
    return PermissionDenied(
        f"the bucket {name} is closed to these credentials",
        "S3 says no more than 403: it is another account's, or s3:ListBucket is not allowed.",
        "Name a bucket of yours (`--bucket NAME`), or allow s3:ListBucket on it.",
        scope="account",
    )


def _days(rules: list[dict[str, Any]], rule_id: str, where: dict[str, Any], action: tuple[str, str]) -> int:
    """What our rule says; 0: there is none that is at work for these objects."""
    name, unit = action
    rule = next((rule for rule in rules if rule.get("ID") == rule_id and rule.get("Status") == "Enabled"), {})
    found = rule.get("Filter") or {"Prefix": rule.get("Prefix", "")}
    return int((rule.get(name) or {}).get(unit, 0)) if found == where else 0


def _rules(current: list[dict[str, Any]], wanted: Bucket) -> list[dict[str, Any]]:
    """The lifecycle: others' rules, which mean what they did, and ours."""
    (uploads, after), (versions, days) = _UPLOADS, _VERSIONS
    ours = [
        _rule(_ABORT, _EVERYWHERE, **{uploads: {after: wanted.abort_uploads_days}}),
        _rule(
            _EXPIRE,
            _EVERYWHERE,
            **{versions: {days: wanted.old_versions_days}, "Expiration": {"ExpiredObjectDeleteMarker": True}},
        ),
        _rule(_EXPIRE_PARTS, _PARTS, **{versions: {days: wanted.old_parts_days}}),
    ]
    ids = {rule["ID"] for rule in ours}
    return [*(_filtered(rule) for rule in current if rule.get("ID") not in ids), *ours]


def _filtered(rule: dict[str, Any]) -> dict[str, Any]:
    """With its prefix in a filter: S3 takes no rule of the old form beside those of the new one."""
    if "Prefix" not in rule:
        return rule
    return {**{key: rule[key] for key in rule if key != "Prefix"}, "Filter": {"Prefix": rule["Prefix"]}}


def _rule(rule_id: str, where: dict[str, Any], **actions: dict[str, Any]) -> dict[str, Any]:
    return {"ID": rule_id, "Status": "Enabled", "Filter": where, **actions}
