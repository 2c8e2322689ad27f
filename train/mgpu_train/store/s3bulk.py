"""Large bodies between files and S3, as tasks for the process that moves them."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from mgpu_train.store import crc
from mgpu_train.store.base import Progress
from mgpu_train.store.bulk.engine import Engine, Failed
from mgpu_train.store.bulk.message import Keys, Route, Task
from mgpu_train.store.bulk.worker import identity
from mgpu_train.store.pace import Pace
from mgpu_train.store.s3errors import S3Errors
from mgpu_train.timeouts import Timeouts

PART = 8 << 20  # bytes; S3's least is 5 MiB
_LONGEST_RANGE = 32 << 20  # bytes; servers take their time for each request, and a range that is cut goes on there
_MOST_PARTS = 10_000  # S3's limit
_REGION = re.compile(r"Credential=[^/]+/\d+/([^/]+)/s3/")
Sent = tuple[dict[str, str], int, int]  # what completing an upload needs of a part, its checksum and its bytes


class Bulk:
    """The transfers of one store. Where its bucket is it learns from the requests that botocore makes."""

    def __init__(
        self,
        errors: S3Errors,
        timeouts: Timeouts,
        pace: Pace,
        keys: Callable[[bool], Keys],
        *,
        ca: str | None,
        prefix: str,
    ) -> None:
        self.engine = Engine(timeouts, pace, keys)
        self._prefix = prefix
        self._errors, self._ca = errors, ca
        self._seen = threading.local()
        self._route: Route | None = None

    def watch(self, client: Any) -> None:
        """Sees where requests of this client go."""
        client.meta.events.register("before-send.s3", self._note)

    def learn(self, key: str) -> bool:
        """The last request of this thread was for `key`; False: it has made none."""
        request = getattr(self._seen, "request", None)
        path = urlsplit(request.url).path if request else ""
        if request is None or not path.endswith(quoted := _quoted(self._prefix + key)):
            return False
        parts = urlsplit(request.url)
        url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        region = _REGION.search(_text(request.headers.get("Authorization", "")))
        self._route = Route(
            url=url,
            base=path.removesuffix(quoted),
            region=region[1] if region else "us-east-1",
            proxy=_with_scheme(get_environ_proxies(url).get(parts.scheme)),
            ca=str(get_cert_path(self._ca or True)) if parts.scheme == "https" else None,
        )
        return True

    @property
    def has_route(self) -> bool:
        """False until `learn` was called after a request."""
        return self._route is not None

    def send(self, key: str, file: Path, found: os.stat_result) -> str:
        """Puts a file as one object; returns its checksum. Raises StoreError."""
        task = self._task("PUT", key, file, 0, found.st_size, identity=identity(found))
        (answer,) = self._run(f"write {key}", [task])
        return crc.to_hex(answer["crc"])

    def send_parts(self, key: str, upload: str, file: Path, found: os.stat_result) -> list[Sent]:
        """Puts a file as parts of a multipart upload. Raises StoreError."""
        spans = list(_spans(found.st_size, part_size(found.st_size)))
        tasks = [
            self._task(
                "PUT",
                key,
                file,
                *span,
                identity=identity(found),
                query=(("partNumber", str(number)), ("uploadId", upload)),
            )
            for number, span in enumerate(spans, 1)
        ]
        answers = self._run(f"write {key}", tasks)
        return [
            ({"ETag": answer["etag"], "ChecksumCRC64NVME": crc.to_base64(crc.to_hex(answer["crc"]))}, answer["crc"], n)
            for answer, (_, n) in zip(answers, spans, strict=True)
        ]

    def receive(self, key: str, size: int, to: Path | None, progress: Progress | None) -> str:
        """Reads an object by ranges, into a file of that size or nowhere; returns its checksum. Raises StoreError."""
        spans = list(_spans(size, self._range(size)))
        answers = self._run(f"read {key}", [self._task("GET", key, to, *span) for span in spans], progress)
        return crc.joined((answer["crc"], length) for answer, (_, length) in zip(answers, spans, strict=True))

    def _range(self, size: int) -> int:
        """Bytes of a range: as many as there are connections, unless that makes them very short or long."""
        return min(_LONGEST_RANGE, max(PART, -(-size // self.engine.settings.connections)))

    def _run(self, doing: str, tasks: Sequence[Task], progress: Progress | None = None) -> list[dict[str, Any]]:
        try:
            return self.engine.run(tasks, progress)
        except Failed as failed:
            raise self._errors.of_transfer(doing, failed.told) from failed

    def _task(self, method: str, key: str, file: Path | None, offset: int, length: int, **more: Any) -> Task:
        if self._route is None:
            raise RuntimeError("no request was made before")
        path = self._route.base + _quoted(self._prefix + key)
        return Task(0, method, self._route, path, offset, length, None if file is None else str(file), **more)

    def _note(self, request: Any, **_event: Any) -> None:
        self._seen.request = request


def part_size(size: int) -> int:
    """Bytes of a part of an upload: whole MiB, and few enough parts."""
    return max(PART, -(-size // (_MOST_PARTS << 20)) << 20)


@contextmanager
def in_memory(data: bytes | memoryview) -> Iterator[Path]:
    """A file with these bytes that another process of this user can read, on no disk where there is a way."""
    if not hasattr(os, "memfd_create"):
        with tempfile.NamedTemporaryFile(prefix="mgpu-put-") as file:
            file.write(data)
            file.flush()
            yield Path(file.name)
        return
    descriptor = os.memfd_create("mgpu-put")
    try:
        with open(descriptor, "wb", buffering=0, closefd=False) as file:
            file.write(data)
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _spans(size: int, step: int) -> Iterator[tuple[int, int]]:
    return ((offset, min(step, size - offset)) for offset in range(0, size, step))


def _quoted(key: str) -> str:
    return quote(key, safe="/~-_.")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _with_scheme(proxy: str | None) -> str | None:
    """`host:port` is a proxy that speaks HTTP, as it is for botocore."""
    if not proxy or proxy.startswith(("http:", "https:")):
        return proxy or None
    return f"http://{proxy.removeprefix('//')}"
