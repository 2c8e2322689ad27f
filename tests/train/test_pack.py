"""Small files travel together: which share an object, what it holds, and that taking it apart checks every one."""

from __future__ import annotations

import os
import threading

import pytest
from mgpu_train.checkpoint.log.manifest import MAX_PACK_BYTES, FileEntry
from mgpu_train.checkpoint.threads import in_threads
from mgpu_train.checkpoint.transfer import pack
from mgpu_train.checkpoint.transfer.pack import SMALL_BYTES, Load, Stored, build, loads, read
from mgpu_train.store import Changed, Damaged, NotFound, crc, open_store

MIB = 1 << 20


def shared_out(*sizes: int) -> list[tuple[int | None, list[int]]]:
    """For files of these sizes: the numbers of the packs, None for an object, and the sizes in each."""
    return [(load.number, [size for _, size in load.files]) for load in loads((f"{n}", s) for n, s in enumerate(sizes))]


# --- which share an object --------------------------------------------------------------------------------------------


def test_small_files_are_packed_and_larger_ones_are_objects():
    assert SMALL_BYTES == MIB
    assert MAX_PACK_BYTES == 8 * MIB
    assert shared_out() == []
    assert shared_out(0) == [(0, [0])]
    assert shared_out(MIB, MIB + 1, 5) == [(None, [MIB + 1]), (0, [MIB, 5])]


def test_a_pack_is_closed_before_it_is_too_large():
    assert shared_out(*[MIB] * 17) == [(0, [MIB] * 8), (1, [MIB] * 8), (2, [MIB])]
    assert shared_out(*[MIB] * 7, MIB - 1, 0, 2) == [(0, [MIB] * 7 + [MIB - 1, 0]), (1, [2])]


def test_files_stand_in_a_pack_in_their_order():
    (load,) = loads([("a", 1), ("b/c", 2), ("d", 0)])
    assert load == Load(0, (("a", 1), ("b/c", 2), ("d", 0)))


# --- building one -----------------------------------------------------------------------------------------------------


def built(folder, *files: tuple[str, int]) -> bytes:
    load = Load(0, files)
    data = bytearray(load.size)
    build(folder, load, memoryview(data))
    return bytes(data)


def test_a_pack_is_its_files_one_behind_the_other(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_bytes(b"first")
    (tmp_path / "sub" / "b").write_bytes(b"")
    (tmp_path / "sub" / "c").write_bytes(b"third")
    assert built(tmp_path, ("a", 5), ("sub/b", 0), ("sub/c", 5)) == b"firstthird"


@pytest.mark.parametrize("now", [b"firs", b"first!", b""], ids=["shorter", "longer", "empty"])
def test_a_file_that_changes_while_it_is_packed_fails_the_upload(tmp_path, now):
    (tmp_path / "a").write_bytes(now)
    with pytest.raises(Changed, match="was changed while it was uploaded"):
        built(tmp_path, ("a", 5))


def test_what_became_a_link_or_a_pipe_meanwhile_is_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(b"first")
    (tmp_path / "a").symlink_to("secret")
    os.mkfifo(tmp_path / "b")
    for name in ("a", "b"):
        with pytest.raises(OSError):  # noqa: PT011 - ELOOP, or EINVAL
            built(tmp_path, (name, 5))


# --- taking one apart -------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    """A pack of four files in a folder store, as (store, Stored)."""
    contents, offset, files = {"a": b"first", "b": b"", "c": b"third", "d": b"4"}, 0, []
    for path, data in contents.items():
        sum_ = crc.of_bytes(data)
        files.append(FileEntry(path=path, size=len(data), crc64nvme=sum_, node=0, pack=0, offset=offset))
        offset += len(data)
    whole = b"".join(contents.values())
    store = open_store(f"file://{tmp_path}")
    store.put("k", whole)
    return store, Stored("k", len(whole), crc.of_bytes(whole), packed=True, files=tuple(files))


def test_what_was_packed_is_read(stored):
    assert [(file.path, bytes(data)) for file, data in read(*stored)] == [
        ("a", b"first"),
        ("b", b""),
        ("c", b"third"),
        ("d", b"4"),
    ]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"firstthird5", r"k \(d\): the checksum is not the manifest's"),
        (b"FirsTthiRd5", r"k \(a, c, d\): the checksum"),
        (b"firstthird", r"k \(a, b, c and 1 more files\) has 10 bytes, not 11"),
        (b"firstthird44", "has 12 bytes, not 11"),
        (b"", "has 0 bytes, not 11"),
    ],
)
def test_a_damaged_pack_is_refused_with_the_files_that_are_hit(stored, data, why):
    store, pack = stored
    store.put("k", data)
    with pytest.raises(Damaged, match=why):
        read(store, pack)


def test_bytes_between_the_files_count_too(stored):
    """A file that two nodes have stands in both packs and counts in one: its bytes are still part of the other."""
    store, whole = stored
    hole = Stored(whole.key, whole.size, whole.crc64nvme, packed=True, files=whole.files[2:])
    assert [bytes(data) for _, data in read(store, hole)] == [b"third", b"4"]
    store.put("k", b"First" + b"third4")
    with pytest.raises(Damaged, match=r"k \(c, d\): its checksum is [0-9a-f]{16}, not"):
        read(store, hole)


def test_a_pack_that_is_gone_names_what_went_with_it(stored):
    store, pack = stored
    store.delete("k")
    with pytest.raises(NotFound, match=r"k \(a, b, c and 1 more files\) is missing"):
        read(store, pack)


def test_a_pack_without_end_is_not_read_into_memory(stored, monkeypatch):
    store, whole = stored
    monkeypatch.setattr(pack, "MAX_PACK_BYTES", 20)
    store.put("k", bytes(21))
    with pytest.raises(Damaged, match="21 bytes where at most 20 make sense"):
        read(store, whole)


# --- the threads that do it -------------------------------------------------------------------------------------------


def test_results_come_in_order_and_things_are_drawn_as_they_are_needed():
    drawn, running, most = [], 0, 0
    lock, together = threading.Lock(), threading.Barrier(3, timeout=10)

    def things():
        for n in range(9):
            drawn.append(n)
            yield n

    def work(n):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            assert len(drawn) <= n + 3
        together.wait()  # three at a time, or it breaks
        with lock:
            running -= 1
        return n * n

    assert in_threads(work, things(), 3) == [n * n for n in range(9)]
    assert most == 3
    assert in_threads(work, [], 3) == []


def test_after_a_failure_nothing_more_is_begun_and_nothing_runs_on():
    begun, ended = [], []
    failing = threading.Event()

    def work(n):
        begun.append(n)
        if n == 1:
            failing.set()
            raise ValueError("one")
        assert failing.wait(10)
        ended.append(n)

    with pytest.raises(ValueError, match="one"):
        in_threads(work, range(100), 2)
    assert len(begun) < 100
    assert sorted(begun) == sorted([*ended, 1])


def test_things_that_cannot_be_drawn_are_a_failure():
    def things():
        yield 1
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        in_threads(lambda n: n, things(), 2)
