"""Hashes of files that are remembered: never a wrong one, whatever happened to the file or to what was remembered."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mgpu.image.build import hashes as module
from mgpu.image.build.context import scan
from mgpu.image.build.hashes import Hashes

LATER_NS = 10_000_000_000
FIELDS = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")


def sha(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kept"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("one")
    return path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were read, not remembered, so far."""
    paths, real = [], module._digest

    def counting(path: str, key: bytes) -> bytes:
        paths.append(path)
        return real(path, key)

    monkeypatch.setattr(module, "_digest", counting)
    return paths


def later() -> int:
    """A scan that begins when all files are old enough to be remembered."""
    return time.time_ns() + LATER_NS


def ask(kept: Path | None, *files: Path, now_ns: int | None = None) -> list[bytes]:
    hashes = Hashes(kept, later() if now_ns is None else now_ns)
    found = [hashes.of(str(file), file.lstat()) for file in files]
    hashes.save()
    return found


def test_a_file_that_did_not_change_is_read_once(kept, file, read):
    assert ask(kept, file) == ask(kept, file) == [sha("one")]
    assert len(read) == 1


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 21) + 1])
def test_a_file_is_read_to_its_end(tmp_path, size):
    (tmp_path / "file").write_bytes(b"x" * size)
    assert ask(None, tmp_path / "file") == [hashlib.sha256(b"x" * size).digest()]


def test_without_a_place_nothing_is_remembered(file, read):
    assert ask(None, file) == ask(None, file)
    assert len(read) == 2


def rewritten(file: Path) -> None:
    before = file.stat()
    file.write_text("two")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # the time of its inode gives it away


def replaced(file: Path) -> None:
    other = file.with_name("other")
    other.write_text("two")
    other.replace(file)


def grown(file: Path) -> None:
    file.write_text("one more")


@pytest.mark.parametrize(("change", "text"), [(rewritten, "two"), (replaced, "two"), (grown, "one more")])
def test_a_file_that_changed_is_read_again(kept, file, change, text):
    assert ask(kept, file) == [sha("one")]
    change(file)
    assert ask(kept, file) == [sha(text)]


@pytest.mark.parametrize("name", FIELDS)
def test_each_thing_that_the_file_system_says_counts(kept, file, name):
    ask(kept, file)
    seen = {each: getattr(file.lstat(), each) for each in FIELDS}
    assert Hashes(kept, later()).of(str(file), SimpleNamespace(**seen)) == sha("one")
    with pytest.raises(OSError, match="changed while it was read"):  # it was read: not what is remembered was taken
        Hashes(kept, later()).of(str(file), SimpleNamespace(**seen | {name: seen[name] + 1}))


@pytest.mark.parametrize("which", ["st_mtime_ns", "st_ctime_ns"])
def test_a_file_that_was_changed_just_now_is_not_remembered(kept, file, read, which):
    if which == "st_ctime_ns":
        os.utime(file, (1, 1))
    else:
        os.utime(file, ns=(later() + LATER_NS,) * 2)  # a clock that goes wrong
    newest = getattr(file.stat(), which)
    ask(kept, file, now_ns=newest + 2_000_000_000)
    ask(kept, file, now_ns=newest + 2_000_000_000)
    assert len(read) == 2
    ask(kept, file, now_ns=newest + 2_000_000_001)
    ask(kept, file, now_ns=newest + 2_000_000_001)
    assert len(read) == 3


def test_a_file_that_changes_while_it_is_read_has_no_hash(kept, file):
    seen = file.lstat()
    file.write_text("two")
    os.utime(file, (1, 1))
    with pytest.raises(OSError, match="changed while it was read"):
        Hashes(kept, later()).of(str(file), seen)


@pytest.mark.timeout(20)
def test_a_file_that_became_a_link_or_a_pipe_is_not_followed(kept, file, tmp_path):
    seen = file.lstat()
    file.rename(tmp_path / "moved")
    file.symlink_to("moved")
    with pytest.raises(OSError, match=r"symbolic link|too many levels"):
        Hashes(kept, later()).of(str(file), seen)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(OSError, match="changed while it was read"):
        Hashes(kept, later()).of(str(file), seen)


def torn(raw: bytes) -> bytes:
    return raw[:-40]


def cut_at_a_record(raw: bytes) -> bytes:
    return raw[:-72]


def flipped(raw: bytes) -> bytes:
    return raw[:-1] + bytes([raw[-1] ^ 1])


def of_another_version(raw: bytes) -> bytes:
    return raw.replace(b"hashes 1", b"hashes 0")


def empty(raw: bytes) -> bytes:
    return b""


def something_else(raw: bytes) -> bytes:
    return b"x" * len(raw)


@pytest.mark.parametrize("damage", [torn, cut_at_a_record, flipped, of_another_version, empty, something_else])
def test_what_is_damaged_or_foreign_is_not_believed(kept, file, read, damage):
    ask(kept, file)
    kept.write_bytes(damage(kept.read_bytes()))
    assert ask(kept, file) == [sha("one")]
    assert len(read) == 2
    ask(kept, file)
    assert len(read) == 2  # and it is mended


def test_only_what_is_in_use_is_remembered(kept, file, tmp_path):
    other = tmp_path / "other"
    other.write_text("other")
    ask(kept, file, other)
    both = kept.stat().st_size
    ask(kept, file)
    assert both - kept.stat().st_size == 72


def test_nothing_is_written_when_nothing_is_new(kept, file):
    ask(kept, file)
    before = kept.stat()
    ask(kept, file)
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_place_that_cannot_be_written_costs_only_time(file, tmp_path):
    (tmp_path / "occupied").write_text("")
    assert ask(tmp_path / "occupied" / "kept", file) == [sha("one")]


def test_a_disk_that_is_full_leaves_what_was_there(kept, file, monkeypatch):
    ask(kept, file)
    before = kept.read_bytes()
    file.write_text("other")

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert ask(kept, file) == [sha("other")]
    assert kept.read_bytes() == before
    assert [each.name for each in kept.parent.iterdir()] == ["kept"]


def test_what_nobody_used_for_a_month_is_forgotten(kept, file, tmp_path):
    ask(kept, file)
    old, aside = kept.with_name("old"), kept.with_name("tmp123")
    for each in (old, aside):
        each.write_text("")
        os.utime(each, (1, 1))
    (young := kept.with_name("young")).write_text("")
    file.write_text("new")
    ask(kept, file)
    assert sorted(each.name for each in kept.parent.iterdir()) == [kept.name, young.name]


def test_others_do_not_read_it(kept, file):
    ask(kept, file)
    assert kept.stat().st_mode & 0o777 == 0o600
    assert kept.parent.stat().st_mode & 0o777 == 0o700


def _many(kept: Path, folder: Path, times: int) -> None:
    for number in range(times):
        files = [folder / str(each) for each in range(50) if each % 3 != number % 3]
        if ask(kept, *files) != [sha(file.name) for file in files]:
            os._exit(1)


def test_two_processes_at_once_remember_nothing_wrong(kept, tmp_path):
    for number in range(50):
        (tmp_path / str(number)).write_text(str(number))
    spawn = multiprocessing.get_context("fork")
    both = [spawn.Process(target=_many, args=(kept, tmp_path, 60)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert [each.name for each in kept.parent.iterdir()] == [kept.name]
    assert len(module._load(kept)) in (33, 34)


def test_a_folder_is_remembered_in_the_users_cache_by_its_real_path(tmp_path, read, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    now_ns = later()
    monkeypatch.setattr(module.time, "time_ns", lambda: now_ns)
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "Dockerfile").write_text("FROM scratch\n")
    (tmp_path / "link").symlink_to("context")
    assert scan(tmp_path / "context").entries == scan(tmp_path / "link").entries
    Hashes.of_folder(tmp_path / "link").of(
        str(tmp_path / "context/Dockerfile"), (tmp_path / "context/Dockerfile").lstat()
    )
    assert len(read) == 1
    assert len(list((tmp_path / "cache" / "mgpu" / "image").iterdir())) == 1
