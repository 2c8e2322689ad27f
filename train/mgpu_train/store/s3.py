"""Objects in S3, or in anything that speaks its language, with every checksum, deadline and retry explicit.

Small requests are botocore's; bodies beyond a quarter of a MiB are moved by another process (mgpu_train.store.bulk).
Every checksum is computed here from the bytes that are sent or received: a ranged read carries none, and not every
server minds a wrong one.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from email.utils import mktime_tz, parsedate_tz
from pathlib import Path
from typing import Any, TypeVar

from botocore.exceptions import ClientError, ConnectTimeoutError, EndpointConnectionError

from mgpu_train.store import crc, disk
from mgpu_train.store.base import (
    Ambiguous,
    Damaged,
    Expired,
    NotFound,
    Progress,
    Stat,
    StoreError,
    Unavailable,
    Versioned,
    check_key,
)
from mgpu_train.store.bulk.message import Keys
from mgpu_train.store.bulk.minimum_rate import LEAST
from mgpu_train.store.pace import Pace
from mgpu_train.store.s3bulk import PART, Bulk, in_memory
from mgpu_train.store.s3client import connect
from mgpu_train.store.s3errors import maybe_done
from mgpu_train.timeouts import Timeouts

_THREADS = 8  # that may make requests at once without waiting for a connection
_FIRST_ATTEMPTS = 2  # at an endpoint that never answered: rather a wrong address than a blip
_ROUNDS = 5  # of botocore's attempts; it also repeats nothing once a stream has begun
_SMALL = 256 << 10  # bytes of a body that is no matter for another process
_STREAM = 64 << 10  # bytes between two looks at an incoming stream
T = TypeVar("T")


class S3Store:
    """The store `s3://<bucket>/<prefix>`; see `open_store` for `env` and `timeouts`. Makes no request by itself."""

    def __init__(
        self,
        url: str,
        bucket: str,
        prefix: str,
        env: Mapping[str, str] | None,
        timeouts: Timeouts,
        max_bytes_per_s: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._answered = False
        self._clock, self._sleep = clock, sleep
        self._renewing = threading.Lock()
        self._timeouts = timeouts
        self._env = env
        self._pace = Pace(max_bytes_per_s)
        self._connect()
        self._bulk = Bulk(self._errors, timeouts, self._pace, self._keys, ca=self._connection.ca, prefix=self._prefix)
        self._bulk.watch(self._client)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See Store."""
        return self._put_where(key, data, IfNoneMatch="*")

    def replace(self, key: str, data: bytes, version: str) -> bool:
        """See Store."""
        try:
            return self._put_where(key, data, IfMatch=version)
        except NotFound:
            return False

    def _put_where(self, key: str, data: bytes, **condition: str) -> bool:
        try:
            with self._errors.translated(f"write {key}"):  # once: whoever lost the answer reads back
                self._put(key, data, **condition)
        except StoreError as error:
            if _unmet(error):
                return False
            if maybe_done(error):
                raise Ambiguous(str(error)) from error
            raise
        return True

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See Store."""
        if len(data) <= _SMALL:
            self._pace.take(len(data))
            self._patiently(f"write {key}", lambda: self._put(key, bytes(data)))
            return
        with in_memory(data) as path:
            self._put_whole(key, path, path.stat())

    def put_file(self, key: str, path: Path) -> Stat:
        """See Store. A file that somebody writes to meanwhile is refused."""
        with disk.translated(f"cannot read {path}"), disk.opened(path) as source:
            found = os.fstat(source)
            if found.st_size <= _SMALL:
                data = os.read(source, _SMALL + 1)
                self.put(key, data)
                return Stat(key, len(data), crc.of_bytes(data), time.time())
        send = self._put_whole if found.st_size <= PART else self._put_parts
        return Stat(key, found.st_size, send(key, path, found), time.time())

    def get(self, key: str, limit: int) -> bytes:
        """See Store."""
        return self.read(key, limit).data

    def read(self, key: str, limit: int) -> Versioned:
        """See Store."""
        where = self._at(key)

        def read() -> Versioned:
            answer = self._client.get_object(**where, ChecksumMode="ENABLED")
            with closing(answer["Body"]) as body:  # its own `with` gives the unchecked stream
                if answer["ContentLength"] > limit:
                    size = answer["ContentLength"]
                    raise Damaged(f"{self.url}: {key} has {size} bytes where at most {limit} make sense")
                data = self._slowly_read(key, body, answer["ContentLength"])
            now = _date(answer)
            return Versioned(data, answer["ETag"], max(0.0, now - answer["LastModified"].timestamp()), now)

        return self._patiently(f"read {key}", read)

    def get_file(self, key: str, path: Path, *, size: int, crc64nvme: str, progress: Progress | None = None) -> None:
        """See Store."""
        with disk.translated(f"cannot write {path}"), disk.filled(path, size) as aside:
            found = self._read_all(key, size, aside, progress)
            if found != crc64nvme:
                raise Damaged(f"{self.url}: {key}: its checksum is {found}, not {crc64nvme}")

    def forget(self, key: str) -> None:
        """See Store. Nothing is kept here."""

    def checksum(self, key: str, size: int, progress: Progress | None = None) -> str:
        """See Store."""
        return self._read_all(key, size, None, progress)

    def stat(self, key: str) -> Stat | None:
        """See Store."""
        where = self._at(key)
        try:
            found = self._patiently(f"look at {key}", lambda: self._client.head_object(**where, ChecksumMode="ENABLED"))
        except NotFound:
            return None
        whole = found.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
        own = crc.from_base64(found.get("ChecksumCRC64NVME")) if whole else None
        return Stat(key, found["ContentLength"], own, found["LastModified"].timestamp(), found["ETag"])

    def list(self, prefix: str, after: str = "") -> Iterator[Stat]:
        """See Store."""
        start = {"StartAfter": self._prefix + after} if after else {}
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix, **start
        )
        with self._errors.translated(f"list {prefix or 'its objects'}"):
            for page in pages:
                for each in page.get("Contents", ()):
                    key = each["Key"][len(self._prefix) :]
                    yield Stat(key, each["Size"], None, each["LastModified"].timestamp(), each["ETag"])

    def delete(self, key: str) -> None:
        """See Store."""
        where = self._at(key)
        try:
            self._patiently(f"delete {key}", lambda: self._client.delete_object(**where))
        except NotFound:  # some servers say so; S3 does not
            pass

    def may_delete(self, prefix: str) -> None:
        """See Store. What there is not may not be deleted either; on condition that it is (If-Match) no delete
        marker is left in a bucket that keeps versions. Without an answer to that, a plain delete tells."""
        key = f"{prefix}none"
        try:
            with self._errors.translated(f"delete {key}"):
                self._client.delete_object(**self._at(key), IfMatch="*")
        except NotFound:
            pass
        except StoreError as error:
            if not _unmet(error):  # S3 says 404, some servers 412, and others refuse any condition
                self.delete(key)

    def sweep(self, prefix: str, dead: Callable[[str], bool]) -> int:
        """See Store."""
        pages = self._client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix
        )
        with self._errors.translated(f"list the unfinished uploads under {prefix}"):
            found = [each for page in pages for each in page.get("Uploads", ())]
        ours = [each for each in found if dead(each["Key"][len(self._prefix) :])]
        for each in ours:
            self._abort(each["Key"], each["UploadId"])
        return len(ours)

    def _put(self, key: str, data: bytes, **conditions: str) -> None:
        own = crc.to_base64(crc.of_bytes(data))
        self._client.put_object(
            **self._at(key), Body=data, ChecksumAlgorithm="CRC64NVME", ChecksumCRC64NVME=own, **conditions
        )

    def _put_whole(self, key: str, path: Path, found: os.stat_result) -> str:
        if not self._bulk.has_route:
            self.stat(key)
            self._bulk.learn(key)
        return self._bulk.send(key, path, found)

    def _put_parts(self, key: str, path: Path, found: os.stat_result) -> str:
        where = self._at(key)
        upload = self._patiently(f"write {key}", lambda: self._begin_upload(where))
        try:
            self._bulk.learn(key)
            parts = self._bulk.send_parts(key, upload, path, found)
            whole = crc.joined((value, length) for _, value, length in parts)
            self._complete(key, upload, [sent for sent, _, _ in parts], found.st_size, whole)
        except BaseException:
            self._abort(where["Key"], upload)
            raise
        return whole

    def _begin_upload(self, where: dict[str, str]) -> str:
        """The id of a new upload; one whose answer was lost stays until `sweep` comes."""
        return self._client.create_multipart_upload(**where, ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT")[
            "UploadId"
        ]

    def _complete(self, key: str, upload: str, parts: list[dict[str, str]], size: int, whole: str) -> None:
        """Makes an object of its parts; where the upload is gone, an earlier try may have done it unheard."""
        numbered = [{"PartNumber": number, **part} for number, part in enumerate(parts, 1)]

        def complete() -> None:
            try:
                self._client.complete_multipart_upload(
                    **self._at(key),
                    UploadId=upload,
                    MultipartUpload={"Parts": numbered},
                    ChecksumCRC64NVME=crc.to_base64(whole),
                    ChecksumType="FULL_OBJECT",
                )
            except self._client.exceptions.NoSuchUpload:
                stat = self.stat(key)
                if stat is None or (stat.size, stat.crc64nvme) != (size, whole):
                    raise

        self._patiently(f"write {key}", complete)

    def _abort(self, full_key: str, upload: str) -> None:
        try:
            with self._errors.translated("abort an upload"):
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=full_key, UploadId=upload)
        except StoreError:  # it is over already, or the store is away: `sweep` comes again
            pass

    def _read_all(self, key: str, size: int, to: Path | None, progress: Progress | None) -> str:
        """Reads an object of `size` bytes, in parallel, and returns its checksum."""
        found = self.stat(key)
        if found is None:
            raise NotFound(f"{self.url}: cannot read {key}: there is no such object")
        if found.size != size:
            raise Damaged(f"{self.url}: {key} has {found.size} bytes, not {size}")
        self._bulk.learn(key)
        return self._bulk.receive(key, size, to, progress)

    def _slowly_read(self, key: str, body: Any, size: int) -> bytes:
        """All of a stream, unless it is too slow; botocore waits for every byte as if it were the last."""
        pieces, end = [], self._clock() + self._timeouts.store_stall_s * (1 + size / LEAST)
        while piece := body.read(_STREAM):
            pieces.append(piece)
            self._pace.take(len(piece))
            if self._clock() > end:
                raise Unavailable(f"{self.url}: cannot read {key}: the server is too slow. Check the network.")
        return b"".join(pieces)

    def _patiently(self, doing: str, work: Callable[[], T]) -> T:
        """Does what may be done twice, again after growing pauses while the store does not answer as it should.

        botocore's own repetitions are over within seconds, or each has cost its whole time-out: then not again.
        """
        end, renewed = self._clock() + self._timeouts.store_retry_s, False
        for attempt in range(1, _ROUNDS):
            try:
                with self._errors.translated(doing):
                    return work()
            except Expired:
                if renewed or not self._renew():
                    raise
                renewed = True
            except Unavailable:
                if not self._answered or self._clock() > end:
                    raise
                self._sleep(random.uniform(0.5, 1) * 2**attempt)
        with self._errors.translated(doing):
            return work()

    def _connect(self) -> None:
        self._connection = connect(self.url, self._env, self._timeouts, threads=_THREADS)
        self._client, self._errors = self._connection.client, self._connection.errors
        self._client.meta.events.register_first("needs-retry.s3", self._give_up_early)
        self._client.meta.events.register("response-received.s3", self._note_answer)

    def _renew(self) -> bool:
        """Looks for credentials again: a profile or a role may have others by now; False: they are the same."""
        with self._renewing:
            before = self._connection.keys()
            self._connect()
            self._bulk.watch(self._client)
            return self._connection.keys() != before

    def _keys(self, expired: bool) -> Keys:
        if expired:
            self._renew()
        return self._connection.keys()

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key)}

    def _note_answer(self, response_dict: Any = None, **_event: Any) -> None:
        self._answered = self._answered or response_dict is not None

    def _give_up_early(
        self, attempts: int, caught_exception: Exception | None, request_dict: dict[str, Any], **_event: Any
    ) -> bool | None:
        """False ends the retries: where nobody ever answered, nobody will; and not after `store_retry_s`."""
        now = self._clock()
        if now - request_dict["context"].setdefault("mgpu_began", now) > self._timeouts.store_retry_s:
            return False
        silent = isinstance(caught_exception, (EndpointConnectionError, ConnectTimeoutError))
        return False if silent and not self._answered and attempts >= _FIRST_ATTEMPTS else None


def _date(answer: Any) -> float:
    """When the server answered, in UNIX seconds of its own clock; of this machine's where it does not say."""
    date = parsedate_tz(answer["ResponseMetadata"]["HTTPHeaders"].get("date", ""))
    return mktime_tz(date) if date else time.time()


def _unmet(error: StoreError) -> bool:
    """Whether a condition of the request did not hold."""
    return isinstance(error.__cause__, ClientError) and _status(error.__cause__) == 412


def _status(error: ClientError) -> int:
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
