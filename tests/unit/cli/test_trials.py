"""`--smoke` and `--tune` as a user meets them: what does not go together, and the table at the end."""

from __future__ import annotations

import json

import pytest
from mgpu_train.config import TrialResults, Trials

from mgpu.cli import trials
from mgpu.console import Console
from mgpu.run.nodes import outputs
from mgpu.run.record.record import Record, State
from mgpu.spec.text.change import Change

TRAIN = "name: a\nprovider: local\nmax_hours: 1\nmax_price_usd_per_hour: 1\ntrain: {strategy: ddp, global_batch: 8}\n"


def record(**given) -> Record:
    fields = {"run_id": "a-1", "name": "a", "project": "/p", "project_base": "/p", "run_file": "/p/mgpu.yaml"}
    fields |= {"stack": "a-1", "own_stack": True, "fleet_name": "p-a-1", "provider": "local", "nodes": 2}
    return Record(**fields | given)


def row(name: str, speed: float | None, outcome: str = "ok", said: str = "", purpose: str = "tune", **train) -> dict:
    return {
        "name": name, "train": train, "world_size": 2, "outcome": outcome, "said": said, "seconds": 7.0,
        "unit": "tokens" if speed else "", "units_per_s": speed, "memory_gib": speed and 1.5, "mfu": None,
        "purpose": purpose, "usd_per_million": speed and 36 / speed,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tune", "--smoke"], "--tune and --smoke"),
        (["--tune", "--resume", "x"], "--tune and --resume"),
        (["--smoke", "--detach"], "--smoke and --detach"),
        (["--tune", "--lr-range"], "--tune and --lr-range"),
        (["--smoke", "--write"], "--write is for --tune"),
        (["--lr-range", "--write"], "`train.lr_from` and --write"),
    ],
)
@pytest.mark.parametrize("command", ["launch", "run"])
def test_what_does_not_go_together_is_said_before_anything_is_rented(mgpu, world, command, options, said):
    world.run_file.write_text(TRAIN.replace("8}", "8, lr_from: 1e-5}"))
    done = mgpu(command, "--yes", *options)
    assert done.code == 2
    assert said in done.err
    assert world.calls == []


def test_the_table_shows_what_is_known_and_the_fastest_as_a_run_file_has_it(capsys):
    rows = [
        row("micro_batch: 8", None, "out of memory", "CUDA out of memory", micro_batch=8),
        row("micro_batch: 4", 4000.0, micro_batch=4, compile=True),
        row("micro_batch: 2", 2000.0, micro_batch=2),
    ]
    trials.show(Console(), record(trials=rows))
    shown = capsys.readouterr().out
    head, _, *lines = shown.strip().splitlines()
    assert head.split() == ["trial", "tokens/s", "GiB", "$", "per", "million", "tokens", "seconds", "outcome"]
    assert lines[0].split() == ["micro_batch:", "8", "7.0", "out", "of", "memory:", "CUDA", "out", "of", "memory"]
    assert lines[1].split() == ["micro_batch:", "4", "*", "4,000", "1.50", "0.0090", "7.0", "ok"]
    assert lines[-1] == "train: {micro_batch: 4, compile: true}"


def test_a_smoke_run_has_no_fastest(capsys):
    trials.show(Console(), record(trials=[row("one process", 10.0, purpose="smoke")]))
    assert "train:" not in capsys.readouterr().out


def rate(lr: float | None) -> dict:
    rates = [{"lr": 10.0**-power, "loss": 9.0, "smooth": power / 8} for power in range(60, 0, -1)]
    return {**row("lr: 1e-60 to 0.1", 9.0, purpose="lr-range", lr=0.1), "rates": rates, "lr": lr}


def test_the_table_of_rates_has_twenty_of_them_and_what_is_suggested(capsys):
    trials.show(Console(), record(trials=[rate(1e-4)]))
    shown = capsys.readouterr().out
    lines = shown.strip().splitlines()
    assert lines[-1] == "train: {lr: 0.0001}"
    rows = [line.split() for line in lines if "e-" in line and "to" not in line]
    assert len(rows) in (20, 21)
    assert ["1.0e-04", "*", "0.5000"] in rows
    trials.show(Console(), record(trials=[rate(None)]))
    said = capsys.readouterr()
    assert "train:" not in said.out
    assert "falls with none of these rates" in said.err


@pytest.mark.parametrize(
    ("rows", "written"), [([row("x", 4000.0, micro_batch=4)], "{micro_batch: 4, "), ([rate(1e-5)], "{lr: 1e-05, ")]
)
def test_write_changes_the_run_file_of_a_run_that_has_succeeded_alone(tmp_path, rows, written):
    path, asked = tmp_path / "mgpu.yaml", trials.Asked(smoke=False, tune=True, lr_range=False, write=True)
    for state, changed in ((State.FAILED, False), (State.SUCCEEDED, True)):
        path.write_text(TRAIN)
        asked.end(Console(), path, record(state=state, trials=rows))
        assert (written in path.read_text()) is changed


def test_a_range_is_tried_and_written_of_one_run_of_a_sweep(tmp_path):
    path, asked = tmp_path / "mgpu.yaml", trials.Asked(smoke=False, tune=False, lr_range=True, write=True)
    path.write_text(f"{TRAIN}matrix: {{train.seed: [1, 2]}}\n")
    assert asked.load(path, [Change.of("--set", "train.seed=1")], None, detach=False).trials.purpose == "lr-range"
    own = "slurm: {partition: x}\nhosts: {addresses: [a]}\nmatrix: {provider: [slurm, hosts]}\n"
    path.write_text(f"{TRAIN}checkpoint: none\n{own}")
    one = [Change.of("--set", "provider=slurm"), Change.of("--set", "train.lr_from=1e-5")]
    assert asked.load(path, one, None, detach=False).provider == "slurm"


def test_the_record_has_the_rows_with_what_a_million_units_cost(tmp_path):
    known = record(project_base=str(tmp_path), price_usd_per_hour=3.6)
    assert outputs._tried(known) == []
    found = {"name": "x", "world_size": 1, "outcome": "ok", "unit": "tokens", "units_per_s": 500.0}
    told = TrialResults.model_validate({"purpose": "tune", "rows": [found, {**found, "units_per_s": None}]})
    home = outputs.home(known)
    home.mkdir(parents=True)
    (home / "trials.json").write_text(told.model_dump_json())
    first, second = outputs._tried(known)
    assert (first["usd_per_million"], first["purpose"], second["usd_per_million"]) == (2.0, "tune", None)
    (home / "trials.json").write_text(json.dumps({"rows": 1}))
    assert outputs._tried(known) == []
    assert Trials.model_validate({"purpose": "smoke", "tries": [{"name": "x"}]}).steps == 8
