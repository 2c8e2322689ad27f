from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from mgpu import events
from mgpu.events import Event, RunEvent, ScheduleMissed

SAMPLES = {
    "str": "text",
    "float": 1.5,
    "int": 3,
    "bytes": b"ab\xff\n",
    "bool": True,
    "str | None": None,
    "int | None": 3,
    "tuple[int, ...]": (1, 2),
    "dict[str, float]": {"loss": 0.5},
    "tuple[dict[str, Any], ...]": ({"metric": "loss", "met": False},),
}
KINDS = [each for each in vars(events).values() if isinstance(each, type) and issubclass(each, Event)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_event_becomes_json_with_its_type(kind):
    event = kind(**{each.name: SAMPLES[str(each.type)] for each in fields(kind)})
    data = json.loads(json.dumps(event.to_json()))
    assert data["event"] == kind.__name__
    version = {"version"} if issubclass(kind, RunEvent | ScheduleMissed) else set()
    assert set(data) == {"event", *version, *(each.name for each in fields(kind))}


def test_the_page_has_what_each_event_of_a_run_says():
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    _, _, section = page.partition("\n## Events\n")
    rows = {row.split("`")[1]: row for row in section.partition("\n## ")[0].splitlines() if row.startswith("| `")}
    told = {kind.__name__: kind for kind in KINDS if issubclass(kind, RunEvent) and kind is not RunEvent}
    assert set(rows) == set(told)
    common = {each.name for each in fields(RunEvent)}
    for name, kind in told.items():
        for each in fields(kind):
            assert each.name in common or f"`{each.name}`" in rows[name], (name, each.name)


def test_log_bytes_that_are_not_utf8_are_replaced():
    assert events.LogChunk(0, 7, b"a\xffb").to_json()["data"] == "a\ufffdb"


def test_events_do_not_change():
    with pytest.raises(FrozenInstanceError):
        events.Note("a").text = "b"  # type: ignore[misc]


def test_ignore_takes_any_event():
    assert events.ignore(events.Note("a")) is None
