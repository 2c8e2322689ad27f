"""The region of a bucket: S3 tells it to everybody, in the header of every answer about it, a refusal's too."""

from __future__ import annotations

import os
import re
import threading
from urllib.parse import urlsplit

from mgpu.providers.aws import names
from mgpu.providers.aws.session import Account

DEADLINE_S = 4.0
_HEADER = "x-amz-bucket-region"
_told: dict[tuple[str, str], str] = {}  # by endpoint and bucket: it never changes, and no answer is waited for twice
_lock = threading.Lock()


def elsewhere() -> str:
    """The server of all stores where that is not AWS's (R2, MinIO): its buckets may be called as others of S3's are.
    Empty: it is S3."""
    try:
        host = urlsplit(os.environ.get("AWS_ENDPOINT_URL_S3", "")).hostname or ""
    except ValueError:  # no address: whoever opens a store is told
        return ""
    return "" if f".{host}".endswith((".amazonaws.com", ".amazonaws.com.cn")) else host


def region_of(account: Account, url: str, deadline_s: float = DEADLINE_S) -> str:
    """The region of the bucket of this address; empty: it is no bucket of S3's, or nobody has said it in time."""
    bucket = url.removeprefix("s3://").partition("/")[0] if url.startswith("s3://") and not elsewhere() else ""
    if ours := re.fullmatch(names.bucket("[0-9]{12}", "([a-z0-9-]+)"), bucket):
        return ours[1]
    key = (account.options.endpoint_url or "", bucket)
    with _lock:
        if bucket and key not in _told:
            _told[key] = _within(deadline_s, account, bucket)
        return _told.get(key, "")


def _within(deadline_s: float, account: Account, bucket: str) -> str:
    """A daemon thread asks: no process waits for a name server that does not answer."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(_ask(account, bucket)), daemon=True, name=f"region {bucket}")
    thread.start()
    thread.join(deadline_s)
    return found[0] if found else ""


def _ask(account: Account, bucket: str) -> str:
    from botocore.exceptions import BotoCoreError, ClientError

    from mgpu.errors import ProviderError

    try:
        answer = account.unsigned("s3", DEADLINE_S).head_bucket(Bucket=bucket)
    except ClientError as error:
        answer = error.response
    except (BotoCoreError, ProviderError):
        return ""
    return answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get(_HEADER, "")
