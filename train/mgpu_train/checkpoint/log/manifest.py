"""The documents of the object store: a node's sidecar, a checkpoint's manifest, the entries of the commit log.

What is read here was perhaps written by somebody else: everything is typed, bounded and checked before any of it is
used as a path or a size.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.dataclasses import dataclass, rebuild_dataclass
from pydantic.functional_validators import AfterValidator

from mgpu_train.config import RunId
from mgpu_train.store.base import Damaged, key_problem

FORMAT = 2  # of manifests and sidecars; 1 had no packs
MAX_FILES = 100_000
MAX_PACK_BYTES = 8 << 20
MAX_DOCUMENT_BYTES = 64 << 20
_MAX_PATH_BYTES = 700  # what a key has left beside bucket prefix, run, checkpoint and node
_MAX_FILE_BYTES = 1 << 46
_MAX_TOTAL_BYTES = 1 << 50

T = TypeVar("T")


def checkpoint_id(attempt: int, step: int) -> str:
    """The id of a checkpoint; attempts are never repeated, so no two checkpoints of a run share one."""
    return f"a{attempt:03d}-step-{step}"


def local_name(checkpoint_id: str) -> str:
    """The folder of a checkpoint among those of its attempt, on the node: `step-<n>`."""
    return checkpoint_id.partition("-")[2]


def _safe_path(path: str) -> str:
    problem = key_problem(path)
    if problem is None and len(path.encode()) > _MAX_PATH_BYTES:
        problem = f"is longer than {_MAX_PATH_BYTES} bytes"
    if problem:
        raise ValueError(f"path {path[:80]!r} {problem}")
    return path


CheckpointId = Annotated[str, StringConstraints(pattern=r"^a[0-9]{3,6}-step-[0-9]{1,15}$")]
FilePath = Annotated[str, AfterValidator(_safe_path)]
Token = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,128}$")]
MetaText = Annotated[str, StringConstraints(max_length=4096)]
Meta = Annotated[dict[MetaText, MetaText | int | float], Field(max_length=64)]
Attempt = Annotated[int, Field(ge=1, le=999_999)]
Step = Annotated[int, Field(ge=0, le=10**15 - 1)]
Node = Annotated[int, Field(ge=0, le=99_999)]
Crc64Nvme = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
PackNumber = Annotated[int, Field(ge=0, lt=MAX_FILES)]
PackOffset = Annotated[int, Field(ge=0, le=MAX_PACK_BYTES)]
Seq = Annotated[int, Field(ge=0, le=99_999_999)]
Seconds = Annotated[float, Field(ge=0, description="UNIX seconds, the writer's clock")]


# of dataclasses; they are frozen by themselves
STRICT = ConfigDict(defer_build=True, extra="forbid", strict=True, allow_inf_nan=False)
_BUILDING = threading.Lock()


def build_checks(kind: type) -> None:
    """Builds a dataclass that is checked, where that was put off. Whoever makes one in several threads calls it before:
    pydantic (2.14) takes a lock for models, and none for dataclasses, whose validator may be gone for a moment."""
    with _BUILDING:
        rebuild_dataclass(kind)


class Document(BaseModel):
    """The base of what the store holds: frozen, strict types, every unknown key is a mistake."""

    model_config = STRICT | ConfigDict(frozen=True)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class FileEntry:
    """One file of a checkpoint. There may be 100,000 of them, and a Document takes five times the memory."""

    path: FilePath = Field(description="relative to the checkpoint's folder, parts joined by /")
    size: int = Field(ge=0, le=_MAX_FILE_BYTES, description="bytes")
    crc64nvme: Crc64Nvme = Field(description="checksum of all bytes, hex")
    node: Node = Field(description="node_rank of the node that wrote it")
    pack: PackNumber | None = Field(
        default=None, description="its node's pack that holds it; none: an object of its own"
    )
    offset: PackOffset | None = Field(default=None, description="bytes of the pack before it")

    @model_validator(mode="after")
    def _placed(self) -> FileEntry:
        if (self.pack is None) != (self.offset is None):
            raise ValueError("a file has a pack and an offset in it, or neither")
        return self


class PackEntry(Document):
    """One object that holds many small files of a node, one behind the other."""

    node: Node = Field(description="node_rank of the node that wrote it")
    number: PackNumber = Field(description="the node's packs count 0, 1, 2, ...")
    size: int = Field(ge=0, le=MAX_PACK_BYTES, description="bytes")
    crc64nvme: Crc64Nvme = Field(description="checksum of all bytes, hex")


Files = Annotated[tuple[FileEntry, ...], Field(max_length=MAX_FILES)]
Packs = Annotated[tuple[PackEntry, ...], Field(max_length=MAX_FILES)]


class Sidecar(Document):
    """One node's part of one checkpoint; written after all files of the part."""

    version: Literal[2] = FORMAT
    checkpoint_id: CheckpointId
    attempt: Attempt
    node: Node
    step: Step = Field(description="optimizer steps done")
    world_size: int = Field(ge=1, description="processes of all nodes")
    files: Files
    packs: Packs = Field(default=(), description="by number")
    meta: Meta = Field(default_factory=dict, description="what the program says of it, for people")

    @model_validator(mode="after")
    def _consistent(self) -> Sidecar:
        _check(self.checkpoint_id, self.attempt, self.step, self.files, self.packs)
        if any(file.node != self.node for file in self.files):
            raise ValueError("it has a file of another node")
        return self

    def sha256(self) -> str:
        """Of the sidecar's JSON, as it would be written here."""
        return _sha256(self)


class StoredSidecar(Document):
    """A sidecar as the store holds it: what stands in it becomes the manifest, so it is not believed unchecked."""

    sidecar: Sidecar
    sidecar_sha256: Sha256

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> StoredSidecar:
        if not _fits(self.sidecar_sha256, self.sidecar, info):
            raise ValueError("the sidecar does not have the checksum that stands beside it")
        return self


class Manifest(Document):
    """All files of one checkpoint: what a folder must hold, byte for byte, before anything in it is read."""

    version: Literal[2] = FORMAT
    run_id: RunId
    checkpoint_id: CheckpointId
    attempt: Attempt
    step: Step = Field(description="optimizer steps done")
    nodes: int = Field(ge=1, le=100_000, description="nodes of the attempt")
    world_size: int = Field(ge=1, description="processes of all nodes")
    writers: Annotated[tuple[Node, ...], Field(min_length=1)] = Field(
        description="node_rank of the nodes that had a part, ascending"
    )
    files: Annotated[Files, Field(min_length=1)]
    packs: Packs = Field(default=(), description="those that hold one of the files, by node and number")
    created_at: Seconds
    meta: Meta = Field(default_factory=dict, description="node 0's")

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        _check(self.checkpoint_id, self.attempt, self.step, self.files, self.packs)
        if any(a >= b for a, b in zip(self.writers, self.writers[1:], strict=False)) or self.writers[-1] >= self.nodes:
            raise ValueError("writers are not distinct nodes in ascending order")
        if not {file.node for file in self.files} <= set(self.writers):
            raise ValueError("it has a file of a node that is no writer")
        return self

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(file.size for file in self.files)

    def sha256(self) -> str:
        """Of the manifest's JSON, as it would be written here."""
        return _sha256(self)


class _Entry(Document):
    version: Literal[1] = 1
    seq: Seq = Field(description="its number in the log: 0, 1, 2, ...")
    attempt: Attempt
    writer: Token = Field(description="token of who wrote it")
    at: Seconds


class AttemptEntry(_Entry):
    """An attempt begins: no older one may commit from here on."""

    kind: Literal["attempt"] = "attempt"


class CheckpointEntry(_Entry):
    """A checkpoint is committed."""

    kind: Literal["checkpoint"] = "checkpoint"
    manifest: Manifest
    manifest_sha256: Sha256

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> CheckpointEntry:
        if self.manifest.attempt != self.attempt:
            raise ValueError("the manifest is of another attempt")
        if not _fits(self.manifest_sha256, self.manifest, info):
            raise ValueError("the manifest does not have the checksum that the entry gives")
        return self


class PrunedEntry(_Entry):
    """Checkpoints are given up: their files may be gone from here on, and that is no damage."""

    kind: Literal["pruned"] = "pruned"
    checkpoint_ids: Annotated[tuple[CheckpointId, ...], Field(min_length=1, max_length=MAX_FILES)]


class SupervisorEntry(_Entry):
    """Another process supervises the run from here on (`writer`): an earlier one begins no attempt any more."""

    kind: Literal["supervisor"] = "supervisor"
    attempt: int = Field(ge=0, description="the newest attempt when it took over; 0: none")
    host: str = Field(max_length=255, description="for people")
    pid: int = Field(ge=1, description="for people")


class EndEntry(_Entry):
    """An attempt is over, by the word of node 0's agent: what is left to read when the machines are gone."""

    kind: Literal["end"] = "end"
    succeeded: bool
    fault: str | None = Field(default=None, max_length=64, description="whose, where it did not succeed")
    reason: str | None = Field(default=None, max_length=1000, description="one line, no secret")


Entry = AttemptEntry | CheckpointEntry | PrunedEntry | SupervisorEntry | EndEntry
_ENTRY: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Field(discriminator="kind")])
_SIDECAR = TypeAdapter(StoredSidecar)


def parse_entry(data: bytes, where: str) -> Entry:
    """An entry of the commit log; `where` names it in messages. Raises Damaged."""
    return _parse(_ENTRY, data, where, "manifest")


def parse_sidecar(data: bytes, where: str) -> Sidecar:
    """A node's sidecar. Raises Damaged."""
    return _parse(_SIDECAR, data, where, "sidecar").sidecar


def to_bytes(document: Document) -> bytes:
    """What is stored of a document."""
    if isinstance(document, Sidecar):
        document = StoredSidecar(sidecar=document, sidecar_sha256=document.sha256())
    return document.model_dump_json().encode()


def _sha256(document: Document) -> str:
    return hashlib.sha256(document.model_dump_json().encode()).hexdigest()


def _fits(sha256: str, document: Manifest | Sidecar, info: ValidationInfo) -> bool:
    """Whether a checksum is that of the bytes that were read; else of what would be written here.

    The bytes count: pydantic 2.11 writes 1e16 where 2.14 writes 1e+16, and whoever wrote it may have had another one.
    """
    return (info.context or {}).get("sha256") == sha256 or document.sha256() == sha256


def _stored_sha256(data: bytes, part: str) -> str | None:
    """SHA-256 of the bytes of a manifest or sidecar in the document that holds it; None: it is not where we write it.

    In a JSON text a quote is always escaped: only keys look like these two.
    """
    begin, end = data.find(b'"%s":' % part.encode()), data.rfind(b',"%s_sha256":' % part.encode())
    if not 0 <= begin < end:
        return None
    return hashlib.sha256(memoryview(data)[begin + len(part) + 3 : end]).hexdigest()


def _parse(adapter: TypeAdapter[T], data: bytes, where: str, part: str) -> T:
    if len(data) > MAX_DOCUMENT_BYTES:
        raise Damaged(f"{where} is longer than {MAX_DOCUMENT_BYTES} bytes")
    try:
        # pydantic lets the last of two equal keys win, without a word
        found = json.loads(data, object_pairs_hook=_distinct, parse_constant=_refuse)
        _check_format(found.get(part) if isinstance(found, dict) else None, where)
        return adapter.validate_json(data, context={"sha256": _stored_sha256(data, part)})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise Damaged(f"{where} is not valid: {field + ': ' if field else ''}{first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{where} is not valid: {str(error)[:200]}") from error


def _check_format(document: Any, where: str) -> None:
    """Raises Damaged for a manifest or sidecar that another version of mgpu wrote, with what to do (F52)."""
    version = document.get("version") if isinstance(document, dict) else None
    if type(version) is int and version != FORMAT:
        raise Damaged(
            f"{where} describes a checkpoint in format {version}, and this mgpu reads format {FORMAT} alone. "
            f"Use {'a newer mgpu' if version > FORMAT else 'the older mgpu that wrote it'}, or start a new run."
        )


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _check(name: str, attempt: int, step: int, files: Sequence[FileEntry], packs: Sequence[PackEntry]) -> None:
    """What sidecars and manifests have in common. Raises ValueError."""
    if name != checkpoint_id(attempt, step):
        raise ValueError(f"{name} is not the id of attempt {attempt}, step {step}")
    paths, folders, total = set[str](), set[str](), 0
    for file in files:
        if file.path in paths:
            raise ValueError(f"path {file.path[:80]!r} stands twice")
        paths.add(file.path)
        above = file.path.split("/")[:-1]
        folders.update("/".join(above[: depth + 1]) for depth in range(len(above)))
        total += file.size
    if both := paths & folders:
        raise ValueError(f"path {min(both)[:80]!r} is a file and a folder")
    if total > _MAX_TOTAL_BYTES:
        raise ValueError(f"{total} bytes in all are more than any store holds")
    _check_packs(files, packs)


def _check_packs(files: Sequence[FileEntry], packs: Sequence[PackEntry]) -> None:
    """Every packed file has bytes of its own in a pack that is there, and every pack is of use. Raises ValueError."""
    room = {(pack.node, pack.number): pack.size for pack in packs}
    if len(room) < len(packs) or list(room) != sorted(room):
        raise ValueError("packs are not distinct ones in ascending order")
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for file in files:
        if file.pack is not None and file.offset is not None:
            spans.setdefault((file.node, file.pack), []).append((file.offset, file.offset + file.size))
    if spans.keys() != room.keys():
        raise ValueError("the pack of a file is missing, or a pack holds none of the files")
    for (node, number), found in spans.items():
        end = 0
        for begin, stop in sorted(found):
            if begin < end or stop > room[node, number]:
                raise ValueError(f"pack {number} of node {node} cannot hold its files as they stand there")
            end = stop
