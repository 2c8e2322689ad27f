"""What `mgpu bootstrap aws` says at its end."""

from __future__ import annotations

import pytest

from mgpu.cli import bootstrap
from mgpu.console import Console
from mgpu.iac.aws.bootstrap import Wanted

URI = "123456789012.dkr.ecr.us-east-1.amazonaws.com/theirs"


@pytest.mark.parametrize(
    ("wanted", "needs"),
    [
        (Wanted(), ()),
        (Wanted(repository="theirs"), ("image: {repository: " + URI + "}",)),
        (Wanted(reaper_role="r", vpc="vpc-1"), ("aws: {reaper_role: r}", "aws: {subnet_ids: [...]}", "vpc-1")),
    ],
    ids=["ours", "a repository", "a role and a network"],
)
def test_what_run_files_need_to_use_what_was_given(wanted: Wanted, needs: tuple[str, ...], capsys):
    result = {"account": "123456789012", "region": "us-east-1", "repository": URI}
    bootstrap._report(Console(), [result], wanted)
    said = " ".join("".join(capsys.readouterr()).split())
    assert [each for each in needs if each not in said] == []
    assert ("run files" in said) == bool(needs)
