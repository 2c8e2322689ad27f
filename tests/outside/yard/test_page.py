"""The code in docs/provider.md is the provider's own, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mgpu.cli import COMMANDS
from mgpu.providers import base

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "provider.md").read_text()
BLOCKS = re.findall(r"(?:^<!-- (\S+) -->\n)?^```(\w*)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
TAKEN = [(source, text) for source, _, text in BLOCKS if source]


def test_every_block_of_code_says_where_it_is_from():
    assert [language for source, language, _ in BLOCKS if language and not source] == []
    assert len(TAKEN) >= 8


@pytest.mark.parametrize(("source", "text"), TAKEN, ids=[f"{text.split(maxsplit=2)[1]}" for _, text in TAKEN])
def test_a_block_is_what_its_file_has(source, text):
    there = (ROOT / source).read_text()
    at = 0
    for piece in re.split(r"^ *\.\.\.\n", text, flags=re.MULTILINE):
        found = there.find(piece.strip("\n"), at)
        assert found >= 0, f"{source} has not, after the piece before it:\n{piece}"
        at = found + len(piece)


def test_files_that_it_names_are_there():
    links = re.findall(r"\]\(([^)#]+)", PAGE)
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
    paths = re.findall(r"`((?:mgpu|tests)/[\w./]+)`", PAGE)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_commands_that_it_names_are_there():
    assert set(re.findall(r"^mgpu (\w+)", PAGE, re.MULTILINE)) <= COMMANDS.keys()


def test_it_names_all_protocols():
    protocols = {name for name, kind in vars(base).items() if getattr(kind, "_is_runtime_protocol", False)}
    assert protocols == set(re.findall(r"^\| `(\w+)` \| (?:that|whose)", PAGE, re.MULTILINE))
