"""TFRecord: what protobuf and TensorFlow wrote is read, each damage is named, and an index is made once."""

from __future__ import annotations

import base64
import fcntl
import io
import itertools
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from awscrt.checksums import crc32c
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from mgpu_train.data import image_records, tfrecord
from mgpu_train.data.corpus import Corpus
from mgpu_train.data.images import Images, open_splits
from mgpu_train.errors import TrainError
from PIL import Image

# --- files as others write them ---------------------------------------------------------------------------------------


def message_classes() -> Any:
    """Google's own encoder of tf.train.Example, by the fields of tensorflow/core/example/{example,feature}.proto."""
    file = descriptor_pb2.FileDescriptorProto(name="mgpu_test_example.proto", package="tensorflow", syntax="proto3")

    def message(name: str, of: Any, *parts: tuple[str, int, int, int, str]) -> Any:
        made = of.add(name=name)
        for field, number, label, kind, type_name in parts:
            made.field.add(name=field, number=number, label=label, type=kind, type_name=type_name or None)
        return made

    one, many, message_, text, data, number, real = 1, 3, 11, 9, 12, 3, 2
    message("BytesList", file.message_type, ("value", 1, many, data, ""))
    message("FloatList", file.message_type, ("value", 1, many, real, ""))
    message("Int64List", file.message_type, ("value", 1, many, number, ""))
    feature = message(
        "Feature", file.message_type,
        ("bytes_list", 1, one, message_, ".tensorflow.BytesList"),
        ("float_list", 2, one, message_, ".tensorflow.FloatList"),
        ("int64_list", 3, one, message_, ".tensorflow.Int64List"),
    )  # fmt: skip
    feature.oneof_decl.add(name="kind")
    for field in feature.field:
        field.oneof_index = 0
    features = message(
        "Features", file.message_type, ("feature", 1, many, message_, ".tensorflow.Features.FeatureEntry")
    )
    entry = message(
        "FeatureEntry", features.nested_type,
        ("key", 1, one, text, ""), ("value", 2, one, message_, ".tensorflow.Feature"),
    )  # fmt: skip
    entry.options.map_entry = True
    message("Example", file.message_type, ("features", 1, one, message_, ".tensorflow.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


EXAMPLE = message_classes()


def example(values: Mapping[str, Any]) -> bytes:
    made = EXAMPLE()
    for name, value in values.items():
        each = list(value) if isinstance(value, list | tuple) else [value]
        kind = {bytes: "bytes_list", float: "float_list", int: "int64_list"}[type(each[0])]
        getattr(made.features.feature[name], kind).value.extend(each)
    return made.SerializeToString()


def framed(record: bytes) -> bytes:
    def masked(data: bytes) -> bytes:
        crc = crc32c(data)
        return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32)

    length = struct.pack("<Q", len(record))
    return length + masked(length) + record + masked(record)


def png(value: int, size: int = 12) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((size, size, 3), value, np.uint8)).save(file, "PNG")
    return file.getvalue()


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    path.write_bytes(b"".join(framed(example(record)) for record in records))
    return path


# Two records, as tensorflow-cpu 2.21 wrote them: tf.io.TFRecordWriter, tf.train.Example and tf.io.encode_png
OF_TENSORFLOW = base64.b64decode(
    "6QAAAAAAAAA1M/SJCuYBChsKEWltYWdlL2NsYXNzL2xhYmVsEgYaBAoCrAIKJgoWaW1hZ2Uvb2JqZWN0L2Jib3gveG1pbhIMEgoKCAAAgD4AAA"
    "A/ChcKDGltYWdlL2Zvcm1hdBIHCgUKA3BuZwpkCg1pbWFnZS9lbmNvZGVkElMKUQpPiVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91Jpz"
    "AAAAFklEQVQImWNkZ2dnYGBgYmBgYGBgAAABJgAZsbNfLgAAAABJRU5ErkJgggogCgdudW1iZXJzEhUaEwoRAP///////////wGAgICAgCBtef"
    "ji6QAAAAAAAAA1M/SJCuYBChsKEWltYWdlL2NsYXNzL2xhYmVsEgYaBAoCrQIKJgoWaW1hZ2Uvb2JqZWN0L2Jib3gveG1pbhIMEgoKCAAAgD4A"
    "AAA/ChcKDGltYWdlL2Zvcm1hdBIHCgUKA3BuZwpkCg1pbWFnZS9lbmNvZGVkElMKUQpPiVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91J"
    "pzAAAAFklEQVQImWPk4OBgYGBgYmBgYGBgAAABSgAcMqfihgAAAABJRU5ErkJgggogCgdudW1iZXJzEhUaEwoRAP///////////wGAgICAgCDn"
    "k05D"
)

TFDS = [{"image": png(10 * number), "label": number % 3, "file_name": b"x.png"} for number in range(8)]


def tfds(root: Path) -> Path:
    write(root / "toy-train.tfrecord-00000-of-00002", TFDS[:4])
    write(root / "toy-train.tfrecord-00001-of-00002", TFDS[4:6])
    write(root / "toy-test.tfrecord-00000-of-00001", TFDS[6:])
    (root / "dataset_info.json").write_text("{}")
    return root


def shown(images: Images) -> list[tuple[int, int]]:
    """Of each image its only value, and its class."""
    read = [images.read(number) for number in range(len(images))]
    assert {each.shape for each in read} == {(3, 12, 12)}
    return [(int(each.max()), images.label(number)) for number, each in enumerate(read)]


# --- what is read -----------------------------------------------------------------------------------------------------


def test_an_example_is_what_protobuf_says():
    values = {
        "empty": b"", "several": [b"a", b"\x00" * 300], "numbers": [0, 1, 127, 128, -1, 2**63 - 1, -(2**63)],
        "floats": [1.5, -2.0], "ä": b"utf-8",
    }  # fmt: skip
    found = tfrecord.example(memoryview(example(values)))
    assert found == {
        "empty": [b""], "several": values["several"], "numbers": values["numbers"], "floats": [], "ä": [b"utf-8"],
    }  # fmt: skip
    assert tfrecord.example(memoryview(example(values)), ["numbers", "none"]) == {"numbers": values["numbers"]}


def test_numbers_that_are_not_packed_are_read_too():
    """As proto2 writes lists: a field each."""
    feature = b"\x1a" + bytes([4]) + b"\x08\x05\x08\x07"  # Int64List {value: 5, value: 7}
    entry = b"\x0a\x01n" + b"\x12" + bytes([len(feature)]) + feature
    features = b"\x0a" + bytes([len(entry)]) + entry
    assert tfrecord.example(memoryview(b"\x0a" + bytes([len(features)]) + features)) == {"n": [5, 7]}


def test_an_example_that_is_cut_anywhere_is_none_or_has_less():
    """Never another error, and no endless loop."""
    whole = example({"image": png(7), "label": 300})
    for end in range(len(whole)):
        try:
            assert tfrecord.example(memoryview(whole[:end])) in ({}, {"image": [png(7)]}, {"label": [300]})
        except ValueError:
            pass


def test_what_tensorflow_wrote_is_read(tmp_path):
    (tmp_path / "train-00000-of-00001").write_bytes(OF_TENSORFLOW)
    (tmp_path / "validation-00000-of-00001").write_bytes(OF_TENSORFLOW)
    (_, first), _ = tfrecord.records(tmp_path / "train-00000-of-00001")
    found = tfrecord.example(first)
    assert found.pop("image/encoded")[0][1:4] == b"PNG"  # type: ignore[index]
    assert found == {
        "image/class/label": [300], "image/format": [b"png"], "image/object/bbox/xmin": [], "numbers": [0, -1, 2**40],
    }  # fmt: skip
    training, validation = open_splits(str(tmp_path), 12)
    assert shown(training) == shown(validation) == [(7, 300), (8, 301)]
    assert training.fingerprint == validation.fingerprint


def test_files_of_tensorflows_data_sets_are_read(tmp_path):
    training, validation = open_splits(str(tfds(tmp_path)), 12)
    assert shown(training) == [(0, 0), (10, 1), (20, 2), (30, 0), (40, 1), (50, 2)]
    assert shown(validation) == [(60, 0), (70, 1)]
    assert (training.classes, validation.classes) == (3, 3)


def test_files_of_tensorflows_models_are_read_and_a_test_beside_a_validation_is_not(tmp_path):
    def record(value: int, label: int) -> dict[str, Any]:
        return {"image/encoded": png(value), "image/class/label": label, "image/object/bbox/xmin": [0.25]}

    write(tmp_path / "train-00000-of-00001", [record(1, 1), record(2, 2)])
    write(tmp_path / "validation-00000-of-00001", [record(3, 2)])
    write(tmp_path / "test-00000-of-00001", [{"image/encoded": png(4), "image/class/label": -1}])
    training, validation = open_splits(str(tmp_path), 12)
    assert (shown(training), shown(validation)) == ([(1, 1), (2, 2)], [(3, 2)])


@pytest.mark.parametrize("name", ["val00-1.tfrec", "validation0.tfrecord", "eval-00000-of-00001.tfrecord", "dev.tfrec"])
def test_whatever_a_file_for_validation_is_called_nothing_of_it_is_trained_on(tmp_path, name):
    for file, value in (("train00-1.tfrec", 1), (name, 2), ("test00-1.tfrec", 3)):
        write(tmp_path / file, [{"image": png(value), "label": 0}])
    training, validation = open_splits(str(tmp_path), 12)
    assert (shown(training), shown(validation)) == ([(1, 0)], [(2, 0)])


def test_files_without_a_record_are_told(tmp_path):
    write(tmp_path / "a.tfrecord", [])
    with pytest.raises(TrainError, match=r"without a record: a\.tfrecord"):
        open_splits(str(tmp_path), 12)


def test_one_in_ten_is_held_out_where_no_file_is_for_validation(tmp_path):
    write(tmp_path / "all.tfrecords", [{"image": png(number), "label": 0} for number in range(100)])
    training, validation = open_splits(str(tmp_path), 12)
    seen = [value for part in (training, validation) for value, _ in shown(part)]
    assert sorted(seen) == list(range(100))
    assert 3 <= len(validation) <= 20


def test_images_are_cut_to_one_size(tmp_path):
    write(tmp_path / "a.tfrecord", [{"image": png(value, size=30), "label": 0} for value in range(20)])
    assert open_splits(str(tmp_path), 12)[0].read(0).shape == (3, 12, 12)


# --- damage -----------------------------------------------------------------------------------------------------------


def damaged(path: Path, at: int, by: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= by
    path.write_bytes(data)


@pytest.mark.parametrize("seed", range(4))
def test_a_bit_that_flips_is_found_and_its_record_named(tmp_path, seed):
    """In the length, in its checksum, in the bytes and in theirs."""
    path = tfds(tmp_path) / "toy-train.tfrecord-00000-of-00002"
    found = [record for record, _ in tfrecord.records(path)]
    record, where = found[2], seed % 4
    at = (record.begin, record.begin + 8, record.start + record.length // 2, record.end - 1)[where]
    damaged(path, at, 1 << seed)
    with pytest.raises(TrainError, match=rf"{path.name}, record 2 at byte {record.begin}[,:]"):
        shown(open_splits(str(tmp_path), 12)[0])


def test_a_record_that_is_damaged_later_is_found_where_it_is_read(tmp_path):
    """The file keeps its size and its time: the index is still believed, the bytes are not."""
    path = tfds(tmp_path) / "toy-train.tfrecord-00000-of-00002"
    training, _ = open_splits(str(tmp_path), 12)
    record = [record for record, _ in tfrecord.records(path)][1]
    stat = path.stat()
    damaged(path, record.start + 40)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    again, _ = open_splits(str(tmp_path), 12)
    for images in (training, again):
        assert images.read(0).max() == 0
        with pytest.raises(TrainError, match=rf"record 1 at byte {record.begin}, is damaged .*fetch the file anew"):
            images.read(1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda whole: whole[:-3], "record 1 at byte {second}: it has .* bytes, and the file ends within them"),
        (lambda whole: whole + b"\x01\x02", "record 2 at byte {size}: the file ends within it"),
        (lambda _: b"no records at all", "record 0 at byte 0: it is damaged, or the file is no TFRecord file"),
        (lambda whole: b"\x1f\x8b\x08" + whole, "compressed as a whole, .*unpack it"),
        (lambda whole: whole + framed(b"\x0a\xff"), "record 2 at byte {size}, is no tf.train.Example"),
        (
            lambda whole: whole + framed(example({"image": b"x", "name": b"y"})),
            "record 2 at byte {size}, has no image of one class: .* there is image, name",
        ),
        (lambda whole: whole + framed(example({"image": b"x", "label": [1, 2]})), "has no image of one class"),
        (lambda whole: whole + framed(example({"image": b"x", "label": -1})), "record 2, has label -1: labels begin"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, content, message):
    records = [framed(example(each)) for each in TFDS[:2]]
    whole = b"".join(records)
    (tmp_path / "a.tfrecord").write_bytes(content(whole))
    with pytest.raises(TrainError, match=message.format(second=len(records[0]), size=len(whole))):
        open_splits(str(tmp_path), 12)


def test_what_is_no_image_and_a_size_that_is_not_said_are_told(tmp_path):
    write(tmp_path / "a.tfrecord", [{"image": b"no image", "label": 0}] * 12)
    with pytest.raises(
        TrainError, match=r"a\.tfrecord, record \d+ at byte \d+,: cannot identify|cannot read the image"
    ):
        open_splits(str(tmp_path), 12)
    with pytest.raises(TrainError, match=r"`train\.options\.size` is needed with TFRecord files"):
        open_splits(str(tmp_path), None)
    (tmp_path / "a.tfrecord").rename(tmp_path / "a-validation.tfrecord")
    with pytest.raises(TrainError, match="for validation alone"):
        open_splits(str(tmp_path), 12)


# --- the index --------------------------------------------------------------------------------------------------------


def test_an_index_is_made_once_and_anew_when_a_file_has_changed(tmp_path, monkeypatch):
    made, looked = image_records._made, list[list[str]]()
    monkeypatch.setattr(image_records, "_made", lambda root, names: looked.append(names) or made(root, names))
    first = open_splits(str(tfds(tmp_path)), 12)
    again = open_splits(str(tmp_path), 12)
    assert len(looked) == 1
    assert [each.fingerprint for each in again] == [each.fingerprint for each in first]
    assert shown(again[0]) == shown(first[0])
    write(tmp_path / "toy-train.tfrecord-00001-of-00002", TFDS[:1])
    changed = open_splits(str(tmp_path), 12)
    assert (len(looked), len(changed[0])) == (2, 5)
    assert changed[0].fingerprint != first[0].fingerprint
    assert changed[1].fingerprint == first[1].fingerprint


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", None])
def test_an_index_that_was_cut_or_is_of_something_else_is_made_anew(tmp_path, content):
    first = open_splits(str(tfds(tmp_path)), 12)
    path = tmp_path / image_records.INDEX
    whole = path.read_bytes()
    path.write_bytes(content if content is not None else whole[: len(whole) // 2])
    assert [each.fingerprint for each in open_splits(str(tmp_path), 12)] == [each.fingerprint for each in first]
    with np.load(path, allow_pickle=False) as found:
        assert len(found["label"]) == 8, "it has been written anew"


def test_ranks_that_begin_together_make_one(tmp_path, monkeypatch):
    """Whoever comes while it is made waits, and finds it."""
    made, held = image_records._made, list[bool]()

    def slowly(root: Path, names: list[str]) -> image_records.Index:
        with (root / f"{image_records.INDEX}.lock").open("w") as another:
            try:
                fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(True)
            else:
                held.append(False)
        return made(root, names)

    monkeypatch.setattr(image_records, "_made", slowly)
    tfds(tmp_path)
    ranks = [threading.Thread(target=open_splits, args=(str(tmp_path), 12)) for _ in range(4)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert held == [True]
    assert sorted(path.name for path in tmp_path.glob(".*")) == [image_records.INDEX, f"{image_records.INDEX}.lock"]


def test_a_folder_that_cannot_be_written_to_is_read_all_the_same(tmp_path, monkeypatch):
    def refuse(self: Path, mode: str = "r", *others: Any, **named: Any) -> Any:
        if "w" in mode:
            raise PermissionError(13, "Permission denied")
        return opened(self, mode, *others, **named)

    opened = Path.open
    tfds(tmp_path)
    monkeypatch.setattr(Path, "open", refuse)
    assert len(open_splits(str(tmp_path), 12)[0]) == 6
    assert not list(tmp_path.glob(".*"))


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 150, 1 << 20])
def test_texts_are_read_in_pieces_that_hold_each_once(tmp_path, size):
    texts = [f"document {number}: " + "ä → 𝄞 " * number for number in range(20)]
    write(tmp_path / "c4-train.tfrecord-00000-of-00002", [{"text": text.encode(), "url": b"u"} for text in texts[:12]])
    write(tmp_path / "c4-train.tfrecord-00001-of-00002", [{"text": text.encode(), "url": b"u"} for text in texts[12:]])
    (tmp_path / "features.json").write_text("{}")  # of the data set, and no document
    corpus = Corpus(tmp_path, "text")
    pieces = corpus.pieces(size)
    assert len(pieces) == {1: 20, 1 << 20: 1}.get(size, len(pieces))
    assert [each.text for piece in pieces for each in corpus.read(piece)] == texts


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"label": 1}, "there is no text under 'text', only 'label'"),
        ({"text": [1]}, "there is no text under 'text'"),
        ({"text": b"\xff"}, "no tf.train.Example of a text .*utf-8"),
        ({"text": [b"a", b"b"]}, "no tf.train.Example of a text"),
    ],
)
def test_a_record_without_a_text_is_named(tmp_path, record, message):
    path = write(tmp_path / "a.tfrecord", [{"text": b"good"}, record])
    corpus = Corpus(path, "text")
    with pytest.raises(TrainError, match=f"the record at byte {len(framed(example({'text': b'good'})))}: {message}"):
        list(itertools.chain.from_iterable(map(corpus.read, corpus.pieces(1))))


def test_a_text_that_is_damaged_is_named(tmp_path):
    path = write(tmp_path / "a.tfrecord", [{"text": b"good and long enough"}])
    damaged(path, 30)
    corpus = Corpus(path, "text")
    with pytest.raises(TrainError, match="the record at byte 0: it is damaged"):
        list(corpus.read(corpus.pieces(1)[0]))
