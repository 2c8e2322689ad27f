"""Which variables a run file names, found by the types of its fields: those of other people's blocks, too."""

from __future__ import annotations

from typing import Annotated, Any, cast

from mgpu_train.config import EnvName, Text
from pydantic import Field

from mgpu.spec import environment
from mgpu.spec.block import Block
from mgpu.spec.load import loads

RUN_FILE = """
name: it
provider: local
max_hours: 1
max_price_usd_per_hour: 1
command: [train.py]
secrets: [TOKEN]
env: {SET: x}
image: {repository: hub/it, args: {ARG: x}, secrets: [OF_THE_BUILD]}
sinks:
  webhook: {url: HOOK_URL, secret: HOOK_SECRET}
  apprise: {urls: [SLACK_URL, MAIL_URL]}
  github: {token: GITHUB_TOKEN, context: NOT_THIS}
  command: {run: [NOR_THIS], secrets: [PIN]}
"""
NAMED = ["GITHUB_TOKEN", "HOOK_SECRET", "HOOK_URL", "MAIL_URL", "PIN", "SLACK_URL", "TOKEN"]


def test_all_that_a_pass_reads_is_named():
    assert environment.named(loads(RUN_FILE, "mgpu.yaml")) == NAMED
    plain = RUN_FILE.replace("HOOK_URL", "https://x.example/HOOK_URL")
    assert environment.named(loads(plain, "mgpu.yaml")) == [name for name in NAMED if name != "HOOK_URL"]


class Inner(Block):
    token: EnvName
    note: Text


class Theirs(Block):
    one: EnvName | None = None
    short: Annotated[EnvName, Field(max_length=9)] = "B"
    by_name: dict[Text, EnvName] = Field({})
    sets: dict[EnvName, Text] = Field({})
    inner: tuple[Inner, ...] = ()
    lists: dict[str, list[EnvName]] = Field({})


def test_a_block_of_other_people_may_have_them_anywhere():
    more: dict[str, Any] = {
        "one": "A", "by_name": {"NOT": "C"}, "sets": {"NOT": "NOR"}, "inner": [{"token": "D", "note": "NOT"}],
        "lists": {"NOT": ["E", "F"]},
    }  # fmt: skip
    assert environment.named(cast(Any, Theirs.model_validate(more))) == ["A", "B", "C", "D", "E", "F"]
    assert environment.named(cast(Any, Theirs())) == ["B"]


def test_an_empty_value_counts_as_none():
    assert environment.unset(loads(RUN_FILE, "mgpu.yaml"), {"TOKEN": "", "OF_THE_BUILD": "x"}) == [
        "secrets: TOKEN not set in the environment: a launch needs them"
    ]
