"""The run file: what is accepted, and that every mistake is found at once, in the right line, in words that help."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import yaml

from mgpu.errors import InputError, SpecError
from mgpu.spec.expect import Expectation
from mgpu.spec.load import accepted, load, loads
from mgpu.spec.model import Checkpoint
from mgpu.spec.schema import schema
from mgpu.spec.text import wording

ROOT = Path(__file__).resolve().parents[3]

DEMO = """\
name: demo
provider: local
nodes: 2
processes_per_node: 1
market: spot
max_price_usd_per_hour: 0.20
max_hours: 0.5
train: {task: lm, strategy: fsdp, steps: 300, global_batch: 32, precision: fp32, seed: 1}
checkpoint: {to: "s3://mgpu-demo/runs", every_steps: 25, keep_last: 3}
recovery: {attempts: 5, wait_minutes: 2}
teardown: always
"""

AWS = """\
name: llama-ft
provider: aws
regions: [us-east-1, us-west-2]
nodes: 2
gpus_per_node: 8
gpu: [A100-80GB, A100-40GB]
market: spot-then-on-demand
max_price_usd_per_hour: 70
max_hours: 12
recovery: {attempts: 10, wait_minutes: 60}
code: {workdir: ., mode: sync, requirements: requirements.lock}
env: {WANDB_PROJECT: llama}
secrets: [WANDB_API_KEY, HF_TOKEN]
data: [{from: "s3://my-data/tokens", to: /data}]
launcher: torchrun
command: [train.py, --config, fsdp.yaml]
checkpoint: {to: "s3://my-bucket/runs", writers: all, every_minutes: 10, keep_last: 3}
aws: {subnet_ids: [subnet-1], security_group_id: sg-1}
teardown: always
"""

NASTY = "\t\n :-?*&!|>%@`'\"{}[]#,~\\\x00\x1b\u202eé0159.:_eabnoy<=$"

OWN = """\
name: own
provider: local
max_price_usd_per_hour: 1
max_hours: 1
command: [train.py]
"""


def problems(text: str) -> list[SimpleNamespace]:
    """What is wrong with a run file; fails where nothing is."""
    with pytest.raises(SpecError) as caught:
        loads(text, "f.yaml")
    return [SimpleNamespace(**vars(problem)) for problem in caught.value.problems]


def test_what_a_run_was_taken_with_is_not_judged_again_but_for_what_is_not_here():
    text = edited(edited(DEMO, "env", "{RANK: a}"), "train", "{strategy: single}")
    assert {"env.RANK", "train.strategy"} <= {*fields(text)}
    assert accepted(text, "f").env == {"RANK": "a"}
    text = edited(edited(DEMO, "sinks", "{webhook: {url: hooks.slack.com/x}}"), "lease_minutes", "1.0e9")
    assert {"sinks.webhook.url", "lease_minutes"} == {*fields(text)}
    assert accepted(text, "f").sinks.webhook.url == "hooks.slack.com/x"
    for key, wrong in (("provider", "nowhere"), ("launcher", "nothing"), ("train", "{task: none}")):
        with pytest.raises(SpecError, match=key):
            accepted(edited(text, key, wrong), "f")


def fields(text: str) -> list[str]:
    return [problem.field for problem in problems(text)]


def the_problem(text: str) -> SimpleNamespace:
    found = problems(text)
    assert len(found) == 1, [f"{each.field}: {each.message}" for each in found]
    return found[0]


def without(text: str, *keys: str) -> str:
    return "".join(line for line in text.splitlines(True) if line.split(":")[0] not in keys)


def edited(text: str, key: str, value: str) -> str:
    """The run file with another (or one more) top-level key."""
    return without(text, key) + f"{key}: {value}\n"


# --- what is accepted


def test_options_of_the_task_stand_in_train_or_in_its_options():
    spec = loads(edited(DEMO, "train", "{seq_len: 64, options: {model: {layers: 3}}}"), "f")
    assert spec.train is not None
    options = spec.train.task_options
    assert (options["seq_len"], options["model"], options["text"]) == (64, {"layers": 3}, None)
    other = loads(edited(DEMO, "train", "{task: 'a.b:C', options: {x: [1, {y: z}]}}"), "f").train
    assert other is not None
    assert other.task_options == {"x": [1, {"y": "z"}]}


def test_code_and_setup_go_with_a_task_that_is_not_mgpus():
    spec = loads(edited(DEMO, "train", "{task: 'a.b:C'}") + "code: {workdir: src}\nsetup: ls\n", "f")
    assert spec.own_code
    assert not loads(DEMO, "f").own_code


def test_outputs_and_setup_are_lists_or_one_of_them():
    assert loads(edited(OWN, "outputs", "runs/"), "f").outputs == ("runs/",)
    assert loads(edited(OWN, "outputs", '[runs/, "*.pt"]'), "f").outputs == ("runs/", "*.pt")
    assert loads(OWN + "setup: |\n  pip install x\n  ls\n", "f").setup == ("pip install x\nls\n",)


def test_the_demo_file_of_the_repository_is_the_first_example():
    lines = (ROOT / "mgpu.yaml").read_text().splitlines(keepends=True)
    # but for the store: the first run of a fresh checkout must not ask for anybody's bucket
    demo = loads(DEMO, "demo")
    kept = Checkpoint.model_validate({"every_steps": 25, "keep_last": 3})
    assert load(ROOT / "mgpu.yaml") == demo.model_copy(update={"checkpoint": kept})
    assert lines[0].startswith("# yaml-language-server: $schema=")
    assert (ROOT / lines[0].partition("=")[2].strip()).is_file()


# docs/provider.md has one of a provider of another package, whose own tests load it
@pytest.mark.parametrize("page", ["README.md", "docs/aws.md", "docs/hosts.md", "docs/kubernetes.md", "docs/slurm.md"])
def test_the_run_files_of_the_documents_are_run_files(page, tmp_path):
    found = re.findall(r"^```yaml\n(name: .*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert found
    (tmp_path / "train.py").touch()
    for number, text in enumerate(found):
        (path := tmp_path / f"{number}.yaml").write_text(text)
        assert load(path).name in ("first", "ft")


def test_both_examples_load():
    demo, aws = loads(DEMO, "demo"), loads(AWS, "aws")
    assert (demo.world_size, demo.train and demo.train.steps) == (2, 300)
    assert isinstance(demo.checkpoint, Checkpoint)
    assert demo.checkpoint.to == "s3://mgpu-demo/runs"
    assert (aws.processes, aws.world_size, aws.gpu) == (8, 16, ("A100-80GB", "A100-40GB"))
    assert aws.command == ("train.py", "--config", "fsdp.yaml")
    assert aws.data[0].source == "s3://my-data/tokens"
    assert aws.aws is not None
    assert aws.aws.subnet_ids == ("subnet-1",)


def test_one_word_is_a_list_of_one():
    spec = loads(edited(edited(AWS, "gpu", "H100"), "regions", "us-east-1"), "f")
    assert (spec.gpu, spec.regions) == (("H100",), ("us-east-1",))


def test_checkpoints_can_be_switched_off():
    assert loads(edited(AWS, "checkpoint", "none"), "f").checkpoint == "none"


def test_numbers_among_arguments_and_variables_stay_as_they_are_written():
    spec = loads(
        edited(edited(OWN, "command", "[t.py, --lr, 1e-3, 010, 1.10, 1_0, .inf]"), "env", "{A: 1.10, B: 0x1F}"), "f"
    )
    assert spec.command == ("t.py", "--lr", "1e-3", "010", "1.10", "1_0", ".inf")
    assert spec.env == {"A": "1.10", "B": "0x1F"}


def test_numbers_with_an_exponent_are_numbers():
    spec = loads(edited(DEMO, "train", "{lr: 1e-3, global_batch: 2}"), "f")
    assert spec.train is not None
    assert spec.train.lr == 0.001


def test_a_module_may_be_run():
    assert loads(edited(OWN, "command", "[-m, package.train]"), "f").command == ("-m", "package.train")


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path):
    path = tmp_path / "mgpu.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + DEMO.replace("\n", "\r\n").encode())
    assert load(path) == loads(DEMO, "f")


@pytest.mark.parametrize(
    "value", ["$(id)", "`id`", "; rm -rf /", "a && b", "ünï→", "a'\\\"b", "%2e%2e", "!x", "*", "a\\nb"]
)
def test_arguments_and_variables_are_taken_literally(value):
    spec = loads(OWN + f'env: {{A: "{value}"}}\n', "f")
    literal = value.replace('\\"', '"').replace("\\n", "\n")
    assert spec.env == {"A": literal}
    assert loads(edited(OWN, "command", f'[t.py, "{value}"]'), "f").command == ("t.py", literal)


# --- one key alone


@pytest.mark.parametrize(
    ("key", "value", "field", "message", "nearest"),
    [
        ("name", "Demo_1", "name", "lower-case letters", None),
        ("name", '"' + "a" * 41 + '"', "name", "at most 40", None),
        ("nodes", "0", "nodes", "at least 1, not `0`", None),
        ("nodes", "yes", "nodes", "a whole number is needed, not `yes`", None),
        ("nodes", '"2"', "nodes", 'a whole number is needed, not `"2"`', None),
        ("nodes", "1.5", "nodes", "a whole number is needed, not `1.5`", None),
        ("nodes", "[2]", "nodes", "a whole number is needed, not a list", None),
        ("max_hours", "soon", "max_hours", "a number is needed", None),
        ("max_hours", "0.0001", "max_hours", "at least 0.01", None),
        ("max_hours", "100000", "max_hours", "at most 1440", None),
        ("max_price_usd_per_hour", ".inf", "max_price_usd_per_hour", "plain decimal number", None),
        ("max_price_usd_per_hour", ".nan", "max_price_usd_per_hour", "plain decimal number", None),
        ("max_hours", "1:30", "max_hours", "`1:30`: write a plain decimal number", None),
        ("nodes", "010", "nodes", "`010`: write a plain decimal number", None),
        ("nodes", "0x2", "nodes", "`0x2`: write a plain decimal number", None),
        ("nodes", "1_0", "nodes", "`1_0`: write a plain decimal number", None),
        ("max_hours", "1e999", "max_hours", "plain decimal number", None),
        ("market", "spott", "market", "`spott` is not one of: spot, on-demand, spot-then-on-demand", "spot"),
        ("teardown", "no", "teardown", "`no` is not one of: always, keep", None),
        ("teardown", "Always", "teardown", "`Always` is not one of", "always"),
        ("provider", "gcp", "provider", "`gcp` is not one of aws, hosts, kubernetes", None),
        ("provider", "lcoal", "provider", "`lcoal` is not one of aws, hosts, kubernetes", "local"),
        ("train", "5", "train", "a block of keys is needed, not `5`", None),
        ("train", "{strategy: fdsp}", "train.strategy", "`fdsp` is not one of", "fsdp"),
        ("sinks", "{webhook: {url: 5}}", "sinks.webhook.url", "YAML reads `5` as a number", None),
        (
            "sinks",
            "{webhook: {url: hooks.slack.com/x}}",
            "sinks.webhook.url",
            "must be http(s)://..., or the name",
            None,
        ),
        ("preflight", "y", "preflight", "yes or no is needed, not `y`", None),
        ("train", "{ema: 1}", "train.ema", "must be less than 1, not `1`", None),
        (
            "train",
            "{task: lmm}",
            "train.task",
            "`lmm` is not one of diffusion, hf, lm, recommender, vision; a class of yours is package.module:Class",
            "lm",
        ),
        ("train", "{task: a b}", "train.task", "must be a name in lower case, or package.module:Class", None),
        ("train", "{options: {seq_len: 4}}", "train.options.seq_len", "must be at least 8, not `4`", None),
        ("train", "{options: {seq_len: yes}}", "train.options.seq_len", "a whole number is needed, not `yes`", None),
        ("train", "{options: {model: {layer: 3}}}", "train.options.model.layer", "unknown key", "layers"),
        ("train", "{options: {txt: x}}", "train.options.txt", "unknown key", "text"),
        ("train", "{model: {dim: 10, heads: 3}}", "train.model", "heads (3) does not divide dim (10)", None),
        ("train", "{model: {preset: gpt2}}", "train.model.preset", "`gpt2` is not one of", "gpt2-124m"),
        ("train", "{tokens: a}", "train", "`model.vocabulary` is needed with `tokens`", None),
        ("train", "{tokens: a, text: b}", "train", "both name what is learned from", None),
        ("train", "{preccision: fp32}", "train.preccision", "unknown key", "precision"),
        ("train", "{model: {layer: 3}}", "train.model.layer", "unknown key", "layers"),
        ("checkpoint", "non", "checkpoint", "`non` is not one of: none, or a block of keys", "none"),
        ("checkpoint", "{every_step: 3}", "checkpoint.every_step", "unknown key", "every_steps"),
        ("checkpoint", "{keep_last: 0}", "checkpoint.keep_last", "at least 1", None),
        ("checkpoint", "{keep_best: 0}", "checkpoint.keep_best", "at least 1", None),
        ("checkpoint", "{keep_every_hours: 0}", "checkpoint.keep_every_hours", "more than 0", None),
        ("checkpoint", "{best_metric: a b}", "checkpoint.best_metric", "letters, digits", None),
        ("checkpoint", "{best_mode: mim}", "checkpoint.best_mode", "`mim` is not one of", "min"),
        ("checkpoint", "{max_upload_mib_per_s: 0.5}", "checkpoint.max_upload_mib_per_s", "at least 1", None),
        ("checkpoint", '{to: "http://x/y"}', "checkpoint.to", "must be s3://bucket/prefix or file:///folder", None),
        ("checkpoint", '{to: "s3://user:pw@bucket/x"}', "checkpoint.to", "must be s3://", None),
        ("checkpoint", '{to: "file://host/x"}', "checkpoint.to", "must be s3://", None),
        ("gpus-per-node", "1", "gpus-per-node", "unknown key", "gpus_per_node"),
        ("every_steps", "5", "every_steps", "unknown key", "checkpoint.every_steps"),
        ("runpod", "{}", "runpod", "unknown key", None),
        ("env", "{A: on}", "env.A", 'YAML reads `on` as yes or no: write it in quotes, "on"', None),
        ("env", "{A: [b]}", "env.A", "text is needed, not a list", None),
        ("env", "{A-B: x}", "env.A-B", "name of an environment variable", None),
        ("env", "[A]", "env", "a block of keys is needed, not a list", None),
        ("secrets", "{A: b}", "secrets", "a list is needed", None),
        ("secrets", "[A=b]", "secrets[0]", "name of an environment variable", None),
        ("gpu", "4090", "gpu", 'YAML reads `4090` as a number: write it in quotes, "4090"', None),
        ("data", '[{from: "s3://bucket/x"}]', "data[0].to", "is missing", None),
        ("data", '[{source: "s3://bucket/x", from: "s3://bucket/x", to: x}]', "data[0].source", "unknown key", None),
        ("recovery", "", "recovery", "has no value", None),
        ("recovery", "~", "recovery", "has no value", None),
        ("local", '{python: "/opt/py\\0"}', "local.python", "control character U+0000", None),
        ("regions", '["us-east-1\\n"]', "regions[0]", "letters, digits", None),
        ("regions", '["-oProxyCommand=id"]', "regions[0]", "beginning with a letter or digit", None),
    ],
)
def test_a_mistake_in_one_key(key, value, field, message, nearest):
    found = the_problem(edited(DEMO, key, value))
    assert (found.field, found.nearest, found.line) == (field, nearest, len(edited(DEMO, key, value).splitlines()))
    assert message in found.message


def test_a_command_as_one_string_is_told_how_to_be_a_list():
    found = the_problem(edited(OWN, "command", "python train.py --name 'a b'"))
    assert found.field == "command"
    assert found.message.endswith('mgpu starts python itself: write `command: [train.py, --name, "a b"]`')
    assert "no shell" in found.message
    assert the_problem(edited(edited(OWN, "outputs", "[runs/]"), "command", "python train.py"))  # and no other one
    unbalanced = the_problem(edited(OWN, "command", '"train.py \'a"'))
    assert unbalanced.message.endswith("""`command: [train.py, "'a"]`""")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bash -c 'python train.py && ls'", "no shell reads it; `launcher: bash` starts one, and takes this text"),
        ("cd src && python train.py", "only a shell understands `&&`: `launcher: bash` starts one"),
        ("python train.py > log.txt", "only a shell understands `>`"),
        ("python train.py --to $HOME/x", "only a shell understands `$HOME/x`"),
        ('"pip install x\\npython train.py\\n"', "only a shell understands several lines"),
        ("python train.py --name 'a;b'", 'write `command: [train.py, --name, "a;b"]`'),
        ('"python train.py \\\\\\n --x 1\\n"', "write `command: [train.py, --x, 1]`"),
        ("LR=3 python train.py", "write `command: [train.py]`; `LR=3` belongs in `env:`"),
        ("uv run train.py --x", "mgpu starts Python itself: write `command: [train.py, --x]`"),
        ('""', "name the Python file, and then its arguments"),
    ],
)
def test_the_advice_for_a_string_can_be_followed(text, says):
    """A list with `&&` or `bash` in it would be refused in turn, or be rented for nothing."""
    message = the_problem(edited(OWN, "command", text)).message
    assert says in message
    if written := re.search(r"`command: (\[.*?\])`", message):
        assert loads(edited(OWN, "command", written[1]), "f").command
    if "launcher: bash" in message:
        assert loads(edited(edited(OWN, "launcher", "bash"), "command", text), "f").command[0] == "-c"


def test_with_a_shell_a_command_may_be_a_script_or_one_line():
    shell = edited(OWN, "launcher", "bash")
    line = "python train.py | tee out"
    assert loads(edited(shell, "command", f'"{line}"'), "x").command == ("-c", line)
    assert loads(edited(shell, "command", "[run.sh, a b]"), "x").command == ("run.sh", "a b")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("[bash, -e, run.sh, a]", "starts the shell itself: write `command: [run.sh, a]`"),
        ("[sh, -c, 'ls && pwd']", 'starts the shell itself: write `command: "ls && pwd"`'),
        ("[torchrun, train.py, --lr, '1']", 'write `command: "torchrun train.py --lr 1"`'),
        ("[-c, ls, pwd]", "one line is needed"),
        ('" "', "is empty: name a script, or write one line of a shell"),
    ],
)
def test_what_is_no_script_for_a_shell_is_told_how_to_be_one(command, says):
    found = the_problem(edited(edited(OWN, "launcher", "bash"), "command", command))
    assert (found.field, says in found.message) == ("command[0]", True), found.message


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("[python, train.py, --steps, 20]", "mgpu starts torchrun itself: write `command: [train.py, --steps, 20]`"),
        ("[/usr/bin/python3.11, -u, train.py]", "write `command: [train.py]`"),
        ("[python, -m, package.train]", "write `command: [-m, package.train]`"),
        ("[python, -c, 'print(1)']", "name the Python file"),
        ("[-m, torch.distributed.run, --standalone, train.py]", "write `command: [train.py]`"),
        ("[uv, run, train.py, -x]", "write `command: [train.py, -x]`"),
        ("[nohup, python, train.py]", "write `command: [train.py]`"),
        ("[-m]", "`-m` is followed by the name of a module"),
        ("[torchrun, --nproc-per-node, 8, train.py, --lr, '1e-3']", "write `command: [train.py, --lr, 1e-3]`"),
        ("[python, -m, torch.distributed.run, --standalone, train.py]", "write `command: [train.py]`"),
        ("[accelerate, launch, --multi_gpu, train.py]", "write `command: [train.py]`"),
        ("[torchrun, --standalone]", "name the Python file"),
        ("[bash, -c, 'python train.py']", 'write `launcher: bash` and `command: "python train.py"`'),
        ("[/bin/sh, run.sh]", "torchrun starts no shell: write `launcher: bash` and `command: [run.sh]`"),
    ],
)
def test_what_the_launcher_does_itself_is_no_program(command, says):
    """Each of these was rented for, and torchrun said `can't open file`."""
    found = the_problem(edited(OWN, "command", command))
    assert (found.field, says in found.message) == ("command[0]", True), found.message


def test_an_empty_command_is_refused():
    assert "at least 1 item" in the_problem(edited(OWN, "command", "[]")).message


@pytest.mark.parametrize("key", ["name", "provider", "max_price_usd_per_hour", "max_hours"])
def test_a_missing_key_is_told_with_its_meaning(key):
    found = the_problem(without(OWN, key))
    assert (found.field, found.line) == (key, 1)
    assert found.message.startswith("is missing: ")


def test_messages_speak_no_pydantic():
    text = str(SpecError("f", ()))
    for key, value in [
        ("nodes", "x"),
        ("env", "{A: [1]}"),
        ("train", "{model: {dim: 9, heads: 2}}"),
        ("gpu", "{a: b}"),
    ]:
        text += "".join(each.message for each in problems(edited(DEMO, key, value)))
    for jargon in ("pydantic", "http", "Input should", "Value error", "tuple", "dict", "str"):
        assert jargon not in text


# --- the keys together


NO_CODE = without(without(AWS, "command"), "code")


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        (edited(DEMO, "command", "[a.py]"), "command", "either `train` or `command`"),
        (without(DEMO, "train"), "train", "needed: `train`"),
        (edited(DEMO, "share", "true") + "image: {reference: a/b:1}\n", "share", "is for runs without `image`"),
        (
            edited(DEMO, "share", "true") + "env: {CUDA_VISIBLE_DEVICES: '0'}\n",
            "env.CUDA_VISIBLE_DEVICES",
            "says which GPUs the run has",
        ),
        (edited(DEMO, "gpus_per_node", "1"), "processes_per_node", "either `gpus_per_node`"),
        (edited(DEMO, "gpu", "H100"), "gpu", "`gpus_per_node` is needed"),
        (edited(DEMO, "train", "{precision: fp8}"), "train.precision", "fp8 is computed by GPUs: say `gpus_per_node`"),
        (
            edited(edited(NO_CODE, "gpu", "[h100-80gb, a100-80gb]"), "train", "{precision: fp8}"),
            "gpu[1]",
            "a100-80gb has compute capability 8.0, and `precision: fp8` takes 8.9",
        ),
        (
            edited(edited(DEMO, "processes_per_node", "2"), "train", "{tensor_parallel: 2, optimizer: adamw8bit}"),
            "train",
            "`optimizer: adamw8bit`: not with `tensor_parallel`",
        ),
        (edited(DEMO, "aws", "{}"), "aws", "settings of another provider"),
        (edited(AWS, "aws", "{tags: {Name: x}}"), "aws.tags.Name", "mgpu sets"),
        (edited(AWS, "aws", "{tags: {Cost*: x}}"), "aws.tags.Cost*", "must be letters"),
        (edited(AWS, "aws", "{tags: {Cost: 42}}"), "aws.tags.Cost", 'write it in quotes, "42"'),
        (edited(edited(AWS, "market", "spot"), "aws", "{reservation: cr-1}"), "market", "is rented in alone"),
        (edited(AWS, "aws", "{reservation: cr-1, instance_type: p5.48xlarge}"), "aws", "a machine type of its own"),
        (edited(AWS, "aws", "{reservation: cb-1}"), "aws.reservation", "mgpu reservations ls"),
        (edited(AWS, "local", "{}"), "local", "settings of another provider"),
        (edited(DEMO, "code", "{}"), "code", "is for `command`"),
        (edited(DEMO, "setup", "ls"), "setup", "is for `command`"),
        (edited(DEMO, "train", "{seq_len: 64, options: {seq_len: 64}}"), "train.seq_len", "says it, too"),
        (edited(DEMO, "train", "{task: 'a.b:C', text: x}"), "train.text", "is an option of task lm; those of a.b:C"),
        (edited(DEMO, "launcher", "python"), "launcher", "one process, and 2 are asked for"),
        (edited(DEMO, "launcher", "jax"), "launcher", "jax is for a `command`"),
        (edited(OWN, "launcher", "mpi") + "nodes: 2\n", "launcher", "processes of one node, and 2 nodes"),
        (edited(edited(OWN, "launcher", "jax"), "env", "{JAX_PROCESS_ID: 1}"), "env.JAX_PROCESS_ID", "is reserved"),
        (edited(DEMO, "train", "{strategy: single}"), "train.strategy", "one process, and 2 are asked for"),
        (edited(DEMO, "train", "{global_batch: 1}"), "train.global_batch", "1 samples are not one for each of 2"),
        (edited(DEMO, "train", "{tensor_parallel: 2}"), "train.strategy", "1 processes of a node are not a multiple"),
        (
            edited(DEMO, "train", "{pipeline_parallel: 3, model: {layers: 3}}"),
            "train.strategy",
            "2 processes cannot be parted by 3 (pipe",
        ),
        (
            edited(edited(DEMO, "processes_per_node", "2"), "train", "{tensor_parallel: 2, context_parallel: 4}"),
            "train.strategy",
            "4 processes cannot be parted by 2 (tensor_parallel) x 4 (context_parallel)",
        ),
        (
            edited(DEMO, "train", "{strategy: single, context_parallel: 2}"),
            "train.strategy",
            "single is for one process, and 2 are asked for",
        ),
        (
            edited(DEMO, "train", "{context_parallel: 2, seq_len: 18}"),
            "train.context_parallel",
            "`seq_len`: 2 ranks share sequences of a multiple of 4 tokens, and 18 is none",
        ),
        (
            edited(DEMO, "train", "{task: vision, context_parallel: 2}"),
            "train.context_parallel",
            "it has no sequences that ranks could share",
        ),
        (
            edited(DEMO, "train", "{task: hf, options: {model: ./m, data: d, kind: classifier}, context_parallel: 2}"),
            "train.context_parallel",
            "a classifier reads a text as a whole",
        ),
        (
            edited(DEMO, "train", "{task: hf, options: {model: ./m, data: d, pack: false}, context_parallel: 2}"),
            "train.context_parallel",
            "`pack: true`",
        ),
        (edited(DEMO, "train", "{strategy: hsdp}"), "train.strategy", "hsdp needs 2 replicas or more, of 2 ranks"),
        (edited(DEMO, "train", "{lr: 0.1, lr_from: 0.1}"), "train", "`lr_from` (0.1) has to be below `lr` (0.1)"),
        (edited(DEMO, "train", "{micro_batch: 0}"), "train.micro_batch", "must be at least 1"),
        (edited(DEMO, "train", "{micro_batch: most}"), "train.micro_batch", "`most` is not one of: auto"),
        (edited(DEMO, "train", "{pipeline_parallel: 2, micro_batch: auto}"), "train", "leave stages idle"),
        (edited(DEMO, "train", "{pipeline_parallel: 2}"), "train.global_batch", "a pipeline of 2 stages takes 2 micro"),
        (
            edited(DEMO, "train", "{strategy: single, pipeline_parallel: 2, micro_batch: 8, model: {layers: 1}}"),
            "train.pipeline_parallel",
            "1 layers are no 2 stages",
        ),
        (
            edited(DEMO, "train", "{strategy: single, pipeline_parallel: 2, micro_batch: 8, model: {tied: true}}"),
            "train.pipeline_parallel",
            "a tied head has the weights of the embedding",
        ),
        (
            edited(
                edited(DEMO, "processes_per_node", "4"),
                "train",
                "{tensor_parallel: 4, model: {heads: 4, kv_heads: 2}}",
            ),
            "train.tensor_parallel",
            "4 ranks cannot share 4 heads (2 of keys and values)",
        ),
        (
            edited(edited(DEMO, "processes_per_node", "2"), "train", "{task: vision, tensor_parallel: 2}"),
            "train.tensor_parallel",
            "its layers are not shared, nor cut into stages",
        ),
        (
            edited(DEMO, "train", "{task: recommender, options: {data: x.csv}, pipeline_parallel: 2, micro_batch: 8}"),
            "train.pipeline_parallel",
            "tensor_parallel parts its tables",
        ),
        (edited(DEMO, "train", "{task: recommender}"), "train.options.data", "is missing: file on the node"),
        (
            edited(edited(DEMO, "processes_per_node", "2"), "train", "{task: diffusion, tensor_parallel: 2}"),
            "train.tensor_parallel",
            "ddp, fsdp, hsdp and pipeline_parallel spread it",
        ),
        (
            edited(edited(DEMO, "nodes", "8"), "train", "{task: diffusion, pipeline_parallel: 8, micro_batch: 1}"),
            "train.pipeline_parallel",
            "4 layers are no 8 stages",
        ),
        (
            edited(DEMO, "train", "{task: diffusion, options: {size: 32, patch: 5}}"),
            "train.options",
            "patch (5) does not divide size (32)",
        ),
        (
            edited(DEMO, "train", '{task: vision, options: {model: "timm:vit_tiny_patch16_224", stem: small}}'),
            "train.options",
            "stem is of resnet18, resnet34 and resnet50",
        ),
        (edited(DEMO, "secrets", "[A, B, A]"), "secrets", "`A` is given 2 times"),
        (edited(AWS, "regions", "[a, a]"), "regions", "`a` is given 2 times"),
        (edited(DEMO, "env", "{MGPU_RUN_ID: x}"), "env.MGPU_RUN_ID", "reserved"),
        (edited(DEMO, "env", "{MASTER_ADDR: x}"), "env.MASTER_ADDR", "reserved"),
        (edited(DEMO, "secrets", "[OK, RANK]"), "secrets[1]", "reserved"),
        (edited(DEMO, "secrets", "[PET_NNODES]"), "secrets[0]", "reserved"),
        (DEMO + "env: {A: x}\nsecrets: [A]\n", "secrets[0]", "in `env` too"),
        (edited(DEMO, "checkpoint", "{writers: rank0}"), "checkpoint.writers", "shards"),
        (edited(DEMO, "checkpoint", "{keep_best: 1, best_metric: rmse}"), "checkpoint.best_metric", "has `loss`, and"),
        (edited(DEMO, "checkpoint", "{keep_best: 1, every_minutes: 5}"), "checkpoint.keep_best", "is sure to have"),
        (
            edited(OWN, "checkpoint", "{keep_best: 1, best_metric: eval/accuracy}"),
            "checkpoint.best_mode",
            "more of `eval/accuracy` is better (max)",
        ),
        (
            edited(DEMO, "train", "{early_stopping: {metric: accuracy}}"),
            "train.early_stopping.mode",
            "more of `accuracy` is better (max)",
        ),
        (edited(DEMO, "checkpoint", "{keep_best: 1, every_steps: 3}"), "checkpoint.keep_best", "validate_every` (100)"),
        (edited(AWS, "checkpoint", "{writers: all}"), "checkpoint.to", "is needed with provider aws"),
        (without(AWS, "checkpoint"), "checkpoint.to", "is needed with provider aws"),
        (edited(AWS, "checkpoint", '{to: "file:///x"}'), "checkpoint.to", "do not see this machine's files"),
        (edited(DEMO, "checkpoint", '{to: "file:///x/../y"}'), "checkpoint.to", "no `..`"),
        (edited(DEMO, "checkpoint", '{to: "s3://bucket/../y"}'), "checkpoint.to", "no `..`"),
        (edited(AWS, "data", '[{from: "file:///x", to: x}]'), "data[0].from", "do not see this machine's files"),
        (edited(AWS, "data", '[{from: "s3://bucket/x", to: ../x}]'), "data[0].to", "no `..`"),
        (edited(AWS, "data", '[{from: "s3://bucket/x", to: "~/x"}]'), "data[0].to", "`~`"),
        (edited(DEMO, "data", '[{from: "s3://bucket/x", to: /x}]'), "data[0].to", "is relative with provider local"),
        (edited(DEMO, "outputs", "[runs]"), "outputs", "files that a `command` writes"),
        (edited(OWN, "outputs", "[a, /b]"), "outputs[1]", "paths are relative to it"),
        (edited(OWN, "outputs", "[../a]"), "outputs[0]", "paths are relative to it"),
        (edited(OWN, "outputs", "[~/a]"), "outputs[0]", "paths are relative to it"),
        (edited(OWN, "outputs", "[a, b, a]"), "outputs", "`a` is given 2 times"),
        (edited(DEMO, "setup", "[ls]"), "setup", "is for `command`"),
        (edited(OWN, "setup", '["  "]'), "setup[0]", "is empty"),
        (edited(OWN, "code", "{workdir: /src}"), "code.workdir", "is relative"),
        (edited(OWN, "code", "{workdir: ~/src}"), "code.workdir", "is relative"),
        (edited(OWN, "code", "{requirements: ../r.txt}"), "code.requirements", "no `..`"),
        (edited(OWN, "code", "{requirements: /r.txt}"), "code.requirements", "is relative"),
        (edited(OWN, "code", "{requirements: --index-url=x}"), "code.requirements", "begins with `-`"),
        (edited(OWN, "code", "{workdir: -x}"), "code.workdir", "begins with `-`"),
        (edited(OWN, "code", '{workdir: "a\\nb"}'), "code.workdir", "one name"),
        (edited(OWN, "code", '{workdir: ""}'), "code.workdir", "one name"),
        (edited(OWN, "command", "[-c, 'import os']"), "command[0]", "begins with `-`"),
        (edited(OWN, "command", "[--nnodes=9, t.py]"), "command[0]", "begins with `-`"),
        (edited(OWN, "local", "{python: -x}"), "local.python", "begins with `-`"),
        (edited(DEMO, "train", "{text: -x}"), "train.text", "begins with `-`"),
        (edited(DEMO, "train", "{tokens: -x, model: {vocabulary: 9}}"), "train.tokens", "begins with `-`"),
        (edited(OWN, "data", '[{from: "s3://bucket/x", to: -x}]'), "data[0].to", "begins with `-`"),
    ],
)
def test_keys_that_do_not_go_together(text, field, message):
    found = the_problem(text)
    assert found.field == field
    assert message in found.message


@pytest.mark.parametrize(
    "text",
    [
        edited(edited(DEMO, "nodes", "1"), "train", "{strategy: single}"),
        edited(edited(DEMO, "nodes", "1"), "launcher", "python"),
        edited(edited(DEMO, "nodes", "1"), "checkpoint", "{writers: rank0}"),
        edited(edited(DEMO, "train", "{strategy: ddp}"), "checkpoint", "{writers: rank0}"),
        edited(DEMO, "train", "{global_batch: 33, micro_batch: 5}"),
        edited(DEMO, "train", "{global_batch: 33, micro_batch: auto}"),
        edited(OWN, "launcher", "python") + "nodes: 2\n",
        edited(OWN, "code", "{workdir: ..}"),
        without(DEMO, "checkpoint"),
        edited(DEMO, "checkpoint", "{keep_best: 1}"),
        edited(DEMO, "checkpoint", "{best_metric: validation_accuracy}"),
        edited(DEMO, "checkpoint", "{keep_best: 1, best_metric: validation_accuracy, best_mode: min}"),
        edited(DEMO, "train", "{early_stopping: {metric: accuracy, mode: max}}"),
        edited(DEMO, "checkpoint", "{keep_best: 1, every_minutes: 5, best_metric: loss}"),
        edited(OWN, "checkpoint", "{keep_best: 1, every_minutes: 5, best_metric: rmse}"),
        edited(DEMO, "checkpoint", '{to: "file:///x/a..b"}'),
        edited(AWS, "checkpoint", "none"),
    ],
)
def test_what_looks_like_it_but_is_allowed(text):
    assert loads(text, "f").name


# --- all at once


def test_all_mistakes_are_in_one_error_in_the_order_of_lines():
    text = """\
name: Demo
provider: aws
nodes: two
gpus-per-node: 8
train:
  strategy: fsdpp
  stepps: 3
command: [a.py]
secrets: [RANK]
data:
  - from: "s3://bucket/x"
    to: ok
  - from: "s3://bucket/x"
    to: ../x
local: {}
"""
    assert [(each.line, each.field) for each in problems(text)] == [
        (1, "name"),
        (1, "max_price_usd_per_hour"),
        (1, "max_hours"),
        (1, "checkpoint.to"),
        (3, "nodes"),
        (4, "gpus-per-node"),
        (6, "train.strategy"),
        (7, "train.stepps"),
        (8, "command"),
        (9, "secrets[0]"),
        (14, "data[1].to"),
        (15, "local"),
    ]


def test_nothing_is_concluded_from_a_key_that_is_wrong():
    # `nodes: two` says nothing about the batch, a wrong provider nothing about its block
    assert fields(edited(edited(DEMO, "nodes", "two"), "train", "{global_batch: 1}")) == ["nodes"]
    assert fields(edited(edited(AWS, "provider", "asw"), "local", "{}")) == ["provider"]
    assert fields(edited(DEMO, "train", "7")) == ["train"]


@pytest.mark.parametrize("url", ["HTTPS://example.com/x", "http://example.com", "HOOK_URL"])
def test_a_webhook_is_an_address_or_a_variable(url):
    assert loads(DEMO + f"sinks: {{webhook: {{url: '{url}'}}}}\n", "f").sinks.webhook.url == url


def test_an_unknown_key_hides_nothing():
    assert fields(edited(DEMO, "train", "{stepps: 3, global_batch: 1}")) == ["train.stepps", "train.global_batch"]


def test_what_keys_of_a_block_say_together_is_told_beside_a_key_that_is_unknown():
    text = edited(edited(DEMO, "train", "{stepps: 3, strategy: deepspeed, optimizer: muon}"), "env", "{RANK: a}")
    assert fields(text) == ["train.stepps", "train", "env.RANK"]


def test_a_block_that_can_be_nothing_without_its_wrong_keys_hides_nothing_of_the_rest():
    wrong = edited(DEMO, "env", "{RANK: a}") + "sinks: {webhook: {url: 5}, github: {}}\n"
    assert fields(edited(wrong, "train", "{lr: -1, strategy: deepspeed, optimizer: muon}")) == [
        "env.RANK", "sinks.github.token", "sinks.webhook.url", "train.lr",
    ]  # fmt: skip


def test_very_many_mistakes_are_counted():
    found = problems(DEMO + "".join(f"x{i}: 1\n" for i in range(1000)))
    assert len(found) == 51
    assert found[-1].message == "and 950 more problems from here on"


def test_names_are_compared_for_what_may_be_shown_alone(monkeypatch):
    """A flat file of 20,000 keys is refused at once."""
    compared = list[object]()
    monkeypatch.setattr(wording, "nearest_key", lambda at, _options: compared.append(at))
    problems(DEMO + "".join(f"x{i}: 1\n" for i in range(2000)))
    assert 50 <= len(compared) <= 500


# --- YAML's own dangers


@pytest.mark.parametrize(
    ("text", "line", "field", "message"),
    [
        ("", 1, "file", "empty: remove it, and `mgpu init`"),  # which leaves alone what is there
        ("# only a comment\n", 1, "file", "empty"),
        ("- a\n- b\n", 1, "file", "block of keys"),
        ("just text", 1, "file", "block of keys"),
        ("null", 1, "file", "has no value"),
        ("a: [1,\nb: {", 2, "file", "not readable as YAML"),
        ("a: 1\n\tb: 2\n", 2, "file", "tab"),
        ("\ta: 1\n", 1, "file", "a tab?"),
        ("name: x\nprovider:\u00a0local\nnodes: 1\n", 3, "file", "a no-break space in line 2?"),
        ("a: b: c\n", 1, "file", "not readable as YAML"),
        ("name: x\nx: \x07\n", 2, "file", "U+0007"),
        ("name: x\n# \u202e\n", 2, "file", "U+202E"),
        ("[" * 100_000, 1, "[0]" * 17, "nested more than 16 deep"),
        ("{a: " * 100_000, 1, ".".join("a" * 17), "nested more than 16 deep"),
        ("x: " + "y" * (1 << 20), 1, "file", "larger than 1 MiB"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_text_that_is_no_run_file(text, line, field, message):
    found = the_problem(text)
    assert (found.line, found.field) == (line, field)
    assert message in found.message


@pytest.mark.parametrize(
    ("line", "field", "message"),
    [
        ("name: again", "name", "given twice; the first is in line 1"),
        ("env: {A: x, A: y}", "env.A", "given twice"),
        ("env: {A: !!python/object/apply:os.system [id]}", "env.A", "tag `!!python/object/apply:os.system`"),
        ("env: {A: !!python/name:os.system x}", "env.A", "tag `!!python/name:os.system`"),
        ("env: {A: !mine x}", "env.A", "tag `!mine`"),
        ("env: {A: ! x}", "env.A", "tag `!`"),
        ("env: {A: !!binary aGk=}", "env.A", "tag `!!binary`"),
        ("env: {A: !!timestamp 2001-01-01}", "env.A", "tag `!!timestamp`"),
        ("env: !!omap [A: x]", "env", "tag `!!omap`"),
        ("env: {!!python/name:os.system A: x}", "env", "a key has no tag"),
        ("env: &a {A: x}", "env", "`&a`: anchors"),
        ("env: *nothing", "env", "`*nothing`: aliases"),
        ("<<: *nothing", "<<", "`*nothing`: aliases"),
        ("env: {\u00a0A: b}", "env", "a no-break space (U+00A0) in a key"),
        ("env: {<<: *nothing}", "env.<<", "`*nothing`: aliases"),
        ("env: {? [a] : b}", "env", "a key is a plain word"),
        ('env: {A: "\\e]52;c;aGk=\\a"}', "env.A", "control character U+001B"),
        ('env: {A: "a\\r\\nb"}', "env.A", "control character U+000D"),
        ('env: {"A\\x00": b}', "env", "control character U+0000 in a key"),
        ("env: {" + "A" * 200 + ": b}", "env", "a key of 200 characters"),
        ("---\nname: b", "file", "a second document"),
    ],
)
def test_yaml_that_is_refused(line, field, message):
    found = [each for each in problems(DEMO + line + "\n") if each.field == field]
    assert found
    assert message in found[0].message
    assert found[0].line == 12


def test_plain_tags_are_only_types():
    spec = loads(DEMO + "env: {A: !!str yes, B: !!str 010}\n", "f")
    assert spec.env == {"A": "yes", "B": "010"}
    assert loads(edited(DEMO, "nodes", '!!int "2"'), "f").nodes == 2


def test_a_date_is_text_and_a_key_is_a_word():
    assert loads(OWN + "env: {ON: 2001-01-01, y: z}\n", "f").env == {"ON": "2001-01-01", "y": "z"}


def test_a_bomb_is_refused_quickly():
    bomb = 'a: &a ["x","x","x"]\n' + "".join(
        f"{b}: &{b} [*{a},*{a},*{a}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)
    )
    began = time.monotonic()
    assert any("anchors are not supported" in each.message for each in problems(bomb))
    problems("x:\n" + "- a\n" * 200_000)
    assert time.monotonic() - began < 60, "a bomb would take hours"


def mangled(seed: int) -> str:
    rng = random.Random(seed)
    text = list(rng.choice((DEMO, AWS, OWN)))
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(text))
        text[at : at + rng.randint(0, 3)] = rng.choices(NASTY, k=rng.randint(0, 3))
    return "".join(text)


def test_mangled_files_raise_nothing_but_a_spec_error():
    refused = 0
    for seed in range(1000):
        try:
            loads(mangled(seed), "f.yaml")
        except SpecError as error:
            refused += all(each.line >= 1 and each.message for each in error.problems)
    assert refused > 500


@pytest.mark.parametrize("key", ["<<", "<block>", "[key]", "[0]", "a.b", "", "checkpoint.to"])
def test_a_strange_key_is_an_unknown_key(key):
    for text in (DEMO + f'"{key}": 1\n', edited(DEMO, "checkpoint", f'{{"{key}": 1}}')):
        assert the_problem(text).message == "unknown key"


def test_a_secret_in_the_wrong_place_is_not_repeated():
    canary = "hunter2-Canary"
    for key, value in [
        ("secrets", canary),
        ("secrets", f"{{HF_TOKEN: {canary}}}"),
        ("secrets", f"[HF_TOKEN={canary}]"),
        ("env", f"{{TOKEN: [{canary}]}}"),
        ("env", f'{{TOKEN: "{canary}\\0"}}'),
        ("checkpoint", f'{{to: "s3://user:{canary}@bucket/x"}}'),
        ("data", f'[{{from: "https://user:{canary}@host/x", to: x}}]'),
        ("token", canary),
    ]:
        with pytest.raises(SpecError) as caught:
            loads(edited(DEMO, key, value), "f")
        assert canary not in str(caught.value), key


# --- files


def test_a_missing_file_says_what_why_and_next(tmp_path):
    with pytest.raises(InputError) as caught:
        load(tmp_path / "none.yaml")
    error = caught.value
    assert str(tmp_path / "none.yaml") in error.what
    assert "no such file" in error.why
    assert "mgpu init" in error.next_step
    assert error.exit_code == 2


@pytest.mark.timeout(20)
def test_a_folder_or_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(InputError, match="cannot be read"):
            load(path)


def test_text_that_is_not_utf8_is_refused_with_its_line(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_bytes(b"name: x\nenv: {A: \xff}\n")
    with pytest.raises(SpecError) as caught:
        load(path)
    assert str(caught.value.problems[0]) == f"{path}:2: file: not UTF-8 text"


@pytest.fixture
def project(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").touch()
    (tmp_path / "src" / "requirements.txt").touch()
    (tmp_path / "outside.txt").touch()
    (tmp_path / "src" / "link.txt").symlink_to(tmp_path / "outside.txt")
    return tmp_path


def loaded(project: Path, code: str, command: str = "[train.py]") -> list[tuple[str, str | None]]:
    path = project / "mgpu.yaml"
    path.write_text(edited(edited(OWN, "code", code), "command", command))
    try:
        load(path)
    except SpecError as error:
        return [(each.field, each.nearest) for each in error.problems]
    return []


def test_the_users_code_has_to_be_there(project):
    assert loaded(project, "{workdir: src, requirements: requirements.txt}") == []
    assert loaded(project, "{workdir: scr}") == [("code.workdir", None)]
    assert loaded(project, "{workdir: src, requirements: requirement.txt}") == [
        ("code.requirements", "requirements.txt")
    ]
    assert loaded(project, "{workdir: src, requirements: link.txt}") == [("code.requirements", None)]
    assert loaded(project, "{workdir: src}", "[trian.py]") == [("command[0]", "train.py")]
    assert loaded(project, "{workdir: src}", "[trian]") == [("command[0]", "train.py")]
    assert loaded(project, "{workdir: src}", "[-m, package.train]") == []


def test_a_class_of_the_users_is_looked_for_in_its_file(project):
    def told(task: str) -> list[str]:
        path = project / "mgpu.yaml"
        path.write_text(edited(edited(DEMO, "train", f"{{task: '{task}'}}"), "code", "{workdir: src}"))
        try:
            load(path)
        except SpecError as error:
            return [each.message for each in error.problems]
        return []

    (project / "src" / "mine.py").write_text("class Mine: ...\n")
    assert told("mine:Mine") == []
    assert told("mine:Yours") == [f"there is no Yours in {project / 'src' / 'mine.py'}"]
    assert told("elsewhere.installed:Mine") == []


@pytest.mark.parametrize(
    ("name", "content", "good"),
    [
        ("train", b"#!/usr/bin/env python3\nprint(1)\n", True),
        ("train", b"print(1)\n", True),
        ("new.py", b"match = type[x] := syntax of tomorrow\n", True),
        ("run.sh", b"#!/bin/bash\npython train.py\n", False),
        ("run.sh", b"python train.py --steps 20\n", False),
        ("passwd", b"root:x:0:0:root:/root:/bin/bash\n", False),
        ("program", b"\x7fELF\x02\x01\0\0", False),
        ("train.ipynb", b'{"cells": []}', False),
    ],
)
def test_a_program_is_what_python_can_run(project, name, content, good):
    (project / "src" / name).write_bytes(content)
    assert loaded(project, "{workdir: src}", f"[{name}]") == ([] if good else [("command[0]", None)])
    absolute = loaded(project, "{workdir: src}", f"[{project / 'src' / name}]")
    assert absolute == ([] if good else [("command[0]", None)])


def test_a_folder_is_a_program_where_it_says_so(project):
    (project / "src" / "tool").mkdir()
    assert loaded(project, "{workdir: src}", "[tool]") == [("command[0]", None)]
    (project / "src" / "tool" / "__main__.py").touch()
    assert loaded(project, "{workdir: src}", "[tool]") == []


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("[-m, package.trian]", "there is no module package.trian"),
        ("[-m, package]", "there is no module package"),
        ("[-m, package.train]", None),
        ("[-m, package.runs]", None),
        ("[-m, installed.elsewhere]", None),
        ("[../src/train.py]", "is not below"),
        ("[dead.py]", "is a link to nothing"),
        ("[foo, train.py, x]", "there is no file foo in {}: write `command: [train.py, x]`"),
        (
            "[train.py --steps 20]",
            "there is no file train.py --steps 20 in {}: write `command: [train.py, --steps, 20]`",
        ),
    ],
)
def test_what_python_would_not_find_is_not_rented_for(project, command, says):
    for name in ("package/__init__.py", "package/train.py", "package/runs/__main__.py"):
        (project / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (project / "src" / name).touch()
    (project / "src" / "dead.py").symlink_to("nowhere")
    path = project / "mgpu.yaml"
    path.write_text(edited(edited(OWN, "code", "{workdir: src}"), "command", command))
    if says is None:
        assert load(path).command
        return
    with pytest.raises(SpecError) as refused:
        load(path)
    (problem,) = refused.value.problems
    assert says.format(project / "src") in problem.message


def test_a_program_that_set_up_may_bring_is_not_looked_for(project):
    path = project / "mgpu.yaml"
    path.write_text(edited(edited(OWN, "command", "[repo/train.py]"), "setup", "git clone x repo"))
    assert load(path).command == ("repo/train.py",)


def test_a_program_that_data_may_bring_is_not_looked_for_but_the_data_is(project):
    path, source = project / "mgpu.yaml", project / "scripts"
    data = json.dumps([{"from": source.as_uri(), "to": "scripts"}])
    path.write_text(edited(edited(OWN, "command", "[scripts/x.py]"), "data", data))
    with pytest.raises(SpecError) as refused:
        load(path)
    assert [(each.field, each.message) for each in refused.value.problems] == [
        ("data[0].from", f"there is no folder {source}")
    ]
    source.mkdir()
    assert load(path).command == ("scripts/x.py",)


@pytest.mark.parametrize(
    ("code", "command", "field", "says"),
    [
        ("{}", "['train.py" + " --rate 1e-4" * 30 + "']", "command", "write `command: [train.py, --rate"),
        ("{}", f"[-m, {'a' * 300}.b]", None, ""),
        ("{}", "[' ']", "command", "one name"),
        (f"{{workdir: {'a' * 300}}}", "[train.py]", "code.workdir", "there is no folder"),
        (f"{{requirements: {'a' * 300}}}", "[train.py]", "code.requirements", "there is no file"),
    ],
    ids=["command", "module", "blank", "workdir", "requirements"],
)
def test_what_is_too_long_for_a_files_name_is_no_file(project, code, command, field, says):
    (project / "train.py").touch()
    found = loaded(project, code, command)
    assert [each[0].partition("[")[0] for each in found] == ([field] if field else []), found
    path = project / "mgpu.yaml"
    if field:
        with pytest.raises(SpecError, match=re.escape(says)):
            load(path)


def test_what_is_too_long_for_a_folders_name_may_be_made_by_the_set_up(project):
    path = project / "mgpu.yaml"
    path.write_text(edited(OWN, "command", f"[{'a' * 300}/x.py]") + "setup: make\n")
    assert load(path).setup


def test_no_program_is_missed_that_wrong_data_may_bring(project):
    path = project / "mgpu.yaml"
    data = "data: [{from: 's3://bucket/code', to: scripts, unpak: true}]\n"
    path.write_text(edited(OWN, "command", "[scripts/x.py]") + data)
    with pytest.raises(SpecError) as caught:
        load(path)
    assert [problem.field for problem in caught.value.problems] == ["data[0].unpak"]


def test_files_are_looked_for_beside_the_run_file_not_in_the_current_folder(project, monkeypatch):
    monkeypatch.chdir("/")
    assert loaded(project, "{workdir: src}") == []


def test_text_alone_looks_for_no_files():
    spec = loads(edited(OWN, "code", "{workdir: nowhere, requirements: none.txt}"), "f")
    assert spec.code
    assert spec.code.workdir == "nowhere"


# --- the price of asking


def test_reading_a_run_file_imports_nothing_heavy():
    heavy = ("torch", "boto3", "pulumi", "paramiko", "asyncssh", "docker", "rich", "grpc", "jsonschema")
    code = f"import sys, mgpu.spec.load, mgpu.plan.rank; print(*(m for m in {heavy!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


def test_without_libyaml_the_answers_are_the_same(monkeypatch):
    monkeypatch.setattr("mgpu.spec.text.document._LOADER", yaml.SafeLoader)
    assert loads(AWS, "f").nodes == 2
    assert the_problem(edited(DEMO, "nodes", "010")).line == 11
    assert any("aliases" in each.message for each in problems("a: *b\n"))


# --- what is expected of a run


@pytest.mark.parametrize(
    ("expected", "field", "message"),
    [
        ("{bleu: {}}", "expect.bleu", "says nothing: `max`, `min` or `median_of` is needed"),
        ("{bleu: 3}", "expect.bleu", "a block of keys is needed, not `3`"),
        ("{min: {max: high}}", "expect.min.max", "a number is needed, not `high`"),
        ("{bleu: {max: high}}", "expect.bleu.max", "a number is needed, not `high`"),
        ("{bleu: {max: 1, min: 2}}", "expect.bleu.max", "1 is less than `min`, 2"),
        ("{bleu: {max: 1, better: lower}}", "expect.bleu.better", "is for `median_of`"),
        ("{bleu: {max: 1, tolerance_percent: 2}}", "expect.bleu.tolerance_percent", "is for `median_of`"),
        ("{loss: {median_of: 7}}", "expect.loss.median_of", "`tolerance_percent` is needed with it"),
        (
            "{bleu: {median_of: 7, tolerance_percent: 2}}",
            "expect.bleu.median_of",
            "`better: lower` or `better: higher`",
        ),
        ("{loss: {median_of: 0, tolerance_percent: 2}}", "expect.loss.median_of", "at least 1, not `0`"),
        ('{"a b": {max: 1}}', "expect.a b", "must be letters, digits"),
    ],
)
def test_an_expectation_that_cannot_be_judged(expected, field, message):
    found = the_problem(edited(OWN, "expect", expected))
    assert (found.field, message in found.message) == (field, True), found.message


@pytest.mark.parametrize(
    ("expected", "field", "nearest"),
    [
        ("{loss: {maximum: 1, max: 1}}", "expect.loss.maximum", "max"),
        ("{tokens_per_second: {min: 1}}", "expect.tokens_per_second", "tokens_per_s"),
        ("{cost_us: {max: 1}}", "expect.cost_us", "cost_usd"),
    ],
)
def test_a_name_in_an_expectation_that_is_almost_right(expected, field, nearest):
    found = the_problem(edited(DEMO, "expect", expected))
    assert (found.field, found.nearest) == (field, nearest)


def test_a_validation_of_the_mean_parameters_can_be_expected_where_there_are_some():
    text = edited(DEMO, "expect", "{validation_ema_loss: {max: 1.9}}")
    assert the_problem(text).nearest == "validation_loss"
    assert loads(text.replace("train: {", "train: {ema: 0.999, ", 1), "f.yaml").expect


@pytest.mark.parametrize(
    ("metric", "better"),
    [
        ("validation_loss", "lower"),
        ("duration_s", "lower"),
        ("cost_usd", "lower"),
        ("tokens_per_s", "higher"),
        ("images_per_second", "higher"),
        ("validation_accuracy", "higher"),
        ("bleu", None),
        ("epochs", None),
    ],
)
def test_whether_lower_is_better_follows_from_names_that_say_it(metric, better):
    assert Expectation(median_of=7).direction(metric) == better
    assert Expectation(median_of=7, better="higher").direction(metric) == "higher"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lease_minutes", "86401"),
        ("recovery", "{wait_minutes: 1.0e+9}"),
        ("timeouts", "{saving_minutes: 1.0e+13}"),
        ("max_hours", "1441"),
    ],
)
def test_nothing_is_waited_for_longer_than_any_machine_may_live(key, value):
    text = edited(DEMO, key, value)
    assert "must be at most" in the_problem(text).message
    assert not jsonschema.Draft202012Validator(schema()).is_valid(yaml.safe_load(text)), "an editor says it, too"


# --- several providers


def test_a_run_may_have_machines_of_several_providers():
    spec = loads(edited(AWS, "provider", "[aws, slurm]"), "f")
    assert (spec.candidates, spec.provider) == (("aws", "slurm"), "aws")
    assert (spec.of("slurm").candidates, spec.of("slurm").provider) == (("slurm",), "slurm")
    assert spec.model_dump(mode="json", by_alias=True)["provider"] == ["aws", "slurm"]
    assert spec.of("slurm").model_dump(mode="json", by_alias=True)["provider"] == "slurm"


def test_any_is_every_provider_whose_machines_are_not_this_one():
    found = loads(edited(AWS, "provider", "any"), "f").candidates
    assert {"aws", "slurm"} <= set(found)
    assert "local" not in found


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        (edited(AWS, "provider", "[aws, gcp]"), "provider[1]", "`gcp` is not one of"),
        (edited(AWS, "provider", "[any, aws]"), "provider[0]", "`any` stands alone"),
        (edited(AWS, "provider", "[aws, slurm, aws]"), "provider", "`aws` is given 2 times"),
        (edited(AWS, "provider", "[]"), "provider", ""),
        (edited(edited(AWS, "provider", "[aws, slurm]"), "hosts", "{}"), "hosts", "settings of another provider"),
        # what one of them would make a mistake is one
        (
            edited(edited(AWS, "provider", "[aws, local]"), "data", '[{from: "s3://my-data/x", to: /x}]'),
            "data[0].to",
            "local",
        ),
        (edited(edited(AWS, "provider", "[aws, slurm]"), "image", "{}"), "image.repository", "several providers"),
    ],
)
def test_what_stands_beside_several_providers_holds_for_each(text, field, message):
    found = [(each.field, each.message) for each in problems(text) if each.field == field]
    assert [where for where, _ in found] == [field]
    assert message in found[0][1]
