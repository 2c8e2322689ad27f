"""The images that a Dockerfile builds on."""

from __future__ import annotations

import pytest

from mgpu.errors import ImageError, InputError
from mgpu.image.build import bases

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
        ("FROM a:1${V-.2}\nFROM b${V:+c}", {}, ("a:1.2", "b")),
        ("ARG V=\nFROM a:1${V-.2}\nFROM b:${V:-3}\nFROM c${V+d}", {}, ("a:1", "b:3", "cd")),
        ("ARG W=2\nFROM a:${V:-1.${W}}", {}, ("a:1.2",)),
        ('FROM "a:1"', {}, ("a:1",)),
        ("FROM a\\\n# in between\n:1 AS b\nFROM b", {}, ("a:1",)),
        ("# escape=`\nFROM `\na", {}, ("a",)),
        ("FROM a\r\nCOPY --from=b x y\r\n", {}, ("a", "b")),
        ("FROM a:${TARGETARCH}\nFROM b:$TARGETOS", {}, ("a:amd64", "b:linux")),
        ("ARG TARGETARCH\nFROM a:${TARGETARCH}", {"TARGETARCH": "x"}, ("a:x",)),
        ("FROM a AS base-amd64\nFROM base-${TARGETARCH}", {}, ("a",)),
        ("FROM a\nRUN <<EOF\nFROM users\nEOF\nFROM b", {}, ("a", "b")),
        ("FROM a\nCOPY <<-'X' <<Y /z\nFROM q\n\tX\nFROM r\nY\nFROM b", {}, ("a", "b")),
        ("FROM a\nRUN cat <<-X <<Y\nFROM q\n\tX\nY\nFROM b", {}, ("a", "b")),
        ("FROM a\nRUN cat <<-X\nFROM q\n\tX\nFROM b", {}, ("a", "b")),
        ("FROM a\nRUN cat <<X\nFROM q\n\tX\nFROM r\nX\nFROM b", {}, ("a", "b")),
        ('FROM a\nRUN echo "<<EOF" $((1<<2)) <<<x\nFROM b', {}, ("a", "b")),
        ("ARG V=1.2.3\nFROM a:${V%.*}\nFROM b:${V/1./2.}", {}, ("a:1.2", "b:2.2.3")),
        (
            "FROM a\nRUN --mount=from=u:1,source=/uv,target=/uv --mount=type=bind,from=later uv\nFROM b AS later",
            {},
            ("a", "u:1", "b"),
        ),
        (
            "FROM a AS s\nRUN --mount=type=cache,target=/from=x y\nFROM b\nRUN --mount=from=s,target=/s x",
            {},
            ("a", "b"),
        ),
        ("FROM a\nONBUILD COPY --from=b x y", {}, ("a",)),
    ],
)
def test_images(recipe, args, expected):
    assert bases.read(recipe.encode(), args).images == expected


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        ("FROM a\nRUN cat <<NEVER\nFROM b", "line 2: unterminated heredoc"),
        ("FROM a\nEOF", "line 2: unknown instruction: EOF"),
    ],
)
def test_what_builders_refuse_is_refused_before_one_is_asked(recipe, line):
    with pytest.raises(ImageError, match=f"the Dockerfile cannot be read: {line}"):
        bases.read(recipe.encode(), {})


def test_what_is_built_for_is_what_a_name_says():
    assert bases.read(b"FROM a:$TARGETARCH", {}, "linux/arm64").images == ("a:arm64",)


PINNED = bases.BaseImage(DIGEST, pinned=True)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("FROM a:1", "FROM docker.io/library/a@D"),
        ("# a:1\n\nfrom --platform=$X a:1 as a", "# a:1\n\nfrom --platform=$X docker.io/library/a@D as a"),
        ("FROM a AS b\nFROM b", "FROM docker.io/library/a@D AS b\nFROM b"),
        ("ARG V=1\nFROM r.io/a:${V} AS b\n", "ARG V=1\nFROM r.io/a@D AS b\n"),
        ("FROM a\\\n# x\n:1 AS b\nRUN y", "\n\nFROM docker.io/library/a@D AS b\nRUN y"),
        ("\ufeff# é\r\nFROM a\r\nRUN x\r\n", "\ufeff# é\r\nFROM docker.io/library/a@D\r\nRUN x\r\n"),
        ("FROM own\nCOPY --from=a --chown=1 a b", "FROM own\nCOPY --from=docker.io/library/a@D --chown=1 a b"),
        ("FROM own\nRUN --mount=from=r.io/a,target=/a \\\n a", "FROM own\n\nRUN --mount=from=r.io/a@D,target=/a  a"),
        ("FROM own\nRUN --mount=from=r.io/a <<E \\\n b\nfrom=r.io/a\nE",
         "FROM own\n\nRUN --mount=from=r.io/a@D <<E  b\nfrom=r.io/a\nE"),
        ("FROM own\nRUN --mount=from=r.io/a --mount=from=r.io/b c",
         "FROM own\nRUN --mount=from=r.io/a@D --mount=from=r.io/b@D c"),
        (f"FROM a:1@{DIGEST}", f"FROM a:1@{DIGEST}"),
        ("FROM scratch\nRUN <<E\nFROM a\nE", "FROM scratch\nRUN <<E\nFROM a\nE"),
    ],
)  # fmt: skip
def test_the_builder_is_sent_digests_in_the_same_lines(recipe, expected):
    named = bases.read(recipe.encode(), {})
    found = {name: PINNED._replace(pinned=name != "own") for name in named.images}
    sent = bases.pinned(recipe.encode(), named, found)
    assert sent.decode() == expected.replace("@D", f"@{DIGEST}")
    assert sent.count(b"\n") == recipe.count("\n")
    again = bases.read(sent, {})
    assert (again.stages, again.parents) == (named.stages, named.parents)


def nobody(_: str) -> None:
    raise AssertionError("nobody is asked")


def here(**digests: str):
    return {name: bases.BaseImage(digest, pinned=True) for name, digest in digests.items()}.get


def resolve(name: str, engine=nobody, registry=nobody, glance=nobody, tell=nobody) -> bases.BaseImage:
    return bases.resolve((name,), engine, registry, glance, tell)[name]


def test_a_name_with_a_digest_is_asked_of_nobody():
    assert resolve(f"a@{DIGEST}") == PINNED


def test_what_only_the_engine_has_is_asked_of_no_registry():
    assert resolve("a", {"a": bases.BaseImage("id", pinned=False)}.get) == bases.BaseImage("id", pinned=False)


def test_a_copy_that_is_older_than_the_registrys_does_not_count():
    assert resolve("a", here(a="old"), glance={"a": "new"}.get) == bases.BaseImage("new", pinned=True)


def test_what_the_engine_lacks_is_the_registrys():
    assert resolve("a", here(), {"a": "1"}.get) == bases.BaseImage("1", pinned=True)


UNSURE = bases.BaseImage(DIGEST, pinned=True, unsure=True)
OTHER = "sha256:" + "e" * 64


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ({"a": OTHER}, bases.BaseImage(DIGEST, pinned=False)),  # built here, after somebody has pushed that name
        ({"a": OTHER, f"docker.io/library/a@{DIGEST}": DIGEST}, bases.BaseImage(OTHER, pinned=True)),  # an old copy
        ({"a": DIGEST}, bases.BaseImage(DIGEST, pinned=True)),
    ],
)
def test_an_engine_that_gives_its_own_images_digests_keeps_its_own(there, expected):
    """Or a copy of one that the registry has let go of: who wants the new one is told."""
    told = list[str]()
    assert resolve("a", {"a": UNSURE}.get, glance=there.get, tell=told.append) == expected
    assert ["`docker pull a`" in each for each in told] == [True] * (not expected.pinned)


def test_whether_an_image_is_the_engines_own_is_not_known_without_the_registry():
    def glance(name: str) -> str:
        if name == "a":
            return OTHER
        raise ImageError("docker.io cannot be reached", "", "")

    assert resolve("a", {"a": UNSURE}.get, glance=glance) == bases.BaseImage(OTHER, pinned=True)


def refuses(what: str, cure: str):
    def ask(_: str) -> str:
        raise ImageError(what, "because", cure)

    return ask


NO_ENGINE, AWAY = refuses("no Docker engine at x", "Start Docker."), refuses("docker.io cannot be reached", "Wait.")


@pytest.mark.parametrize(
    ("glance", "why"), [(AWAY, "docker.io cannot be reached"), ({}.get, "docker.io does not have it")]
)
def test_without_its_registry_the_engines_copy_counts_and_that_is_told(glance, why):
    told = list[str]()
    assert resolve("a", here(a="1"), glance=glance, tell=told.append) == bases.BaseImage("1", pinned=False)
    assert told == [f"base image a: {why}; the Docker engine's copy of it is built on"]


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
        resolve("a", engine, registry)
    assert caught.value.what == f"no base image a: {said}"
    assert cure in caught.value.next_step


def test_what_the_registry_has_needs_no_engine():
    assert resolve("a", NO_ENGINE, {"a": "1"}.get) == bases.BaseImage("1", pinned=True)


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
