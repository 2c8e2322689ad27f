"""A provider's options as stacks and records keep them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import Field

from mgpu.errors import InputError
from mgpu.spec.block import Block, Names, ProviderOptions


class Shed(Block):
    """A block within the block."""

    width_m: float | None = Field(None, description="a number, or nothing")
    doors: int = Field(1, description="a whole number")


class Options(ProviderOptions):
    """All kinds of options."""

    block = "yard"

    gate: str = Field("north", description="a text")
    price: float = Field(0.5, ge=0, description="a number")
    men: int = Field(2, description="a whole number")
    fenced: bool = Field(default=True, description="yes or no")
    tools: Names = Field((), description="texts")
    dogs: Names | None = Field(None, description="texts, or nothing")
    colour: str | None = Field(None, pattern="^[a-z]+$", description="a text of a form")
    owners: dict[str, str] = Field({}, description="texts by names of the user's")
    shed: Shed = Field(Shed(), description="a block")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"gate": "a,b [c]", "price": 0.0, "men": 0, "fenced": False},
        {"tools": ["spade"], "dogs": ["rex", "fido"]},
        {"tools": ["a,b", "c", "[d]"], "dogs": ["", "x"]},
        {"owners": {"north side": "Ann, Bob", "{x}": ""}, "shed": {"width_m": 2.5, "doors": 2}},
    ],
)
def test_what_was_kept_is_read_back(given: dict[str, Any]):
    options = Options.model_validate(given)
    kept = options.flat()
    assert all(isinstance(value, str) for value in kept.values())
    assert Options.of(kept) == options


def test_lists_are_kept_as_stacks_of_older_versions_have_them():
    assert Options.model_validate({"tools": ["a", "b"]}).flat()["tools"] == "a,b"
    assert Options.of({"tools": "a,b", "gate": ""}) == Options.model_validate({"tools": ["a", "b"]})


@pytest.mark.parametrize("text", ["Ann", "{", "[1]", '{"a": 1}'])
def test_a_block_that_is_none_is_refused_with_its_key(text: str):
    with pytest.raises(InputError, match=r"yard\.owners: "):
        Options.of({"owners": text})


def test_every_mistake_is_told_at_once_with_its_key():
    with pytest.raises(InputError) as caught:
        Options.of({"price": "-1", "men": "many", "colour": "RED", "gates": "south"})
    said = caught.value.what.splitlines()
    assert said == [
        'yard.price: must be at least 0, not `"-1"`',
        'yard.men: a whole number is needed, not `"many"`',
        "yard.colour: must be text that matches ^[a-z]+$",
        "yard.gates: there is no such setting; there are " + ", ".join(Options.model_fields),
    ]


def test_an_option_that_could_not_be_kept_is_a_mistake_of_its_package():
    with pytest.raises(TypeError, match="an option has a default"):

        class Wrong(ProviderOptions):
            gate: str
