"""Under which name a provider lists the machines of a stack."""

from __future__ import annotations

import json
import re

import pytest
from mgpu_train.timeouts import Timeouts

from mgpu.backend import location
from mgpu.iac import tokens
from mgpu.iac.engine.stack import Stack
from mgpu.iac.naming import fleet_name


@pytest.mark.parametrize("stack", ["dev", "x" * 100])
def test_a_fleets_name_may_stand_in_any_label(stack):
    assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", fleet_name("llm", stack))


def test_long_names_that_begin_alike_are_two():
    assert fleet_name("llm", "x" * 100) != fleet_name("llm", "x" * 99)


def stack_in(folder, name):
    (folder / "Pulumi.yaml").write_text(f"name: {name}\nruntime: python\n")
    return Stack(folder, "dev", folder / "mgpu.yaml", log_dir=folder, emit=print, timeouts=Timeouts())


@pytest.mark.parametrize(
    "text",
    ["", "{}", "cut off", json.dumps({"checkpoint": {"latest": {"resources": [{"type": "another:index:Kind"}]}}})],
)
def test_a_stack_without_a_fleet_gets_a_name_of_its_own(xdg, tmp_path, text):
    written(text)
    assert stack_in(tmp_path, "llm").fleet == fleet_name("llm", "dev") != "llm-dev"


def test_a_stack_that_has_a_fleet_keeps_its_name(xdg, tmp_path):
    guard = {"type": tokens.FLEET_GUARD, "inputs": {"fleet": "llm-dev"}}
    written(json.dumps({"checkpoint": {"latest": {"resources": [guard]}}}))
    assert stack_in(tmp_path, "llm").fleet == "llm-dev"


def test_a_checkouts_stack_has_its_own_name(xdg, tmp_path):
    assert stack_in(tmp_path, "mgpu").fleet == "dev"


def written(state):
    path = location.current().folder / ".pulumi/stacks/llm/dev.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if state:
        path.write_text(state)
