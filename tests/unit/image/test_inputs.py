"""One hash of all inputs: the same wherever the folder lies and whoever looks; another one when anything changes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mgpu.image.build import inputs as module
from mgpu.image.build.context import BuildContext, Entry, scan
from mgpu.image.build.hashes import Hashes
from mgpu.image.build.inputs import inputs_hash, tag
from mgpu.spec.image import ImageSpec

SPEC: dict[str, Any] = {
    "target": "run",
    "platform": "linux/amd64",
    "args": {"A": "1", "B": "2"},
    "ca_file": "/etc/ca.pem",
    "secrets": ["TOKEN"],
    "repository": "r.example/a",
    "context": "docker",
}
BASES = {"ubuntu:22.04": "sha256:aa", "python:3.12": "sha256:bb"}


def make(root: Path) -> Path:
    (root / "src" / "empty").mkdir(parents=True)
    (root / "Dockerfile").write_text("FROM ubuntu:22.04\n")
    (root / "Other").write_text("FROM ubuntu:22.04\n")
    (root / ".dockerignore").write_text("left-out\n")
    (root / "src" / "a.py").write_text("a")
    (root / "src" / "run.sh").write_text("#!/bin/sh\n")
    (root / "src" / "run.sh").chmod(0o755)
    (root / "link").symlink_to("src/a.py")
    (root / "left-out").write_text("secret")
    return root


def hashed(root: Path, *, spec: dict[str, Any] | None = None, bases: dict[str, str] | None = None) -> str:
    found = scan(root, (spec or {}).get("dockerfile", "Dockerfile"), Hashes())
    return inputs_hash(found, ImageSpec.model_validate(SPEC | (spec or {})), BASES if bases is None else bases)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make(tmp_path / "context")


# --- what does not count


def test_another_folder_another_time_another_user(root, tmp_path):
    before = os.umask(0o002)
    try:
        other = make(tmp_path / "elsewhere" / "deeper")
    finally:
        os.umask(before)
    for number, path in enumerate(sorted(other.rglob("*"))):
        os.utime(path, (number, number), follow_symlinks=False)
        if os.geteuid() == 0:
            os.chown(path, 1000 + number, 1000, follow_symlinks=False)
    (other / "src").chmod(0o700)
    (other / "src" / "a.py").chmod(0o600)
    assert hashed(other) == hashed(root)


def test_another_process_with_another_hash_seed(root):
    code = (
        "import sys; from pathlib import Path; from mgpu.image.build.context import scan;"
        "from mgpu.image.build.hashes import Hashes; from mgpu.image.build.inputs import inputs_hash;"
        "from mgpu.spec.image import ImageSpec;"
        f"print(inputs_hash(scan(Path(sys.argv[1]), hashes=Hashes()), ImageSpec.model_validate({SPEC!r}), {BASES!r}))"
    )
    for seed in ("0", "1"):
        environ = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": "C"}
        done = subprocess.run(
            [sys.executable, "-c", code, str(root)], env=environ, capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout.strip() == hashed(root)


def test_the_order_on_disk_and_in_the_run_file(root, monkeypatch):
    expected, real, rng = hashed(root), os.scandir, random.Random(1)

    class Shuffled(list[Any]):
        def __enter__(self) -> Shuffled:
            return self

        def __exit__(self, *_: object) -> None: ...

    def shuffled(path: Any) -> Shuffled:
        with real(path) as entries:
            found = list(entries)
        rng.shuffle(found)
        return Shuffled(found)

    monkeypatch.setattr(os, "scandir", shuffled)
    assert {hashed(root) for _ in range(8)} == {expected}
    turned = {"args": dict(reversed(SPEC["args"].items()))}
    assert hashed(root, spec=turned, bases=dict(reversed(BASES.items()))) == expected


@pytest.mark.parametrize(
    "spec",
    [{"ca_file": "/other.pem"}, {"secrets": []}, {"repository": "r.example/b"}, {"context": "elsewhere"}],
    ids=lambda spec: next(iter(spec)),
)
def test_what_ends_in_no_layer(root, spec):
    assert hashed(root, spec=spec) == hashed(root)


def test_what_is_left_out(root):
    before = hashed(root)
    (root / "left-out").write_text("changed")
    assert hashed(root) == before


# --- what counts


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda root: (root / name).write_text(text)


CHANGES: dict[str, Callable[[Path], object]] = {
    "the Dockerfile": _write("Dockerfile", "FROM ubuntu:22.04\n\n"),
    "the rules": _write(".dockerignore", "left-out\n#\n"),
    "what is left out": _write(".dockerignore", ""),
    "a file's contents": _write("src/a.py", "b"),
    "a file more": _write("src/b.py", ""),
    "a file less": lambda root: (root / "src" / "a.py").unlink(),
    "a file's name": lambda root: (root / "src" / "a.py").rename(root / "src" / "b.py"),
    "a file's folder": lambda root: (root / "src" / "a.py").rename(root / "a.py"),
    "executable": lambda root: (root / "src" / "a.py").chmod(0o744),
    "not executable": lambda root: (root / "src" / "run.sh").chmod(0o644),
    "an empty folder more": lambda root: (root / "src" / "empty" / "er").mkdir(),
    "an empty folder less": lambda root: (root / "src" / "empty").rmdir(),
    "a link's target": lambda root: ((root / "link").unlink(), (root / "link").symlink_to("src/run.sh")),
    "a link's spelling": lambda root: ((root / "link").unlink(), (root / "link").symlink_to("./src/a.py")),
    "a link for its file": lambda root: ((root / "link").unlink(), (root / "link").write_text("a")),
    "a pipe for a file": lambda root: ((root / "src" / "a.py").unlink(), os.mkfifo(root / "src" / "a.py")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_in_the_folder_gives_another_hash(root, change):
    before = hashed(root)
    CHANGES[change](root)
    assert hashed(root) != before


@pytest.mark.parametrize(
    "spec",
    [
        {"target": "build"},
        {"target": None},
        {"platform": "linux/arm64"},
        {"args": {"A": "1", "B": "3"}},
        {"args": {"A": "1", "C": "2"}},
        {"args": {"A": "1"}},
        {"args": {"A": "1", "B": "2", "C": ""}},
        {"args": {"A": "2", "B": "1"}},
    ],
    ids=str,
)
def test_any_change_in_the_run_file_gives_another_hash(root, spec):
    assert hashed(root, spec=spec) != hashed(root)


@pytest.mark.parametrize(
    "bases",
    [{}, {"ubuntu:22.04": "sha256:aa"}, BASES | {"ubuntu:22.04": "sha256:bb"}, BASES | {"x": "sha256:cc"}],
    ids=["none", "less", "moved", "more"],
)
def test_any_change_of_a_base_gives_another_hash(root, bases):
    assert hashed(root, bases=bases) != hashed(root)


def test_another_dockerfile_of_the_same_text_is_the_same_image(root):
    assert hashed(root, spec={"dockerfile": "Other"}) == hashed(root)


def test_another_format_gives_other_tags(root, monkeypatch):
    before = hashed(root)
    monkeypatch.setattr(module, "_FORMAT", b"mgpu image inputs 2")
    assert hashed(root) != before


# --- inputs that a careless concatenation would confuse


def of(recipe: bytes = b"", entries: tuple[Entry, ...] = (), bases: dict[str, str] | None = None, **spec: Any) -> str:
    found = BuildContext(Path("/x"), "Dockerfile", recipe, entries)
    return inputs_hash(found, ImageSpec.model_validate(spec), bases or {})


CONFUSABLE = {
    "names and values": lambda: [
        of(args={"A": "B"}),
        of(args={"AB": ""}),
        of(args={"A": "", "B": ""}),
        of(args={"A": "1:B"}),
        of(args={"A": "", "B": "0:"}),
    ],
    "arguments and bases": lambda: [of(args={"A": "b"}), of(bases={"A": "b"}), of(args={"A": "b"}, bases={"A": "b"})],
    "no target and others": lambda: [of(), of(target="0:"), of(target="0"), of(recipe=b"0:"), of(target="run")],
    "the Dockerfile and what follows": lambda: [of(recipe=b"a"), of(recipe=b"a1:"), of(recipe=b"", target="a")],
    "a path and a link's target": lambda: [
        of(entries=(Entry("a", "l", b"bc"),)),
        of(entries=(Entry("ab", "l", b"c"),)),
        of(entries=(Entry("abc", "l", b""),)),
        of(entries=(Entry("a:b", "l", b"c"),)),
        of(entries=(Entry("a", "l", b":bc"),)),
    ],
    "one entry and two": lambda: [
        of(entries=(Entry("a", "l", b"4:d1:b"),)),
        of(entries=(Entry("a", "l"), Entry("b", "d"))),
        of(entries=(Entry("a", "d"), Entry("b", "d"))),
        of(entries=(Entry("ab", "d"),)),
        of(entries=(Entry("a/b", "d"),)),
    ],
    "kinds": lambda: [of(entries=(Entry("a", kind, b"x" * 32),)) for kind in ("d", "f", "x", "l", "p")],
    "lengths and digits": lambda: [
        of(entries=(Entry("1", "l", b"1"),)),
        of(entries=(Entry("11", "l", b""),)),
        of(entries=(Entry("", "l", b"11"),)),
    ],
    "empty and no": lambda: [of(), of(args={"A": ""}), of(bases={"": ""}), of(entries=(Entry("", "d"),))],
}


@pytest.mark.parametrize("what", CONFUSABLE)
def test_inputs_that_look_alike_have_different_hashes(what):
    found = CONFUSABLE[what]()
    assert len(set(found)) == len(found)


def test_no_two_of_many_made_at_random_have_one_hash():
    rng, seen = random.Random(3), {}
    words = ["", "0", "1", "2:", "a", "d1:a", "1:a0:", "f", "l"]

    def made() -> tuple[Any, ...]:
        paths = sorted({rng.choice(words) for _ in range(rng.randint(0, 3))})
        entries = tuple(Entry(path, rng.choice("dlp"), rng.choice(words).encode()) for path in paths)
        args = {rng.choice("ABC"): rng.choice(words) for _ in range(rng.randint(0, 2))}
        bases = {rng.choice("ABC"): rng.choice(words) for _ in range(rng.randint(0, 2))}
        return rng.choice(words).encode(), entries, tuple(sorted(bases.items())), tuple(sorted(args.items()))

    for _ in range(4000):
        recipe, entries, bases, args = case = made()
        assert seen.setdefault(of(recipe, entries, dict(bases), args=dict(args)), case) == case
    assert len(seen) > 3000


def test_sizes_are_in_the_contents_hash_and_do_not_count_again(root):
    found = scan(root, hashes=Hashes())
    sizeless = replace(found, entries=tuple(entry._replace(size=0) for entry in found.entries))
    spec = ImageSpec.model_validate({})
    assert inputs_hash(found, spec, {}) == inputs_hash(sizeless, spec, {})


def test_the_hash_of_given_inputs_stays_what_it_is():
    # another one here means that every image of every user is built anew: raise _FORMAT, and mean it
    entries = (Entry(".dockerignore", "f", b"\x01" * 32, 3), Entry("a\udcff", "x", b"\x02" * 32), Entry("l", "l", b"a"))
    digest = of(b"FROM x\n", entries, {"x:1": "sha256:aa"}, args={"B": "2", "A": "é"}, target="run")
    assert tag(digest) == "mgpu-" + digest[:32]
    assert digest == "1ada7f104fed68a8682ea8213ed65a8d94d9eaec107fd66947b43e7880a572f7"
