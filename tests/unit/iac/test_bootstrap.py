"""What `infra/base` is told of what was given to `mgpu bootstrap aws`."""

from __future__ import annotations

from mgpu.iac.aws import bootstrap


def test_the_program_is_told_what_was_given_and_nothing_else():
    assert bootstrap.Wanted(ssh=("203.0.113.7/32",)).config() == {"ssh": ["203.0.113.7/32"]}
    texts = ("v", "b", "r", "p", "role", "sg")
    everything = bootstrap.Wanted(("a",), True, *texts, ("mine",), "arn:bound", ("Team=ml",), True)
    assert everything.config() == {
        "ssh": ["a"],
        "allowWorld": True,
        "vpc": "v",
        "bucket": "b",
        "repository": "r",
        "instanceProfile": "p",
        "reaperRole": "role",
        "securityGroup": "sg",
        "dataBuckets": ["mine"],
        "permissionsBoundary": "arn:bound",
        "tags": ["Team=ml"],
        "ssm": True,
    }
