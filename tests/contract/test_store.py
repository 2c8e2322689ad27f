"""One suite for any store: what S3 promises, a folder promises too; then what only a network can do wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.checkpoint.log.manifest import checkpoint_id
from mgpu_train.checkpoint.newest import newest_verified
from mgpu_train.checkpoint.retention import plan_prune, prune
from mgpu_train.checkpoint.transfer.fetch import fetch
from mgpu_train.checkpoint.transfer.upload import commit_when_complete, upload_part
from mgpu_train.config import Retention
from mgpu_train.store import (
    Ambiguous,
    Damaged,
    Denied,
    Expired,
    NoStore,
    NotFound,
    StoreError,
    Unavailable,
    crc,
    disk,
    open_store,
)

MIB = 1 << 20
BAD_KEYS = [
    "",
    "/a",
    "a/",
    "a//b",
    "../a",
    "a/../b",
    "a/./b",
    "a\\b",
    "a\0b",
    "a\nb",
    "a/..%2fb",
    "a/%2E%2e/b",
    "a\u202eb",
    "a/.aside-x",
    "a/" + "n" * 256,
    "a/" * 600 + "b",
]


# --- objects ----------------------------------------------------------------------------------------------------------


def test_a_key_is_created_once(site):
    assert site.store.put_if_absent("a/b", b"first") is True
    assert site.store.put_if_absent("a/b", b"second") is False
    assert site.store.get("a/b", 10) == b"first"


def test_of_many_creators_one_wins(site):
    gate = threading.Barrier(20)

    def create(number: int) -> bool:
        gate.wait()
        return site.store.put_if_absent("race", b"%d" % number)

    with ThreadPoolExecutor(20) as pool:
        won = list(pool.map(create, range(20)))
    assert won.count(True) == 1
    assert site.store.get("race", 10) == b"%d" % won.index(True)


def test_an_object_is_replaced_while_it_is_what_was_read(site):
    assert not site.store.replace("a", b"0", "none-such")
    site.store.put_if_absent("a", b"1")
    first = site.store.read("a", 9)
    assert (first.data, first.age_s < 60, abs(first.now - time.time()) < 600) == (b"1", True, True)
    assert site.store.replace("a", b"2", first.version)
    assert not site.store.replace("a", b"3", first.version)
    second = site.store.read("a", 9)
    assert second.data == b"2"
    assert [stat.version for stat in site.store.list("")] == [second.version] != [first.version]
    site.store.delete("a")
    assert not site.store.replace("a", b"4", second.version)
    assert site.store.stat("a") is None


def test_of_many_who_replace_one_wins_each_round(site):
    site.store.put_if_absent("count", b"0")

    def add(_: int) -> None:
        while True:
            seen = site.store.read("count", 9)
            if site.store.replace("count", b"%d" % (int(seen.data) + 1), seen.version):
                return

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(24)))
    assert site.store.get("count", 9) == b"24"


def test_put_replaces(site):
    site.store.put("a", b"first, and long")
    site.store.put("a", b"second")
    assert site.store.get("a", 100) == b"second"


def test_absent_is_its_own_error(site, tmp_path):
    with pytest.raises(NotFound):
        site.store.get("nothing", 10)
    with pytest.raises(NotFound):
        site.store.get_file("nothing", tmp_path / "x", size=1, crc64nvme="0" * 16)
    with pytest.raises(NotFound):
        site.store.checksum("nothing", 1)
    assert site.store.stat("nothing") is None
    assert not (tmp_path / "x").exists()


def test_an_object_longer_than_the_limit_is_not_read(site):
    site.store.put("a", b"x" * 11)
    assert site.store.get("a", 11) == b"x" * 11
    with pytest.raises(Damaged, match="11 bytes"):
        site.store.get("a", 10)


@pytest.mark.parametrize("size", [0, 1, 5 * MIB, 16 * MIB, 33 * MIB + 7])
def test_a_file_goes_in_and_comes_out(site, tmp_path, size):
    source, target = tmp_path / "source", tmp_path / "deep" / "target"
    source.write_bytes(os.urandom(size))
    sent = site.store.put_file("folder/file.bin", source)
    assert (sent.size, sent.crc64nvme) == disk.checksum(source) == (size, crc.of_bytes(source.read_bytes()))
    stored = site.store.stat("folder/file.bin")
    assert (stored.key, stored.size) == ("folder/file.bin", size)
    assert stored.crc64nvme in (None, sent.crc64nvme)
    assert abs(stored.modified - time.time()) < 3600
    assert site.store.checksum("folder/file.bin", size) == sent.crc64nvme
    site.store.get_file("folder/file.bin", target, size=size, crc64nvme=sent.crc64nvme)
    assert target.read_bytes() == source.read_bytes()
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_s3_keeps_the_checksum_that_was_sent(site, tmp_path):
    if site.kind == "file":
        pytest.skip("a folder keeps no checksums")
    for size in (10, 17 * MIB):
        (tmp_path / "f").write_bytes(os.urandom(size))
        assert site.store.put_file("f", tmp_path / "f").crc64nvme == site.store.stat("f").crc64nvme


def test_a_flipped_bit_is_caught(site, tmp_path):
    data = bytearray(os.urandom(17 * MIB))
    (tmp_path / "source").write_bytes(data)
    sent = site.store.put_file("f", tmp_path / "source")
    data[-5] ^= 1
    site.overwrite("f", bytes(data))
    assert site.store.checksum("f", sent.size) != sent.crc64nvme
    with pytest.raises(Damaged, match="checksum"):
        site.store.get_file("f", tmp_path / "out" / "f", size=sent.size, crc64nvme=sent.crc64nvme)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_truncated_object_is_caught(site, tmp_path):
    (tmp_path / "source").write_bytes(b"x" * 1000)
    sent = site.store.put_file("f", tmp_path / "source")
    site.overwrite("f", b"x" * 999)
    with pytest.raises(Damaged, match="999 bytes"):
        site.store.get_file("f", tmp_path / "f", size=1000, crc64nvme=sent.crc64nvme)
    with pytest.raises(Damaged, match="999 bytes"):
        site.store.checksum("f", 1000)
    assert not (tmp_path / "f").exists()


def test_a_failed_download_leaves_the_old_file(site, tmp_path):
    site.store.put("f", b"new")
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(Damaged):
        site.store.get_file("f", tmp_path / "f", size=3, crc64nvme="0" * 16)
    assert (tmp_path / "f").read_bytes() == b"old"


def test_listing_is_sorted_and_by_prefix(site):
    keys = ["B", "a-b/c", "a.json", "a/b", "a/c/d", "ab", "a/é", "z"]
    for key in reversed(keys):
        site.store.put(key, key.encode())
    in_order = sorted(keys, key=str.encode)
    assert [stat.key for stat in site.store.list("")] == in_order
    assert [stat.size for stat in site.store.list("")] == [len(key.encode()) for key in in_order]
    assert [stat.key for stat in site.store.list("a/")] == ["a/b", "a/c/d", "a/é"]
    assert [stat.key for stat in site.store.list("a/c")] == ["a/c/d"]
    assert [stat.key for stat in site.store.list("a")] == in_order[1:-1]
    assert list(site.store.list("nothing/here/")) == []


def test_a_listing_from_a_key_on(site):
    for key in ("a/1", "a/2", "a/3", "a/2-x", "b/1"):
        site.store.put(key, b"")
    assert [stat.key for stat in site.store.list("a/", after="a/2")] == ["a/2-x", "a/3"]  # itself left out
    assert [stat.key for stat in site.store.list("a/", after="a/25")] == ["a/3"]  # no object has to have that key
    assert [stat.key for stat in site.store.list("", after="a/3")] == ["b/1"]
    assert list(site.store.list("a/", after="z")) == []


def test_progress_is_told_of_every_byte(site, tmp_path):
    for size in (0, 1000, 17 * MIB):
        (tmp_path / "f").write_bytes(bytes(size))
        sent, told = site.store.put_file("f", tmp_path / "f"), []
        site.store.checksum("f", size, told.append)
        site.store.get_file("f", tmp_path / "g", size=size, crc64nvme=sent.crc64nvme, progress=told.append)
        assert sum(told) == 2 * size


def test_deleting_is_idempotent(site):
    site.store.put("a/b/c", b"")
    site.store.put("a/d", b"")
    site.store.delete("a/b/c")
    site.store.delete("a/b/c")
    assert [stat.key for stat in site.store.list("")] == ["a/d"]
    site.store.put("a/b", b"now a file")  # nothing of the folder stands in the way
    assert site.store.get("a/b", 100) == b"now a file"


def test_unfinished_writes_are_swept_if_they_are_dead(site):
    site.store.put("keep/x", b"x")
    for key in ("keep/a", "dead/b", "dead/c", "other/d"):
        site.begin_unfinished(key)
    assert [stat.key for stat in site.store.list("")] == ["keep/x"]  # what is unfinished is not listed
    assert site.store.sweep("", lambda key: key.startswith("dead/")) == 2
    assert site.unfinished() == 2
    assert site.store.sweep("keep/", lambda _key: True) == 1
    assert site.store.get("keep/x", 10) == b"x"


@pytest.mark.parametrize("key", BAD_KEYS)
def test_bad_keys_are_refused_before_anything_is_asked(key, site):
    for call in (
        lambda: site.store.put(key, b""),
        lambda: site.store.put_if_absent(key, b""),
        lambda: site.store.get(key, 1),
        lambda: site.store.stat(key),
        lambda: site.store.delete(key),
    ):
        with pytest.raises(StoreError, match="object key"):
            call()


def test_a_reader_sees_whole_objects_only(site):
    wholes = [bytes([letter]) * 200_000 for letter in b"ab"]
    site.store.put("x", wholes[0])
    done = threading.Event()

    def write() -> None:
        for turn in range(20):
            site.store.put("x", wholes[turn % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not done.is_set() or not reads:
        assert site.store.get("x", 1 << 20) in wholes
        reads += 1
    writer.join()


def test_the_life_of_checkpoints(site, tmp_path):
    log = CommitLog(site.store, "run")
    log.begin_attempt(1, "token")
    for step in (1, 2, 3):
        name = checkpoint_id(1, step)
        for node in (0, 1):
            folder = tmp_path / f"node-{node}" / f"step-{step}"
            (folder / "sub").mkdir(parents=True)
            (folder / f"{node}.distcp").write_bytes(os.urandom(1000))
            (folder / "sub" / f"empty-{node}").touch()
            assert commit(site.store, name) is None
            upload_part(site.store, "run", name, folder=folder, attempt=1, node=node, step=step, world_size=2, meta={})
        assert commit(site.store, name).step == step
        prune(site.store, "run", plan_prune(site.store, "run", Retention(keep_last=2)))
    assert [entry.step for entry in log.checkpoints()] == [3, 2]
    newest = newest_verified(site.store, "run", deep=True, report=pytest.fail)
    fetch(site.store, "run", log.manifest(newest), tmp_path / "resume")
    for node in (0, 1):
        name = f"{node}.distcp"
        assert (tmp_path / "resume" / name).read_bytes() == (tmp_path / f"node-{node}/step-3" / name).read_bytes()
    assert not list(site.store.list("run/checkpoints/a001-step-1/"))


def commit(store, name):
    return commit_when_complete(store, "run", name, writers=(0, 1), nodes=2, writer="token")


# --- folders ----------------------------------------------------------------------------------------------------------


def test_a_killed_writer_leaves_nothing_under_the_key(tmp_path):
    """SIGKILL when all bytes are written but not yet on disk."""
    (tmp_path / "source").write_bytes(b"x" * 1000)
    program = (
        "import os, signal, sys; from pathlib import Path; from mgpu_train.store import open_store\n"
        "os.fsync = lambda _fd: os.kill(os.getpid(), signal.SIGKILL)\n"
        "store = open_store('file://' + sys.argv[1]); store.put_file('a', Path(sys.argv[2]))"
    )
    (tmp_path / "store").mkdir()
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "store"), str(tmp_path / "source")])
    assert done.returncode == -signal.SIGKILL
    store = open_store(f"file://{tmp_path}/store")
    assert store.stat("a") is None
    assert list(store.list("")) == []
    assert store.sweep("", lambda key: True) == 1
    assert list((tmp_path / "store").iterdir()) == []


def test_links_and_pipes_in_a_folder_are_not_followed(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("canary")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "link").symlink_to(secret)
    os.mkfifo(tmp_path / "store" / "pipe")
    store = open_store(f"file://{tmp_path}/store")
    assert list(store.list("")) == []
    for key in ("link", "pipe"):
        with pytest.raises(StoreError):
            store.get(key, 100)


def test_a_large_file_is_copied_in_pieces(tmp_path):
    with (tmp_path / "source").open("wb") as file:
        file.truncate(96 * MIB)
    store = open_store(f"file://{tmp_path}/store")
    tracemalloc.start()
    try:
        sent = store.put_file("f", tmp_path / "source")
        store.get_file("f", tmp_path / "target", size=sent.size, crc64nvme=sent.crc64nvme)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 48 * MIB


def test_asking_whether_a_prefix_may_be_deleted_removes_nothing(site):
    site.store.put("a/b", b"x")
    for prefix in ("a/", "absent/"):
        site.store.may_delete(prefix)
    assert [each.key for each in site.store.list("")] == ["a/b"]


def test_no_delete_marker_is_left_where_a_bucket_keeps_versions(through):
    """S3 makes one for each plain delete, also of what is not there, and none where a condition does not hold; moto
    makes none for what is not there."""
    plain = list[str]()
    store, proxy = through(lambda call: None if "If-Match" in call.headers else plain.append(call.path))
    store.may_delete("run/checkpoints/a001-step-1/")
    assert (plain, len(proxy.calls)) == ([], 1)


@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (403, "AccessDenied"), (412, "Precondition")])
@pytest.mark.parametrize("denied", [False, True])
def test_where_a_condition_tells_nothing_a_plain_delete_does(through, status, code, denied):
    """A server may know no conditions, or hide from these credentials what is not there."""

    def before(call) -> None:
        if call.method == "DELETE" and "If-Match" in call.headers:
            call.status, call.answer = status, error(code)
        elif call.method == "DELETE" and denied:
            call.status, call.answer = 403, error("AccessDenied")

    store, proxy = through(before)
    with pytest.raises(Denied) if denied and status != 412 else nullcontext():
        store.may_delete("a/")
    assert len(proxy.calls) == (1 if status == 412 else 2)


@pytest.mark.parametrize(("mode", "refused"), [(0o777, None), (0o755, "may not be changed"), (0o1777, "sticky bit")])
def test_a_folder_says_whether_its_files_may_be_deleted(require, mode, refused):
    require("users", os.geteuid() == 0, "only root can be another user for a while")
    with tempfile.TemporaryDirectory() as root, pytest.raises(Denied, match=refused) if refused else nullcontext():
        Path(root).chmod(0o755)
        store = open_store(f"file://{root}")
        store.put("a/b/c", b"x")
        (Path(root) / "a" / "b").chmod(mode)
        os.seteuid(65534)
        try:
            store.may_delete("a/")
        finally:
            os.seteuid(0)
            assert store.get("a/b/c", 1) == b"x"


def test_a_folder_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"Not a directory|File exists"):
        open_store(f"file://{tmp_path}/file").put("a", b"")


def test_a_full_disk_says_so(tmp_path, monkeypatch):
    def full(_fd: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    store = open_store(f"file://{tmp_path}/store")
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(Unavailable, match=r"No space left.*Free some space"):
        store.put("a/b", b"data")
    assert list((tmp_path / "store" / "a").iterdir()) == []


@pytest.mark.parametrize(
    "url", ["relative", "ftp://x/y", "file://relative/x", "file:///a/../b", "s3://", "s3:///x", "s3://u:canary@b/x"]
)
def test_addresses_that_are_none(url):
    with pytest.raises(NoStore) as caught:
        open_store(url)
    assert "canary" not in str(caught.value)


def test_importing_the_store_loads_no_client():
    program = "import sys, mgpu_train.store, mgpu_train.checkpoint.log.manifest as _\n"
    program += "print({'boto3', 'awscrt'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "set()"


# --- networks ---------------------------------------------------------------------------------------------------------


def test_a_listing_has_more_than_one_page(moto):
    store = open_store(f"s3://{moto.bucket()}", moto.env)
    for number in range(7):
        store.put(f"k/{number}", b"")
    store._client.meta.events.register(  # the server would need 1001 objects
        "provide-client-params.s3.ListObjectsV2", lambda params, **_: {**params, "MaxKeys": 2}
    )
    assert [stat.key for stat in store.list("k/")] == [f"k/{number}" for number in range(7)]


def test_a_lost_answer_to_a_create_is_no_loss(through, lost):
    """F30: the object is made, the answer lost, the repeated request refused: 412 is no proof of losing."""
    dropped = []

    def drop_first(call) -> None:
        if call.method == "PUT" and call.path not in dropped:
            dropped.append(call.path)
            raise lost

    store, proxy = through(after=drop_first)
    assert store.put_if_absent("a", b"mine") is False
    assert len(proxy.calls) == 2
    log = CommitLog(store, "run")
    assert log.begin_attempt(1, "token").seq == 0
    assert log.begin_attempt(2, "other").seq == 1
    assert [entry.writer for entry in CommitLog(store, "run").entries()] == ["token", "other"]


def test_answers_that_are_all_lost_are_ambiguous(through, lost):
    def drop(call) -> None:
        if call.method == "PUT":
            raise lost

    store, _ = through(after=drop)
    with pytest.raises(Ambiguous):
        store.put_if_absent("a", b"mine")
    assert store.get("a", 10) == b"mine"  # and it was done


def test_a_conflict_is_ambiguous(through):
    store, _ = through(refuse(409, "ConditionalRequestConflict", "PUT"))
    with pytest.raises(Ambiguous, match="another write was under way"):
        store.put_if_absent("a", b"mine")


def test_throttling_is_borne(through, tmp_path):
    """F27: three of eight tries are refused."""
    seen = []

    def slow_down(call) -> None:
        seen.append(call)
        if len(seen) % 8 in (0, 3, 4):
            call.status, call.answer = 503, error("SlowDown")

    store, _ = through(slow_down)
    (tmp_path / "f").write_bytes(os.urandom(33 * MIB))
    sent = store.put_file("f", tmp_path / "f")
    store.get_file("f", tmp_path / "g", size=sent.size, crc64nvme=sent.crc64nvme)
    assert disk.checksum(tmp_path / "g") == (sent.size, sent.crc64nvme)


def test_a_stream_that_breaks_off_is_read_again(through, tmp_path):
    broken = []

    def cut(call) -> None:
        last = call.headers.get("Range", "whole").rpartition("-")[2]  # the same when it goes on where it was cut
        if call.method == "GET" and last not in broken:
            broken.append(last)
            call.answer = call.answer[: len(call.answer) // 2]
            call.hang_up = True

    store, _ = through(after=cut)
    (tmp_path / "f").write_bytes(os.urandom(17 * MIB))
    sent = store.put_file("f", tmp_path / "f")
    assert store.checksum("f", sent.size) == sent.crc64nvme
    assert len(broken) == 3  # one for each range
    assert len(store.get("f", 20 * MIB)) == sent.size
    assert broken[-1] == "whole"


def test_an_upload_that_fails_in_the_middle_is_aborted(through, tmp_path):
    """F26: the second part is refused; no object, and no upload left that would be billed."""
    store, proxy = through(refuse(403, "AccessDenied", "PUT", "partNumber=2"))
    (tmp_path / "f").write_bytes(os.urandom(33 * MIB))
    with pytest.raises(Denied):
        store.put_file("f", tmp_path / "f")
    assert store.stat("f") is None
    assert any(call.startswith("DELETE") and "uploadId" in call for call in proxy.calls)
    assert store.sweep("", lambda _key: True) == 0


@pytest.mark.parametrize("size", [1000, 17 * MIB])
def test_bytes_that_change_on_the_way_up_are_caught_later(through, tmp_path, size):
    """moto accepts a wrong checksum, as a careless server might: what is read back is compared with what was sent."""

    def flip(call) -> None:
        if call.method == "PUT":
            call.body = bytes([call.body[0] ^ 1]) + call.body[1:]

    store, _ = through(flip)
    (tmp_path / "f").write_bytes(b"x" * size)
    sent = store.put_file("f", tmp_path / "f")
    assert sent.crc64nvme == disk.checksum(tmp_path / "f")[1]
    with pytest.raises(Damaged, match="checksum"):
        store.get_file("f", tmp_path / "g", size=size, crc64nvme=sent.crc64nvme)


def test_bytes_that_change_on_the_way_down_are_caught(through, tmp_path):
    def flip(call) -> None:
        if call.method == "GET" and call.status == 206:
            call.answer = call.answer[:-1] + bytes([call.answer[-1] ^ 1])

    store, _ = through(after=flip)
    (tmp_path / "f").write_bytes(b"x" * 1000)
    sent = store.put_file("f", tmp_path / "f")
    with pytest.raises(Damaged, match="checksum"):
        store.get_file("f", tmp_path / "g", size=1000, crc64nvme=sent.crc64nvme)
    assert not (tmp_path / "g").exists()


def test_a_silent_server_is_given_up(through):
    quiet, waited = threading.Event(), []
    store, proxy = through(
        lambda call: call.method == "GET" and waited.append(quiet.wait(120)), store_read_s=0.1, store_retry_s=0.5
    )
    with pytest.raises(Unavailable, match="stopped answering"):
        store.get("a", 1)
    assert waited == [], "it was waited for"
    quiet.set()
    assert 1 < len(proxy.calls) <= 8  # as long as `store_retry_s` lets it, and not once more


@pytest.mark.drawn("faults on the way to a store", "train/mgpu_train/store")
@pytest.mark.parametrize("what", ["put", "put_file", "put_file of parts", "get", "get_file", "stat", "delete"])
def test_an_outage_of_half_a_minute_is_borne(through, tmp_path, what):
    """Longer than all of botocore's attempts, in whatever may be done twice."""
    seen, down = [], []

    def outage(call) -> None:
        seen.append(call)
        if down and "uploads" not in call.path and len(seen) <= 24:
            call.status, call.answer = 500, error("InternalError")

    store, _ = through(outage)
    (tmp_path / "f").write_bytes(os.urandom(17 * MIB if "parts" in what else 1000))
    sent = store.put_file("before", tmp_path / "f")
    seen.clear()
    down.append(True)
    if what == "get_file":
        store.get_file("before", tmp_path / "g", size=sent.size, crc64nvme=sent.crc64nvme)
    else:
        arguments = {"put": (b"x",), "get": (20 * MIB,), "stat": (), "delete": ()}.get(what, (tmp_path / "f",))
        getattr(store, what.partition(" ")[0])("before", *arguments)
    assert len(seen) > 24


@pytest.mark.parametrize(
    ("status", "code", "kind", "advice"),
    [
        (403, "AccessDenied", Denied, "list, read, write and delete"),
        (403, "InvalidAccessKeyId", Denied, "AWS_PROFILE"),
        (403, "SignatureDoesNotMatch", Denied, "AWS_PROFILE"),
        (400, "ExpiredToken", Expired, "Renew"),
        (403, "RequestTimeTooSkewed", Denied, "clock"),
        (404, "NoSuchBucket", NoStore, "Make it"),
        (503, "SlowDown", Unavailable, "later"),
        (500, "InternalError", Unavailable, "later"),
        (400, "BadDigest", Damaged, "arrived"),
        (418, "Teapot", StoreError, "Teapot"),
    ],
)
def test_every_refusal_says_what_and_what_next(through, status, code, kind, advice):
    store, _ = through(refuse(status, code, "GET"))
    with pytest.raises(kind, match=advice) as caught:
        list(store.list("a/"))
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"{store.url}: cannot list a/")
    assert "canary" not in repr(caught.value)
    assert caught.value.__cause__ is not None


def test_a_bucket_that_is_not_there(moto):
    with pytest.raises(NoStore, match=r"no bucket 'not-there'.*Make it"):
        list(open_store("s3://not-there/x", moto.env).list(""))
    with pytest.raises(NoStore):
        open_store("s3://not-there/x", moto.env).put("a", b"")


def test_a_bucket_name_that_is_none(moto):
    with pytest.raises(NoStore, match="name of a bucket"):
        list(open_store("s3://Not A Bucket/x", moto.env).list(""))


def test_no_credentials(moto, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of the process, not to be used")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    store = open_store("s3://bucket/x", {"AWS_ENDPOINT_URL": moto.endpoint})
    with pytest.raises(Denied, match=r"no usable credentials\. Set AWS_PROFILE"):
        list(store.list(""))
    with pytest.raises(Denied, match="Set AWS_PROFILE"):
        open_store("s3://bucket/x", {"AWS_PROFILE": "nobody"})


def test_the_process_environment_is_used_when_none_is_given(moto, monkeypatch):
    for name, value in moto.env.items():
        monkeypatch.setenv(name, value)
    store = open_store(f"s3://{moto.bucket()}")
    store.put("a", b"x")
    assert store.get("a", 1) == b"x"


def test_an_endpoint_that_is_down_is_found_out_soon(moto, monkeypatch):
    env = {**moto.env, "AWS_ENDPOINT_URL": "http://user:canary@127.0.0.1:9"}
    pauses: list[float] = []
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=pauses.append))
    with pytest.raises(Unavailable, match=r"no connection to http://127.0.0.1:9\. Check the network") as caught:
        list(open_store("s3://bucket/x", env).list(""))
    with pytest.raises(Unavailable, match="no connection"):
        open_store("s3://bucket/x", env).get("a", 1)
    assert len(pauses) == 2  # one each: what never answered is not waited for
    assert "canary" not in str(caught.value)


def test_an_endpoint_that_went_down_is_tried_as_long_as_any(through, monkeypatch):
    store, proxy = through()
    assert store.stat("a") is None
    tries = []
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=tries.append))
    proxy.close()
    with pytest.raises(Unavailable, match="no connection"):
        list(store.list(""))
    assert len(tries) == 7


def test_an_endpoint_that_is_none():
    with pytest.raises(NoStore, match="https://host:port"):
        open_store("s3://bucket/x", {"AWS_ENDPOINT_URL": "not an address"})


def test_plain_http_is_signed_and_https_is_not_hashed():
    def signing(env):
        return open_store("s3://bucket/x", env)._client.meta.config.s3["payload_signing_enabled"]

    assert signing({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}) is True
    assert signing({"AWS_ENDPOINT_URL": "https://127.0.0.1:9"}) is False
    assert signing({"AWS_REGION": "us-east-1"}) is False


def refuse(status: int, code: str, method: str, part: str = ""):
    def before(call) -> None:
        if call.method == method and part in call.path:
            call.status, call.answer = status, error(code)

    return before


def error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>told by a test</Message></Error>".encode()
