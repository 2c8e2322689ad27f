"""What the sink answers: as much of S3 as s5cmd, boto3 and mgpu's own store ask for."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

_NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
_ETAG = re.compile(rb"<ETag>(?:&quot;|&#34;|\")?([0-9a-f]+)-")


@dataclass
class Request:
    """One request without its body, which is still to be read."""

    method: str
    key: str  # without the bucket; empty for the bucket itself
    query: dict[str, str]
    headers: dict[str, str]

    @property
    def body_bytes(self) -> int:
        """Of the object's content; what is on the wire may be longer."""
        return int(self.headers.get("x-amz-decoded-content-length") or self.headers.get("content-length") or 0)


@dataclass
class Answer:
    """What is sent back; `content` counts bytes of the pattern from `offset` on, after `body`."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    offset: int = 0
    content: int = 0
    length: int | None = None  # where the header says more than what is sent: HEAD


class Objects:
    """What is known of the objects, for all processes: one small file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, key: str, size: int, crc: str, body: bytes) -> None:
        """Note an object; `crc` is S3's Base64 of its CRC64NVME, or empty."""
        path = self._folder / quote(key, safe="")
        aside = path.with_name(f"~{os.getpid()}")
        aside.write_bytes(json.dumps({"size": size, "crc": crc}).encode() + b"\n" + body)
        aside.replace(path)

    def read(self, key: str) -> tuple[dict[str, str | int], bytes, float] | None:
        """Size and checksum, the kept bytes, and when it was written; None: no such object."""
        path = self._folder / quote(key, safe="")
        try:
            head, _, body = path.read_bytes().partition(b"\n")
            return json.loads(head), body, path.stat().st_mtime
        except FileNotFoundError:
            return None

    def delete(self, key: str) -> None:
        """Forget an object."""
        (self._folder / quote(key, safe="")).unlink(missing_ok=True)

    def list(self, prefix: str, after: str) -> Iterator[tuple[str, int, float]]:
        """Key, size and time of all that follow `after` under a prefix."""
        names = sorted(unquote(path.name) for path in self._folder.iterdir() if not path.name.startswith("~"))
        for key in names:
            if key.startswith(prefix) and key > after and (found := self.read(key)):
                yield key, int(found[0]["size"]), found[2]


class Answers:
    """One answer per request, from what is known of the objects."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def to(self, request: Request, body: bytes) -> Answer:
        """The answer to a request; `body` is what was kept of its body."""
        if not request.key:
            return self._bucket(request)
        if request.method == "PUT":
            return self._put(request, body)
        if request.method == "POST":
            return self._create(request) if "uploads" in request.query else self._complete(request, body)
        if request.method == "DELETE":
            if "uploadId" not in request.query:
                self._objects.delete(request.key)
            return Answer(204)
        return self._get(request)

    def _put(self, request: Request, body: bytes) -> Answer:
        size, crc = request.body_bytes, request.headers.get("x-amz-checksum-crc64nvme", "")
        answer = Answer(headers={"ETag": f'"{size:x}-{secrets.token_hex(8)}"'})  # completing adds up the parts' sizes
        if crc:
            answer.headers["x-amz-checksum-crc64nvme"] = crc
        if "partNumber" in request.query:
            return answer
        if request.headers.get("if-none-match") == "*" and self._objects.read(request.key):
            return refusal(412, "PreconditionFailed", "It exists.")
        self._objects.write(request.key, size, crc, body)
        return answer

    def _create(self, request: Request) -> Answer:
        return _xml(
            "InitiateMultipartUploadResult",
            f"<Bucket>b</Bucket><Key>{escape(request.key)}</Key><UploadId>{secrets.token_hex(16)}</UploadId>",
        )

    def _complete(self, request: Request, body: bytes) -> Answer:
        size = sum(int(tag, 16) for tag in _ETAG.findall(body))
        self._objects.write(request.key, size, request.headers.get("x-amz-checksum-crc64nvme", ""), b"")
        return _xml(
            "CompleteMultipartUploadResult",
            f'<Bucket>b</Bucket><Key>{escape(request.key)}</Key><ETag>"{size:x}-done"</ETag>',
        )

    def _get(self, request: Request) -> Answer:
        found = self._objects.read(request.key)
        if found is None:
            answer = refusal(404, "NoSuchKey", "There is none.")
            return Answer(404, length=0) if request.method == "HEAD" else answer
        (about, body, modified), whole = found, int(found[0]["size"])
        headers = {"ETag": f'"{whole:x}-0"', "Last-Modified": formatdate(modified, usegmt=True)}
        if about["crc"] and request.headers.get("x-amz-checksum-mode"):
            headers |= {"x-amz-checksum-crc64nvme": str(about["crc"]), "x-amz-checksum-type": "FULL_OBJECT"}
        first, last, status = 0, whole - 1, 200
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", "")):
            first, last, status = int(asked[1]), min(int(asked[2] or whole), whole - 1), 206
            headers["Content-Range"] = f"bytes {first}-{last}/{whole}"
            headers.pop("x-amz-checksum-crc64nvme", None)  # a range has none
        size = last - first + 1
        if request.method == "HEAD":
            return Answer(status, headers, length=size)
        if request.key.endswith(".json"):
            return Answer(status, headers, body[first : last + 1])
        return Answer(status, headers, offset=first, content=size)

    def _bucket(self, request: Request) -> Answer:
        if request.method == "HEAD":
            return Answer(length=0)
        if "uploads" in request.query:
            return _xml("ListMultipartUploadsResult", "<Bucket>b</Bucket><IsTruncated>false</IsTruncated>")
        prefix, after = request.query.get("prefix", ""), request.query.get("continuation-token", "")
        found = list(self._objects.list(prefix, after or request.query.get("start-after", "")))
        most = int(request.query.get("max-keys", 1000))
        page, cut = found[:most], len(found) > most
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>&quot;{size:x}-0&quot;</ETag>"
            f"<LastModified>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(at))}</LastModified></Contents>"
            for key, size, at in page
        )
        follow = f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>" if cut else ""
        return _xml(
            "ListBucketResult",
            f"<Name>b</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<MaxKeys>{most}</MaxKeys><IsTruncated>{str(cut).lower()}</IsTruncated>{follow}{rows}",
        )


def _xml(name: str, inner: str) -> Answer:
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name} {_NAMESPACE}>{inner}</{name}>'
    return Answer(headers={"Content-Type": "application/xml"}, body=text.encode())


def refusal(status: int, code: str, message: str) -> Answer:
    """An error of S3's."""
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'
    return Answer(status, {"Content-Type": "application/xml"}, text.encode())
