"""What a program says of its checkpoints in meta.json, on the way into the manifest."""

from __future__ import annotations

import json

import pytest
from mgpu_train.agent.uploads.checkpoint_store import described
from mgpu_train.checkpoint.log.manifest import Sidecar


def kept(found: dict, first: str = "validation_loss") -> dict:
    """What of it a sidecar takes, as it is stored."""
    meta = described(json.dumps(found).encode(), first)
    sidecar = Sidecar(checkpoint_id="a001-step-1", attempt=1, node=0, step=1, world_size=1, files=(), meta=meta)
    return json.loads(sidecar.model_dump_json())["meta"]


def test_a_long_configuration_beside_them_hides_no_values():
    found = {"config": {f"key-{number}": "x" * 50 for number in range(1000)}, "validation_loss": 1.5, "mesh": "dp=2"}
    assert kept(found) == {"validation_loss": 1.5, "mesh": "dp=2"}


def test_of_too_many_values_the_one_that_the_best_are_chosen_by_stays():
    found = {f"value-{number}": number for number in range(100)} | {"accuracy": 0.9}
    assert kept(found, "accuracy")["accuracy"] == 0.9
    assert len(kept(found, "accuracy")) == 64


def test_what_a_manifest_has_no_room_for_costs_no_checkpoint():
    found = {"long": "x" * 5000, "n" * 5000: 1, "half": "\ud800", "many": [1], "yes": True, "endless": float("inf")}
    assert kept({**found, "good": "text"}) == {"good": "text"}


@pytest.mark.parametrize("text", [b"[1]", b"{", b"\xff", b""])
def test_what_is_no_object_is_said_to_be_none(text):
    with pytest.raises(ValueError):  # noqa: PT011 - whatever json has to say of it
        described(text, "validation_loss")
