"""What is told of a run's work: a program that seems to save nothing, an overdue checkpoint, what a stop does."""

from __future__ import annotations

import pytest
from mgpu_train.agent.status.status import AgentStatus, CheckpointStatus, Phase
from mgpu_train.timeouts import Timeouts

from mgpu.remote.snapshot import scan
from mgpu.run.job.request import resolve
from mgpu.run.job.saving import Saving, doubts
from mgpu.run.record.record import Record
from mgpu.spec.model import RunSpec

BASE = {"name": "a", "provider": "local", "max_hours": 1, "max_price_usd_per_hour": 1}
HOUR = 3600.0


def request(folder, **spec):
    program = {} if "train" in spec else {"command": ["t.py"]}
    return resolve(RunSpec.model_validate(BASE | program | spec), "run-1", folder, timeouts=Timeouts())


# --- before anything is rented ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "code", "doubt"),
    [
        ({}, "torch.save(model, 'm.pt')", "names MGPU_CHECKPOINT_DIR"),
        ({}, "os.environ['MGPU_CHECKPOINT_DIR']", None),
        ({"outputs": ["*.pt"]}, "torch.save(model, 'm.pt')", "names MGPU_CHECKPOINT_DIR"),
        ({"checkpoint": "none"}, "torch.save(model, 'm.pt')", "nothing that the program writes comes back"),
        ({"checkpoint": "none", "outputs": ["*.pt"]}, "torch.save(model, 'm.pt')", None),
        ({"train": {}}, "", None),
    ],
)
def test_a_program_that_seems_to_save_nothing_is_doubted(tmp_path, spec, code, doubt):
    (tmp_path / "t.py").write_text("")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "saving.py").write_text(code)
    found = list(doubts(request(tmp_path, **spec), scan(tmp_path)))
    assert len(found) == (doubt is not None)
    assert all(doubt in text for text in found)
    assert all(("`outputs: [" in text) == ("outputs" not in spec) for text in found), "the cure is named"


# --- while it runs ----------------------------------------------------------------------------------------------------


def status(trained_s, *, step=-1, phase=Phase.TRAINING, saved=-1, committed=-1, problem=None):
    done = CheckpointStatus(saved_step=saved, committed_step=committed, problem=problem)
    seconds = {"preparing": 100.0, "launching": 50.0, "training": trained_s}
    return AgentStatus(
        run_id="r", attempt=1, node_rank=0, phase=phase, agent_pid=1, started_at=1000.0,
        updated_at=1150.0 + trained_s, phase_seconds=seconds, step=step, checkpoint=done,
    )  # fmt: skip


OWN = Saving(own=True)


@pytest.mark.parametrize(
    ("saving", "said", "overdue"),
    [
        (OWN, status(0.9 * HOUR), None),
        (OWN, status(1.1 * HOUR), "no checkpoint after 1.1 h of training"),
        (OWN, status(9 * HOUR, saved=3), None),
        (OWN, status(9 * HOUR, committed=3), None),
        (OWN, status(9 * HOUR, problem="the store refuses"), None),
        (OWN, status(9 * HOUR, phase=Phase.DONE), None),
        (Saving(own=True, every_s=600), status(1190), None),
        (Saving(own=True, every_s=600), status(1210), "no checkpoint after 20.2 min of training"),
        (Saving(own=True, every_s=9 * HOUR), status(10 * HOUR), None),
        (Saving(own=True, every_steps=100), status(10, step=199), None),
        (Saving(own=True, every_steps=100), status(10, step=200), "no checkpoint by step 200, with `every_steps: 100`"),
        (Saving(own=True, checkpoints=False, outputs=True), status(9 * HOUR), None),
        (Saving(own=False), status(9 * HOUR), None),
    ],
)
def test_an_overdue_first_checkpoint_is_told(saving, said, overdue):
    found = saving.overdue(said)
    assert (found is None) == (overdue is None)
    assert overdue is None or overdue in found


def test_before_it_trains_nothing_is_overdue():
    said = status(9 * HOUR)
    assert OWN.overdue(said.model_copy(update={"phase_seconds": {"preparing": 9 * HOUR}})) is None


# --- what a stop promises ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saving", "committed", "promise"),
    [
        (Saving(), False, "checkpoint"),
        (OWN, True, "checkpoint"),
        (OWN, False, "time for a first checkpoint: it has made none so far"),
        (Saving(own=True, outputs=True), True, "checkpoint, outputs come home"),
        (Saving(own=True, checkpoints=False), False, "nothing of it is saved"),
        (Saving(own=True, checkpoints=False, outputs=True), False, "outputs come home"),
    ],
)
def test_no_more_is_promised_than_can_happen(saving, committed, promise):
    record = Record("r", "a", "p", "p", "f", "s", True, "fleet", "local", 1, checkpoint_id="c" if committed else None)
    assert saving.promise(record) == promise


def test_it_follows_the_run_file(tmp_path):
    spec = {"checkpoint": {"every_minutes": 5, "every_steps": 7}, "outputs": ["a"]}
    assert Saving.of(request(tmp_path, **spec)) == Saving(True, True, True, 300.0, 7)
    assert Saving.of(request(tmp_path, checkpoint="none")) == Saving(False, False, True)
    assert Saving.of(request(tmp_path, train={})).own is False
