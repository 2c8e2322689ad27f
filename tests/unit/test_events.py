from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields

import pytest

from mgpu import events
from mgpu.events import Event

SAMPLES = {"str": "text", "float": 1.5, "int": 3, "bytes": b"ab\xff\n"}
KINDS = [each for each in vars(events).values() if isinstance(each, type) and issubclass(each, Event)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_event_becomes_json_with_its_type(kind):
    event = kind(**{each.name: SAMPLES[str(each.type)] for each in fields(kind)})
    data = json.loads(json.dumps(event.to_json()))
    assert data["event"] == kind.__name__
    assert set(data) == {"event", *(each.name for each in fields(kind))}


def test_log_bytes_that_are_not_utf8_are_replaced():
    assert events.LogChunk(0, 7, b"a\xffb").to_json()["data"] == "a\ufffdb"


def test_events_do_not_change():
    with pytest.raises(FrozenInstanceError):
        events.Note("a").text = "b"  # type: ignore[misc]


def test_ignore_takes_any_event():
    assert events.ignore(events.Note("a")) is None
