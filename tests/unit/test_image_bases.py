"""The images that a Dockerfile builds on."""

from __future__ import annotations

import pytest

from mgpu.errors import ImageError, InputError
from mgpu.image import bases

DIGEST = "sha256:" + "c" * 64


@pytest.mark.parametrize(
    ("recipe", "args", "expected"),
    [
        ("FROM a", {}, ("a",)),
        ("from a AS b\nFROM b", {}, ("a",)),
        ("FROM a\nFROM scratch\nFROM a", {}, ("a",)),
        ("FROM --platform=$X a:1 as B\nCOPY --from=b x y\nCOPY --from=0 x y\nCOPY --from=c:2 x y", {}, ("a:1", "c:2")),
        ("ARG BASE=a:1\nFROM ${BASE}", {}, ("a:1",)),
        ("ARG BASE=a:1\nFROM $BASE", {"BASE": "z"}, ("z",)),
        ("ARG A=1 B='2'\nARG C=x:$A$B\nFROM ${C}", {}, ("x:12",)),
        ("ARG A\nFROM ${A:-d}\nFROM x${A:+e}", {}, ("d", "x")),
        ("ARG A\nFROM ${A:-d}\nFROM x${A:+e}", {"A": "1"}, ("1", "xe")),
        ("FROM $NONE", {}, ()),
        ("FROM a\nARG B=b\nFROM $B", {}, ("a",)),
        ("# FROM comment\nFROM \\\n# in between\n  a\n", {}, ("a",)),
        ("FROM a AS s\nRUN echo FROM b", {}, ("a",)),
        ("ARG A=1\nFROM a", {"OTHER": "x"}, ("a",)),
    ],
)
def test_images(recipe, args, expected):
    assert bases.read(recipe.encode(), args).images == expected


def test_a_name_with_a_digest_is_asked_of_nobody():
    def nobody(_: str) -> str:
        raise AssertionError

    assert bases.resolve((f"a@{DIGEST}",), nobody, nobody) == {f"a@{DIGEST}": DIGEST}


def test_the_engine_is_asked_before_the_registry():
    engine, registry = {"a": "1"}.get, {"a": "2", "b": "3"}.get
    assert bases.resolve(("a", "b"), engine, registry) == {"a": "1", "b": "3"}


def refuses(what: str, cure: str):
    def ask(_: str) -> str:
        raise ImageError(what, "because", cure)

    return ask


NO_ENGINE, AWAY = refuses("no Docker engine at x", "Start Docker."), refuses("docker.io cannot be reached", "Wait.")


@pytest.mark.parametrize(
    ("engine", "registry", "said", "cure"),
    [
        ({}.get, {}.get, "the Docker engine does not have it, and docker.io does not have it", "Mend FROM"),
        (NO_ENGINE, {}.get, "no Docker engine at x, and docker.io does not have it", "Start Docker."),
        ({}.get, AWAY, "the Docker engine does not have it, and docker.io cannot be reached", "Wait."),
        (NO_ENGINE, AWAY, "no Docker engine at x, and docker.io cannot be reached", "Start Docker. Wait."),
    ],
)
def test_a_base_that_nobody_has_is_named_with_both_reasons(engine, registry, said, cure):
    with pytest.raises(ImageError) as caught:
        bases.resolve(("a",), engine, registry)
    assert caught.value.what == f"no base image a: {said}"
    assert cure in caught.value.next_step


def test_what_the_registry_has_needs_no_engine():
    assert bases.resolve(("a",), NO_ENGINE, {"a": "1"}.get) == {"a": "1"}


@pytest.mark.parametrize("target", [None, "one", "ONE", "two", "0", "2"])
def test_a_target_is_a_stage_by_name_or_number(target):
    bases.read(b"FROM a AS One\nFROM b AS two\nFROM c\n", {}).require(target, "D")


@pytest.mark.parametrize(
    ("recipe", "target", "words"),
    [
        ("FROM a AS one\nFROM b\n", "noe", ("image.target: D has no stage `noe`", "one", "Did you mean `one`?")),
        ("FROM a AS one\nFROM b\n", "2", ("no stage `2`", "leave it out")),
        ("FROM a\n", "x", ("None of its stages has a name",)),
        ("", None, ("D builds nothing", "no FROM")),
        ("# FROM a\nARG X\n", "x", ("D builds nothing",)),
    ],
)
def test_a_dockerfile_without_what_is_to_be_built(recipe, target, words):
    with pytest.raises(InputError) as caught:
        bases.read(recipe.encode(), {}).require(target, "D")
    assert all(word in f"{caught.value.what} {caught.value.why} {caught.value.next_step}" for word in words)


def test_arguments_that_no_arg_takes_are_named_with_the_nearest():
    found = bases.read(b"ARG BASE\nFROM a\nARG WORD=1 OTHER\n", {})
    given = dict.fromkeys(("BASE", "WORD", "OTHER", "HTTP_PROXY", "no_proxy", "BUILDKIT_INLINE_CACHE"), "x")
    assert found.unused(given) == []
    near, far = found.unused({"WROD": "1", "QQ": "2"})
    assert "no ARG WROD" in near
    assert near.endswith("did you mean `WORD`?")
    assert "no ARG QQ" in far
    assert "did you mean" not in far
