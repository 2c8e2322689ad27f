"""What `mgpu bootstrap aws` refuses, and what it says at its end."""

from __future__ import annotations

import pytest

from mgpu.cli import bootstrap
from mgpu.console import Console
from mgpu.errors import InputError
from mgpu.iac.aws.bootstrap import Wanted

URI = "123456789012.dkr.ecr.us-east-1.amazonaws.com/theirs"


@pytest.mark.parametrize(
    ("wanted", "needs"),
    [
        (Wanted(), ()),
        (Wanted(repository="theirs"), ("image: {repository: " + URI + "}",)),
        (Wanted(ssm=True), ("aws: {address: ssm, subnet_ids: [...]}", "NAT gateway")),
        (Wanted(reaper_role="r", vpc="vpc-1"), ("aws: {reaper_role: r}", "aws: {subnet_ids: [...]}", "vpc-1")),
    ],
    ids=["ours", "a repository", "sessions", "a role and a network"],
)
def test_what_run_files_need_to_use_what_was_given(wanted: Wanted, needs: tuple[str, ...], capsys):
    result = {"account": "123456789012", "region": "us-east-1", "repository": URI, "ssm": wanted.ssm}
    bootstrap._report(Console(), [result], wanted)
    said = " ".join("".join(capsys.readouterr()).split())
    assert [each for each in needs if each not in said] == []
    assert ("run files" in said) == bool(needs)


@pytest.mark.parametrize("given", ["Team", "aws:x=y", "mgpu:owner=me", "a*=b", "=b"])
def test_a_tag_that_cannot_be_set_is_refused_before_anything_is_asked(given: str):
    with pytest.raises(InputError, match="--tags") as caught:
        bootstrap._require_tags((given,))
    assert "KEY=VALUE" in caught.value.next_step


@pytest.mark.parametrize(("tags", "told"), [(["Team=ml"], False), ([], True)], ids=["passed on", "dropped"])
def test_a_program_of_ones_own_that_drops_the_tags_is_told_of(tags: list[str], told: bool, capsys):
    result = {"account": "123456789012", "region": "us-east-1", "tags": tags}
    bootstrap._report(Console(), [result], Wanted(tags=("Team=ml",)))
    assert ("the tags were not set" in " ".join("".join(capsys.readouterr()).split())) == told


@pytest.mark.parametrize(("ssm", "told"), [(True, False), (None, True)], ids=["passed on", "dropped"])
def test_a_program_of_ones_own_that_drops_session_manager_is_told_of(ssm: bool | None, told: bool, capsys):
    result = {"account": "123456789012", "region": "us-east-1", **({"ssm": ssm} if ssm else {})}
    bootstrap._report(Console(), [result], Wanted(ssm=True))
    assert ("does not pass `ssm` on" in " ".join("".join(capsys.readouterr()).split())) == told


def test_the_bucket_is_offered_as_a_backend(capsys):
    bootstrap._report(Console(), [{"account": "1", "region": "eu-west-1", "bucket": "mgpu-1-eu-west-1"}], Wanted())
    assert "mgpu init --backend 's3://mgpu-1-eu-west-1/backend?region=eu-west-1'" in capsys.readouterr().err
