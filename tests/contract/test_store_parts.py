"""What stores say went wrong, and what a folder does as a store: no server is needed to see it."""

from __future__ import annotations

import errno

import pytest
from botocore import exceptions as boto
from mgpu_train.store import Denied, NoStore, NotFound, StoreError, Unavailable, disk, open_store
from mgpu_train.store.s3errors import S3Errors

# --- errors


@pytest.mark.parametrize(
    ("kind", "code", "status", "expected", "words"),
    [
        ("http", "NoSuchUpload", 404, StoreError, "somebody has ended this upload"),
        ("http", "PermanentRedirect", 301, NoStore, "Check the bucket's name and AWS_REGION"),
        ("tls", "", 0, Unavailable, "the certificate of https://s3.test is not trusted"),
        ("connect", "", 0, Unavailable, "no connection to https://s3.test"),
        ("file", "", errno.EROFS, Denied, "Use a folder that can be written"),
        ("file", "", errno.EACCES, Denied, "Give this user access to the folder"),
        ("bug", "", 0, StoreError, "the process that moves the bytes failed: told by a test"),
        ("network", "", 0, Unavailable, "stopped answering (told by a test)"),
        (boto.SSLError(endpoint_url="x", error="x"), "", 0, Unavailable, "Set AWS_CA_BUNDLE"),
        (boto.UnknownServiceError(service_name="x", known_service_names=""), "", 0, StoreError, "UnknownServiceError"),
    ],
)
def test_what_went_wrong_is_told_with_what_to_do(kind, code, status, expected, words):
    errors = S3Errors("s3://bucket/runs", "https://user:secret@s3.test")
    told = {"kind": kind, "code": code, "status": status, "text": "told by a test"}
    met = kind if isinstance(kind, Exception) else errors.of_transfer("write a", told)
    with pytest.raises(StoreError) as caught, errors.translated("write a"):
        raise met
    told = str(caught.value)
    assert (type(caught.value), words in told, "secret" in told) == (expected, True, False), told
    assert told.startswith("s3://bucket/runs: cannot write a: ")


# --- a folder


def test_a_file_is_replaced_only_as_it_was_read(tmp_path):
    store = open_store(f"file://{tmp_path}/store")
    assert not store.replace("a/b", b"new", "any")
    store.put("a/b", b"old")
    version = store.read("a/b", 9).version
    assert store.replace("a/b", b"new", version)
    assert not store.replace("a/b", b"newer", version)
    assert (store.get("a/b", 9), [each.key for each in store.list("")]) == (b"new", ["a/b"])
    store.delete("a/b")
    assert (tmp_path / "store").is_dir()
    assert not (tmp_path / "store" / "a").exists()


def test_files_and_folders_that_go_meanwhile_are_no_error_of_the_list_and_one_of_a_write(tmp_path, monkeypatch):
    store = open_store(f"file://{tmp_path}/store")
    for key in ("a", "b"):
        store.put(key, b"x")
    found = store.list("")
    assert next(found).key == "a"
    (tmp_path / "store" / "b").unlink()
    assert list(found) == []
    real, faster = disk.make_folder, iter(range(9))  # so often whoever deletes the folder is faster
    monkeypatch.setattr(disk, "make_folder", lambda folder: next(faster) < 6 or real(folder))
    with pytest.raises(NotFound, match="there is no such file"):
        store.put("gone/c", b"x")
    store.put("gone/c", b"x")
    assert next(faster) == 7
