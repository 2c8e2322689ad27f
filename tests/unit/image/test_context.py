"""What counts in a build's folder: the same as what Docker's SDK sends, and an archive that says the same anywhere."""

from __future__ import annotations

import errno
import gc
import hashlib
import io
import os
import random
import socket
import stat
import tarfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from docker.utils import build as docker_sdk

from mgpu.errors import InputError
from mgpu.image.build import context as module
from mgpu.image.build.context import BuildContext, Entry, folder_of, scan
from mgpu.image.build.hashes import Hashes
from mgpu.image.build.shipped import trainer_context
from mgpu.spec.image import ImageSpec


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def scanned(folder: Path, dockerfile: str = "Dockerfile") -> BuildContext:
    return scan(folder, dockerfile, Hashes())


def names(folder: Path, dockerfile: str = "Dockerfile") -> list[str]:
    return [entry.path for entry in scanned(folder, dockerfile).entries]


def archived(found: BuildContext) -> tuple[bytes, list[tarfile.TarInfo]]:
    stream = io.BytesIO()
    found.write_tar(stream)
    with tarfile.open(fileobj=io.BytesIO(stream.getvalue()), errors="surrogateescape") as archive:
        return stream.getvalue(), archive.getmembers()


def sent_by_the_sdk(folder: Path, dockerfile: str = "Dockerfile") -> set[str]:
    """The names in the archive that docker-py makes of a folder, reading the rules as its `images.build` does."""
    ignore = folder / ".dockerignore"
    lines = [line.strip() for line in ignore.read_text().splitlines()] if ignore.exists() else []
    patterns = [line for line in lines if line and not line.startswith("#")]
    with tarfile.open(fileobj=docker_sdk.tar(str(folder), patterns, (dockerfile, None)), mode="r") as archive:
        return set(archive.getnames())


def with_folders(paths: set[str]) -> set[str]:
    """With the folders that they lie in: docker-py leaves it to the builder to make these."""
    return paths | {above.as_posix() for path in paths for above in Path(path).parents} - {"."}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "context", {"Dockerfile": "FROM scratch\n", "src/a.py": "a", "src/deep/b.py": "b"})


TREE = ["a.py", "a.md", "src/a.py", "src/b.md", "src/deep/a.py", "src/deep/c.txt", "data/x", "data/y/z", ".git/HEAD"]
RULES = [
    "",
    "*",
    "src",
    "src/*",
    "**/*.md",
    "**/deep",
    "src/deep/a.py",
    "data/?",
    "*/y",
    "*\n!src/a.py",
    "*\n!src",
    "src\n!src/deep/c.txt",
    "src/**\n!src/b.md",
    "# all\n*.md\n!a.md\n\n.git",
    "Dockerfile\n.dockerignore",
    "**",
    "data/[xy]",
    "/data/y/",
    "a.py\n!a.py\na.py",
]


@pytest.mark.parametrize("rules", RULES, ids=repr)
def test_what_counts_is_what_the_docker_sdk_sends(folder, rules):
    write(folder, dict.fromkeys(TREE, "x") | {".dockerignore": rules})
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("src/a.py")
    (folder / "to-nowhere").symlink_to("/nonexistent")
    (folder / "to-folder").symlink_to("src")
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.bind(os.path.relpath(folder / "socket"))
    assert set(names(folder)) == with_folders(sent_by_the_sdk(folder))


def test_folders_made_at_random_count_as_the_docker_sdk_sends_them(tmp_path):
    rng, compared = random.Random(6), 0
    parts = ["a", "b", "ab", "*", "a*", "?", "**", "[ab]", "*b"]
    for number in range(60):
        root = write(tmp_path / str(number), {"Dockerfile": ""})
        for _ in range(12):
            (root / "/".join(rng.choices(["a", "b", "ab", "c"], k=rng.randint(1, 3))) / "e").mkdir(
                parents=True, exist_ok=True
            )
        # docker-py forgets what a folder further up says of a negation and of `**`: not compared
        lines = ["/".join(rng.choices(parts, k=rng.randint(1, 2))) for _ in range(rng.randint(1, 3))]
        write(root, {".dockerignore": "\n".join(line for line in lines if "**" not in line)})
        assert set(names(root)) == with_folders(sent_by_the_sdk(root)), lines
        compared += len(names(root)) > 3
    assert compared > 20


def test_upper_and_lower_case_differ_as_for_docker_itself(folder):
    write(folder, {"README": "x", "readme": "x", ".dockerignore": "readme"})
    assert "README" in names(folder)
    assert "readme" not in names(folder)


def test_the_dockerfile_and_the_rules_count_whatever_the_rules_say(folder):
    write(folder, {".dockerignore": "*", "docker/gpu/Dockerfile": "FROM x\n", "docker/other": "x"})
    assert names(folder) == [".dockerignore", "Dockerfile"]
    found = scanned(folder, "docker/gpu/../gpu/Dockerfile")
    assert [entry.path for entry in found.entries] == [".dockerignore", "docker", "docker/gpu", "docker/gpu/Dockerfile"]
    assert found.recipe == b"FROM x\n"
    assert found.dockerfile == "docker/gpu/Dockerfile"


def test_rules_of_a_dockerfile_come_before_those_of_the_folder(folder):
    write(folder, {".dockerignore": "*", "Dockerfile.dockerignore": "src\n.dockerignore"})
    assert names(folder) == ["Dockerfile", "Dockerfile.dockerignore"]


def test_a_folder_counts_for_what_is_taken_back_in_it_and_not_without(folder):
    write(folder, {".dockerignore": "src\n!src/deep/*.py\ndata\n!data/*.py", "data/x": "x"})
    assert names(folder) == [".dockerignore", "Dockerfile", "src", "src/deep", "src/deep/b.py"]


def test_what_each_thing_is(folder):
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o700)
    (folder / "link").symlink_to("a//b/../c")
    os.mkfifo(folder / "pipe")
    by_path = {entry.path: entry for entry in scanned(folder).entries}
    assert by_path["src"] == Entry("src", "d")
    assert by_path["src/a.py"] == Entry("src/a.py", "f", hashlib.sha256(b"a").digest(), 1)
    assert by_path["run.sh"].kind == "x"
    assert by_path["link"] == Entry("link", "l", b"a//b/../c")
    assert by_path["pipe"] == Entry("pipe", "p")


def test_a_name_that_is_not_utf8_is_kept_byte_by_byte(folder):
    try:
        (folder / os.fsdecode(b"\xff\xfe")).write_text("x")
    except OSError:
        pytest.skip("this file system takes only UTF-8")
    (folder / "link").symlink_to(os.fsdecode(b"\xff\xfe"))
    found = scanned(folder)
    assert os.fsdecode(b"\xff\xfe") in [entry.path for entry in found.entries]
    _, members = archived(found)
    assert os.fsdecode(b"\xff\xfe") in [member.name for member in members]
    assert [member.linkname for member in members if member.issym()] == [os.fsdecode(b"\xff\xfe")]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_garbage_collector_is_as_it_was(folder, monkeypatch, enabled, fails):
    def look(self: Hashes, path: str, seen: os.stat_result) -> bytes:
        if fails:
            raise KeyboardInterrupt
        return b""

    monkeypatch.setattr(Hashes, "of", look)
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
            scanned(folder)
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


# --- what cannot be used


def test_all_files_that_cannot_be_read_are_named_at_once(folder, monkeypatch):
    write(folder, {"x/one": "1", "x/two": "2"})
    real = os.open

    def refusing(path: Any, *args: Any, **more: Any) -> int:
        if "/x/" in str(path):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(InputError) as caught:
        scanned(folder)
    assert "2 of its files" in caught.value.what
    assert caught.value.why == "x/one cannot be read: Permission denied\nx/two cannot be read: Permission denied"
    assert str(folder / ".dockerignore") in caught.value.next_step
    write(folder, {".dockerignore": "x"})
    assert "x" not in names(folder)


def test_of_very_many_the_first_are_named(folder, monkeypatch):
    write(folder, {f"x/{number:03}": "" for number in range(100)})
    monkeypatch.setattr(Hashes, "of", lambda self, path, seen: (_ for _ in ()).throw(OSError(5, "I/O error")))
    with pytest.raises(InputError) as caught:
        scanned(folder)
    assert len(caught.value.why.splitlines()) == 21
    assert caught.value.why.endswith("\nand 83 more")


def test_a_folder_that_cannot_be_listed_is_named(folder, monkeypatch):
    real = os.scandir

    def refusing(path: Any) -> Any:
        if str(path).endswith("deep/"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(InputError, match="src/deep/ cannot be read"):
        scanned(folder)


def test_a_device_is_refused(folder, monkeypatch):
    monkeypatch.setattr(module.stat, "S_ISREG", lambda mode: False)
    with pytest.raises(InputError, match="it is a device"):
        scanned(folder)


def test_no_folder_no_dockerfile_no_rule(folder, tmp_path):
    with pytest.raises(InputError, match="no folder"):
        scanned(tmp_path / "none")
    with pytest.raises(InputError, match="no Dockerfile") as caught:
        scanned(folder, "Dokcerfile")
    assert "image.dockerfile" in caught.value.next_step
    write(folder, {".dockerignore": "ok\n[a"})
    with pytest.raises(InputError, match="cannot be used") as caught:
        scanned(folder)
    assert "'[a'" in caught.value.why


def test_a_dockerfile_does_not_lead_out_of_the_folder(folder, tmp_path):
    write(tmp_path, {"Dockerfile": "FROM x\n"})
    (folder / "Link").symlink_to("../Dockerfile")
    for name in ("../Dockerfile", "Link"):
        with pytest.raises(InputError, match="leads out of the folder"):
            scanned(folder, name)


# --- the archive


def test_the_archive_holds_what_was_counted(folder):
    (folder / "src" / "deep" / "b.py").chmod(0o755)
    (folder / "link").symlink_to("src/a.py")
    (folder / "empty").mkdir()
    os.mkfifo(folder / "pipe")
    long = "n" * 120
    write(folder, {f"{long}/{long}": "x" * 3000})
    found = scanned(folder)
    raw, members = archived(found)
    assert [member.name for member in members] == [entry.path for entry in found.entries]
    kinds = {member.name: (member.type, member.mode) for member in members}
    assert kinds["src"] == (tarfile.DIRTYPE, 0o755)
    assert kinds["src/a.py"] == (tarfile.REGTYPE, 0o644)
    assert kinds["src/deep/b.py"] == (tarfile.REGTYPE, 0o755)
    assert kinds["link"][0] == tarfile.SYMTYPE
    assert kinds["pipe"][0] == tarfile.FIFOTYPE
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        content = archive.extractfile(f"{long}/{long}")
        assert content is not None
        assert content.read() == b"x" * 3000


def test_the_archive_is_the_same_whoever_checked_the_folder_out(tmp_path):
    archives = []
    for name, umask in (("here", 0o077), ("there", 0o002)):
        before = os.umask(umask)
        try:
            root = write(tmp_path / name, {"Dockerfile": "FROM x\n", "run.sh": "x", "d/f": "f"})
            (root / "run.sh").chmod(0o777 & ~umask)
            os.utime(root / "d" / "f", (umask, umask))
        finally:
            os.umask(before)
        archives.append(archived(scanned(root))[0])
    assert stat.S_IMODE((tmp_path / "here" / "d" / "f").stat().st_mode) == 0o600
    assert archives[0] == archives[1]
    assert all(member.uid == member.gid == 0 for member in archived(scanned(tmp_path / "here"))[1])


# of what is longer, as many bytes as were hashed are looked at
@pytest.mark.parametrize("text", ["b", "ba", ""], ids=["other", "longer", "shorter"])
def test_a_file_that_changed_since_it_was_hashed_is_not_sent(folder, text):
    found = scanned(folder)
    (folder / "src" / "a.py").write_text(text)
    with pytest.raises(InputError, match=r"a\.py changed while the image was built"):
        found.write_tar(io.BytesIO())


@pytest.mark.parametrize("put", ["link", "nothing"])
def test_a_file_that_is_gone_or_became_a_link_is_not_sent(folder, put):
    found = scanned(folder)
    (folder / "src" / "a.py").rename(folder / "src" / "moved")
    if put == "link":
        (folder / "src" / "a.py").symlink_to("moved")
    with pytest.raises(InputError, match="changed while"):
        found.write_tar(io.BytesIO())


def test_a_file_that_cannot_be_read_any_more_is_not_sent(folder, monkeypatch):
    found = scanned(folder)

    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(module.os, "fdopen", lambda number, _: os.close(number) or Broken())
    with pytest.raises(InputError, match="changed while"):
        found.write_tar(io.BytesIO())


def test_an_archive_that_finds_no_room_is_no_change_of_a_file(folder):
    (folder / "src" / "a.py").write_bytes(bytes(1 << 20))
    full = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]

    class Stream(io.BytesIO):
        def write(self, data: Any) -> int:
            if full and self.tell():
                raise full.pop()
            return super().write(data)

    with pytest.raises(OSError, match="No space left"):
        scanned(folder).write_tar(Stream())


# --- which folder


def test_the_folder_is_the_users_or_the_one_that_mgpu_ships(tmp_path):
    assert folder_of(ImageSpec.model_validate({"context": "docker"}), tmp_path) == tmp_path / "docker"
    shipped = folder_of(ImageSpec.model_validate({}), tmp_path)
    assert shipped == trainer_context()
    assert not shipped.is_relative_to(tmp_path)
