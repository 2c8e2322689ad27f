"""The recipes of `train/baselines`: run files that the plan accepts, and what a finished run is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu.plan import rank
from mgpu.providers.aws.catalog import offers
from mgpu.providers.aws.options import Options
from mgpu.run.record.checks import check
from mgpu.spec.load import load

FOLDER = Path(__file__).parents[4] / "train" / "baselines"
# as published; the run file's first lines say where
FIGURES = {
    "bert-large": {"validation_loss": 1.17},
    "gpt2-124m": {"validation_loss": 2.85, "duration_s": 4 * 24 * 3600},
    "llama-1b": {"tokens_per_s": 8 * 24_000},
    "llama-8b": {"tokens_per_s": 8 * 6_667},
    "lora-7b": {"validation_loss": 0.802},
    "resnet34-cifar10": {"validation_accuracy": 0.9334},
}


@pytest.fixture(autouse=True)
def _no_settings_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_every_recipe_has_its_figures_here():
    assert sorted(FIGURES) == sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("name", FIGURES)
def test_a_recipe_is_planned_and_says_what_it_is_compared_with(name):
    path = FOLDER / f"{name}.yaml"
    spec = load(path)
    assert spec.name == name
    needed = rank.requirements(spec)
    planned = rank.plan(needed, offers.offers(needed, Options()).offers)
    assert {offer.gpu for offer in planned.offers} == set(spec.gpu), "on the hardware of the figure"

    words = " ".join(line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    published, _, _ = words.partition("Published: ")[2].partition("As there: ")
    assert "https://" in published
    assert "We have not run it." in published
    assert spec.expect.keys() == FIGURES[name].keys()
    for metric, figure in FIGURES[name].items():
        wanted = spec.expect[metric]
        third_worse = figure * 4 / 3 if wanted.max is not None else figure * 2 / 3
        assert check(metric, wanted, {metric: figure}, ()).met
        assert not check(metric, wanted, {metric: third_worse}, ()).met
