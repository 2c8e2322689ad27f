"""The object store: S3, or a folder with the same semantics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_train.store.base import (
    Ambiguous,
    Changed,
    Damaged,
    Denied,
    Expired,
    NoCredentials,
    NoRoom,
    NoStore,
    NotFound,
    Progress,
    Stat,
    Store,
    StoreError,
    Unavailable,
    Versioned,
    check_key,
)

if TYPE_CHECKING:
    from mgpu_train.timeouts import Timeouts

__all__ = [
    "open_store",
    "Store",
    "Stat",
    "Versioned",
    "Progress",
    "StoreError",
    "NoStore",
    "NotFound",
    "Denied",
    "Expired",
    "NoCredentials",
    "Unavailable",
    "NoRoom",
    "Ambiguous",
    "Changed",
    "Damaged",
]


def open_store(
    url: str,
    env: Mapping[str, str] | None = None,
    *,
    timeouts: Timeouts | None = None,
    max_bytes_per_s: int | None = None,
) -> Store:
    """The store at `s3://bucket/prefix` or `file:///folder`; a file path is taken literally, without %-codes.

    `env` holds AWS_* values that are used instead of the process environment: keys, token, profile, region,
    AWS_CA_BUNDLE, AWS_ENDPOINT_URL[_S3]. Nothing is asked of the store yet: the first use says whether it is there.
    `max_bytes_per_s` bounds what all transfers of this store together move, up and down; None: as fast as it goes.

    Raises:
        NoStore: the URL is malformed.
        Denied: the profile that is asked for does not exist.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "file":
        return _file_store(rest, max_bytes_per_s)
    if scheme == "s3":
        return _s3_store(rest, env, timeouts, max_bytes_per_s)
    raise NoStore(f"a store's address begins with s3:// or file://, not with {scheme[:20]!r}")


def _file_store(rest: str, max_bytes_per_s: int | None) -> Store:
    from mgpu_train.store.file import FileStore

    if not rest.startswith("/") or "\0" in rest or ".." in Path(rest).parts:
        raise NoStore(f"file://{rest[:200]}: name a folder by its absolute path: file:///folder")
    return FileStore(Path(rest), max_bytes_per_s)


def _s3_store(
    rest: str, env: Mapping[str, str] | None, timeouts: Timeouts | None, max_bytes_per_s: int | None
) -> Store:
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if not bucket or "@" in bucket or ":" in bucket:  # userinfo would be a secret in an address: not repeated here
        raise NoStore("s3:// is followed by the name of a bucket and a prefix alone: s3://bucket/prefix")
    if prefix:
        check_key(prefix)
    from mgpu_train.store.s3 import S3Store  # what they import is much: nobody pays for it who has no S3
    from mgpu_train.timeouts import Timeouts

    url = f"s3://{bucket}" + (f"/{prefix}" if prefix else "")
    return S3Store(url, bucket, prefix, env, timeouts or Timeouts(), max_bytes_per_s)  # type: ignore[call-arg]
