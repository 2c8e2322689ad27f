"""What the nodes are told: defaults filled in, and nothing secret in it (I8)."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

import pytest
from mgpu_train.config import Share
from mgpu_train.timeouts import Timeouts

from mgpu.errors import InputError
from mgpu.iac.outputs import NodeOutput, StackOutput
from mgpu.run.job.request import Request, resolve, secrets_of
from mgpu.spec.model import RunSpec
from mgpu.spec.provider import entry

BASE = {"name": "a", "provider": "local", "max_hours": 1, "max_price_usd_per_hour": 1}


def spec(**more) -> RunSpec:
    return RunSpec.model_validate(BASE | more)


def fleet(nodes: int) -> StackOutput:
    return StackOutput(
        version=1,
        fleet="f",
        provider="local",
        private_key_file="/k",
        nodes=tuple(
            NodeOutput(
                rank=r,
                id=f"i{r}",
                address="127.0.0.1",
                user="u",
                host_key="ssh-ed25519 AAAA",
                private_address=f"10.0.0.{r}",
            )
            for r in range(nodes)
        ),
    )


def asked(run_spec: RunSpec) -> Request:
    return resolve(run_spec, "a-1", Path("/base"), timeouts=Timeouts())


def jobs(run_spec: RunSpec, nodes: int = 2):
    return asked(run_spec).jobs(fleet(nodes), attempt=1, writer="w", ports=(29500, 29501, 29502), resume=None)


def test_jobs_differ_in_their_node_rank_alone():
    first, second = jobs(spec(train={}, nodes=2))
    assert (first.node_rank, second.node_rank) == (0, 1)
    assert first.model_copy(update={"node_rank": 1}) == second
    assert (first.master_addr, first.addresses) == ("10.0.0.0", ("10.0.0.0", "10.0.0.1"))


def test_the_agents_of_several_nodes_have_a_port_of_their_own():
    assert [(job.master_port, job.peer_port) for job in jobs(spec(train={}, nodes=2))] == [(29500, 29501)] * 2
    assert jobs(spec(train={}), nodes=1)[0].peer_port is None


def test_the_gpus_that_were_rented_are_demanded_and_no_others(monkeypatch):
    monkeypatch.delenv("MGPU_EMULATED_GPUS", raising=False)
    assert [job.gpus for job in jobs(spec(train={}, nodes=2))] == [0, 0]
    asked, rented = spec(train={}, gpus_per_node=4), fleet(1).model_copy(update={"gpus_per_node": 8})
    request = resolve(asked, "a-1", Path("/base"), timeouts=Timeouts())
    told = {"attempt": 1, "writer": "w", "ports": (29500, 29501, 29502), "resume": None}
    assert request.jobs(fleet(1), **told)[0].gpus == 4
    assert request.jobs(rented, **told)[0].gpus == 8, "a machine that lacks one of those that were paid for is broken"
    monkeypatch.setenv("MGPU_EMULATED_GPUS", "1")
    assert request.jobs(rented, **told)[0].gpus == 0
    monkeypatch.delenv("MGPU_EMULATED_GPUS")
    half = Share(slots=(4, 5, 6, 7), of=8, gpus=True)
    (shared,) = request.jobs(rented, **told, share=half)
    assert (shared.gpus, shared.share) == (4, half), "of a node that it shares it demands its own"


def test_what_is_measured_before_the_program_has_a_port_of_its_own_and_can_be_left_out():
    (job,) = jobs(spec(train={}), nodes=1)
    assert (job.preflight, job.preflight_port) == (True, 29502)
    assert not jobs(spec(train={}, preflight=False), nodes=1)[0].preflight


def quiet(run_spec: RunSpec, **given: float) -> tuple[float, ...]:
    """How long the nodes let the program be quiet: before its first step, training, validating, saving."""
    times = resolve(run_spec, "a-1", Path("/base"), timeouts=Timeouts(**given)).timeouts
    return times.first_step_s, times.stall_s, times.validation_s, times.save_s


def test_how_long_a_program_may_be_quiet():
    assert quiet(spec(train={})) == (1800, 780, 1800, 1800)
    assert quiet(spec(command=["t.py"])) == (7200,) * 4, "a line an hour is enough"
    minutes = {"first_step_minutes": 1, "training_minutes": 2, "validation_minutes": 3, "saving_minutes": 4}
    ends = resolve(
        spec(train={}, timeouts={"building_minutes": 5, "finishing_minutes": 6}), "a-1", Path("/b"), timeouts=Timeouts()
    )
    assert (ends.timeouts.building_s, ends.timeouts.finishing_s) == (300, 360)
    for program in ({"train": {}}, {"command": ["t.py"]}):
        assert quiet(spec(**program, timeouts=minutes)) == (60, 120, 180, 240)
        assert quiet(spec(**program, timeouts=minutes), stall_s=5, save_s=6) == (60, 5, 180, 6), "MGPU_TIMEOUTS wins"
    assert quiet(spec(command=["t.py"], timeouts={"training_minutes": 0.5})) == (7200, 30, 7200, 7200)


def test_train_saves_on_all_nodes_and_a_command_on_node_0():
    trained, commanded = jobs(spec(train={}))[0].checkpoint, jobs(spec(command=["t.py"]))[0].checkpoint
    assert trained is not None
    assert commanded is not None
    assert (trained.writers, trained.every_steps) == ("all", 100)
    assert (commanded.writers, commanded.every_steps) == ("rank0", None)


def test_what_is_kept_and_how_fast_it_travels_goes_to_the_nodes_as_it_is_written():
    given = {
        "to": "s3://bucket/x",
        "every_minutes": 10.0,
        "keep_last": 7,
        "keep_every_hours": 6.0,
        "keep_best": 2,
        "best_metric": "eval/accuracy",
        "best_mode": "max",
        "max_upload_mib_per_s": 200.0,
    }
    told = jobs(spec(train={}, checkpoint=given))[0].checkpoint
    assert told is not None
    assert told.model_dump() == given | {"every_steps": None, "writers": "all"}


def test_without_a_store_checkpoints_go_to_a_folder_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    checkpoint = jobs(spec(train={}))[0].checkpoint
    assert checkpoint is not None
    assert checkpoint.to == f"file://{tmp_path}/mgpu/checkpoints"


def test_checkpoint_none_means_none():
    assert jobs(spec(train={}, checkpoint="none"))[0].checkpoint is None


def test_a_secrets_value_is_in_no_job():
    canary = "canary-7f3a"
    run_spec = spec(command=["t.py"], secrets=["TOKEN"], checkpoint={"to": "s3://bucket/x"})
    environ = {"TOKEN": canary, "MGPU_STORE_ACCESS_KEY_ID": canary, "MGPU_STORE_SECRET_ACCESS_KEY": canary}
    assert all(canary not in job.model_dump_json() for job in jobs(run_spec))
    sent = secrets_of(asked(run_spec), environ, None)
    assert sent.env == {"TOKEN": canary}
    assert sent.store["AWS_SECRET_ACCESS_KEY"] == canary


def test_all_missing_secrets_are_named_at_once():
    with pytest.raises(InputError, match="ONE, TWO"):
        secrets_of(asked(spec(command=["t.py"], secrets=["ONE", "TWO"])), {}, None)


def test_a_file_store_takes_no_credentials_along():
    run_spec = spec(command=["t.py"], checkpoint={"to": "file:///x"})
    assert secrets_of(asked(run_spec), {"AWS_ACCESS_KEY_ID": "k"}, None).store == {}


def test_aws_has_its_notices_from_a_class_that_nodes_have():
    assert isinstance(resolve_name(entry("aws").capabilities.notices), type)


def test_the_nodes_look_for_notices_where_the_provider_puts_them(world):
    request = resolve(spec(train={}), "a-1", Path("/base"), timeouts=Timeouts())
    told = request.jobs(fleet(1).model_copy(update={"owner": "o"}), attempt=1, writer="w", ports=(1, 2, 3), resume=None)
    assert told[0].notices == "file"
    world.cloud.capabilities = world.cloud.capabilities.model_copy(update={"notices": "yard.notices:Own"})
    options = {"account": "123456789012"}
    theirs = fleet(1).model_copy(update={"owner": "o", "options": options})
    assert request.jobs(theirs, attempt=1, writer="w", ports=(1, 2, 3), resume=None)[0].notices == "yard.notices:Own"
    assert world.reached[-1] == ("local", options)
    assert jobs(spec(train={}))[0].notices == "file", "of a program of the user's own nothing else is known"
