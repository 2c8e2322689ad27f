"""What other people's packages bring is used like mgpu's own, without a change in mgpu."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from mgpu.paths import state_dir

PROGRAM = """
import os
print("rank", os.environ["RANK"], "started by", os.environ["STARTED_BY"], "with", os.environ["PEERS"], flush=True)
"""

RUN_FILE = """
name: doors
provider: yard
nodes: 2
max_price_usd_per_hour: 1
max_hours: 0.2
launcher: envrun
command: [train.py]
checkpoint: none
regions: [south]
yard: {endpoint: ENDPOINT, key: OUR_YARD_KEY, disk: nvme}
sinks: {bell: {tower: tower.txt, strokes: 2}, jsonl: {}}
"""

TRAINED = """
name: doors
provider: local
nodes: 2
max_price_usd_per_hour: 1
max_hours: 0.2
train:
  task: parity
  strategy: byhand
  steps: 12
  global_batch: 8
  micro_batch: 2
  threads: 1
  options: {bits: 5, width: 16}
checkpoint: {every_steps: 6}
"""

INTERRUPTED = """
name: interrupted
provider: yard
nodes: 2
max_price_usd_per_hour: 1
max_hours: 0.2
launcher: python
command: [train.py, "60", "0.1"]
env: {{COUNT_UNTIL: {end}}}
recovery: {{attempts: 5, wait_minutes: 1}}
yard: {{endpoint: "{endpoint}", key: OUR_YARD_KEY}}
"""

# as a user writes it, in their own folder
OWN_TASK = """
from mgpu_parity.task import Parity
from pydantic import BaseModel

class Options(BaseModel):
    bits: int
    width: int = 8

class Mine(Parity):
    Options = Options
"""


def events(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def newest() -> dict[str, Any]:
    """The record of the run."""
    found = list((state_dir() / "runs").glob("*/record.json"))
    return json.loads(found[0].read_text()) if found else {"attempt": 0, "checkpoint_step": -1}


@pytest.fixture(autouse=True)
def files(beside, cloud) -> None:
    (beside.folder / "train.py").write_text(PROGRAM)
    (beside.folder / "mgpu.yaml").write_text(RUN_FILE.replace("ENDPOINT", cloud.endpoint))


def test_their_keys_are_keys_of_the_run_file(beside):
    schema = json.loads(beside.mgpu("spec", "--json"))
    assert schema["properties"]["provider"]["anyOf"][0]["enum"] == [
        "any",
        "aws",
        "hosts",
        "kubernetes",
        "local",
        "slurm",
        "yard",
    ]
    assert schema["properties"]["launcher"]["enum"] == [
        *("accelerate", "bash", "deepspeed", "envrun", "jax", "mpi", "python", "tensorflow", "torchrun")
    ]
    train = schema["$defs"]["TrainConfig"]["properties"]
    assert train["task"]["anyOf"][0]["enum"] == ["diffusion", "hf", "lm", "parity", "recommender", "vision"]
    assert train["strategy"]["enum"] == ["byhand", "ddp", "deepspeed", "fsdp", "hsdp", "single"]
    ours = {"apprise", "command", "github", "gitlab", "jsonl", "webhook"}
    assert set(schema["$defs"]["Sinks"]["properties"]) == {*ours, "bell"}
    assert schema["$defs"]["YardOptions"]["properties"]["disk"]["enum"] == ["ssd", "nvme"]


def test_a_variable_that_a_sink_of_theirs_names_is_passed_on(beside):
    text = (beside.folder / "mgpu.yaml").read_text()
    (beside.folder / "mgpu.yaml").write_text(text.replace("strokes: 2", "ringer: RINGER"))
    beside.mgpu("schedule", "add", "--cron", "0 2 * * *", "--yes")
    told = json.loads(beside.mgpu("schedule", "install", "--systemd", "--dry-run", "--json"))
    assert "set OUR_YARD_KEY, RINGER in it" in told["by_hand"][0]


def test_the_run_file_of_their_page_is_one(beside, cloud):
    page = Path(__file__).parent / "yard" / "yard.yaml"
    (beside.folder / "mgpu.yaml").write_text(page.read_text().replace("disk:", f"endpoint: {cloud.endpoint}, disk:"))
    beside.mgpu("check", "yard", code=3)
    text = (beside.folder / "mgpu.yaml").read_text()
    (beside.folder / "mgpu.yaml").write_text(text.replace("disk:", "key: OUR_YARD_KEY, disk:"))
    beside.mgpu("check", "yard")
    plan = json.loads(beside.mgpu("plan", "--json"))
    assert [(each["market"], each["region"]) for each in plan["offers"]] == [("spot", "south"), ("on-demand", "south")]


def test_mistakes_in_them_are_told_like_any_other(beside):
    wrong = RUN_FILE.replace("disk: nvme", "disk: floppy").replace("endpoint: ENDPOINT", "prise: 1")
    wrong = wrong.replace("strokes: 2", "strokes: 0").replace("jsonl:", "jsnol:")
    (beside.folder / "mgpu.yaml").write_text(wrong.replace("envrun", "envrum"))
    said = beside.mgpu("plan", code=2)
    for words in (
        "`floppy` is not one of: ssd, nvme",
        "yard.prise",
        "`envrum` is not one of accelerate, bash, deepspeed, envrun, jax, mpi, python, tensorflow, torchrun",
        "sinks.bell.strokes: must be at least 1, not `0`",
        "sinks.jsnol: unknown key",
    ):
        assert words in said, said


def test_a_run_on_their_machines_started_by_their_launcher(beside, cloud):
    plan = json.loads(beside.mgpu("plan", "--json"))
    assert [(each["instance_type"], each["region"]) for each in plan["offers"]] == [("barrow", "south")], plan
    ended = json.loads(beside.mgpu("launch", "--yes", "--json"))
    assert ended["state"] == "succeeded", ended
    told = json.loads(beside.mgpu("status", ended["run_id"], "--json"))
    assert (told["provider"], told["price_usd_per_hour"]) == ("yard", pytest.approx(0.18)), told
    logs = beside.mgpu("logs", ended["run_id"])
    for rank in (0, 1):
        assert f"rank {rank} started by envrun 1 of {ended['run_id']} with 2 at 127.0.0.1" in logs, logs
    assert json.loads(beside.mgpu("gc", "--json"))["fleets"] == []
    assert (len(cloud.instances), cloud.billed) == (2, [])
    assert (beside.folder / "tower.txt").read_text() == f"ding {ended['run_id']} succeeded\n" * 2
    heard = events(beside.folder / "mgpu-runs" / ended["run_id"] / "events.jsonl")
    states = [event["state"] for event in heard if event["event"] == "RunStateChanged"]
    assert states == ["queued", "provisioning", "running", "teardown", "succeeded"], heard
    assert [event["succeeded"] for event in heard if event["event"] == "AttemptEnded"] == [True]
    assert (heard[-1]["event"], heard[-1]["exit_code"], heard[-1]["teardown"]) == ("RunEnded", 0, "confirmed")
    assert (heard[-1]["stop_reason"], told["stop_reason"]) == (None, None)
    assert 0 < heard[-1]["spent_usd"] == told["spent_usd"] < 0.18 / 60 * 5


def test_a_cloud_that_pauses_a_machine_and_then_takes_one_with_a_notice(beside, cloud, monkeypatch):
    (beside.folder / "train.py").write_text((Path(__file__).parents[1] / "programs" / "count.py").read_text())
    end = beside.folder / "end"
    (beside.folder / "mgpu.yaml").write_text(INTERRUPTED.format(endpoint=cloud.endpoint, end=end))
    monkeypatch.setenv("MGPU_TIMEOUTS", json.dumps({"silence_s": 4}))

    def machine(attempt: int, rank: int, step: int) -> str:
        """A node's, when this attempt has committed this step."""
        until(lambda: newest()["attempt"] == attempt and newest()["checkpoint_step"] >= step, 100, newest)
        return newest()["fleet"]["nodes"][rank]["id"]

    launch = beside.start("launch", "--yes", "--json")
    try:
        paused = machine(1, 1, 10)
        cloud.machines.pause(paused)
        taken = machine(2, 0, 20)
        assert cloud.show(taken)["status"] == "running"
        assert paused not in cloud.billed, "it looked as if it ran, and was given back all the same"
        cloud.machines.notice(taken, 30)
        machine(3, 0, 20)
        end.touch()
        ended = json.loads(beside.ended(launch))
    finally:
        launch.kill()
    assert (ended["state"], ended["attempt"]) == ("succeeded", 3), ended
    told = json.loads(beside.mgpu("status", ended["run_id"], "--json"))
    silent, warned = told["interruptions"]
    assert (silent["nodes"], warned["nodes"]) == ([1], [0]), told
    assert warned["steps_lost"] == 0, "the notice was long enough for a save"
    assert (len(cloud.instances), cloud.billed) == (4, []), "two, and one in the place of each"


def test_a_run_whose_cloud_has_nothing_left_goes_on_at_another_provider(beside, cloud):
    (beside.folder / "train.py").write_text((Path(__file__).parents[1] / "programs" / "count.py").read_text())
    end = beside.folder / "end"
    text = INTERRUPTED.format(endpoint=cloud.endpoint, end=end)
    text = text.replace("provider: yard", "provider: [local, yard]").replace("wait_minutes: 1", "wait_minutes: 0.05")
    (beside.folder / "mgpu.yaml").write_text(text)
    plan = json.loads(beside.mgpu("plan", "--json"))
    assert [(each["provider"], each["price_usd_per_hour"]) for each in plan["offers"]] == [
        *(("yard", 0.07), ("yard", 0.09), ("local", 0.1)),
    ]
    launch = beside.start("launch", "--yes", "--json")
    try:
        until(lambda: newest()["checkpoint_step"] >= 10, 100, newest)
        cloud.capacity = dict.fromkeys(cloud.capacity, 0)
        cloud.machines.notice(newest()["fleet"]["nodes"][1]["id"], 30)
        until(lambda: newest()["attempt"] == 2 and newest()["checkpoint_step"] >= 40, 100, newest)
        end.touch()
    finally:
        ended = json.loads(beside.ended(launch))
    assert (ended["state"], ended["attempt"]) == ("succeeded", 2), ended
    told = json.loads(beside.mgpu("status", ended["run_id"], "--json"))
    assert (told["provider"], [each["steps_lost"] for each in told["interruptions"]]) == ("local", [0]), told
    costs = json.loads(beside.mgpu("costs", "--by", "provider", "--json"))
    assert {each["key"] for each in costs["rows"]} == {"local", "yard"}, costs
    assert (len(cloud.instances), cloud.billed) == (2, [])
    assert json.loads(beside.mgpu("gc", "--json"))["fleets"] == []


def test_mistakes_in_what_is_trained_are_told_like_any_other(beside):
    wrong = TRAINED.replace("bits: 5, width: 16", "bits: 99, widht: 16").replace("threads: 1", "seq_len: 64")
    (beside.folder / "mgpu.yaml").write_text(wrong.replace("nodes: 2", "nodes: 1"))
    said = beside.mgpu("plan", code=2)
    for words in (
        "mgpu.yaml:14: train.options.bits: must be at most 12, not `99`",
        "mgpu.yaml:14: train.options.widht: unknown key",
        "did you mean `width`?",
        "mgpu.yaml:13: train.seq_len: is an option of task lm; those of parity stand in `train.options`",
        "mgpu.yaml:9: train.strategy: byhand takes ranks in pairs, and there are 1",
    ):
        assert words in said, said
    (beside.folder / "mgpu.yaml").write_text(TRAINED.replace("parity", "party").replace("byhand", "byhnad"))
    said = beside.mgpu("plan", code=2)
    for words in (
        "`party` is not one of diffusion, hf, lm, parity, recommender, vision",
        "`byhnad` is not one of byhand, ddp, deepspeed, fsdp, hsdp, single",
    ):
        assert words in said, said


def test_their_task_is_trained_by_their_strategy(beside):
    (beside.folder / "mgpu.yaml").write_text(TRAINED)
    assert json.loads(beside.mgpu("plan", "--json"))["offers"]
    ended = json.loads(beside.mgpu("launch", "--yes", "--json"))
    assert (ended["state"], ended["step"], ended["checkpoint_step"]) == ("succeeded", 12, 12), ended
    metrics = json.loads(beside.mgpu("status", ended["run_id"], "--json"))["metrics"]
    assert {"accuracy", "validation_accuracy", "numbers_per_s"} < set(metrics), metrics
    assert "tokens_per_s" not in metrics
    assert "step 12/12" in beside.mgpu("logs", ended["run_id"])


def test_a_task_of_the_users_own_folder(beside):
    own = TRAINED.replace("task: parity", "task: mine.task:Mine").replace("byhand", "fsdp")
    (beside.folder / "mgpu.yaml").write_text(own)
    (beside.folder / "mine").mkdir()
    (beside.folder / "mine" / "task.py").write_text(OWN_TASK.replace("Mine", "Yours"))
    assert "mgpu.yaml:8: train.task: there is no Mine in " in beside.mgpu("plan", code=2)
    (beside.folder / "mine" / "task.py").write_text(OWN_TASK)
    ended = json.loads(beside.mgpu("launch", "--yes", "--json"))
    assert (ended["state"], ended["checkpoint_step"]) == ("succeeded", 12), ended
    assert "accuracy" in ended["metrics"]
