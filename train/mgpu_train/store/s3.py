"""Objects in S3, or in anything that speaks its language: boto3, with every checksum, deadline and retry explicit.

Large objects travel in parts by a few threads that hold one part each. Every checksum is computed here from the bytes
that are sent or received: a ranged read carries none, and not every server minds a wrong one.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from awscrt.checksums import crc64nvme
from botocore.exceptions import ClientError, ConnectTimeoutError, EndpointConnectionError

from mgpu_train.store import crc, disk
from mgpu_train.store.base import (
    PIECE,
    Ambiguous,
    Damaged,
    NotFound,
    Progress,
    Stat,
    StoreError,
    Unavailable,
    check_key,
)
from mgpu_train.store.s3client import connect
from mgpu_train.store.s3errors import maybe_done
from mgpu_train.timeouts import Timeouts

_THREADS = 8  # parts in flight; each holds up to one part in memory
_FIRST_ATTEMPTS = 2  # at an endpoint that never answered: rather a wrong address than a blip
_ROUNDS = 5  # of botocore's attempts; it also repeats nothing once a stream has begun
_MOST_PARTS = 10_000  # S3's limit
_STREAM = 1 << 20  # bytes between two looks at an incoming stream
T = TypeVar("T")
Sink = Callable[[int, bytes], None]  # takes what was read at an offset


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
        self._timeouts = timeouts
        self._client, self._errors = connect(url, env, timeouts, threads=_THREADS)
        self._pool = ThreadPoolExecutor(_THREADS, "s3")
        self._client.meta.events.register_first("needs-retry.s3", self._give_up_early)
        self._client.meta.events.register("response-received.s3", self._note_answer)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See Store."""
        try:
            with self._errors.translated(f"write {key}"):  # once: whoever lost the answer reads back
                self._put(key, data, IfNoneMatch="*")
        except StoreError as error:
            if isinstance(error.__cause__, ClientError) and _status(error.__cause__) == 412:
                return False
            if maybe_done(error):
                raise Ambiguous(str(error)) from error
            raise
        return True

    def put(self, key: str, data: bytes) -> None:
        """See Store."""
        self._patiently(f"write {key}", lambda: self._put(key, data))

    def put_file(self, key: str, path: Path) -> Stat:
        """See Store. Reads the file once."""
        with disk.translated(f"cannot read {path}"), disk.opened(path) as source:
            size = os.fstat(source).st_size
            if size <= PIECE:
                data = _read_part(source, 0, size)
                self.put(key, data)
                return Stat(key, size, crc.of_bytes(data), time.time())
            return Stat(key, size, self._put_parts(key, source, size), time.time())

    def get(self, key: str, limit: int) -> bytes:
        """See Store."""
        where = self._at(key)

        def read() -> bytes:
            answer = self._client.get_object(**where, ChecksumMode="ENABLED")
            with closing(answer["Body"]) as body:  # its own `with` gives the unchecked stream
                if answer["ContentLength"] > limit:
                    size = answer["ContentLength"]
                    raise Damaged(f"{self.url}: {key} has {size} bytes where at most {limit} make sense")
                return body.read()

        return self._patiently(f"read {key}", read)

    def get_file(self, key: str, path: Path, *, size: int, crc64nvme: str, progress: Progress | None = None) -> None:
        """See Store."""
        with disk.translated(f"cannot write {path}"), disk.written(path, durable=False) as target:
            found = self._read_all(key, size, lambda offset, data: _pwrite(target, offset, data), progress)
            if found != crc64nvme:
                raise Damaged(f"{self.url}: {key}: its checksum is {found}, not {crc64nvme}")

    def checksum(self, key: str, size: int, progress: Progress | None = None) -> str:
        """See Store."""
        return self._read_all(key, size, lambda _offset, _data: None, progress)

    def stat(self, key: str) -> Stat | None:
        """See Store."""
        where = self._at(key)
        try:
            found = self._patiently(f"look at {key}", lambda: self._client.head_object(**where, ChecksumMode="ENABLED"))
        except NotFound:
            return None
        whole = found.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
        own = crc.from_base64(found.get("ChecksumCRC64NVME")) if whole else None
        return Stat(key, found["ContentLength"], own, found["LastModified"].timestamp())

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
                    yield Stat(key, each["Size"], None, each["LastModified"].timestamp())

    def delete(self, key: str) -> None:
        """See Store."""
        where = self._at(key)
        try:
            self._patiently(f"delete {key}", lambda: self._client.delete_object(**where))
        except NotFound:  # some servers say so; S3 does not
            pass

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

    def _put_parts(self, key: str, source: int, size: int) -> str:
        where = self._at(key)
        with self._errors.translated(f"write {key}"):
            upload = self._client.create_multipart_upload(
                **where, ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT"
            )["UploadId"]
            try:
                parts = self._upload(where | {"UploadId": upload}, source, size)
                whole = crc.joined((value, length) for _, value, length in parts)
                numbered = [{"PartNumber": n, **sent} for n, (sent, _, _) in enumerate(parts, 1)]
                self._client.complete_multipart_upload(
                    **where,
                    UploadId=upload,
                    MultipartUpload={"Parts": numbered},
                    ChecksumCRC64NVME=crc.to_base64(whole),
                    ChecksumType="FULL_OBJECT",
                )
            except BaseException:
                self._abort(where["Key"], upload)
                raise
        return whole

    def _upload(self, where: dict[str, str], source: int, size: int) -> list[tuple[dict[str, str], int, int]]:
        """Sends all parts; each comes back as what completing needs of it, its checksum and its bytes."""

        def send(number: int, offset: int, length: int) -> tuple[dict[str, str], int, int]:
            data = _read_part(source, offset, length)
            value = crc64nvme(data)
            own = crc.to_base64(crc.to_hex(value))
            sent = self._patiently(
                f"write part {number} of {where['Key']}",
                lambda: self._client.upload_part(**where, PartNumber=number, Body=data, ChecksumCRC64NVME=own),
            )
            return {"ETag": sent["ETag"], "ChecksumCRC64NVME": own}, value, length

        part = _part_size(size)
        spans = [(offset, min(part, size - offset)) for offset in range(0, size, part)]
        return _all([self._pool.submit(send, n, *span) for n, span in enumerate(spans, 1)])

    def _abort(self, full_key: str, upload: str) -> None:
        try:
            with self._errors.translated("abort an upload"):
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=full_key, UploadId=upload)
        except StoreError:  # it is over already, or the store is away: `sweep` comes again
            pass

    def _read_all(self, key: str, size: int, sink: Sink, progress: Progress | None) -> str:
        """Reads an object of `size` bytes by ranges, in parallel, and returns its checksum."""
        found = self.stat(key)
        if found is None:
            raise NotFound(f"{self.url}: cannot read {key}: there is no such object")
        if found.size != size:
            raise Damaged(f"{self.url}: {key} has {found.size} bytes, not {size}")
        spans = [(offset, min(PIECE, size - offset)) for offset in range(0, size, PIECE)]

        def one(offset: int, length: int) -> int:
            value = self._read_range(key, offset, length, sink)
            if progress:
                progress(length)
            return value

        parts = _all([self._pool.submit(one, *span) for span in spans])
        return crc.joined((value, length) for value, (_, length) in zip(parts, spans, strict=True))

    def _read_range(self, key: str, offset: int, length: int, sink: Sink) -> int:
        where = self._at(key)

        def read() -> int:
            value = done = 0
            answer = self._client.get_object(**where, Range=f"bytes={offset}-{offset + length - 1}")
            with closing(answer["Body"]) as body:  # its own `with` gives the unchecked stream
                while done <= length and (data := body.read(_STREAM)):
                    sink(offset + done, data)
                    value = crc64nvme(data, value)
                    done += len(data)
            if done != length:
                raise Damaged(f"{self.url}: {key}: {done} bytes came where {length} were asked for")
            return value

        return self._patiently(f"read {key}", read)

    def _patiently(self, doing: str, work: Callable[[], T]) -> T:
        """Does what may be done twice, again after growing pauses while the store does not answer as it should.

        botocore's own repetitions are over within seconds, or each has cost its whole time-out: then not again.
        """
        end = self._clock() + self._timeouts.store_retry_s
        for attempt in range(1, _ROUNDS):
            try:
                with self._errors.translated(doing):
                    return work()
            except Unavailable:
                if not self._answered or self._clock() > end:
                    raise
                self._sleep(random.uniform(0.5, 1) * 2**attempt)
        with self._errors.translated(doing):
            return work()

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key)}

    def _note_answer(self, response_dict: Any = None, **_event: Any) -> None:
        self._answered = self._answered or response_dict is not None

    def _give_up_early(self, attempts: int, caught_exception: Exception | None, **_event: Any) -> bool | None:
        """False ends the retries: where nobody ever answered, nobody will."""
        silent = isinstance(caught_exception, (EndpointConnectionError, ConnectTimeoutError))
        return False if silent and not self._answered and attempts >= _FIRST_ATTEMPTS else None


def _all(futures: list[Future[T]]) -> list[T]:
    """All results; after the first failure nothing more is begun, and nothing still runs when it is raised."""
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        wait(futures)
        raise


def _part_size(size: int) -> int:
    """Bytes of a part: whole MiB, and few enough parts."""
    return max(PIECE, -(-size // (_MOST_PARTS << 20)) << 20)


def _read_part(source: int, offset: int, length: int) -> bytes:
    data = os.pread(source, length, offset)
    if len(data) != length:
        raise OSError(f"the file became shorter than {offset + length} bytes while it was read")
    return data


def _pwrite(target: int, offset: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(target, view, offset)
        view, offset = view[count:], offset + count


def _status(error: ClientError) -> int:
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
