"""`--set` and `--env`: what the command line says otherwise than the run file."""

from __future__ import annotations

import re

import pytest

from mgpu.errors import SpecError
from mgpu.spec.load import load, loads, text_of
from mgpu.spec.text.change import Change

FILE = """
name: a
provider: local
max_hours: 1
max_price_usd_per_hour: 1
command: [t.py, --rate, 1.10]
env: {KEEP: "1", WORD: old}
checkpoint: none
data: [{from: "file:///d", to: data}]
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "t.py").touch()
    path = tmp_path / "run.yaml"
    path.write_text(FILE.replace("file:///d", f"file://{tmp_path}"))
    return path


def changed(path, *given):
    """The run file at `path` with these options."""
    return load(path, changes=[Change.of(*each) for each in given])


def problems(path, *given):
    with pytest.raises(SpecError) as error:
        changed(path, *given)
    return [str(problem) for problem in error.value.problems]


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ("nodes=4", "nodes", 4),
        ("name=b", "name", "b"),
        ("command=[t.py, --rate, 2.50]", "command", ("t.py", "--rate", "2.50")),
        ("launcher=python", "launcher", "python"),
        ("max_hours=1.5", "max_hours", 1.5),
    ],
)
def test_a_value_is_read_as_in_the_file(path, given, key, value):
    assert getattr(changed(path, ("--set", given)), key) == value


def test_the_rest_stays_and_the_last_one_counts(path):
    spec = changed(path, ("--set", "env.MORE=2"), ("--env", "WORD=new"), ("--env", "WORD=a: b, #c\n=d"))
    assert spec.env == {"KEEP": "1", "WORD": "a: b, #c\n=d", "MORE": "2"}
    assert (spec.nodes, spec.data[0].to) == (1, "data")


def test_a_key_of_a_block_takes_the_place_of_a_plain_value(path):
    assert changed(path, ("--set", "checkpoint.keep_last=5")).checkpoint.keep_last == 5


def test_a_mistake_of_the_file_that_is_changed_is_none(path):
    path.write_text(path.read_text() + "nodes: many\n")
    assert changed(path, ("--set", "nodes=2")).nodes == 2


@pytest.mark.parametrize("line", ["nodes:", "nodes: 010", "nodes: *two", "nodes: 1\nnodes: 3"])
def test_what_the_reader_refuses_is_no_mistake_either_where_it_is_changed(path, line):
    path.write_text(path.read_text() + line + "\n")
    assert changed(path, ("--set", "nodes=2")).nodes == 2
    path.write_text(path.read_text().replace("checkpoint: none", "checkpoint:"))
    assert changed(path, ("--set", "nodes=2"), ("--set", "checkpoint.keep_last=5")).checkpoint.keep_last == 5


def test_all_mistakes_are_told_with_their_option(path):
    path.write_text(path.read_text() + "nodez: 2\n")
    options = ("nodes=x", "max_hours=", "name=a: b", "foo.bar=1", "checkpoint.keep_last=0")
    found = problems(path, *(("--set", each) for each in options), ("--env", "A B=3"))
    assert [line.partition(": ")[0] for line in found] == ["--set"] * 3 + ["--env"] + ["--set"] * 2 + [f"{path}:10"]
    for words in (
        "max_hours: has no value",
        "nodes: a whole number",
        "foo: unknown key",
        "keep_last: must be at least",
    ):
        assert any(words in line for line in found), words


def test_no_refused_value_is_repeated(path):
    assert "hf_secret" not in "".join(problems(path, ("--env", "A B=hf_secret"), ("--set", "provider.x=hf_secret")))


@pytest.mark.parametrize(
    ("option", "given", "words"),
    [
        ("--set", "nodes", "--set KEY=VALUE"),
        ("--set", "=1", "--set KEY=VALUE"),
        ("--set", "command[0]=x", "a list is given whole"),
        ("--set", "a..b=x", "no key"),
        ("--set", "name=a\nnodes: 3", "more than one line"),
        ("--env", "TOKEN", "secrets: [TOKEN]"),
    ],
)
def test_what_is_no_change_is_refused(option, given, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        Change.of(option, given)


def test_the_text_of_a_changed_spec_says_the_same(path):
    assert text_of(load(path), path) == path.read_text(), "the user's own, with its comments"
    env = [("--env", "N=010"), ("--env", "U=ä \U0001f600 'x'")]
    spec = changed(path, *env, ("--set", "nodes=4"), ("--set", 'outputs=[runs/, "*.pt"]'))
    assert loads(text_of(spec, path), "x") == spec


@pytest.mark.parametrize("text", ["098765432109", "0891", "12e4", "1:30", "0o17", "1_0", "oN", ".5", "tRue", "nULL"])
def test_text_that_looks_like_something_else_is_kept_as_text(path, text):
    """An AWS account is 12 digits, and often begins with 0."""
    spec = changed(path, ("--set", f'outputs=["{text}"]'))
    assert loads(text_of(spec, path), "kept") == spec


def test_the_text_of_a_file_that_was_edited_meanwhile_is_what_was_read(path):
    spec = load(path)
    path.write_text("name: [")
    assert loads(text_of(spec, path), "x") == spec
    path.unlink()
    assert loads(text_of(spec, path), "x") == spec


def test_who_asks_another_provider_leaves_the_blocks_of_the_others_behind(path):
    """They stand in the file for the other day, and the command line cannot take them out."""
    theirs = "provider: [aws, slurm]\naws: {profile: p}\nslurm: {partition: x}\nhosts:\n"
    path.write_text(path.read_text().replace("provider: local\n", theirs).replace("data:", "outputs: [a] #"))
    spec = changed(path, ("--set", "provider=aws"))
    assert (spec.candidates, spec.aws.profile, spec.slurm) == (("aws",), "p", None)
    assert loads(text_of(spec, path), "kept") == spec
    assert changed(path, ("--set", "provider=[slurm, aws]")).slurm.partition == "x"
    assert changed(path, ("--set", "provider=local")).aws is None
    (told,) = problems(path, ("--set", "slurm.partition=y"), ("--set", "provider=aws"))
    assert "slurm: settings of another provider" in told, "what the line itself says is not left behind"


def test_a_block_of_another_provider_is_a_mistake_where_the_file_alone_says_who_is_asked(path):
    path.write_text(path.read_text() + "slurm: {partition: x}\n")
    assert "settings of another provider" in "".join(problems(path, ("--set", "nodes=2")))
