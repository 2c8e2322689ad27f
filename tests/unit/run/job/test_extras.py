"""Packages that a training needs and its image lacks are missed before anything is rented."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from mgpu_train.config import TrainConfig
from mgpu_train.tasks import extras

from mgpu.errors import InputError
from mgpu.image import place
from mgpu.image.build import shipped
from mgpu.run.job import images
from mgpu.spec import trials
from mgpu.spec.load import loads

ROOT = Path(__file__).resolve().parents[4]
LOCKS = ROOT / "images" / "trainer" / "extras"
HF = "task: hf, options: {model: gpt2, data: texts.jsonl"
# what stands in `train:`, and what it needs
NEEDS = [
    ("steps: 3", ()),
    ("strategy: deepspeed", ("deepspeed",)),
    ("optimizer: adamw8bit", ("torchao",)),
    (f"{HF}}}", ("hf",)),
    (f"{HF}, lora: {{quantize_base: nf4}}}}", ("hf", "torchao")),
    ("task: vision", ("vision",)),
    ("task: vision, options: {data: images}", ()),
    ("task: vision, options: {model: 'timm:vit_tiny'}", ("timm",)),
    ("task: vision, options: {data: images, weights: /data/r18.safetensors}", ("timm",)),
    ("task: vision, options: {data: images, weights: /data/r18.pth}", ()),
    ("task: vision, options: {model: 'timm:vit_tiny', weights: /data/v.safetensors}", ("timm",)),
    ("task: diffusion", ("vision",)),
    ("task: diffusion, options: {data: images}", ()),
    ("task: recommender, options: {data: /data/r.parquet}", ("recommender",)),
    ("task: recommender, options: {data: /data/R.PARQUET}", ("recommender",)),
    ("task: recommender, options: {data: /data/r.csv}", ()),
]
BEFORE = "name: it\nprovider: local\nnodes: 1\nprocesses_per_node: 1\nmax_hours: 1\nmax_price_usd_per_hour: 1\n"


def spec(train: str, args: str = "", image: str = "repository: 127.0.0.1:1/it", more: str = ""):
    built_with = f", args: {{{args}}}" if args else ""
    text = f"{BEFORE}checkpoint: {{to: 's3://bucket/runs'}}\nimage: {{{image}{built_with}}}\n{more}train: {{{train}}}\n"
    return loads(text, "mgpu.yaml")


class Asked(Exception):
    """A registry or an engine would be asked next."""


@pytest.fixture(autouse=True)
def nobody(monkeypatch):
    def site(*_given):
        raise Asked

    monkeypatch.setattr(place, "site", site)


def missed(folder: Path, *given: str, **more: str) -> str:
    """What is said of a run file in this folder, before anybody is asked for the image; "": nothing."""
    told, said = spec(*given, **more), set[str]()
    for look in (images.look, images.settle):
        try:
            look(told, folder)
        except Asked:
            said.add("")
        except InputError as error:
            said.add(str(error))
    (one,) = said
    return one


@pytest.mark.parametrize(("train", "needed"), NEEDS)
def test_what_the_image_lacks_is_missed_with_its_cure(tmp_path, train, needed):
    said = missed(tmp_path, train)
    assert bool(said) == bool(needed)
    if needed:
        assert f'image: {{args: {{EXTRAS: "{" ".join(needed)}"}}}}' in said
        assert "train." in said
        assert not missed(tmp_path, train, f"EXTRAS: '{' '.join(needed)} recommender'")
        assert missed(tmp_path, train, f"EXTRAS: '{' '.join(needed[1:])}'")


def test_a_name_that_the_image_cannot_be_built_with_is_told_with_those_that_it_can(tmp_path):
    """The build would say so, minutes later; no cure repeats it."""
    said = missed(tmp_path, f"{HF}}}", "EXTRAS: 'hf, torchao'")
    assert "`hf,`" in said
    assert "spaces between them: deepspeed, hf, recommender, timm, torchao, vision" in said
    own = shipped.copy_to(tmp_path) / "extras" / "mine.lock"
    assert missed(tmp_path, "steps: 3", "EXTRAS: mine2")
    own.touch()
    assert not missed(tmp_path, "steps: 3", "EXTRAS: mine")


def test_weights_are_read_by_what_another_extra_brings_too(tmp_path):
    weights = "task: vision, options: {data: images, weights: /data/r18.safetensors}"
    assert not missed(tmp_path, weights, "EXTRAS: hf")
    assert missed(tmp_path, weights, "EXTRAS: vision")
    for name in ("hf", "timm"):
        assert re.search(r"^safetensors==", (LOCKS / f"{name}.lock").read_text(), re.MULTILINE)


def test_what_trials_try_is_missed_and_what_they_leave_out_is_not(tmp_path):
    """Else machines are rented for rows that say so."""
    tuned = trials.tune(spec("steps: 3", more="matrix: {train.strategy: [ddp, deepspeed]}\n"))
    for look in (images.look, images.settle):
        with pytest.raises(InputError, match=r'EXTRAS: "deepspeed"'):
            look(tuned, tmp_path)
    less = trials.tune(spec("strategy: deepspeed", more="matrix: {train.strategy: [ddp, fsdp]}\n"))
    for look in (images.look, images.settle):
        with pytest.raises(Asked):
            look(less, tmp_path)


def test_what_others_have_built_or_install_is_not_guessed(tmp_path):
    assert not missed(tmp_path, "optimizer: adamw8bit", image="reference: 'r.io/a:1'")
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "Dockerfile").write_text("FROM scratch\nARG EXTRAS=\n")
    assert not missed(tmp_path, "optimizer: adamw8bit", image="repository: r.io/a, context: docker")
    own = "optimizer: adamw8bit, task: 'mine:Task'"
    assert missed(tmp_path, own, more="code: {workdir: .}\n")
    assert not missed(tmp_path, own, more="code: {workdir: .}\nsetup: [pip install torchao]\n")
    assert not missed(tmp_path, own, more="code: {workdir: ., requirements: lock.txt}\n")


def test_a_users_copy_says_what_is_in_it_and_an_older_one_says_nothing(tmp_path):
    dockerfile = shipped.copy_to(tmp_path) / "Dockerfile"
    text = dockerfile.read_text()
    assert missed(tmp_path, "optimizer: adamw8bit")
    dockerfile.write_text(text.replace("ARG EXTRAS=\n", "ARG EXTRAS=torchao\n"))
    assert not missed(tmp_path, "optimizer: adamw8bit")
    dockerfile.write_text(text.replace("ARG EXTRAS=\n", "").replace("ARG EXTRAS\n", ""))
    assert not missed(tmp_path, "optimizer: adamw8bit")


def test_every_extra_that_is_missed_is_one_that_the_image_can_be_built_with():
    with (ROOT / "train" / "pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)["project"]["optional-dependencies"]
    for name in {name for _, needed in NEEDS for name in needed}:
        locked = re.findall(r"^([\w-]+)==", (LOCKS / f"{name}.lock").read_text(), re.MULTILINE)
        wanted = {re.split(r"[>=<]", each)[0] for each in declared[name] if not each.startswith("mgpu-train")}
        assert wanted <= {*locked}
    for name, others in extras._HAS_TOO.items():
        assert {f"mgpu-train[{other}]" for other in others} <= {*declared[name]}


def test_a_task_of_somebody_elses_needs_what_its_keys_say_alone():
    train = TrainConfig.model_validate({"task": "mine:Task", "options": {"model": "timm:x"}, "precision": "fp8"})
    assert extras.lacking(train, ()) == {"torchao": "`train.precision: fp8`"}
