"""Task diffusion: a transformer that makes real digits out of noise, alike on any number of ranks."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from mgpu_train.checkpoint import samples
from mgpu_train.checkpoint.formats.shards import open_shards
from mgpu_train.data.images import open_splits
from mgpu_train.errors import TrainError
from mgpu_train.models.dit import LEVELS, follow
from mgpu_train.tasks.diffusion import Diffusion
from mgpu_train.tasks.diffusion_config import DiffusionOptions
from mgpu_train.tasks.entry import DIFFUSION
from PIL import Image
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

OPTIONS = {"dim": 16, "layers": 2, "heads": 2}
SMALL = {"task": "diffusion", "lr": 0.01, "global_batch": 12, "options": OPTIONS}
EMA = {"strategy": "fsdp", "ema": 0.9}


# --- training ---------------------------------------------------------------------------------------------------------


def digits(split: int) -> tuple[np.ndarray, np.ndarray]:
    """From -1 to 1, a row each, and what they are."""
    images = open_splits(None, None)[split]
    rows = [images.read(number).ravel() for number in range(len(images))]
    return np.stack(rows) / 127.5 - 1, np.array([images.label(number) for number in range(len(images))])


def line(variances: np.ndarray) -> float:
    """What a straight line errs by: v / ((1 - t)^2 v + t^2) along an axis of variance v, the mean of which over t is
    pi / 2 sqrt(v)."""
    return math.pi / 2 * np.sqrt(variances.clip(0)).mean()


@pytest.mark.timeout(1200)  # half a minute of one core
def test_digits_are_made_out_of_noise(train):
    """The loss is below what straight lines reach, be it one that knows how all pixels go together, or one for each
    pixel and class. (Who knows the mean image alone errs by 1 + v.) What is drawn of a class is nearest to a real digit
    of this class."""
    told = train(
        "digits", steps=350, every_steps=350, validate_every=350, validate_batches=6, global_batch=64, log_every=50,
        ema=0.98, options={"dim": 64, "layers": 3, "heads": 4},
    )  # fmt: skip
    known, labels = digits(0)
    together = line(np.linalg.eigvalsh(np.cov(known.T)))
    by_class = np.mean([line(known[labels == label].var(0)) for label in range(10)])
    assert told.of("start", "pixel_loss")[0] == pytest.approx(line(known.var(0)), rel=0.05)
    first, last = told.of("validation", "ema_loss")
    assert first == pytest.approx(1 + (digits(1)[0] ** 2).mean(), rel=0.05)
    assert last < min(together, by_class) < line(known.var(0)) < 1 + known.var(0).mean() < first
    model = samples.load(told.home / "checkpoints" / "step-350")
    drawn = samples.draw(model, None, 10, guidance=2, steps=20, seed=1).reshape(10, 8, 10, 8).swapaxes(1, 2)
    far = ((drawn.reshape(100, 1, 64) / 127.5 - 1 - known) ** 2).mean(2)
    assert (labels[far.argmin(1)] == np.arange(10).repeat(10)).mean() >= 0.9


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ddp", {"micro_batch": 4}),
        ("fsdp", {"strategy": "fsdp", "activation_checkpointing": "selective"}),
        ("pipeline", {"strategy": "single", "pipeline_parallel": 2, "micro_batch": 4}),
    ],
)
def test_ranks_learn_what_one_process_learns(train, name, settings):
    """Noise and levels follow from each sample's seed."""
    alone, both = train("alone"), train(name, 2, **settings)
    assert alone.metrics == set(DIFFUSION.metrics) - {"mfu"}
    for kind, key in (("step", "loss"), ("step", "grad_norm"), ("validation", "loss")):
        assert both.of(kind, key) == pytest.approx(alone.of(kind, key), rel=1e-5)


def test_resumed_ranks_end_as_if_uninterrupted(train, same_bits):
    whole, resumed = train("whole", 2, **EMA), train("resumed", 2, "whole", **EMA)
    assert resumed.of("step", "loss") == whole.of("step", "loss")[3:]
    same_bits(*(each.home / "checkpoints" / "step-5" for each in (whole, resumed)))


# --- data -------------------------------------------------------------------------------------------------------------


def test_what_is_drawn_for_an_image_follows_from_its_seed_and_in_validation_from_its_number():
    task = Diffusion(DiffusionOptions(flip=True, class_dropout=0.5))
    training, validation = task.data("train"), task.data("validation")
    one, again, other = (training.batch([5, 6], seeds) for seeds in ([1, 2], [1, 2], [3, 4]))
    swapped = training.batch([6, 5], [2, 1])
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert all(torch.equal(one[name], swapped[name].flip(0)) for name in one)
    assert not torch.equal(one["noise"], other["noise"])
    fixed, anew = (validation.batch([5, 6], seeds) for seeds in ([1, 2], [3, 4]))
    assert all(torch.equal(fixed[name], anew[name]) for name in fixed)
    assert not torch.equal(fixed["noise"][0], fixed["noise"][1])
    assert fixed["label"].tolist() == [open_splits(None, None)[1].label(number) for number in (5, 6)]
    many = training.batch([7] * 1000, range(1000))
    told = many["label"][many["label"] != 10]
    assert set(told.tolist()) == {open_splits(None, None)[0].label(7)}
    assert 0.45 < len(told) / 1000 < 0.55
    assert len({image.numpy().tobytes() for image in many["image"]}) == 2
    assert (many["level"].min(), many["level"].max()) == (pytest.approx(0, abs=5), pytest.approx(LEVELS, abs=5))
    assert many["level"].float().mean().item() == pytest.approx(LEVELS / 2, rel=0.05)
    assert many["noise"].std().item() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        ((9, 9), r"`train\.options\.patch` \(2\) does not divide images of 9 x 9 pixels"),
        ((8, 10), r"images of training and of validation have the shapes \(1, 8, 8\) and \(1, 10, 10\)"),
    ],
)
def test_images_that_no_model_can_make_are_refused(tmp_path, sides, message):
    for name, side in zip(("train", "val"), sides, strict=True):
        np.save(tmp_path / f"{name}-images.npy", np.zeros((4, side, side), np.uint8))
        np.save(tmp_path / f"{name}-labels.npy", np.arange(4))
    with pytest.raises(TrainError, match=message):
        Diffusion(DiffusionOptions(data=str(tmp_path))).model()


# --- the model --------------------------------------------------------------------------------------------------------


def test_flops_are_those_that_torch_counts():
    task = Diffusion(DiffusionOptions(dim=24, layers=3, heads=2, patch=4))
    with torch.device("meta"), FlopCounterMode(display=False) as counted:
        task.model()(torch.empty(1, 1, 8, 8), *torch.empty(2, 1, dtype=torch.int64))
    assert task.flops() == 3 * counted.get_total_flops()  # forward, and twice as much backward


def test_a_straight_way_is_followed_to_its_end_and_guidance_goes_beyond_it():
    images = torch.tensor([1.0, 2.0, 5.0])  # of two classes, and of none

    def direction(x: Tensor, level: Tensor, label: Tensor) -> Tensor:
        return (x - images[label].view(-1, 1, 1, 1)) * LEVELS / level.view(-1, 1, 1, 1)

    noise, label = torch.randn(2, 1, 3, 3), torch.tensor([0, 1])
    for guidance, steps, ends in ((1, 1, [1, 2]), (1, 7, [1, 2]), (0, 3, [5, 5]), (2, 4, [-3, -1])):
        made = follow(direction, noise, label, untold=2, guidance=guidance, steps=steps)
        assert made.flatten(1).T.tolist() == pytest.approx(np.array([ends] * 9), abs=1e-4)


# --- what it draws ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_draws_its_moving_average(train, tmp_path):
    folder, out = train("whole", 2, **EMA).home / "checkpoints" / "step-5", tmp_path / "out.png"
    shards, positions = open_shards(folder), samples.load(folder).embed.positions
    assert torch.equal(positions, samples._whole(shards, "ema.embed.positions"))
    assert not torch.equal(positions, samples._whole(shards, "model.embed.positions"))
    more = ["--classes", "3", "7", "--each", "5", "--steps", "2", "--zoom", "4"]
    assert samples.main([str(folder), str(out), *more]) == 0
    with Image.open(out) as image:
        assert (image.format, image.mode, image.size) == ("PNG", "L", (5 * 8 * 4, 2 * 8 * 4))


def test_what_cannot_be_drawn_is_said(train, tmp_path, caplog):
    of = train("alone").home / "checkpoints" / "step-5"
    other, told = shutil.copytree(of, tmp_path / "other"), json.loads((of / "meta.json").read_text())
    told["config"] |= {"task": "vision", "options": {"width": 8}}
    (other / "meta.json").write_text(json.dumps(told))
    (untold := shutil.copytree(of, tmp_path / "untold") / "meta.json").write_text("{}")
    for folder, more, message in (
        (tmp_path, [], "there is no"),
        (other, [], "is of task vision: only what task diffusion has trained draws images"),
        (untold.parent, [], "does not say what was trained"),
        (of, ["--classes", "10"], "there is no class 10: the model knows 0 to 9"),
        (of, ["--steps", "1"], f"cannot write {tmp_path}: Is a directory"),
    ):
        caplog.clear()
        assert samples.main([str(folder), str(tmp_path), *more]) == 1
        assert message in caplog.text
    with pytest.raises(SystemExit):
        samples.main([str(of), str(tmp_path / "out.png"), "--each", "0"])
    assert not Path(tmp_path / "out.png").exists()
