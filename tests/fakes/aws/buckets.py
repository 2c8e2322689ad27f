"""S3's lifecycle, of which moto only keeps the rules, and of those not the sizes: what they let expire is gone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from moto.core.utils import utcnow
from moto.s3.models import FakeBucket, FakeDeleteMarker, s3_backends
from moto.s3.responses import S3Response

from fakes.aws.patching import replace

SIZES = ("ObjectSizeGreaterThan", "ObjectSizeLessThan")
_DAY_S = 86400


def install() -> None:
    """From now on sizes in the filters of rules are kept, and told."""

    def set_lifecycle(self: Any, rules: list[dict[str, Any]]) -> None:
        keep(self, rules)
        for kept, rule in zip(self.rules, rules, strict=True):
            kept.sizes = _sizes(rule.get("Filter") or {})

    def get_bucket_lifecycle(self: Any) -> Any:
        serialize = self.serialized

        def with_sizes(answer: Any) -> Any:
            if isinstance(answer.result, Exception):  # it has no rules
                return serialize(answer)
            kept = self.backend.get_bucket_lifecycle(self.bucket_name)
            for rule, told in zip(kept, answer.result["Rules"], strict=True):
                within = told.get("Filter", {})
                within.get("And", within).update(rule.sizes)
            return serialize(answer)

        self.serialized = with_sizes
        return tell(self)

    keep = replace(FakeBucket, "set_lifecycle", set_lifecycle)
    tell = replace(S3Response, "get_bucket_lifecycle", get_bucket_lifecycle)


def age(seconds: float) -> None:
    """All objects were written that much earlier, and what the rules let expire by now is gone."""
    for bucket in _buckets():
        for key in list(bucket.keys):
            for version in bucket.keys.getlist(key):
                version.last_modified -= timedelta(seconds=seconds)
            _expire(bucket, key)


def _expire(bucket: Any, key: str) -> None:
    versions = bucket.keys.getlist(key)
    newer = [*versions[1:], None]  # what made each of them an old one
    kept = [
        version
        for version, by in zip(versions, newer, strict=True)
        if by is None or not _over(bucket, key, version, by)
    ]
    if len(kept) == 1 and isinstance(kept[0], FakeDeleteMarker) and _drops_markers(bucket, key):
        kept = []
    bucket.keys.setlist(key, kept)
    if not kept:
        bucket.keys.pop(key)


def _over(bucket: Any, key: str, version: Any, by: Any) -> bool:
    size = getattr(version, "size", 0)
    days = [int(rule.nve_noncurrent_days) for rule in _about(bucket, key, size) if rule.nve_noncurrent_days]
    return bool(days) and _next_midnight(by.last_modified + timedelta(days=min(days))) <= utcnow()


def _drops_markers(bucket: Any, key: str) -> bool:
    return any(str(rule.expired_object_delete_marker).lower() == "true" for rule in _about(bucket, key, 0))


def _about(bucket: Any, key: str, size: int) -> Iterator[Any]:
    """The rules that are at work for such an object."""
    for rule in bucket.rules:
        within = rule.filter and (rule.filter.and_filter or rule.filter)
        prefix = (within.prefix if within else rule.prefix) or ""
        least, most = rule.sizes.get(SIZES[0], -1), rule.sizes.get(SIZES[1], math.inf)
        if rule.status == "Enabled" and key.startswith(prefix) and least < size < most:
            yield rule


def _sizes(within: dict[str, Any]) -> dict[str, int]:
    given = within.get("And") or within
    return {name: int(given[name]) for name in SIZES if name in given}


def _next_midnight(at: datetime) -> datetime:
    """S3 rounds up to it."""
    past = at - at.replace(hour=0, minute=0, second=0, microsecond=0)
    return at if not past else at - past + timedelta(seconds=_DAY_S)


def _buckets() -> Iterator[Any]:
    for account in s3_backends.values():
        for backend in account.values():
            yield from backend.buckets.values()
