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


def test_what_the_others_say_is_told_with_it_once():
    def ask(error: ProviderError) -> None:
        raise error

    parts = [PermissionDenied(f"p-{part}", "forbidden", "Ask for the right.") for part in range(12)]
    with pytest.raises(Transient) as refused:
        of_each([*parts, Transient("q", "no answer", "Ask again later."), parts[0]], ask)
    assert refused.value.why.splitlines() == ["no answer", *(f"p-{part}: forbidden" for part in range(8)), "and 4 more"]
    assert refused.value.next_step == "Ask again later. Ask for the right."


def test_who_asks_to_wait_is_heard_whoever_else_has_failed():
    def ask(error: ProviderError) -> None:
        raise error

    busy = [RateLimited("b", retry_after=each) for each in (5.0, 60.0, 0.0)]
    with pytest.raises(Transient) as refused:
        of_each([Transient("a"), *busy, PermissionDenied("c")], ask)
    assert (refused.value.what, refused.value.retry_after) == ("a", 60.0)


def test_of_many_cures_as_many_are_told_as_of_errors():
    def ask(part: int) -> None:
        raise PermissionDenied(f"p-{part}", "forbidden", f"Free {part}.")

    with pytest.raises(PermissionDenied) as refused:
        of_each(range(40), ask)
    assert refused.value.next_step == " ".join(f"Free {part}." for part in range(9))
