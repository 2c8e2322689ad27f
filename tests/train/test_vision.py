"""Task vision: images of every kind of folder, what is drawn for each, and a network that learns real digits."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import real_data
import torch
from mgpu_train.config import TrainConfig
from mgpu_train.data.images import open_splits
from mgpu_train.errors import TrainError
from mgpu_train.models.resnet import DEPTHS, ResNet
from mgpu_train.parallel import Place
from mgpu_train.strategies import memory
from mgpu_train.strategies.initial import _prepare, synchronise, whole
from mgpu_train.strategies.precision import POLICIES
from mgpu_train.tasks.base import Layout
from mgpu_train.tasks.entry import VISION
from mgpu_train.tasks.vision import Vision
from mgpu_train.tasks.vision_config import VisionOptions
from PIL import Image
from safetensors.torch import save_file
from torch import nn

SMALL = {"task": "vision", "lr": 0.01, "global_batch": 32, "validate_batches": 12}
OPTIONS = {"width": 8, "norm": "group", "crop_padding": 1, "mixup": 0.2, "label_smoothing": 0.1}


# --- training ---------------------------------------------------------------------------------------------------------


def test_digits_are_told_apart(train):
    """97 of 100 that it has never seen, after seven times the 1,437 it learns from."""
    options = {"width": 16, "crop_padding": 1}
    told = train("digits", steps=160, global_batch=64, validate_every=160, options=options)
    (accuracy,) = told.of("validation", "accuracy")[1:]
    assert accuracy >= 0.97
    assert told.metrics == set(VISION.metrics)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_ranks_draw_what_one_process_draws(train, name):
    """Crops and mixed images follow from each sample's seed."""
    alone, both = train("alone", options=OPTIONS), train(name, 2, strategy=name, options=OPTIONS)
    for key in ("loss", "grad_norm"):
        assert both.of("step", key) == pytest.approx(alone.of("step", key), rel=1e-5)
    assert both.of("step", "accuracy") == alone.of("step", "accuracy")


def test_handwritten_digits_are_told_apart(train, tmp_path):
    """Of 5,000 images of MNIST: 96 of 100 that it has never seen."""
    images, labels = real_data.mnist()
    np.save(tmp_path / "images.npy", images)
    np.save(tmp_path / "labels.npy", labels)
    options = {"data": str(tmp_path), "width": 16, "stem": "large", "crop_padding": 2}
    told = train("mnist", steps=300, global_batch=64, validate_every=300, validate_batches=8, options=options)
    assert told.of("validation", "accuracy")[-1] >= 0.96


def test_shards_get_the_values_of_a_file(train, tmp_path):
    learned = whole(Vision(VisionOptions(width=8, norm="group")), 7)
    torch.save(learned.state_dict(), tmp_path / "values.pth")
    options = {"width": 8, "norm": "group", "weights": str(tmp_path / "values.pth")}
    few = {"options": options, "validate_batches": 1}
    alone, both = train("first", **few), train("first-fsdp", 2, strategy="fsdp", **few)
    assert both.of("step", "loss") == pytest.approx(alone.of("step", "loss"), rel=1e-5)


def test_batch_norms_of_ranks_that_see_other_images_are_one_in_validation_and_checkpoints(train, same_bits):
    whole = train("batch", 2, options={**OPTIONS, "norm": "batch"})
    assert whole.of("validation", "loss", 0) == whole.of("validation", "loss", 1)
    resumed = train("batch-resumed", 2, resume="batch", options={**OPTIONS, "norm": "batch"})
    assert resumed.of("step", "loss") == whole.of("step", "loss")[3:]
    assert resumed.of("validation", "loss")[-1] == whole.of("validation", "loss")[-1]
    same_bits(*(each.home / "checkpoints" / "step-5" for each in (whole, resumed)))


@pytest.mark.parametrize("how", ["full", "selective"])
def test_batch_norms_count_a_batch_once_though_it_is_computed_again(how):
    def trained(how: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        norms = nn.InstanceNorm2d(4, track_running_stats=True), nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=None)
        block = nn.Sequential(nn.Conv2d(3, 4, 3), norms[0], norms[1], nn.ReLU(), norms[2])
        model = nn.Sequential(block)
        memory.save(model, Layout(("0",)), how)
        for _ in range(3):
            model(torch.randn(8, 3, 8, 8)).pow(3).sum().backward()
        kept = {f"{name}'s gradient": each.grad for name, each in model.named_parameters() if each.grad is not None}
        return {**kept, **dict(model.named_buffers())}

    plain, again = trained("none"), trained(how)
    assert plain["0.4.num_batches_tracked"] == 3
    for name, each in plain.items():
        near = 1e-6 if name.startswith("0.1.") else 0  # torch takes a mean over copies of an instance norm's statistics
        torch.testing.assert_close(again[name], each, rtol=near, atol=near)


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "millions"), [("resnet18", 11.69), ("resnet34", 21.80), ("resnet50", 25.56)])
def test_networks_are_those_of_torchvision(name, millions):
    """Its documentation gives the number of parameters; names of a block are its own."""
    with torch.device("meta"):
        network = ResNet(name, 3, 1000, width=64, small=False, group=False)
    assert sum(each.numel() for each in network.parameters()) / 1e6 == pytest.approx(millions, abs=0.005)
    names = dict(network.named_parameters())
    assert {
        "conv1.weight",
        "bn1.bias",
        "layer2.0.downsample.0.weight",
        "layer4.1.bn2.weight",
        "fc.bias",
    } <= names.keys()
    assert len(Vision(VisionOptions(model=name)).layout(network).blocks) == sum(DEPTHS[name])
    assert network(torch.empty(2, 3, 64, 64, device="meta")).shape == (2, 1000)


@pytest.mark.parametrize("name", ["resnet10t", "mobilenetv3_small_050", "vit_tiny_patch16_224"])
def test_networks_of_timm_get_all_their_values(tmp_path, name):
    folders(tmp_path, "train", "val")
    task = Vision(VisionOptions(model=f"timm:{name}", data=str(tmp_path), size=32))
    network = whole(task, 3)
    torch.manual_seed(3)
    theirs = dict(task.model().named_parameters())
    assert all(torch.equal(value, theirs[each]) for each, value in network.named_parameters())
    assert len(task.layout(network).blocks) > 3
    batch = task.data("validation").batch([0, 1], [0, 0])
    assert task.evaluate(network, batch).total.isfinite()


def test_values_of_a_file_are_the_first_ones_but_where_there_are_other_classes(tmp_path, caplog):
    learned = whole(Vision(VisionOptions(width=8)), 7)
    values = {**learned.state_dict(), "fc.bias": torch.zeros(3), "fc.weight": torch.zeros(3, 64)}
    torch.save(values, tmp_path / "values.pth")
    save_file(values, tmp_path / "values.safetensors")
    for name in ("values.pth", "values.safetensors"):
        network = whole(Vision(VisionOptions(width=8, weights=str(tmp_path / name))), 8)
        other = {each for each, value in network.state_dict().items() if not torch.equal(value, values[each])}
        assert other == {"fc.bias", "fc.weight"}
        assert "fc.bias is of another shape, and stays random" in caplog.text
        caplog.clear()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*values.pth on this node: No such file"),
        (b"no tensors", "is no file of tensors alone"),
        ({"conv1.weight": PosixPath("x")}, "is no file of tensors alone"),
        ({"epoch": 3}, "has more in it than tensors by name"),
        ({"conv1.weight": torch.zeros(1)}, "lacks `.*` and [0-9]+ more: its values are of another model"),
    ],
)
def test_what_is_wrong_with_a_file_of_values_is_said(tmp_path, content, message):
    path = tmp_path / "values.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(TrainError, match=message):
        whole(Vision(VisionOptions(width=8, weights=str(path))), 1)


def test_a_name_that_timm_lacks_is_said_with_its_neighbours():
    with pytest.raises(TrainError, match=r"has no resnet51; near it: .*resnet50"):
        Vision(VisionOptions(model="timm:resnet51")).model()


def test_norms_that_do_more_than_torchs_are_not_made_torchs():
    from timm.layers import BatchNormAct2d  # torchvision and dynamo: not for each worker that reads this file

    network = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(BatchNormAct2d(3)))
    synchronise(network)
    assert [type(each) for each in (network[0], network[1][0])] == [nn.SyncBatchNorm, BatchNormAct2d]


@pytest.mark.parametrize(("stages", "groups"), [(1, []), (2, [[0, 1, 2, 3], [4, 5, 6, 7]])])
def test_batch_norms_on_gpus_see_the_ranks_of_their_own_stage_alone(monkeypatch, stages, groups):
    """The others' batch norms are of other layers, or there are none, and all would wait for them."""
    asked, own, nothing = list[list[int]](), object(), None
    monkeypatch.setattr(
        torch.distributed, "new_subgroups_by_enumeration", lambda every: asked.extend(every) or (own, None)
    )
    place = Place(0, 0, 8, torch.device("cuda"), nothing, nothing, pipeline=stages)  # type: ignore[arg-type]
    strategy: Any = SimpleNamespace(place=place, policy=POLICIES["fp32"])
    model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(3)))
    _prepare(nothing, model, Layout(), TrainConfig(), strategy)  # type: ignore[arg-type]
    norm: Any = model[0][0]
    assert (type(norm), asked) == (nn.SyncBatchNorm, groups)
    assert norm.process_group is (own if groups else None)


# --- data -------------------------------------------------------------------------------------------------------------


def pixels(count: int, *shape: int) -> np.ndarray:
    return (np.arange(count * int(np.prod(shape))) % 251).astype(np.uint8).reshape(count, *shape)


def cifar(folder: Path, classes: int) -> None:
    head = 1 if classes == 10 else 2
    names = [*(f"data_batch_{each}" for each in range(1, 6)), "test_batch"] if classes == 10 else ["train", "test"]
    for name in names:
        labels = np.array([[3, 7]] * 4, np.uint8)[:, -head:]  # of CIFAR-100 a coarse one comes first
        rows = np.concatenate([labels, pixels(4, 3072)], axis=1)
        (folder / f"{name}.bin").write_bytes(rows.tobytes())


def idx(folder: Path, *parts: str, zipped: bool = False) -> None:
    for part in parts:
        images, labels = pixels(20, 28, 28), np.arange(20, dtype=np.uint8) % 10
        for name, data in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            head = bytes((0, 0, 8, data.ndim)) + struct.pack(f">{data.ndim}I", *data.shape)
            path, whole = folder / name, head + data.tobytes()
            (path.with_name(f"{name}.gz") if zipped else path).write_bytes(gzip.compress(whole) if zipped else whole)


def folders(folder: Path, *parts: str) -> None:
    for part in parts or ("",):
        for name in ("cat", "dog"):
            (folder / part / name).mkdir(parents=True)
            for number in range(20):
                Image.fromarray(pixels(1, 20, 30, 3)[0]).save(folder / part / name / f"{number}.png")


def pickled(folder: Path, classes: int) -> None:
    """As Python 2 wrote them: text of bytes, and an array that is made by functions of NumPy."""
    names = [*(f"data_batch_{each}" for each in range(1, 6)), "test_batch"] if classes == 10 else ["train", "test"]
    for name in names:
        raw = pixels(4, 3072).tobytes()
        key = b"labels" if classes == 10 else b"fine_labels"
        parts = [
            b"\x80\x02}(U\x04data",
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n(K\x00tU\x01b\x87R",  # an empty array, and
            b"(K\x01(M\x04\x00M\x00\x0ctcnumpy\ndtype\n(U\x02u1K\x00K\x01tR",  # what it is then told: 4 x 3072
            b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89",
            b"T" + struct.pack("<I", len(raw)) + raw + b"tb",
            b"U" + bytes([len(key)]) + key + b"](K\x07K\x07K\x07K\x07eu.",
        ]
        (folder / name).write_bytes(b"".join(parts))


def arrays(folder: Path, *firsts: str, last: bool = False) -> None:
    for first in firsts:
        np.save(folder / f"{first}images.npy", pixels(20, *((12, 10, 3) if last else (12, 10))))
        np.save(folder / f"{first}labels.npy", np.arange(20) % 4)


KINDS: dict[str, tuple[Any, tuple[int, int], tuple[int, ...], int]] = {
    "cifar-10": (lambda folder: cifar(folder, 10), (20, 4), (3, 32, 32), 10),
    "cifar-100": (lambda folder: cifar(folder, 100), (4, 4), (3, 32, 32), 100),
    "cifar-10 for Python": (lambda folder: pickled(folder, 10), (20, 4), (3, 32, 32), 10),
    "cifar-100 for Python": (lambda folder: pickled(folder, 100), (4, 4), (3, 32, 32), 100),
    "arrays": (lambda folder: arrays(folder, "train-", "val-", last=True), (20, 20), (3, 12, 10), 4),
    "gray arrays": (lambda folder: arrays(folder, ""), (18, 2), (1, 12, 10), 4),
    "idx": (lambda folder: idx(folder, "train", "t10k"), (20, 20), (1, 28, 28), 10),
    "idx.gz": (lambda folder: idx(folder, "train", zipped=True), (18, 2), (1, 28, 28), 10),
    "folders": (lambda folder: folders(folder, "train", "val"), (40, 40), (3, 16, 16), 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_in_a_folder_is_read(tmp_path, kind):
    make, counts, shape, classes = KINDS[kind]
    make(tmp_path)
    splits = open_splits(str(tmp_path), 16)
    assert tuple(map(len, splits)) == counts
    for split in splits:
        assert split.classes == classes
        assert (split.read(0).shape, split.read(0).dtype) == (shape, np.uint8)
        assert 0 <= split.label(len(split) - 1) < classes
        assert "cifar" not in kind or split.label(0) == 7
    assert splits[0].fingerprint == open_splits(str(tmp_path), 16)[0].fingerprint


def test_both_versions_of_cifar_are_the_same_images(tmp_path):
    read = []
    for make in (cifar, pickled):
        (folder := tmp_path / make.__name__).mkdir()
        make(folder, 10)
        read.append(open_splits(str(folder), None))
    for one, other in zip(*read, strict=True):
        assert one.fingerprint == other.fingerprint
        assert np.array_equal(one.read(3), other.read(3))


def test_a_function_that_a_pickle_names_is_not_called(tmp_path):
    made = str(tmp_path / "made").encode()
    for name in (*(f"data_batch_{each}" for each in range(1, 6)), "test_batch"):
        (tmp_path / name).write_bytes(b"cos\nmkdir\n(U" + bytes([len(made)]) + made + b"tR.")
    with pytest.raises(TrainError, match="is no file of CIFAR-10 for Python"):
        open_splits(str(tmp_path), None)
    assert not (tmp_path / "made").exists()


def test_class_folders_without_a_validation_set_are_split_by_name(tmp_path):
    folders(tmp_path)
    training, validation = open_splits(str(tmp_path), 8)
    assert len(training) + len(validation) == 40
    assert 0 < len(validation) < 12


@pytest.mark.parametrize(
    ("make", "size", "message"),
    [
        (lambda _: None, 8, "holds no images that are known"),
        (folders, None, r"`train\.options\.size` is needed"),
        (lambda folder: (folder / "data_batch_1.bin").write_bytes(b"x"), 8, "cannot read .*data_batch_2"),
        (lambda folder: (folder / "images.npy").write_bytes(b"x"), 8, "cannot read .*images.npy"),
        (
            lambda folder: (arrays(folder, ""), np.save(folder / "labels.npy", np.arange(3))),
            8,
            "uint8 of shape .20, 1, 12, 10., and labels are int64 of shape .3,.",
        ),
        (
            lambda folder: (arrays(folder, "train-", "val-"), np.save(folder / "val-images.npy", pixels(20, 8, 8, 3))),
            8,
            "both need the same channels",
        ),
        (lambda folder: [idx(folder, "train"), *(p.write_bytes(b"1") for p in folder.iterdir())], 8, "no IDX file"),
    ],
    ids=["nothing", "no size", "cifar", "no array", "other labels", "other channels", "idx"],
)  # fmt: skip
def test_what_is_wrong_with_a_folder_is_said(tmp_path, make, size, message):
    make(tmp_path)
    with pytest.raises(TrainError, match=message):
        open_splits(str(tmp_path), size)


def test_a_grey_image_of_16_bits_keeps_the_upper_ones_and_one_of_32_is_refused(tmp_path):
    """X-rays and depths come so, and would be white all over."""
    grey = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    for split, label in (("train", "a"), ("val", "a")):
        (tmp_path / split / label).mkdir(parents=True)
        Image.fromarray(grey).save(tmp_path / split / label / "1.png")
    training, _ = open_splits(str(tmp_path), 8)
    assert np.array_equal(training.read(0), np.broadcast_to(grey >> 8, (3, 8, 8)))
    Image.fromarray(grey.astype(np.float32)).save(tmp_path / "train" / "a" / "1.png", "TIFF")
    with pytest.raises(TrainError, match=r"1.png has pixels of 32 bits \(mode F\)"):
        training.read(0)


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    folders(tmp_path, "train", "val")
    (tmp_path / "train" / "cat" / "0.png").write_bytes(b"no image")
    with pytest.raises(TrainError, match=r"cannot read the image .*cat/0\.png"):
        open_splits(str(tmp_path), 8)[0].read(0)


def test_what_is_drawn_for_an_image_follows_from_its_seed_and_validation_draws_nothing():
    task = Vision(VisionOptions(crop_padding=1, flip=True, mixup=0.4))
    training, validation = task.data("train"), task.data("validation")
    one, again, other = (training.batch([5, 6], seeds) for seeds in ([1, 2], [1, 2], [3, 4]))
    swapped = training.batch([6, 5], [2, 1])
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert all(torch.equal(one[name], swapped[name].flip(0)) for name in one)
    assert not torch.equal(one["image"], other["image"])
    assert torch.equal(validation.batch([5], [1])["image"], validation.batch([5], [9])["image"])
    assert set(validation.batch([5], [1])) == {"image", "label"}


def test_a_channel_that_is_the_same_in_all_images_stays_a_number(tmp_path):
    """An alpha that is opaque, say: in validation it may be another."""
    images = pixels(40, 4, 8, 8)
    images[:, 3] = 255
    images[::10, 3] = 251  # of validation
    np.save(tmp_path / "images.npy", images)
    np.save(tmp_path / "labels.npy", np.arange(40) % 4)
    task = Vision(VisionOptions(data=str(tmp_path)))
    data = (task.data(split) for split in ("train", "validation"))
    given, held = (each.batch(range(len(each)), [0] * len(each))["image"] for each in data)
    assert not given[:, 3].any()
    assert given[:, 0].std() == pytest.approx(1, rel=0.01)
    assert held[:, 3].abs().max() <= 4


def test_classes_are_balanced_by_how_rare_they_are_and_a_mixed_image_counts_as_both(tmp_path):
    np.save(tmp_path / "images.npy", pixels(40, 8, 8))
    np.save(tmp_path / "labels.npy", (np.arange(40) % 4 == 1).astype(np.int64))  # a fourth of them
    task = Vision(VisionOptions(data=str(tmp_path), balance=True))
    data = task.data("train")
    batch = data.batch(range(len(data)), [0] * len(data))
    each = {label: batch["share"][batch["label"] == label] for label in (0, 1)}
    assert each[0].sum().item() == pytest.approx(each[1].sum().item())
    assert batch["share"].mean().item() == pytest.approx(1)
    counts = torch.tensor([each[label][0].item() for label in (0, 1)])
    mixed = Vision(VisionOptions(data=str(tmp_path), balance=True, mixup=0.5)).data("train").batch([0, 1, 2], [5, 6, 7])
    parts = mixed["share"] / counts[mixed["label"]] + mixed["rest"] / counts[mixed["other"]]
    assert torch.allclose(parts, torch.ones(3))
    assert "share" not in task.data("validation").batch([0], [0])
