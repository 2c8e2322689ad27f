from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import yaml
from mgpu_train.config import Job

from mgpu.errors import SpecError
from mgpu.spec import provider as providers
from mgpu.spec.load import loads
from mgpu.spec.model import RunSpec
from mgpu.spec.schema import keys, schema, table, text, without_titles
from mgpu.spec.sink import installed

GOOD: dict[str, Any] = {
    "name": "own",
    "provider": "local",
    "max_price_usd_per_hour": 1,
    "max_hours": 1,
    "command": ["train.py", "--lr", 0.1],
    "gpu": "H100",
    "gpus_per_node": 8,
    "env": {"A": 1.10, "B": "x"},
    "data": [{"from": "s3://bucket/x", "to": "x"}],
    "checkpoint": "none",
}


def accepted(data: dict[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(schema()).is_valid(data)


def test_it_is_a_valid_schema_of_its_draft():
    jsonschema.Draft202012Validator.check_schema(schema())
    assert schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert json.loads(text()) == schema()


def test_an_editor_accepts_what_the_loader_accepts():
    assert accepted(GOOD)
    loads(yaml.safe_dump(GOOD), "f")


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": 0},
        {"nodes": "2"},
        {"nodse": 2},
        {"provider": "lcoal"},
        {"market": "spott"},
        {"command": "train.py"},
        {"command": None},
        {"train": {}},
        {"checkpoint": "non"},
        {"checkpoint": {"every_step": 1}},
        {"data": [{"source": "s3://bucket/x", "to": "x"}]},
        {"data": [{"from": "http://x", "to": "x"}]},
        {"env": {"A-B": "x"}},
        {"env": {"A": True}},
        {"gpu": None},
        {"gpu": ["-x"]},
    ],
)
def test_an_editor_refuses_what_the_loader_refuses(change):
    data = GOOD | change
    assert not accepted(data)
    with pytest.raises(SpecError):
        loads(yaml.safe_dump(data), "f")


def test_every_key_has_a_meaning_and_all_but_blocks_a_default():
    blocks = {"checkpoint", "recovery", "sinks", "timeouts", "train.model", *providers.installed().names}
    blocks |= {f"sinks.{name}" for name in installed().found}
    for key in keys():
        assert key.description, key
        assert key.default or key.name in blocks, key


def test_keys_go_down_into_blocks_and_lists():
    by_name = {key.name: key for key in keys()}
    assert {name.split(".")[0].removesuffix("[]") for name in by_name} == {
        field.alias or name for name, field in RunSpec.model_fields.items()
    }
    assert by_name["train.model.heads"].default == "`4`"
    assert by_name["data[].from"].default == "required"
    assert by_name["market"].type == "`spot` | `on-demand` | `spot-then-on-demand`"
    assert by_name["checkpoint"].type == "block or `none`"
    assert by_name["max_hours"].type == "number >= 0.01, <= 1440"
    assert by_name["gpu"].default == "any"
    assert "(default" not in by_name["gpu"].description


def test_defaults_in_the_schema_are_those_of_the_model():
    spec = loads(yaml.safe_dump(GOOD), "f")
    for key in keys():
        if key.default.startswith("`") and "." not in key.name and key.name not in GOOD:
            value = getattr(spec, key.name)
            told = json.dumps(value) if isinstance(value, bool) else value
            assert key.default == f"`{told}`", key


def test_null_is_nowhere_and_titles_neither():
    assert '"null"' not in text()
    assert text().count('"title"') == 1


def test_a_property_called_title_is_kept():
    assert without_titles({"title": "T", "properties": {"title": {"title": "Title", "type": "string"}}}) == {
        "properties": {"title": {"type": "string"}}
    }


def test_a_table_has_a_row_for_every_key():
    rows = table(keys(Job.model_json_schema())).splitlines()
    assert rows[0] == "| key | type | default | meaning |"
    assert len(rows) == len(keys(Job.model_json_schema())) + 2
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)
