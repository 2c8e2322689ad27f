"""What outlives a process: each format reads back what it wrote, is written as it always was, refuses other versions.

The golden texts are what an older program wrote: a change that cannot read them needs a new version, and leaves the
texts here as they are.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import jsonschema
import pytest
from mgpu_train.agent.status.status import AgentStatus, Fault, Phase
from mgpu_train.config import Job, Secrets
from pydantic import BaseModel, ValidationError

from mgpu.cli import cli
from mgpu.iac.outputs import StackOutput
from mgpu.plan.model import Plan

ROOT = Path(__file__).resolve().parents[2]

STACK: dict[str, Any] = {
    "version": 1,
    "fleet": "demo-1",
    "generation": 2,
    "owner": "o-0123456789ab",
    "provider": "local",
    "region": "here",
    "nodes": [
        {
            "rank": 0,
            "id": "n-1",
            "address": "127.0.0.1",
            "port": 2201,
            "user": "mgpu",
            "host_key": "ssh-ed25519 AAAA",
            "private_address": "10.0.0.1",
            "via": {"address": "jump", "port": 22, "user": "j", "host_key": "ssh-ed25519 BBBB"},
        }
    ],
    "gpu": "H100",
    "gpus_per_node": 8,
    "processes_per_node": 8,
    "market": "spot",
    "price_usd_per_hour": 0.2,
    "other_usd_per_hour": 0.05,
    "private_key_file": "/home/u/.ssh/key",
    "store": "s3://bucket/runs",
    "image": "registry/image@sha256:00",
    "lease_minutes": 60.0,
    "hard_cap_at": 1767225600.0,
}

# the least that a program which is not ours may export
FOREIGN: dict[str, Any] = {
    "version": 1,
    "fleet": "mine",
    "provider": "mine",
    "nodes": [{"rank": 0, "id": "a", "address": "host", "user": "root", "host_key": "ssh-ed25519 AAAA"}],
    "private_key_file": "key",
}

CARRIED: dict[str, Any] = {**FOREIGN, "nodes": [{**FOREIGN["nodes"][0], "via": {"command": ["ssh", "-W", "%h:22"]}}]}

JOB: dict[str, Any] = {
    "version": 1,
    "run_id": "demo-0101-abcde",
    "attempt": 2,
    "writer": "0f",
    "node_rank": 1,
    "nodes": 2,
    "processes_per_node": 1,
    "master_addr": "10.0.0.1",
    "master_port": 29500,
    "launcher": "torchrun",
    "command": ["train.py", "--lr", "1.10"],
    "env": {"A": "$(id)\n"},
    "secrets": ["HF_TOKEN"],
    "workdir": "runs/demo-0101-abcde/work",
    "requirements": "requirements.txt",
    "data": [{"from": "s3://bucket/x", "to": "x"}],
    "checkpoint": {"to": "s3://bucket/runs", "every_minutes": 10.0, "keep_last": 3, "writers": "all"},
    "resume": {"checkpoint_id": "step-00000025-0f", "seq": 3},
    "lease_file": ".mgpu/lease",
    "timeouts": {"lease_s": 90.0},
}

STATUS: dict[str, Any] = {
    "version": 2,
    "run_id": "demo-0101-abcde",
    "attempt": 2,
    "node_rank": 1,
    "phase": "failed",
    "agent_pid": 7,
    "beat": 99,
    "started_at": 1767225600.0,
    "updated_at": 1767225601.5,
    "phase_seconds": {"preparing": 0.5},
    "step": 25,
    "steps": 300,
    "metrics": {"loss": 2.5, "tokens_per_s": 1e5, "validation_loss": 2.6},
    "first_metrics": {"validation_loss": 5.5},
    "progress_at": 1767225601.0,
    "checkpoint": {
        "saved_step": 25,
        "uploaded_step": 25,
        "committed_step": 0,
        "committed_id": "step-00000000-0f",
        "skipped": 1,
        "failed": 1,
        "problem": "no space",
    },
    "exit_code": -9,
    "fault": "infrastructure",
    "reason": "the launcher was killed",
}

PLAN: dict[str, Any] = {
    "requirements": {"provider": "p", "nodes": 2, "max_price_usd_per_hour": 1.0, "max_hours": 1.0},
    "offers": [
        {
            "provider": "p",
            "instance_type": "t",
            "market": "spot",
            "price_usd_per_hour": 0.1,
            "region": "r",
            "fetched_at": 0.0,
        }
    ],
}

GOLDEN = [
    pytest.param(StackOutput, STACK, id="stack"),
    pytest.param(StackOutput, FOREIGN, id="foreign-stack"),
    pytest.param(StackOutput, CARRIED, id="stack-by-proxy-command"),
    pytest.param(Job, JOB, id="job"),
    pytest.param(AgentStatus, STATUS, id="status"),
    pytest.param(Secrets, {"env": {"HF_TOKEN": "x"}, "store": {"AWS_REGION": "r"}}, id="secrets"),
    pytest.param(Plan, PLAN, id="plan"),
]
VERSIONED = [
    pytest.param(StackOutput, STACK, id="stack"),
    pytest.param(Job, JOB, id="job"),
    pytest.param(AgentStatus, STATUS, id="status"),
]


@pytest.mark.parametrize(("model", "golden"), GOLDEN)
def test_what_was_written_is_read_and_written_the_same(model: type[BaseModel], golden: dict[str, Any]):
    value = model.model_validate_json(json.dumps(golden))
    assert json.loads(value.model_dump_json(by_alias=True, exclude_unset=True)) == golden


def test_the_status_of_an_agent_that_an_older_mgpu_started_is_read():
    metrics = {"loss": 2.5, "tokens_per_s": 1e5, "first_validation_loss": 5.5, "validation_loss": 2.6}
    kept = {name: value for name, value in STATUS.items() if name not in ("metrics", "first_metrics")}
    older = kept | metrics | {"version": 1, "validation_step": -1}
    assert AgentStatus.model_validate(older) == AgentStatus.model_validate(STATUS)


@pytest.mark.parametrize(("model", "golden"), GOLDEN)
def test_a_value_reads_back_equal_with_its_defaults(model: type[BaseModel], golden: dict[str, Any]):
    value = model.model_validate(golden)
    assert model.model_validate_json(value.model_dump_json(by_alias=True)) == value
    assert model.model_validate_json(value.model_dump_json()) == value


@pytest.mark.parametrize(("model", "golden"), VERSIONED)
@pytest.mark.parametrize("version", [0, 3, "1", None])
def test_an_unknown_version_is_refused(model: type[BaseModel], golden: dict[str, Any], version: Any):
    with pytest.raises(ValidationError, match="version"):
        model.model_validate_json(json.dumps(golden | {"version": version}))


def test_a_stack_output_without_a_version_is_refused():
    with pytest.raises(ValidationError, match="version"):
        StackOutput.model_validate({key: value for key, value in FOREIGN.items() if key != "version"})


@pytest.mark.parametrize(("model", "golden"), [(Job, JOB), (Plan, PLAN)])
def test_our_own_files_have_no_unknown_keys(model: type[BaseModel], golden: dict[str, Any]):
    with pytest.raises(ValidationError, match="new_key"):
        model.model_validate(golden | {"new_key": 1})


def test_a_newer_agent_may_say_more():
    assert AgentStatus.model_validate(STATUS | {"new_key": 1}) == AgentStatus.model_validate(STATUS)


def test_a_newer_program_may_export_more():
    node = FOREIGN["nodes"][0] | {"colour": "blue"}
    assert StackOutput.model_validate(FOREIGN | {"new_key": 1, "nodes": [node]}) == StackOutput.model_validate(FOREIGN)


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": []},
        {"nodes": [FOREIGN["nodes"][0] | {"port": 0}]},
        {"nodes": [{key: value for key, value in FOREIGN["nodes"][0].items() if key != "host_key"}]},
        {"price_usd_per_hour": -1},
        {"market": "preemptible"},
    ],
)
def test_a_stack_output_that_cannot_be_used_is_refused_by_model_and_schema(change: dict[str, Any]):
    with pytest.raises(ValidationError):
        StackOutput.model_validate(FOREIGN | change)
    assert not jsonschema.Draft202012Validator(stack_schema()).is_valid(FOREIGN | change)


@pytest.mark.parametrize(
    "change", [{"train": {}}, {"command": None}, {"node_rank": 2}, {"attempt": 0}, {"run_id": "../x"}]
)
def test_a_job_that_contradicts_itself_is_refused(change: dict[str, Any]):
    with pytest.raises(ValidationError):
        Job.model_validate(JOB | change)


def test_phases_and_faults_keep_their_names():
    assert [phase.value for phase in Phase] == [
        "preparing",
        "resuming",
        "launching",
        "training",
        "draining",
        "done",
        "failed",
    ]
    assert [phase for phase in Phase if phase.final] == [Phase.DONE, Phase.FAILED]
    assert [fault.value for fault in Fault] == ["user", "infrastructure", "provider", "stopped"]


# --- docs/formats.md


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_formats", ROOT / "scripts" / "write_formats.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(name: str = "formats.md") -> str:
    return (ROOT / "docs" / name).read_text()


def stack_schema() -> dict[str, Any]:
    """The schema as it stands in docs/formats.md."""
    block = re.search(r"generated: stack-output-schema -->\n```json\n(.*?)```", page(), re.DOTALL)
    assert block
    return json.loads(block[1])


@pytest.mark.parametrize("name", ["formats.md", "json.md"])
def test_the_page_is_what_the_models_say(writer, name):
    assert writer.filled(name, page(name)) == page(name), "run `python scripts/write_formats.py`"


def test_the_page_has_what_every_command_prints(writer):
    named = {" ".join((each.__doc__ or "").split()) for each in writer._subclasses(writer.results.Result)}
    assert [each for each in named if f"\n### {each.removesuffix('.')}\n" not in page("json.md")] == []


def test_the_page_names_every_command_that_prints_json():
    named = set[str]()
    for head in re.findall(r"^### .*$", page("json.md"), re.MULTILINE):
        words = list[str]()
        for each in re.findall(r"`(?:mgpu )?([^`]+)`", head):  # `mgpu schedule add`, `show`: of the same group
            words = [*(words[:-1] if " " not in each else ()), *each.split()]
            named.add(" ".join(words))
    others = {"logs", "spec"}  # the page's beginning says what they print
    assert {name for name in commands_with_json(cli, ()) if name not in others} - named == set()


def commands_with_json(command: click.Command, path: tuple[str, ...]) -> Iterator[str]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands_with_json(below, (*path, name))
    elif any("--json" in option.opts for option in command.params):
        yield " ".join(path)


def test_the_schema_file_is_what_mgpu_spec_prints():
    from mgpu.spec.schema import text

    assert (ROOT / "docs" / "mgpu.schema.json").read_text() == text(), "run `python scripts/write_formats.py`"


def test_a_page_without_a_marker_is_an_error(writer):
    with pytest.raises(SystemExit, match="no marker"):
        writer.filled("formats.md", page().replace("generated: job", "generated: jobs"))


@pytest.mark.parametrize("output", [STACK, FOREIGN, StackOutput.model_validate(FOREIGN).model_dump(mode="json")])
def test_the_schema_of_the_stack_output_accepts_what_runs_accept(output: dict[str, Any]):
    jsonschema.Draft202012Validator.check_schema(stack_schema())
    jsonschema.validate(output, stack_schema(), jsonschema.Draft202012Validator)
