"""The lifecycle of base's bucket, beside rules that others have put there."""

from __future__ import annotations

from mgpu.providers.aws.bootstrap.bucket import Bucket, _rules

THEIRS = {"ID": "theirs", "Status": "Enabled", "Expiration": {"Days": 9}}


def test_a_rule_of_the_old_form_means_the_same_in_the_new_one_which_alone_goes_with_ours():
    """S3: "Filter element can only be used in Lifecycle V2", where any rule has a prefix of its own."""
    found = _rules([{**THEIRS, "Prefix": "logs/"}], Bucket())
    assert found[0] == {**THEIRS, "Filter": {"Prefix": "logs/"}}
    assert not [rule for rule in found if "Prefix" in rule]


def test_a_rule_of_the_new_form_stays_as_it_is():
    theirs = {**THEIRS, "Filter": {"Tag": {"Key": "a", "Value": "b"}}}
    assert _rules([theirs], Bucket())[0] == theirs
