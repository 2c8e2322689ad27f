"""The rules of a .dockerignore. What Docker's own matcher (moby/patternmatcher 0.6) answers is written down here."""

from __future__ import annotations

import pytest

from mgpu.image.build.context import rules

TREE = (
    "a a/b a/b/c.txt a/keep.md b.log docs docs/README.md docs/a docs/a/b README.md "
    ".git .git/x x[1] x1 é tmp tmp/x.log A"
)


def left_out(text: str) -> list[str]:
    matcher = rules(text.encode())
    return [path for path in TREE.split() if matcher.matches(path)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("a", "a a/b a/b/c.txt a/keep.md"),
        ("/a", "a a/b a/b/c.txt a/keep.md"),
        ("a/", "a a/b a/b/c.txt a/keep.md"),
        ("./a//", "a a/b a/b/c.txt a/keep.md"),
        ("a/../docs", "docs docs/README.md docs/a docs/a/b"),
        ("a/b/..", "a a/b a/b/c.txt a/keep.md"),
        ("A", "A"),
        ("*", TREE),
        ("**", TREE),
        ("**/a", "a a/b a/b/c.txt a/keep.md docs/a docs/a/b"),
        ("*.log", "b.log"),
        ("**/*.log", "b.log tmp/x.log"),
        ("a/*", "a/b a/b/c.txt a/keep.md"),
        ("a/**", "a/b a/b/c.txt a/keep.md"),
        ("*/*", "a/b a/b/c.txt a/keep.md docs/README.md docs/a docs/a/b .git/x tmp/x.log"),
        ("*/b", "a/b a/b/c.txt"),
        ("docs/*.md", "docs/README.md"),
        ("?", "a a/b a/b/c.txt a/keep.md é A"),
        ("x?", "x1"),
        ("x[0-9]", "x1"),
        ("x[^0-9]", ""),
        ("[^a-zA-Z]1", ""),
        ("x\\[1\\]", "x[1]"),
        ("[é]", "é"),
        ("**/b", "a/b a/b/c.txt docs/a/b"),
        ("**/b/**", "a/b/c.txt"),
        ("**.md", "a/keep.md docs/README.md README.md"),
        ("a**", "a a/b a/b/c.txt a/keep.md"),
        ("d*/a/b", "docs/a/b"),
        ("a\\/b", "a/b a/b/c.txt"),
        ("# a\n\n  b.log  \r\n", "b.log"),
        (" # a", ""),
        ("\ufeffa", "a a/b a/b/c.txt a/keep.md"),
        (".", ""),
        ("..", ""),
        ("/", ""),
        ("*\n!a/b", " ".join(path for path in TREE.split() if path not in ("a/b", "a/b/c.txt"))),
        ("*\n!**/*.md", " ".join(path for path in TREE.split() if not path.endswith(".md"))),
        ("a\n!a/b\na/b/c.txt", "a a/b/c.txt a/keep.md"),
        ("a/b\n!a", "a/b a/b/c.txt"),
        ("**/*.md\n!README.md", "a/keep.md docs/README.md"),
        ("*.md\n! docs/*.md", "README.md"),
        ("docs\n!docs/a\n", "docs docs/README.md"),
        ("!a\na", "a a/b a/b/c.txt a/keep.md"),
    ],
    ids=repr,
)
def test_docker_leaves_out_the_same(text, expected):
    assert left_out(text) == expected.split()


@pytest.mark.parametrize("text", ["[a", "[]a]", "[]", "a\\", "!", "ok\n! ", "[b-a]"])
def test_what_docker_refuses_is_refused(text):
    with pytest.raises(ValueError, match="Invalid ignore pattern"):
        rules(text.encode())


def test_only_a_line_that_begins_with_it_is_a_comment():
    assert rules(b"#a\n # a\n!#a\n").patterns == ["# a", "!#a"]


def test_names_that_are_not_utf8_are_matched_byte_by_byte():
    matcher = rules(b"x\xff?")
    names = [name.decode("utf-8", "surrogateescape") for name in (b"x\xff\xfe", b"x\xff", b"x\xfe\xff")]
    assert [matcher.matches(name) for name in names] == [True, False, False]
