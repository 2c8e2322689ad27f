"""From a node's disk to a commit: whole parts or nothing, whatever is cut off, lost or repeated."""

from __future__ import annotations

import os
import shutil

import pytest
from mgpu_train.checkpoint.log.manifest import FileEntry, PackEntry, Sidecar
from mgpu_train.checkpoint.newest import newest_verified
from mgpu_train.checkpoint.transfer import part as transfer_part
from mgpu_train.checkpoint.transfer.part import Unkeepable
from mgpu_train.checkpoint.transfer.upload import assemble, gather, upload_part
from mgpu_train.checkpoint.transfer.verify import verify
from mgpu_train.store import Ambiguous, Changed, Damaged, NotFound, StoreError, Unavailable, disk

PART = "run-1/checkpoints/a001-step-10/node-0"


def test_parts_become_a_commit(run):
    for node in (0, 1):
        assert gather(run.store, "run-1", "a001-step-10", (0, 1)) is None
        assert run.commit(10) is None
        run.upload(node, 10)
    manifest = run.manifest(run.commit(10))
    assert (manifest.step, manifest.attempt, manifest.nodes, manifest.world_size) == (10, 1, 2, 2)
    assert manifest.writers == (0, 1)
    assert manifest.meta == {"loss": 2.5, "step": 10, "by": "test"}
    files = {file.path: file for file in manifest.files}
    assert sorted(files) == [".metadata", "__0_0.distcp", "__1_0.distcp", "sub/0.txt", "sub/1.txt"]
    for path, file in files.items():
        assert (file.size, file.crc64nvme) == disk.checksum(run.folder(file.node, 10) / path)


def test_the_sidecar_comes_last(run):
    run.upload(0, 10)
    puts = [key for operation, key in run.store.calls if operation.startswith("put")]
    assert puts[-1] == "run-1/checkpoints/a001-step-10/node-0.json"


@pytest.mark.parametrize("cut", range(3))
def test_an_upload_that_is_cut_commits_nothing_and_can_be_repeated(run, cut):
    """F26: cut before each object, and before the sidecar; until then resume uses the previous checkpoint."""
    run.save(5)
    run.upload(1, 10)
    puts = []

    def cut_off(operation, key):
        if operation.startswith("put"):
            puts.append(key)
            if len(puts) > cut:
                raise Unavailable("cut")

    run.store.before = cut_off
    with pytest.raises(Unavailable):
        run.upload(0, 10)
    run.store.before = lambda *_: None
    assert run.commit(10) is None
    assert newest_verified(run.store, "run-1", report=pytest.fail).step == 5
    run.upload(0, 10)
    assert run.commit(10).step == 10
    assert newest_verified(run.store, "run-1", deep=True, report=pytest.fail).step == 10


def test_the_store_failing_on_one_node_fails_the_save_as_a_whole(run):
    """F27"""
    run.upload(0, 10)

    def slow_down(operation, key):
        if "/node-1" in key and operation.startswith("put"):
            raise Unavailable("SlowDown")

    run.store.before = slow_down
    with pytest.raises(Unavailable, match="SlowDown"):
        run.upload(1, 10)
    assert run.commit(10) is None
    assert run.log.checkpoints() == []


def test_a_part_that_was_lost_after_its_sidecar_is_not_committed(run, damage):
    """F26"""
    for how in ("missing", "truncated"):
        step = len(how)
        for node in (0, 1):
            run.upload(node, step)
        damage[how](run.root / f"run-1/checkpoints/a001-step-{step}/node-1/__1_0.distcp")
        with pytest.raises(Damaged, match=r"node-1/__1_0\.distcp (is missing|has 2999 bytes); the sidecar says 3000"):
            run.commit(step)
    assert run.log.checkpoints() == []


def test_a_repeated_upload_changes_nothing(run):
    first = run.upload(0, 10)
    run.store.calls.clear()
    assert run.upload(0, 10) == first
    assert not [call for call in run.store.calls if call[0].startswith("put")]


def test_a_part_with_other_content_is_never_overwritten(run):
    run.upload(0, 10)
    (run.folder(0, 10) / "__0_0.distcp").write_bytes(b"other")
    with pytest.raises(StoreError, match="in the store already, with other content"):
        run.upload(0, 10)
    assert (run.root / "run-1/checkpoints/a001-step-10/node-0/__0_0.distcp").stat().st_size == 3000


def test_a_repeated_upload_sends_only_what_is_missing_where_the_store_knows_checksums(run, monkeypatch):
    plain = run.plain

    def stat(key):  # as S3 does
        found = plain.__class__.stat(plain, key)
        crc = disk.checksum(run.root / key)[1] if found else None
        return found and found.__class__(found.key, found.size, crc, found.modified)

    monkeypatch.setattr(plain, "stat", stat)

    def fail(operation, _key):
        if operation == "put_if_absent":
            raise Unavailable("cut")

    def sent():
        run.store.calls.clear()
        run.upload(0, 10)
        return [key.rpartition("/")[2] for operation, key in run.store.calls if operation in ("put", "put_file")]

    run.store.before = fail
    for _ in range(2):  # what stands is not sent again
        with pytest.raises(Unavailable):
            sent()
    assert [operation for operation, _ in run.store.calls if operation.startswith("put")] == ["put_if_absent"]
    (run.folder(0, 10) / ".metadata").write_bytes(b"metb 10")  # same size, other content
    with pytest.raises(Unavailable):
        sent()
    assert [key for operation, key in run.store.calls if operation == "put"] == [f"{PART}.pack-0"]
    (run.folder(0, 10) / "__0_0.distcp").write_bytes(bytes(3000))
    run.store.before = lambda *_: None
    assert sent() == ["__0_0.distcp"]
    for node in (0, 1):
        run.upload(node, 10)
    assert verify(run.store, "run-1", run.manifest(run.commit(10)), deep=True) == ()


@pytest.mark.parametrize("executed", [True, False])
def test_the_lost_answer_to_a_sidecar(run, executed):
    """F30"""

    def lose(operation, _key):
        if operation == "put_if_absent":
            raise Ambiguous("lost")

    setattr(run.store, "after" if executed else "before", lose)
    if executed:
        assert run.upload(0, 10).node == 0
    else:
        with pytest.raises(Unavailable, match=r"did not arrive\. Upload it again"):
            run.upload(0, 10)
        run.store.before = lambda *_: None
        assert run.upload(0, 10).node == 0


def test_what_cannot_be_kept_is_refused_before_anything_is_sent(run, tmp_path):
    def link(folder):
        (folder / "link").symlink_to("/etc/hostname")

    def link_to_folder(folder):
        (folder / "link").symlink_to("/etc")

    def pipe(folder):
        os.mkfifo(folder / "pipe")

    def newline(folder):
        (folder / "a\nb").touch()

    def escape(folder):
        (folder / "..%2fx").touch()

    def not_utf8(folder):
        (folder / os.fsdecode(b"\xff")).touch()

    for step, spoil in enumerate((link, link_to_folder, pipe, newline, escape, not_utf8)):
        spoil(run.folder(0, step))
        with pytest.raises(Unkeepable, match="cannot be kept"):
            run.upload(0, step)
    assert not list(run.plain.list("run-1/checkpoints/"))
    with pytest.raises(StoreError, match="cannot read"):
        upload_part(
            run.store,
            "run-1",
            "a001-step-1",
            folder=tmp_path / "gone",
            attempt=1,
            node=0,
            step=1,
            world_size=1,
            meta={},
        )


def test_a_folder_that_is_written_under_its_name_is_uploaded_once_that_has_ended(run):
    """What came late would be in no checkpoint, and nobody would miss it before a resume."""
    late = run.folder(0, 10) / "late.pt"
    run.store.before = lambda operation, _key: late.write_bytes(b"x") if operation == "put" else None
    with pytest.raises(Changed, match="step-10 was changed while it was uploaded"):
        run.upload(0, 10)
    assert run.plain.stat("run-1/checkpoints/a001-step-10/node-0.json") is None
    assert "late.pt" in {file.path for file in run.upload(0, 10).files}


@pytest.mark.parametrize("size", [5, 2 << 20], ids=["packed", "alone"])
@pytest.mark.parametrize("at", ["list", "put"])
def test_a_file_that_is_renamed_within_a_folder_that_has_its_name_was_written_meanwhile(run, size, at):
    """Many programs write `x.tmp`, and rename it: no file is missing then, it has another name."""
    aside = run.folder(0, 10) / "late.tmp"
    aside.write_bytes(b"x" * size)

    def rename(operation, _key):
        if operation.startswith(at) and aside.exists():
            aside.rename(aside.with_suffix(".pt"))

    run.store.before = rename
    with pytest.raises(Changed, match="step-10 was changed while it was uploaded"):
        run.upload(0, 10)
    assert "late.pt" in {file.path for file in run.upload(0, 10).files}


def test_a_file_that_goes_while_a_folder_is_listed_was_written_meanwhile(run, monkeypatch):
    aside = run.folder(0, 10) / "late.tmp"
    aside.touch()
    entries = transfer_part._entries

    def listed(folder, above):
        for path, entry in list(entries(folder, above)):
            aside.unlink(missing_ok=True)
            yield path, entry

    monkeypatch.setattr(transfer_part, "_entries", listed)
    with pytest.raises(Changed, match="step-10 was changed while it was uploaded"):
        run.upload(0, 10)
    run.upload(0, 10)


def test_a_folder_that_is_gone_was_not_written_meanwhile(run):
    """It does not come back: nobody waits for that."""
    folder = run.folder(0, 10)
    run.store.before = lambda operation, _key: shutil.rmtree(folder, ignore_errors=True)
    with pytest.raises(NotFound, match="there is no such file"):
        run.upload(0, 10)


def test_too_many_files_are_refused(run, monkeypatch):
    monkeypatch.setattr("mgpu_train.checkpoint.transfer.part.MAX_FILES", 2)
    with pytest.raises(Unkeepable, match="more than 2 files"):
        run.upload(0, 10)


def test_a_list_of_files_that_nobody_could_read_is_refused(run, monkeypatch):
    monkeypatch.setattr("mgpu_train.checkpoint.transfer.upload.MAX_DOCUMENT_BYTES", 300)
    with pytest.raises(StoreError, match="list of files is too long"):
        run.upload(0, 10)
    assert not [key for operation, key in run.store.calls if operation == "put_if_absent" and "node-0" in key]


def test_small_files_are_few_objects(run):
    """Thousands of files, a handful of requests, each byte where the sidecar says it is."""
    folder = run.folder(0, 10)
    for n in range(2000):
        (folder / f"part-{n:04d}").write_bytes(os.urandom(n % 90))
    sidecar = run.upload(0, 10)
    puts = [key for operation, key in run.store.calls if operation in ("put", "put_file")]
    assert sorted(key.rpartition("/")[2] for key in puts) == ["__0_0.distcp", "node-0.pack-0"]
    data = (run.root / f"{PART}.pack-0").read_bytes()
    for file in sidecar.files:
        if file.pack is not None:
            assert data[file.offset :][: file.size] == (folder / file.path).read_bytes()
    assert len(sidecar.files) == 2003
    run.upload(1, 10)
    assert verify(run.store, "run-1", run.manifest(run.commit(10)), deep=True) == ()


def test_a_damaged_sidecar_is_not_believed(run, damage):
    for node in (0, 1):
        run.upload(node, 10)
    path = run.root / "run-1/checkpoints/a001-step-10/node-1.json"
    whole = path.read_bytes()
    damage["truncated"](path)
    with pytest.raises(Damaged, match=r"node-1\.json is not valid"):
        run.commit(10)
    path.write_bytes(path.with_name("node-0.json").read_bytes())
    with pytest.raises(Damaged, match="of another part"):
        run.commit(10)
    path.write_bytes(whole)
    assert run.commit(10).seq == 1


# --- assemble ---------------------------------------------------------------------------------------------------------


def part(node: int, *files: tuple[str, int], step: int = 1, world_size: int = 2) -> Sidecar:
    return Sidecar(
        checkpoint_id=f"a001-step-{step}",
        attempt=1,
        node=node,
        step=step,
        world_size=world_size,
        files=tuple(FileEntry(path=path, size=size, crc64nvme="0" * 16, node=node) for path, size in files),
    )


def make(*parts: Sidecar):
    return assemble(parts, run_id="run-1", nodes=2, created_at=1.0)


def test_a_file_that_all_nodes_have_stands_once():
    manifest = make(part(1, ("config.json", 5), ("b", 1)), part(0, ("config.json", 5), ("a", 1)))
    assert [(file.path, file.node) for file in manifest.files] == [("config.json", 0), ("a", 0), ("b", 1)]
    assert manifest.writers == (0, 1)


def test_different_files_of_one_name_are_an_error():
    with pytest.raises(Unkeepable, match=r"nodes 0 and 1 have different files named 'model\.pt'"):
        make(part(0, ("model.pt", 5)), part(1, ("model.pt", 6)))


def test_parts_that_make_no_checkpoint():
    with pytest.raises(Damaged, match="not of one checkpoint"):
        make(part(0, ("a", 1)), part(1, ("b", 1), step=2))
    with pytest.raises(Damaged, match="not of one checkpoint"):
        make(part(0, ("a", 1)), part(1, ("b", 1), world_size=4))
    with pytest.raises(Unkeepable, match="a001-step-1 has no file"):
        make(part(0), part(1))
    with pytest.raises(Damaged, match="make no checkpoint"):
        make(part(0, ("a", 1)), part(1, ("a/b", 1)))
    with pytest.raises(Damaged, match="make no checkpoint"):
        make(part(0, ("a", 1)), part(0, ("b", 1)))
    with pytest.raises(Damaged, match="not of one checkpoint"):
        make()


def test_a_pack_that_holds_no_file_that_counts_is_not_in_the_manifest():
    def packed(node: int, *paths: str) -> Sidecar:
        files = [
            FileEntry(path=path, size=1, crc64nvme="0" * 16, node=node, pack=number, offset=0)
            for number, path in enumerate(paths)
        ]
        packs = tuple(PackEntry(node=node, number=n, size=1, crc64nvme="0" * 16) for n in range(len(paths)))
        return part(node).model_copy(update={"files": tuple(files), "packs": packs})

    manifest = make(packed(0, "common", "a"), packed(1, "common", "b"))
    assert [(pack.node, pack.number) for pack in manifest.packs] == [(0, 0), (0, 1), (1, 1)]
    assert [(file.path, file.node) for file in manifest.files] == [("common", 0), ("a", 0), ("b", 1)]


def test_a_node_may_have_nothing_to_add():
    assert make(part(0, ("a", 1)), part(1)).writers == (0, 1)
