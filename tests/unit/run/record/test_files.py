"""What is brought from a backend stays in its folder."""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from mgpu.errors import StackError
from mgpu.run.record import files


def packed(path: Path, *members: tuple[str, str]) -> SimpleNamespace:
    """A store with an archive of these: name and content, or `-> target` for a link."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if content.startswith("-> "):
                member.type, member.linkname = tarfile.SYMTYPE, content.removeprefix("-> ")
            member.size = 0 if member.issym() else len(content)
            archive.addfile(member, io.BytesIO(content.encode()))
    return SimpleNamespace(get_file=lambda _, to, **__: shutil.copy(path, to))


ARCHIVE = {"key": "k", "size": 0, "crc64nvme": ""}


@pytest.mark.parametrize("filters", [files._FILTER, {}], ids=["this Python", "3.11.2, which has no filters"])
def test_an_archive_is_unpacked_inside_of_its_folder_alone(
    filters: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(files, "_FILTER", filters)
    good = packed(tmp_path / "good", ("a/b", "text"), ("a/data", "-> /mnt/data"), ("here", "-> a"))
    files._unpack(good, ARCHIVE, tmp_path / "run" / "work")
    assert (tmp_path / "run" / "work" / "here" / "b").read_text() == "text"
    assert (tmp_path / "run" / "work" / "a" / "data").readlink() == Path("/mnt/data")
    for evil in (("../out", "x"),), ((f"{tmp_path}/out", "x"),), (("link", f"-> {tmp_path}"), ("link/out", "x")):
        with pytest.raises(StackError, match="is none of mgpu's"):
            files._unpack(packed(tmp_path / "evil", *evil), ARCHIVE, tmp_path / "run" / "work")
    assert not list(tmp_path.rglob("out"))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["work"], "what was there is still there"
