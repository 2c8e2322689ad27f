"""Documents of the store: what was written is read back, and whatever an attacker or a bad disk writes is refused."""

from __future__ import annotations

import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from mgpu_train.checkpoint.log import manifest as m
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.checkpoint.log.lines import Commit, in_short
from mgpu_train.checkpoint.transfer import part
from mgpu_train.store import Damaged
from pydantic import ValidationError
from pydantic._internal import _dataclasses as pydantics

CRC = "0123456789abcdef"


def file(path: str = "a.bin", size: int = 3, node: int = 0) -> m.FileEntry:
    return m.FileEntry(path=path, size=size, crc64nvme=CRC, node=node)


def packed(path: str, offset: int, size: int = 3, number: int = 0, node: int = 0) -> m.FileEntry:
    return m.FileEntry(path=path, size=size, crc64nvme=CRC, node=node, pack=number, offset=offset)


def pack(number: int = 0, size: int = 9, node: int = 0) -> m.PackEntry:
    return m.PackEntry(node=node, number=number, size=size, crc64nvme=CRC)


def manifest(**changes) -> m.Manifest:
    given = {
        "run_id": "run-1",
        "checkpoint_id": "a001-step-25",
        "attempt": 1,
        "step": 25,
        "nodes": 2,
        "world_size": 4,
        "writers": (0, 1),
        "files": (file(), file("sub/b.bin", node=1)),
        "created_at": 1767225600.125,
        "meta": {"loss": 2.0, "step": 25, "name": "x"},
    }
    return m.Manifest(**{**given, **changes})


def entry(**changes) -> m.CheckpointEntry:
    made = manifest(**changes)
    return m.CheckpointEntry(
        seq=3, attempt=made.attempt, writer="w", at=5.5, manifest=made, manifest_sha256=made.sha256()
    )


def altered(change) -> bytes:
    """A stored entry whose JSON was changed, with a checksum that fits."""
    data = json.loads(m.to_bytes(entry()))
    change(data["manifest"])
    return json.dumps(data).encode()


def test_what_was_written_is_read_back():
    read = m.parse_entry(m.to_bytes(entry()), "here")
    assert read == entry()
    assert isinstance(read, m.CheckpointEntry)
    assert [type(value) for value in read.manifest.meta.values()] == [float, int, str]
    assert read.manifest.bytes == 6
    begun = m.AttemptEntry(seq=0, attempt=1, writer="w", at=1.0)
    assert m.parse_entry(m.to_bytes(begun), "here") == begun
    gone = m.PrunedEntry(seq=9, attempt=1, writer="w", at=1.0, checkpoint_ids=("a001-step-1",))
    assert m.parse_entry(m.to_bytes(gone), "here") == gone


def respelled(data: bytes, part: str) -> bytes:
    """What another pydantic writes: 2.11 has 3.1e17 where 2.14 has 3.1e+17."""
    head, _, rest = data.partition(b'"%s":' % part.encode())
    document, _, tail = rest.rpartition(b',"%s_sha256":' % part.encode())
    other = document.replace(b"e+17", b"e17") if b"e+17" in document else document.replace(b"e17", b"e+17")
    assert other != document
    ours, theirs = (hashlib.sha256(each).hexdigest().encode() for each in (document, other))
    assert ours in tail
    return head + b'"%s":' % part.encode() + other + b',"%s_sha256":' % part.encode() + tail.replace(ours, theirs)


def test_how_another_pydantic_spells_a_number_does_not_matter(run):
    meta = {"total_flos": 3.1e17, "loss": 2.5, ',"manifest_sha256":': '"manifest":', "manifest_sha256": "x"}
    written = m.to_bytes(entry(meta=meta))
    for data in (written, respelled(written, "manifest")):
        assert m.parse_entry(data, "here").manifest.meta == meta
    part = m.Sidecar(
        checkpoint_id="a001-step-25", attempt=1, node=0, step=25, world_size=4, files=(file(),), meta={"flos": 3.1e17}
    )
    for data in (m.to_bytes(part), respelled(m.to_bytes(part), "sidecar")):
        assert m.parse_sidecar(data, "here") == part
    with pytest.raises(Damaged, match="does not have the checksum"):
        m.parse_entry(respelled(written, "manifest").replace(b"2.5", b"2.6"), "here")
    path = run.commit_path(run.log.commit(manifest(meta=meta, run_id="run-1"), "writer-1").seq)
    path.write_bytes(respelled(path.read_bytes(), "manifest"))
    log = CommitLog(run.plain, "run-1")
    assert log.manifest(log.checkpoints()[0]).meta == meta, "also by the checksum that the log's line has"


def test_ids_hold_attempt_and_step():
    assert m.checkpoint_id(1, 25) == "a001-step-25"
    assert m.checkpoint_id(1234, 0) == "a1234-step-0"


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "a/../../x",
        "..",
        ".",
        "./x",
        "/etc/passwd",
        "//x",
        "a//b",
        "a/",
        "",
        "a\0b",
        "a\\..\\b",
        "..%2fx",
        "%2E%2e/x",
        "a%5cb",
        "a%00b",
        "a\nb",
        "a\x1b[2Jb",
        "a\u202eb",
        "a\udc80b",
        ".aside-x",
        "n" * 300,
        "n/" * 400 + "x",
    ],
)
def test_paths_that_lead_elsewhere_are_refused(path):
    with pytest.raises(ValidationError):
        file(path)

    def change(data):
        data["files"][0]["path"] = path

    with pytest.raises(Damaged):
        m.parse_entry(altered(change), "here")


@pytest.mark.parametrize("path", [".metadata", "__0_0.distcp", "a b", "é/ü.bin", "x..y", "...", "100%.txt"])
def test_plain_paths_are_taken(path):
    assert file(path).path == path


@pytest.mark.parametrize(
    "change",
    [
        {"files": (file("a"), file("a", node=1))},
        {"files": (file("a"), file("a/b"))},
        {"files": (file("a/b/c"), file("a"))},
        {"files": ()},
        {"files": (file("a", node=2),)},
        {"files": tuple(file(f"b{n}", size=1 << 46) for n in range(17))},
        {"writers": ()},
        {"writers": (1, 0)},
        {"writers": (0, 0)},
        {"writers": (0, 2)},
        {"checkpoint_id": "a001-step-26"},
        {"checkpoint_id": "../x"},
        {"attempt": 0},
        {"attempt": 2},
        {"step": -1},
        {"nodes": 0},
        {"world_size": 0},
        {"run_id": "../other"},
        {"run_id": "Run"},
        {"created_at": float("nan")},
        {"created_at": float("inf")},
        {"meta": {"x": float("inf")}},
        {"meta": {"x": True}},
        {"meta": {"x": ["list"]}},
        {"meta": {str(n): n for n in range(65)}},
        {"meta": {"x": "y" * 5000}},
    ],
)
def test_manifests_that_make_no_sense_are_refused(change):
    with pytest.raises(ValidationError):
        manifest(**change)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["files"][0].update(size=-1),
        lambda d: d["files"][0].update(size=10**30),
        lambda d: d["files"][0].update(size="3"),
        lambda d: d["files"][0].update(size=3.0),
        lambda d: d["files"][0].update(crc64nvme=CRC.upper()),
        lambda d: d["files"][0].update(crc64nvme=CRC[:-1]),
        lambda d: d["files"][0].update(extra=1),
        lambda d: d["files"][0].pop("node"),
        lambda d: d.update(version="2"),
        lambda d: d.update(extra=1),
        lambda d: d.update(step=26),
        lambda d: d.update(files={"0": d["files"][0]}),
    ],
)
def test_stored_manifests_that_were_changed_are_refused(change):
    with pytest.raises(Damaged, match=r"^entry 3 is not valid"):
        m.parse_entry(altered(change), "entry 3")


@pytest.mark.parametrize(
    ("files", "packs"),
    [
        ([packed("a", 0), packed("b", 3)], [pack()]),
        ([packed("b", 6), packed("a", 0)], [pack()]),  # what two nodes have counts once: a gap, in any order
        ([packed("a", 0, size=0), packed("b", 0), packed("c", 9, size=0)], [pack()]),
        ([packed("a", 0, size=0)], [pack(size=0)]),
        ([packed("a", 0), packed("b", 0, node=1), packed("c", 0, number=7)], [pack(), pack(7), pack(node=1)]),
    ],
)
def test_files_stand_in_packs(files, packs):
    made = entry(files=tuple(files), packs=tuple(packs))
    assert m.parse_entry(m.to_bytes(made), "here") == made


@pytest.mark.parametrize(
    ("files", "packs", "why"),
    [
        ([packed("a", 0)], [], "pack of a file is missing"),
        ([packed("a", 0, number=1)], [pack(0)], "pack of a file is missing"),
        ([packed("a", 0, node=1)], [pack(node=0)], "pack of a file is missing"),
        ([file()], [pack()], "holds none of the files"),
        ([packed("a", 0)], [pack(), pack()], "not distinct"),
        ([packed("a", 0), packed("b", 0, number=1)], [pack(1), pack(0)], "ascending order"),
        ([packed("a", 0), packed("b", 2)], [pack()], "cannot hold its files"),
        ([packed("a", 7)], [pack()], "cannot hold its files"),
        ([packed("a", 10, size=0)], [pack()], "cannot hold its files"),
    ],
)
def test_packs_that_make_no_sense_are_refused(files, packs, why):
    with pytest.raises(ValidationError, match=why):
        manifest(files=tuple(files), packs=tuple(packs))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["files"][0].pop("offset"),
        lambda d: d["files"][0].pop("pack"),
        lambda d: d["files"][0].update(offset=-1),
        lambda d: d["files"][0].update(offset=10**30),
        lambda d: d["files"][0].update(pack=-1),
        lambda d: d["files"][0].update(pack="0"),
        lambda d: d["files"][0].update(pack=10**6),
        lambda d: d["packs"][0].update(size=-1),
        lambda d: d["packs"][0].update(size=(8 << 20) + 1),
        lambda d: d["packs"][0].update(crc64nvme=CRC[:-1]),
        lambda d: d["packs"][0].update(extra=1),
        lambda d: d["packs"][0].pop("number"),
    ],
)
def test_stored_packs_that_were_changed_are_refused(change):
    def changed(data):
        data["files"] = [{"path": "a", "size": 3, "crc64nvme": CRC, "node": 0, "pack": 0, "offset": 0}]
        data["packs"] = [{"node": 0, "number": 0, "size": 3, "crc64nvme": CRC}]
        change(data)

    with pytest.raises(Damaged, match=r"^entry 3 is not valid: checkpoint\.manifest"):
        m.parse_entry(altered(changed), "entry 3")


@pytest.mark.parametrize("half", [{"pack": 0}, {"offset": 0}])
def test_a_file_has_a_pack_and_an_offset_or_neither(half):
    with pytest.raises(ValidationError, match="or neither"):
        m.FileEntry(path="a", size=3, crc64nvme=CRC, node=0, **half)


@pytest.mark.parametrize(("version", "use"), [(1, "the older mgpu that wrote it"), (3, "a newer mgpu")])
def test_another_format_is_refused_with_what_to_do(version, use):
    """F52: before anything else of it is looked at."""
    said = f"format {version}, and this mgpu reads format 2 alone. Use {use}, or start a new run"
    with pytest.raises(Damaged, match=said):
        m.parse_entry(altered(lambda d: d.update(version=version, files="of another kind")), "here")
    sidecar = b'{"sidecar": {"version": %d, "whatever": 1}}' % version
    with pytest.raises(Damaged, match=said):
        m.parse_sidecar(sidecar, "here")
    begun = m.AttemptEntry(seq=0, attempt=1, writer="w", at=1.0)  # an entry's own version is 1, as ever
    assert m.parse_entry(m.to_bytes(begun), "here") == begun


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"kind": "checkpoint"}',
        b'{"kind": "other", "seq": 1, "attempt": 1, "writer": "w", "at": 1}',
        b'{"kind": "attempt", "seq": 1, "attempt": 1, "writer": "w", "at": 1',
        b'{"kind": "attempt", "seq": 1, "attempt": 1, "writer": "w", "at": NaN}',
        b'{"kind": "attempt", "seq": 1, "attempt": 1, "writer": "a\\nb", "at": 1}',
        b'{"kind": "attempt", "seq": 1, "attempt": 1, "writer": "w", "at": 1, "x": 1}',
        b'{"kind": "attempt", "seq": 1, "attempt": 1, "attempt": 9, "writer": "w", "at": 1}',
        b'{"kind": "attempt", "seq": 1, "attempt": 1' + b"0" * 5000 + b', "writer": "w", "at": 1}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"__class__": "os.system"}',
        b"\x80\x04\x95pickle",
    ],
)
def test_what_is_no_entry_is_refused(data):
    with pytest.raises(Damaged):
        m.parse_entry(data, "here")


def test_a_key_that_stands_twice_is_refused_at_any_depth():
    data = m.to_bytes(entry()).replace(b'"size":3', b'"size":9,"size":3', 1)
    with pytest.raises(Damaged, match="twice"):
        m.parse_entry(data, "here")


def test_too_many_files_are_refused():
    one = m.to_bytes(sidecar(files=()))
    entry_ = '{"path":"%d","size":0,"crc64nvme":"' + CRC + '","node":0}'
    many = ",".join(entry_ % n for n in range(m.MAX_FILES + 1)).encode()
    with pytest.raises(Damaged, match="at most 100000 items"):
        m.parse_sidecar(one.replace(b'"files":[]', b'"files":[' + many + b"]"), "here")


def test_a_document_without_end_is_not_even_parsed(monkeypatch):
    monkeypatch.setattr(m.json, "loads", lambda *_, **__: pytest.fail("parsed"))
    with pytest.raises(Damaged, match="longer than"):
        m.parse_entry(b" " * (m.MAX_DOCUMENT_BYTES + 1), "here")


def sidecar(**changes) -> m.Sidecar:
    given = {"checkpoint_id": "a001-step-1", "attempt": 1, "node": 0, "step": 1, "world_size": 1}
    return m.Sidecar(**{"files": (file(),), "meta": {"loss": 2.5}, **given, **changes})


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        (m.to_bytes(entry()), lambda data: m.parse_entry(data, "here").manifest),
        (m.to_bytes(sidecar()), lambda data: m.parse_sidecar(data, "here")),
    ],
    ids=["entry", "sidecar"],
)
def test_no_flipped_bit_makes_another_document(stored, read):
    """Any one byte of what is stored changes: it is refused, or what is read is what was written."""
    refused = 0
    for position in range(len(stored)):
        for mask in (0x01, 0x20):
            data = bytearray(stored)
            data[position] ^= mask
            try:
                found = read(bytes(data))
            except Damaged:
                refused += 1
            else:
                assert found == read(stored)
    assert refused > len(stored)


def test_a_sidecar_has_files_of_its_node_only():
    with pytest.raises(ValidationError, match="another node"):
        sidecar(files=(file(node=1),))
    with pytest.raises(Damaged):
        m.parse_sidecar(b'{"checkpoint_id": "a001-step-1"}', "here")


def test_an_entry_and_its_manifest_agree():
    made = manifest()
    with pytest.raises(ValidationError, match="another attempt"):
        m.CheckpointEntry(seq=0, attempt=2, writer="w", at=0.0, manifest=made, manifest_sha256=made.sha256())
    with pytest.raises(ValidationError, match="checksum"):
        m.CheckpointEntry(seq=0, attempt=1, writer="w", at=0.0, manifest=made, manifest_sha256="0" * 64)


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (m.FileEntry, lambda: part._entry("a.bin", 3, CRC, 0)),
        (Commit, lambda: in_short(entry())),
    ],
)
def test_threads_that_make_the_first_ones_build_what_checks_them_once(monkeypatch, kind, make):
    """Of two that build it at once one would take the other's away."""
    complete, met = pydantics.complete_dataclass, threading.Barrier(2)
    built: list[type] = []

    def slow(cls, *given, **named):
        built.append(cls)
        with suppress(threading.BrokenBarrierError):
            met.wait(0.3)  # for the other one, who is not to come
        return complete(cls, *given, **named)

    monkeypatch.setattr(pydantics, "complete_dataclass", slow)
    monkeypatch.setattr(kind, "__pydantic_complete__", False)
    with ThreadPoolExecutor(2) as threads:
        made = [threads.submit(make) for _ in range(2)]
        assert [type(each.result()) for each in made] == [kind, kind]
    assert built == [kind]
