"""Task vision: images of every kind of folder, what is drawn for each, and a network that learns real digits."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mgpu_train.data.images import open_splits
from mgpu_train.errors import TrainError
from mgpu_train.models.resnet import DEPTHS, ResNet
from mgpu_train.tasks.entry import VISION
from mgpu_train.tasks.vision import Vision
from mgpu_train.tasks.vision_config import VisionOptions
from PIL import Image

SMALL = {"task": "vision", "lr": 0.01, "global_batch": 32, "validate_batches": 12}
OPTIONS = {"width": 8, "norm": "group", "crop_padding": 1, "mixup": 0.2, "label_smoothing": 0.1}


# --- training ---------------------------------------------------------------------------------------------------------


def test_digits_are_told_apart(train):
    """97 of 100 that it has never seen, after seven times the 1,437 it learns from."""
    options = {"width": 16, "crop_padding": 1}
    told = train("digits", steps=160, global_batch=64, validate_every=160, options=options)
    (accuracy,) = told.of("validation", "accuracy")[1:]
    assert accuracy >= 0.97
    assert {"accuracy", "top5_accuracy", "images_per_s", "classes", "loss"} <= told.names & set(VISION.metrics)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_ranks_draw_what_one_process_draws(train, name):
    """Crops and mixed images follow from each sample's seed."""
    alone, both = train("alone", options=OPTIONS), train(name, 2, strategy=name, options=OPTIONS)
    for key in ("loss", "grad_norm"):
        assert both.of("step", key) == pytest.approx(alone.of("step", key), rel=1e-5)
    assert both.of("step", "accuracy") == alone.of("step", "accuracy")


def test_batch_norms_of_ranks_that_see_other_images_are_one_in_validation_and_checkpoints(train, same_bits):
    whole = train("batch", 2, options={**OPTIONS, "norm": "batch"})
    assert whole.of("validation", "loss", 0) == whole.of("validation", "loss", 1)
    resumed = train("batch-resumed", 2, resume="batch", options={**OPTIONS, "norm": "batch"})
    assert resumed.of("step", "loss") == whole.of("step", "loss")[3:]
    assert resumed.of("validation", "loss")[-1] == whole.of("validation", "loss")[-1]
    same_bits(*(each.home / "checkpoints" / "step-5" for each in (whole, resumed)))


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


# --- data -------------------------------------------------------------------------------------------------------------


def pixels(count: int, *shape: int) -> np.ndarray:
    return (np.arange(count * int(np.prod(shape))) % 251).astype(np.uint8).reshape(count, *shape)


def cifar(folder: Path, classes: int) -> None:
    head = 1 if classes == 10 else 2
    names = [*(f"data_batch_{each}" for each in range(1, 6)), "test_batch"] if classes == 10 else ["train", "test"]
    for name in names:
        rows = np.concatenate([np.full((4, head), 7, np.uint8), pixels(4, 3072)], axis=1)
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


KINDS: dict[str, tuple[Any, tuple[int, int], tuple[int, ...], int]] = {
    "cifar-10": (lambda folder: cifar(folder, 10), (20, 4), (3, 32, 32), 10),
    "cifar-100": (lambda folder: cifar(folder, 100), (4, 4), (3, 32, 32), 100),
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
    assert splits[0].fingerprint == open_splits(str(tmp_path), 16)[0].fingerprint


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
        (lambda folder: [idx(folder, "train"), *(p.write_bytes(b"1") for p in folder.iterdir())], 8, "no IDX file"),
    ],
    ids=["nothing", "no size", "cifar", "idx"],
)  # fmt: skip
def test_what_is_wrong_with_a_folder_is_said(tmp_path, make, size, message):
    make(tmp_path)
    with pytest.raises(TrainError, match=message):
        open_splits(str(tmp_path), size)


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
