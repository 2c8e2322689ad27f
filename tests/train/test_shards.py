"""Shards of torch.distributed.checkpoint without torch: what they hold, and that nothing hostile in them is run."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from mgpu_train import pickles
from mgpu_train.checkpoint.formats import archives
from mgpu_train.checkpoint.formats.archives import Unsupported
from mgpu_train.checkpoint.formats.rows import Ranks, files
from mgpu_train.checkpoint.formats.shards import Chunk, Piece, Shards, Tensor, open_shards
from mgpu_train.pickles import Call, Name, NotPlain
from mgpu_train.store.base import Damaged, NotFound, StoreError
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.serialization import set_crc32_options

STATE = {
    "model": {"w": torch.arange(24.0).reshape(4, 6), "b": torch.tensor([1.5, -2.0]).bfloat16()},
    "progress": {"step": 3, "samples": 96},
    "optimizer": {"groups": [{"lr": 0.5, "betas": (0.9, 0.95), "fused": True, "by": None}]},
    "odd": slice(1, 2),
}
Change = Callable[[Metadata], None]


def save(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it saves in a single process
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "step-3", STATE)


def metadata(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - torch's own, or what a test made of it


def change(folder: Path, how: Change) -> None:
    """Writes other metadata, by torch's own classes."""
    content = metadata(folder)
    how(content)
    (folder / ".metadata").write_bytes(pickle.dumps(content))


def data(shards: Shards, name: str) -> bytes:
    tensor = shards.tensors[name]
    return b"".join(piece for chunk in tensor.chunks for piece in shards.read(tensor, chunk))


def read_all(folder: Path) -> None:
    """Opens a folder and reads all that is in it."""
    shards = open_shards(folder)
    for name in shards.tensors:
        data(shards, name)
    for name in shards.objects:
        if name != "odd":
            shards.value(name)


def test_names_shapes_dtypes_and_bytes_are_those_that_were_saved(folder):
    shards = open_shards(folder)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in shards.tensors.items()} == {
        "model.w": ("float32", (4, 6)),
        "model.b": ("bfloat16", (2,)),
    }
    assert data(shards, "model.w") == struct.pack("<24f", *range(24))
    assert data(shards, "model.b") == bytes.fromhex("c03f00c0")


def test_what_is_no_tensor_can_be_read_when_it_is_plain(folder):
    shards = open_shards(folder)
    found = {name: shards.value(name) for name in shards.objects if name != "odd"}
    assert found == {
        "progress.step": 3, "progress.samples": 96, "optimizer.groups.0.lr": 0.5,
        "optimizer.groups.0.betas": (0.9, 0.95), "optimizer.groups.0.fused": True, "optimizer.groups.0.by": None,
    }  # fmt: skip
    with pytest.raises(Unsupported, match=r"odd has a \w+\.slice"):
        shards.value("odd")
    with pytest.raises(KeyError):
        shards.value("nothing")


def nested(depth: int) -> tuple[Any, ...]:
    value: tuple[Any, ...] = ()
    for _ in range(depth):
        value = (value,)
    return value


def test_collections_are_plain_and_what_is_nested_too_deep_is_not(tmp_path):
    # DCP takes lists and dictionaries apart, tuples not
    good = ({"a": [1, (2.5, "x" * 300)], 3: {}}, 1 << 70, -1, 255, 65535, -(1 << 31), b"xy", b"", False, nested(40))
    shards = open_shards(save(tmp_path / "in", {"good": good, "deep": nested(60), "w": torch.ones(1)}))
    assert shards.value("good") == good
    with pytest.raises(Unsupported, match="more than 50 deep"):
        shards.value("deep")


def test_a_folder_without_metadata_and_files_that_are_missing_are_named(folder):
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(NotFound, match=r"__0_0\.distcp is missing: fetch the files of all nodes"):
        open_shards(folder)
    (folder / ".metadata").unlink()
    with pytest.raises(NotFound, match=r"\.metadata"):
        open_shards(folder)


# --- what contradicts itself, or the files ---


def entry(content: Metadata) -> TensorStorageMetadata:
    found = content.state_dict_metadata["model.w"]
    assert isinstance(found, TensorStorageMetadata)
    return found


def place(content: Metadata) -> Any:
    return next(info for index, info in content.storage_data.items() if index.fqn == "model.w")


def chunks(*rectangles: tuple[list[int], list[int]]) -> Change:
    """The tensor `model.w` consists of these: offsets and sizes."""

    def how(content: Metadata) -> None:
        size = torch.Size
        entry(content).chunks = [ChunkStorageMetadata(size(offset), size(shape)) for offset, shape in rectangles]
        for offset, _ in rectangles:
            content.storage_data[MetadataIndex("model.w", offset)] = place(content)

    return how


def other_size(content: Metadata) -> None:
    entry(content).size = torch.Size([4, 7])


def other_dtype(content: Metadata) -> None:
    entry(content).properties = TensorProperties(dtype=torch.int32)


def other_shape(content: Metadata) -> None:
    entry(content).size = torch.Size([6, 4])
    chunks(([0, 0], [6, 4]))(content)


def elsewhere(**changes: Any) -> Change:
    def how(content: Metadata) -> None:
        for name, value in changes.items():
            setattr(place(content), name, value)

    return how


def nowhere(content: Metadata) -> None:
    content.storage_data = {index: info for index, info in content.storage_data.items() if index.fqn != "model.w"}


CONTRADICTIONS: dict[str, tuple[Change, str]] = {
    "larger": (other_size, "do not make a whole"),
    "a hole": (chunks(([0, 0], [2, 6]), ([3, 0], [1, 6])), "do not make a whole"),
    "overlap": (chunks(([0, 0], [2, 6]), ([1, 0], [2, 6])), "overlap"),
    "overlap of columns": (chunks(([0, 0], [4, 3]), ([0, 2], [4, 3])), "overlap"),
    "overlap of corners": (
        chunks(([0, 0], [2, 4]), ([1, 3], [3, 3]), ([3, 0], [1, 3]), ([0, 4], [1, 2])),
        "not make|overlap",
    ),
    "outside": (chunks(([1, 0], [4, 6])), "lies outside"),
    "other axes": (chunks(([0], [24])), "lies outside"),
    "other shape": (other_shape, r"is float32\[4, 6\]; .metadata says float32\[6, 4\]"),
    "other dtype": (other_dtype, r"says int32\[4, 6\]"),
    "nowhere": (nowhere, "not what torch.distributed.checkpoint writes"),
    "behind the end": (elsewhere(offset=1 << 40), "bytes; .metadata says that there are"),
    "too long": (elsewhere(length=1 << 40), "bytes; .metadata says that there are"),
    "too short": (elsewhere(length=700), "no archive of torch.save"),
    "beside": (elsewhere(offset=3), "no archive of torch.save|is not where|is not as it was"),
    "before the beginning": (elsewhere(offset=-1), "lies in no file of this folder"),
    "another folder": (elsewhere(relative_path="../__0_0.distcp"), "lies in no file of this folder"),
    "absolute": (elsewhere(relative_path="/etc/passwd"), "lies in no file of this folder"),
    "no name": (elsewhere(relative_path=3), "lies in no file of this folder"),
    "fraction": (elsewhere(offset=1.5), "lies in no file of this folder"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_metadata_that_contradict_themselves_or_the_files_are_damaged(folder, name):
    how, message = CONTRADICTIONS[name]
    change(folder, how)
    with pytest.raises(Damaged, match=message):
        read_all(folder)


def test_chunks_that_tile_in_any_way_are_accepted(folder):
    change(folder, chunks(([0, 0], [1, 4]), ([0, 4], [3, 2]), ([1, 0], [3, 1]), ([1, 1], [2, 3]), ([3, 1], [1, 5])))
    assert len(open_shards(folder).tensors["model.w"].chunks) == 5


def test_a_chunk_that_stands_twice_counts_once_and_an_empty_one_not_at_all(folder):
    change(folder, chunks(([0, 0], [4, 6]), ([0, 0], [4, 6]), ([4, 0], [0, 6])))
    assert len(data(open_shards(folder), "model.w")) == 24 * 4


def test_a_file_that_is_a_link_or_too_large_is_refused(folder, tmp_path, monkeypatch):
    (folder / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (folder / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="symbolic link"):
        open_shards(folder)
    monkeypatch.setattr(pickles, "MAX_BYTES", 100)
    with pytest.raises(Damaged, match="100 are the limit"):
        open_shards(folder)


def test_a_file_may_be_as_large_as_files_are(folder):
    far, path = 1 << 40, folder / "__0_0.distcp"
    content = path.read_bytes()
    with path.open("wb") as file:  # all of it but the end is a hole
        file.seek(far)
        file.write(content)
    for info in (changed := metadata(folder)).storage_data.values():
        info.offset += far
    (folder / ".metadata").write_bytes(pickle.dumps(changed))
    assert data(open_shards(folder), "model.w") == struct.pack("<24f", *range(24))


def test_what_an_extension_of_torch_has_written_is_left_to_torch(folder):
    change(folder, elsewhere(transform_descriptors=["zstd"]))
    with pytest.raises(Unsupported, match="through an extension"):
        open_shards(folder)


# --- what the ranks of a node read ---


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 8, 10, 17, 64])
def test_ranks_have_the_rows_that_torch_gives_them(length):
    """Uneven ones and none included; ranks of one node have theirs in one piece."""
    for world_size in (1, 2, 3, 4, 8, 16):
        of_torch = []
        for rank in range(world_size):
            local, offset = _compute_local_shape_and_global_offset((length, 3), (world_size,), [rank], [Shard(0)])
            of_torch.append(range(offset[0], offset[0] + local[0]))
            assert Ranks(rank, 1, world_size).rows(length) == of_torch[-1]
        for count in (each for each in (2, 4) if world_size % each == 0):
            for first in range(0, world_size, count):
                each = [row for rows in of_torch[first : first + count] for row in rows]
                assert list(Ranks(first, count, world_size).rows(length)) == each


def chunk(rows: range, columns: range, file: int) -> Chunk:
    return Chunk((rows.start, columns.start), (len(rows), len(columns)), Piece(str(file), 0, 1))


WHOLE = range(6)
ROWS = tuple(chunk(range(3 * rank, min(10, 3 * rank + 3)), WHOLE, rank) for rank in range(4))
COLUMNS = (chunk(range(10), range(3), 0), chunk(range(10), range(3, 6), 1))
READ: dict[str, tuple[tuple[Chunk, ...], bool, list[set[str]]]] = {
    "by rows": (ROWS, True, [{"0", "1"}, {"1", "2"}, {"2", "3"}]),
    "by columns": (COLUMNS, True, [{"0", "1"}] * 3),
    "by both": ((*COLUMNS[:1], chunk(range(5), range(3, 6), 1), chunk(range(5, 10), range(3, 6), 2)), True,
                [{"0", "1", "2"}] * 3),
    "by rows, of which there is one": ((chunk(range(1), WHOLE, 2),), True, [{"2"}, set(), set()]),
    "whole": ((chunk(range(10), WHOLE, 3),), False, [{"3"}] * 3),
    "of nothing": ((), True, [set(), set(), set()]),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_rank_reads_the_files_of_its_rows_and_all_of_what_is_not_cut_so(name):
    chunks, sharded, expected = READ[name]
    length = max((each.offset[0] + each.shape[0] for each in chunks), default=0)
    tensor = Tensor("w", "float32", (length, 6), chunks, sharded)
    shards = Shards(Path(), {"w": tensor}, {"step": Piece("common", 0, 1)})
    assert [files(shards, Ranks(rank, 1, 3)) for rank in range(3)] == [{"common", *each} for each in expected]


# --- an archive ---


def rezip(
    folder: Path, tensor: Any = None, *, how: Callable[[dict[str, bytes]], None] | None = None, **zipped: Any
) -> None:
    """The folder's file holds another archive for `model.w`: what torch makes of `tensor`, changed by `how`."""
    buffer = io.BytesIO()
    torch.save(STATE["model"]["w"] if tensor is None else tensor, buffer)
    if how:
        with zipfile.ZipFile(buffer) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        how(members)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", **zipped) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
    path = folder / "__0_0.distcp"
    with path.open("ab") as file:
        offset = file.tell()
        file.write(buffer.getvalue())
    change(folder, elsewhere(offset=offset, length=len(buffer.getvalue())))


def without(name: str) -> Callable[[dict[str, bytes]], None]:
    return lambda members: members.__delitem__(f"archive/{name}")


def replaced(name: str, old: bytes, new: bytes) -> Callable[[dict[str, bytes]], None]:
    def how(members: dict[str, bytes]) -> None:
        content = members[f"archive/{name}"]
        assert old in content
        members[f"archive/{name}"] = content.replace(old, new)

    return how


PICKLE = "data.pkl"
STRIDES = b"K\x06K\x01\x86"  # (6, 1)
NAMED = b"\x07\x00\x00\x00"  # a text of seven bytes
ARCHIVES: dict[str, tuple[Callable[[dict[str, bytes]], None], type[StoreError], str]] = {
    "no pickle": (without(PICKLE), Damaged, "no archive of torch.save"),
    "no bytes": (without("data/0"), Damaged, "has no data/0"),
    "too few bytes": (replaced("data/0", struct.pack("<f", 23), b""), Damaged, "92 bytes, too few for float32"),
    "big-endian": (replaced("byteorder", b"little", b"big"), Unsupported, "little-endian"),
    "an order of 20 bytes": (replaced("byteorder", b"little", b"l" * 20), Damaged, "16 are the limit"),
    "another class": (
        replaced(PICKLE, b"FloatStorage", b"QInt8Storage"),
        Unsupported,
        "QInt8Storage, which only torch",
    ),
    "another function": (replaced(PICKLE, b"_rebuild_tensor_v2", b"_rebuild_qtensor"), Unsupported, "no plain tensor"),
    "another dtype": (replaced(PICKLE, b"FloatStorage", b"IntStorage"), Damaged, r"is int32\[4, 6\]"),
    "a wide dtype": (replaced(PICKLE, b"FloatStorage", b"DoubleStorage"), Damaged, "too few for float64"),
    "a far first element": (replaced(PICKLE, b"QK\x00K\x04", b"QK\x01K\x04"), Damaged, "too few"),
    "a negative stride": (replaced(PICKLE, STRIDES, b"K\x06J\xff\xff\xff\xff\x86"), Damaged, "impossible shape"),
    "a long stride": (replaced(PICKLE, STRIDES, b"K\x07K\x01\x86"), Damaged, "too few"),
    "strides of another rank": (replaced(PICKLE, STRIDES, b"K\x06\x85"), Damaged, "impossible shape"),
    "no storage": (replaced(PICKLE, NAMED + b"storage", NAMED + b"garbage"), Damaged, "without a storage"),
    "a tuple for a storage": (replaced(PICKLE, b"QK\x00K\x04", b"K\x00K\x04"), Damaged, "without a storage"),
    "too few arguments": (replaced(PICKLE, b"\x89ccoll", b"ccoll"), Damaged, "without a shape"),
    "a pickle that is cut": (replaced(PICKLE, b".", b""), Damaged, "cannot be read"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_that_is_not_as_torch_writes_it_is_refused(folder, name):
    how, error, message = ARCHIVES[name]
    rezip(folder, how=how)
    with pytest.raises(error, match=message):
        read_all(folder)


def test_a_compressed_archive_is_refused_before_it_is_unpacked(folder):
    rezip(folder, how=lambda _: None, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(Damaged, match="compressed or encrypted"):
        read_all(folder)


def test_a_directory_without_end_is_not_read(folder, monkeypatch):
    monkeypatch.setattr(archives, "_LARGEST_DIRECTORY", 300)
    with pytest.raises(Damaged, match="directory is too long"):
        read_all(folder)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (lambda: torch.zeros(4, 6).to_sparse(), "_rebuild_sparse_tensor"),
        (lambda: torch.zeros(4, 6, dtype=torch.complex64).conj(), "resolve_conj"),
        (lambda: [1, 2], "no plain tensor but list"),
        (lambda: torch.quantize_per_tensor(torch.zeros(4, 6), 1.0, 0, torch.qint8), "_rebuild_qtensor"),
    ],
    ids=["sparse", "conjugated", "list", "quantized"],
)
def test_what_only_torch_can_read_is_left_to_torch(folder, tensor, reason):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says of some that they will go
        rezip(folder, tensor())
    with pytest.raises(Unsupported, match=reason):
        read_all(folder)


def test_a_parameter_is_a_tensor(folder):
    rezip(folder, torch.nn.Parameter(STATE["model"]["w"] + 1))
    assert data(open_shards(folder), "model.w") == struct.pack("<24f", *range(1, 25))


def test_a_number_in_the_memory_of_many_is_read(tmp_path):
    torch.save(torch.arange(8.0)[3], tmp_path / "one")
    with archives.archive(tmp_path / "one", 0, (tmp_path / "one").stat().st_size, "one") as found:
        assert b"".join(found.read(found.tensor())) == struct.pack("<f", 3)


def test_one_number_that_stands_for_many_is_read(folder):
    rezip(folder, torch.tensor([[3.0]]).expand(4, 6))
    assert data(open_shards(folder), "model.w") == struct.pack("<24f", *24 * [3])


def test_bytes_that_change_or_go_while_they_are_read_are_noticed(tmp_path):
    torch.save(torch.arange(8.0), path := tmp_path / "eight")
    size, content = path.stat().st_size, path.read_bytes()
    with archives.archive(path, 0, size, "eight") as found:
        raw = found.tensor()
        path.write_bytes(content.replace(b"little", b"bitten"))
        with pytest.raises(Damaged, match=r"byteorder of eight in .* is not as it was written"):
            found.tensor()
        os.truncate(path, raw.at)
        with pytest.raises(Damaged, match="became shorter while it was read"):
            list(found.read(raw))


def test_what_torch_wrote_without_checksums_is_read(tmp_path):
    set_crc32_options(False)
    try:
        folder = save(tmp_path / "step-3", STATE)
    finally:
        set_crc32_options(True)
    assert data(open_shards(folder), "model.w") == struct.pack("<24f", *range(24))
    read_all(folder)


@pytest.mark.parametrize("order", ["rows", "columns"])
def test_a_bit_that_flipped_in_a_tensor_is_noticed(tmp_path, order):
    matrix = torch.arange(24.0).reshape(4, 6)
    folder = save(tmp_path / "in", {"w": matrix if order == "rows" else matrix.t()})
    path = folder / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[content.index(struct.pack("<3f", 3, 4, 5))] ^= 1
    path.write_bytes(content)
    with pytest.raises(Damaged, match="CRC-32"):
        data(open_shards(folder), "w")


def test_a_file_that_is_cut_anywhere_is_noticed(folder):
    path = folder / "__0_0.distcp"
    content = path.read_bytes()
    for length in range(0, len(content), 97):
        path.write_bytes(content[:length])
        with pytest.raises(StoreError):
            read_all(folder)


# --- pickles: nothing is run ---


class Evil:
    """Would make a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_call_stays_a_name(tmp_path, protocol):
    hostile = pickle.dumps([Evil(tmp_path / "made"), (1, None)], protocol)
    found, plain = pickles.loads(hostile)
    assert type(found) is Call
    assert found.name.endswith(".mkdir")
    assert found.args == (str(tmp_path / "made"),)
    assert plain == (1, None)
    assert not (tmp_path / "made").exists()
    pickle.loads(hostile)  # noqa: S301 - the bait is good
    assert (tmp_path / "made").exists()


def test_hostile_metadata_are_refused_and_nothing_is_run(folder, tmp_path):
    hostile = Evil(tmp_path / "made")
    for how in (
        lambda content: setattr(content, "storage_data", hostile),
        lambda content: content.state_dict_metadata.__setitem__("model.w", hostile),
        lambda content: setattr(entry(content), "size", hostile),
        lambda content: setattr(entry(content), "chunks", [hostile]),
        lambda content: setattr(entry(content).properties, "dtype", hostile),
    ):
        before = (folder / ".metadata").read_bytes()
        change(folder, how)
        with pytest.raises((Damaged, Unsupported)):
            read_all(folder)
        (folder / ".metadata").write_bytes(before)
    rezip(folder, hostile)
    with pytest.raises(Unsupported, match="no plain tensor"):
        read_all(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(hostile))
    with pytest.raises(Unsupported, match=r"mkdir where torch\.distributed\.checkpoint\.metadata\.Metadata is known"):
        open_shards(folder)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("where", ["storage_data", "state_dict_metadata"])
def test_a_name_that_is_no_text_is_refused_before_it_is_compared(folder, where):
    """What is nested deep enough, or refers twice to itself at each level, can be neither compared nor shown."""

    def rename(content: Metadata) -> None:
        if where == "storage_data":
            object.__setattr__(next(iter(content.storage_data)), "fqn", nested(20))
        else:
            content.state_dict_metadata[Evil(folder)] = entry(content)  # type: ignore[index]

    change(folder, rename)
    with pytest.raises(Damaged, match=r"a (tuple|Call) stands where a name should"):
        open_shards(folder)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "before seeing STOP"),
    "no end": (b"\x80\x04N", "before seeing STOP"),
    "nothing on the stack": (b".", "IndexError"),
    "no mark": (b"t.", "IndexError"),
    "a newer protocol": (b"\x80\x06N.", "protocol 6"),
    "an instance": (b"(ios\nsystem\n.", "instruction INST"),
    "an object": (b"(cos\nsystem\no.", "instruction OBJ"),
    "an extension": (b"\x82\x01.", "instruction EXT1"),
    "an evaluated text": (b"S'x'\n.", "instruction STRING"),
    "a number as text": (b"I99\n.", "instruction INT"),
    "a buffer": (b"\x97.", "instruction NEXT_BUFFER"),
    "a number of very many digits": (b"I" + b"9" * 5000 + b"\n.", "ValueError"),
    "half a character": (b"X\x03\0\0\0\xed\xa0\x80.", "UnicodeEncodeError"),
    "a byte array": (b"\x96" + b"\xff" * 8 + b".", "byte"),
    "a text longer than the pickle": (b"X\xff\xff\xff\xffabc.", "expected 4294967295 bytes"),
    "a text that is none": (b"X\x02\0\0\0\xff\xfe.", "UnicodeDecodeError"),
    "a name that does not end": (b"c" + b"x" * 1000, "no newline"),
    "a memory that is not there": (b"h\x05.", "KeyError"),
    "a tuple of nothing": (b"\x87.", "what is not there"),
    "a call of a text": (b"X\x01\0\0\0x)R.", "no name"),
    "a call of a call": (b"cos\nsystem\n)R)R.", "no name"),
    "a call without arguments": (b"cos\nsystem\nNR.", "no name"),
    "a name that is a number": (b"K\x01K\x02\x93.", "no text"),
    "a state of a list": (b"]Nb.", "takes none"),
    "a second state": (b"cx\ny\n)R}b}b.", "takes none"),
    "an item of a tuple": (b")Na.", "no list"),
    "a key of a list": (b"]K\x01Ns.", "no dictionary"),
    "half an item": (b"}(Nu.", "no dictionary"),
    "a list as a key": (b"}]Ns.", "list as a key"),
    "a deep tuple as a key": (b"})" + b"\x85" * 200_000 + b"Ns.", "tuple as a key"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_pickle_that_is_none_or_wants_more_than_data_is_refused(name):
    program, message = HOSTILE[name]
    with pytest.raises(NotPlain, match=message):
        pickles.loads(program)


def test_a_far_place_in_memory_costs_nothing():
    assert pickles.loads(b"Nr\xff\xff\xff\xffK\x01.") == 1


def test_names_and_states_are_kept():
    assert pickles.loads(pickle.dumps(Path, 2)) == Name("pathlib", "Path")
    found = pickles.loads(pickle.dumps(ChunkStorageMetadata(torch.Size([1]), torch.Size([2]))))
    assert (found.name, found.args) == ("torch.distributed.checkpoint.metadata.ChunkStorageMetadata", ())
    assert [size.args for size in found.state.values()] == [((1,),), ((2,),)]


def test_what_python_pickles_of_plain_values_is_read_the_same():
    values = [0, 1, -1, 255, 256, 70_000, -(1 << 40), 1 << 100, 2.5, True, None, "ü" * 200, b"x" * 300, (), (1, (2,)),
              {"a": [1, {"b": ()}]}, list(range(2000)), {str(n): n for n in range(2000)}]  # fmt: skip
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickles.loads(pickle.dumps(values, protocol)) == values


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_random_damage_ends_in_an_error_of_ours_or_in_nothing(folder, name):
    chance, path = random.Random(7), folder / name
    content = path.read_bytes()
    refused = 0
    for _ in range(400):
        wrong = bytearray(content)
        for _ in range(chance.randint(1, 4)):
            wrong[chance.randrange(len(wrong))] = chance.randrange(256)
        path.write_bytes(wrong[: chance.choice([len(wrong), chance.randrange(len(wrong))])])
        try:
            read_all(folder)
        except StoreError:
            refused += 1
    assert refused > 200  # an archive has bytes that mean nothing
