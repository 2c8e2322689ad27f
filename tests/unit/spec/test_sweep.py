"""A run file with a `matrix` is many runs, each with its values; mistakes in it are found like all others."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu.errors import InputError, SpecError
from mgpu.spec.load import load, loads, sweep, text_of
from mgpu.spec.text import wording
from mgpu.spec.text.change import Change

BASE = """\
name: it
provider: local
nodes: 1
max_price_usd_per_hour: 1
max_hours: 1
checkpoint: none
train: {task: lm, steps: 5}
"""


@pytest.fixture
def write(tmp_path: Path):
    def written(matrix: str) -> Path:
        path = tmp_path / "mgpu.yaml"
        path.write_text(BASE + matrix)
        return path

    return written


def test_there_is_a_run_for_each_combination(write):
    path = write('matrix: {train.lr: [0.1, 1.0e-2], env.SEED: ["1", 2], nodes: [1, 2]}\n')
    runs = sweep(path)
    assert [(spec.train.lr, spec.env["SEED"], spec.nodes) for _, spec in runs] == [
        (lr, seed, nodes) for lr in (0.1, 0.01) for seed in "12" for nodes in (1, 2)
    ]
    assert runs[0][0] == {"train.lr": "0.1", "env.SEED": '"1"', "nodes": "1"}
    assert not any(spec.matrix for _, spec in runs)
    for _, spec in runs:
        assert loads(text_of(spec, path), "kept") == spec, "what is kept of it is a run file of this run alone"


def test_a_run_file_without_one_is_one_run(write):
    ((setting, spec),) = sweep(write(""))
    assert (setting, spec) == ({}, load(write("")))


def test_what_the_command_line_gives_is_no_axis(write):
    path = write("matrix: {train.lr: [0.1, 0.2], train.seed: [1, 2]}\n")
    given = [Change.of("--set", "train.lr=0.3")]
    assert [spec.train.lr for _, spec in sweep(path, given)] == [0.3, 0.3]
    assert load(path, [*given, Change.of("--set", "train.seed=7")]).train.seed == 7


def test_what_takes_one_run_refuses_a_sweep_and_says_what_to_do(write):
    with pytest.raises(InputError, match="is a sweep of 4 runs") as refused:
        load(write("matrix: {train.lr: [0.1, 0.2], train.seed: [1, 2]}\n"))
    assert "--set train.lr=0.1 --set train.seed=1" in refused.value.next_step
    with pytest.raises(InputError, match="is a sweep of 2 runs") as refused:
        load(write('matrix: {env.SEED: ["1", "2"]}\n'))
    assert "--set 'env.SEED=\"1\"'" in refused.value.next_step, "as a shell has to be given it"


def test_mistakes_of_all_its_runs_are_told_at_once_each_in_its_line(write):
    path = write("matrix:\n  train.lr: [0.1, -1]\n  train.steps:\n    - 5\n    - 010\n    - many\n")
    with pytest.raises(SpecError) as refused:
        sweep(path)
    assert [(problem.path, problem.line, problem.field) for problem in refused.value.problems] == [
        (str(path), 9, "train.lr"),
        (str(path), 12, "matrix.train.steps[1]"),
        (str(path), 13, "train.steps"),
    ]
    path = write("matrix:\n  train.lr: [0.1, -1]\n  train.steps:\n    - 5\n    - 0\n    - many\n")
    with pytest.raises(SpecError) as refused:
        sweep(path)
    assert [(problem.path, problem.line, problem.field) for problem in refused.value.problems] == [
        (str(path), 9, "train.lr"),
        (str(path), 12, "train.steps"),
        (str(path), 13, "train.steps"),
    ]


@pytest.mark.parametrize(
    "matrix",
    ["{max_hours: [1, 2]}", f"{{max_hours: [1, 2], train.seed: {[*range(200)]}}}"],
    ids=["a sweep", "too many runs"],
)
def test_a_key_that_the_matrix_gives_is_not_missing_where_something_else_is_wrong(write, matrix):
    path = write(f"env:\nmatrix: {matrix}\n")
    path.write_text(path.read_text().replace("max_hours: 1\n", ""))
    with pytest.raises(SpecError) as refused:
        sweep(path)
    assert "env" in (fields := [problem.field for problem in refused.value.problems])
    assert "max_hours" not in fields


def test_very_many_mistakes_beside_a_matrix_are_counted_once(write):
    with pytest.raises(SpecError) as refused:
        sweep(write("matrix: {train.lr: [0.1, 0.2]}\n" + "".join(f"x{i}: 1\n" for i in range(60))))
    assert refused.value.problems[-1].message == "and 10 more problems from here on"


def test_names_are_compared_once_for_all_runs_of_a_sweep(write, monkeypatch):
    compared = list[str]()
    monkeypatch.setattr(wording, "get_close_matches", lambda key, *_: compared.append(key) or [])
    wording.nearest_key.cache_clear()
    with pytest.raises(SpecError):
        sweep(write("matrix: {train.lr: [0.1, 0.2, 0.3]}\nunlike_all: 1\n"))
    wording.nearest_key.cache_clear()
    assert compared == ["unlike_all"]


def test_text_beyond_the_letters_of_json_is_a_value(write):
    runs = sweep(write('matrix: {env.A: ["\U0001f600", b]}\n'))
    assert [spec.env["A"] for _, spec in runs] == ["\U0001f600", "b"]


@pytest.mark.parametrize(
    ("matrix", "field", "words"),
    [
        ("matrix: 3", "matrix", ""),
        ("matrix: {train.lr: 0.1}", "matrix", ""),
        ("matrix: {train.lr: []}", "matrix", ""),
        ("matrix: {train.lr: [[1]]}", "matrix.train.lr[0]", "one text, number, yes or no is needed"),
        ("matrix: {train.lr: [{a: 1}]}", "matrix.train.lr[0]", "one text, number, yes or no is needed"),
        ('matrix: {"train.betas[0]": [1]}', "matrix", "no key of a run file"),
        ("matrix: {train.larning_rate: [1, 2]}", "train.larning_rate", ""),
        ("matrix: {train.lr: [0.1, fast]}", "train.lr", ""),
        ("matrix: {train.steps: [" + ", ".join(map(str, range(1, 258))) + "]}", "matrix", "257 runs; 256 at most"),
    ],
)
def test_what_cannot_be_a_sweep_is_refused_where_it_stands(write, matrix, field, words):
    with pytest.raises(SpecError) as refused:
        sweep(write(matrix + "\n"))
    (problem,) = refused.value.problems
    assert problem.field.startswith(field)
    assert words in problem.message


def test_providers_can_be_compared_with_the_block_of_each(write):
    path = write("matrix: {provider: [slurm, hosts]}\nslurm: {partition: x}\nhosts: {addresses: [a]}\n")
    runs = [spec for _, spec in sweep(path)]
    assert [(spec.provider, spec.slurm is None, spec.hosts is None) for spec in runs] == [
        ("slurm", False, True), ("hosts", True, False),
    ]  # fmt: skip
    with pytest.raises(SpecError, match="slurm: settings of another provider"):
        sweep(write("matrix: {provider: [slurm, hosts], slurm.partition: [x, y]}\nhosts: {addresses: [a]}\n"))


def test_a_setting_of_the_command_line_is_for_the_providers_of_a_sweep_that_know_it(write):
    path = write("matrix: {provider: [slurm, hosts]}\nhosts: {addresses: [a]}\n")
    runs = [spec for _, spec in sweep(path, [Change.of("--set", "slurm.partition=x")])]
    assert [spec.slurm and spec.slurm.partition for spec in runs] == ["x", None]
    for wrong, why in (("slurm.partion=x", "partion"), ("kubernetes.context=x", "settings of another provider")):
        with pytest.raises(SpecError, match=why):
            sweep(path, [Change.of("--set", wrong)])
