"""Task recommender: ratings out of every kind of file, and tables that learn real ones, also where ranks share them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import real_data
import torch
from mgpu_train.data.ratings import open_ratings
from mgpu_train.errors import TrainError
from mgpu_train.models.dlrm import DLRM
from mgpu_train.tasks.entry import RECOMMENDER
from mgpu_train.tasks.recommender import Recommender
from mgpu_train.tasks.recommender_config import RecommenderOptions
from pyarrow import parquet

SMALL = {"task": "recommender", "lr": 0.01, "global_batch": 64, "micro_batch": 20}
NAMES = ("user", "item", "rating")
NUMBERS = ("0", "1", "2")


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """MovieLens' ratings as options name them."""
    path = tmp_path_factory.mktemp("films") / "ratings.npy"
    np.save(path, np.stack(real_data.movielens(), 1))
    return {"data": str(path), **dict(zip(NAMES, NUMBERS, strict=True))}


# --- training ---------------------------------------------------------------------------------------------------------


def test_what_others_think_of_films_is_learned(train, films):
    """MovieLens: an error of 0.90 stars at most, where the mean alone errs by 1.06."""
    told = train(
        "films", steps=300, validate_every=300, global_batch=1024, micro_batch=None, weight_decay=1.0, log_every=50,
        validate_batches=10, options={**films, "dim": 8, "hidden": [32]},
    )  # fmt: skip
    assert told.of("start", "constant_rmse")[0] > 1.04
    assert told.of("validation", "rmse")[-1] <= 0.90
    ratings = told.of("start", "users") + told.of("start", "items")
    assert ratings == [671, 9066]
    assert told.metrics == set(RECOMMENDER.metrics)


@pytest.mark.parametrize(
    ("name", "count", "settings"),
    [
        ("ddp", 2, {}),
        ("fsdp", 2, {"strategy": "fsdp"}),
        ("tables", 2, {"strategy": "single", "tensor_parallel": 2}),
    ],
)
def test_ranks_learn_what_one_process_learns(train, films, name, count, settings):
    """The root of the mean square, too, which is no mean of the ranks' roots."""
    alone, together = train("alone", options=films), train(name, count, **settings, options=films)
    for kind, key in (("step", "loss"), ("step", "rmse"), ("step", "grad_norm"), ("validation", "rmse")):
        assert together.of(kind, key) == pytest.approx(alone.of(kind, key), rel=1e-5)
    assert together.of("step", "rmse") == [math.sqrt(loss) for loss in together.of("step", "loss")]


@pytest.mark.parametrize(
    ("name", "settings"), [("fsdp", {"strategy": "fsdp"}), ("tables", {"strategy": "single", "tensor_parallel": 2})]
)
def test_resumed_ranks_end_as_if_uninterrupted(train, films, same_bits, name, settings):
    whole = train(name, 2, **settings, options=films)
    resumed = train(f"{name}-resumed", 2, name, **settings, options=films)
    assert resumed.of("step", "loss") == whole.of("step", "loss")[3:]
    same_bits(*(each.home / "checkpoints" / "step-5" for each in (whole, resumed)), more_than=20)


def test_guesses_are_validated_within_the_range_of_ratings(films):
    task = Recommender(RecommenderOptions(**films))
    model = task.model().to_empty(device="cpu")
    task.initialise(model)
    with torch.no_grad():
        model.get_parameter("out.bias").fill_(9.0)
    batch = task.data("validation").batch([0, 1], [1, 2])
    assert task.loss(model, batch).total > 2 * (9 - 5) ** 2
    expected = (5.0 - batch["rating"]).square().sum()
    assert task.evaluate(model, batch).total.item() == pytest.approx(expected.item())


def test_without_a_perceptron_it_is_matrix_factorisation():
    model = DLRM(3, 4, dim=2, hidden=())
    model.initialise(3.5)
    user, item = model.users.weight[1], model.items.weight[2]
    expected = 3.5 + user[0] + item[0] + user[1:] @ item[1:]
    assert model(torch.tensor([1]), torch.tensor([2])).item() == pytest.approx(expected.item())


# --- data -------------------------------------------------------------------------------------------------------------

PEOPLE = [("ann", "film a", 4.5), ("bob", "film b", 1.0), ("ann", "film b", 3.0)] * 20


def text(path: Path, header: str = "", mark: str = ",") -> Path:
    path.write_text(header + "".join(mark.join(map(str, row)) + "\n" for row in PEOPLE))
    return path


def table(path: Path) -> Path:
    columns = dict(zip(("rating", "item", "user"), zip(*(row[::-1] for row in PEOPLE), strict=True), strict=True))
    parquet.write_table(pyarrow.table({name: list(values) for name, values in columns.items()}), path)
    return path


def records(path: Path) -> Path:
    np.save(path, np.array(PEOPLE, dtype=[("user", "U8"), ("item", "U8"), ("rating", "f4")]))
    return path


FILES: dict[str, tuple[Any, tuple[str, str, str], str]] = {
    "csv": (lambda at: text(at / "r.csv", "\N{ZERO WIDTH NO-BREAK SPACE}user,item,rating\n"), NAMES, ","),
    "tsv without names": (lambda at: text(at / "u.data", mark="\t"), NUMBERS, "\t"),
    "parquet": (lambda at: table(at / "r.parquet"), NAMES, ","),
    "records": (lambda at: records(at / "r.npy"), NAMES, ","),
}


@pytest.mark.parametrize("kind", FILES)
def test_every_kind_of_file_has_the_same_ratings(tmp_path, kind):
    make, columns, separator = FILES[kind]
    splits = open_ratings(str(make(tmp_path)), columns, separator)
    assert sum(map(len, splits)) == 60
    assert splits[0].counts == (2, 2)
    batch = splits[0].batch(range(len(splits[0])), [0] * len(splits[0]))
    assert [batch[name].dtype for name in NAMES] == [torch.int64, torch.int64, torch.float32]
    told = {tuple(row) for row in zip(*(batch[name].tolist() for name in NAMES), strict=True)}
    assert told <= {(0, 0, 4.5), (1, 1, 1.0), (0, 1, 3.0)}


def test_one_pair_in_ten_is_held_out_and_all_its_ratings_with_it(tmp_path):
    pairs = [(user, item) for user in range(101) for item in range(199)] * 2
    np.save(tmp_path / "r.npy", np.array([(*pair, number % 5) for number, pair in enumerate(pairs)]))
    splits = open_ratings(str(tmp_path / "r.npy"), NUMBERS, ",")
    assert len(splits[1]) == pytest.approx(len(pairs) / 10, rel=0.05)
    training, validation = (set(zip(each.users.tolist(), each.items.tolist(), strict=True)) for each in splits)
    assert not training & validation
    assert splits[0].fingerprint != splits[1].fingerprint


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.csv", "user,film,rating\n", "has no column `item`, only user, film, rating: `train.options.user`"),
        ("r.csv", "user,item,rating\na,b,1\na,b\n", "line 3: cannot be read"),
        ("r.csv", "user,item,rating\na,b,good\n", "line 2: cannot be read .*'good'.* is parted by ','"),
        ("r.csv", "user,item,rating\na,b,1\na,c,nan\n", "of its 2 ratings, 1 are no finite number"),
        ("r.csv", "", "has no column `user`, only none"),
        ("r.csv", b"user,item,rating\n\xff,a,1\n", "cannot be read .*utf-8"),
        ("r.json", "", "is none of the files that are known"),
        ("r.csv", None, "cannot read .*r.csv on this node: No such file"),
        ("r.npy", "x", "is no file of NumPy"),
        ("r.npy", np.array([["a", 1]], dtype=object), "is no file of NumPy with numbers or text"),
        ("r.npy", np.array([("a", "b", "good")], dtype=[(name, "U4") for name in NAMES]), "its ratings are no numbers"),
        ("r.parquet", "x", "is no Parquet file"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said(tmp_path, name, content, message):
    if isinstance(content, np.ndarray):
        np.save(tmp_path / name, content)
    elif content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TrainError, match=message):
        open_ratings(str(tmp_path / name), NAMES, ",")


@pytest.mark.parametrize(
    ("shape", "columns", "message"),
    [
        ((4,), NUMBERS, "has the shape"),
        ((4, 2), NUMBERS, "has no column `2`, only 0, 1"),
        ((4, 3), NAMES, "`user`, only 0, 1, 2"),
    ],
)
def test_arrays_of_other_shapes_are_refused(tmp_path, shape, columns, message):
    np.save(tmp_path / "r.npy", np.ones(shape))
    with pytest.raises(TrainError, match=message):
        open_ratings(str(tmp_path / "r.npy"), columns, ",")
