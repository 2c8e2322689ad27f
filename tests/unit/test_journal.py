from __future__ import annotations

import errno
import os
import stat

import pytest

from mgpu.journal import Journal, read


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal" / "1.jsonl"


def test_entries_come_back_in_order(path):
    with Journal(path, clock=lambda: 1000.12345) as journal:
        assert journal.append("create", token="t") == 0
        assert journal.append("created", ids=["a"]) == 1
    assert list(read(path)) == [
        {"seq": 0, "at": 1000.123, "kind": "create", "token": "t"},
        {"seq": 1, "at": 1000.123, "kind": "created", "ids": ["a"]},
    ]


def test_a_second_writer_goes_on_counting(path):
    for _ in range(2):
        with Journal(path) as journal:
            journal.append("x")
    assert [entry["seq"] for entry in read(path)] == [0, 1]


def test_an_absent_journal_has_no_entries(path):
    assert list(read(path)) == []


def test_only_the_user_can_read_it(path):
    Journal(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_an_entry_is_on_disk_before_append_returns(path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda _fd: synced.append(path.read_bytes()))
    with Journal(path) as journal:
        journal.append("create")
    assert len(synced) == 1
    assert b'"create"' in synced[0]


@pytest.mark.parametrize("torn", [b'{"seq":1,"ki', b"\xff\xfe", b"[1,2]", b"7"])
def test_a_torn_line_is_passed_over_and_not_glued_to_the_next(path, torn):
    with Journal(path) as journal:
        journal.append("a")
    with path.open("ab") as tail:
        tail.write(torn)
    assert [entry["kind"] for entry in read(path)] == ["a"]
    with Journal(path) as journal:
        journal.append("b")
    assert [(entry["seq"], entry["kind"]) for entry in read(path)] == [(0, "a"), (1, "b")]


def test_a_full_disk_is_an_error_and_the_next_entry_stands_alone(path, monkeypatch):
    write = os.write
    with Journal(path) as journal:
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            journal.append("lost")
        monkeypatch.setattr(os, "write", write)
        journal.append("kept")
    assert [entry["kind"] for entry in read(path)] == ["kept"]


def test_text_with_line_breaks_stays_one_entry(path):
    with Journal(path) as journal:
        journal.append("note", text='a\nb\r\n{"seq":9}')
    assert [entry["text"] for entry in read(path)] == ['a\nb\r\n{"seq":9}']
