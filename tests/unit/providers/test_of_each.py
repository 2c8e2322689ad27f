"""Machines are given back one by one, and one that stays keeps no other."""

from __future__ import annotations

import pytest

from mgpu.errors import InvalidRequest, PermissionDenied, ProviderError, RateLimited, Transient
from mgpu.providers.base import of_each


@pytest.mark.parametrize(
    ("answers", "raised"),
    [
        ([PermissionDenied("a"), InvalidRequest("b"), "c"], "a"),
        ([PermissionDenied("a"), "b", Transient("c")], "c"),  # the same call comes again, and then says the first
        (["a", RateLimited("b"), InvalidRequest("c")], "b"),
    ],
)
def test_all_are_asked_before_one_is_raised(answers, raised):
    asked = list[object]()

    def ask(answer: object) -> object:
        asked.append(answer)
        if isinstance(answer, ProviderError):
            raise answer
        return answer

    with pytest.raises(ProviderError) as refused:
        of_each(answers, ask)
    assert (refused.value.what, asked) == (raised, answers)


def test_what_each_says_comes_in_their_order():
    assert of_each("ab", str.upper) == ["A", "B"]
