"""F39, and whoever reads: the copy of a node's file is that file, byte for byte."""

from __future__ import annotations

import errno
import os
import random
from types import SimpleNamespace

import pytest

from mgpu.errors import ConnectionFailed
from mgpu.run.supervision import remote_tail
from mgpu.run.supervision.remote_tail import RemoteTail


class Remote:
    """A file of a node that grows while it is read, over a line that breaks."""

    def __init__(self, data=b"", breaks=0.0):
        self.data, self.breaks, self.dice = data, breaks, random.Random(7)
        self.most = 0

    def read_from(self, _path, offset, limit):
        self.most = max(self.most, limit)
        if self.dice.random() < self.breaks:
            raise ConnectionFailed("cut")
        return None if offset > len(self.data) else self.data[offset : offset + self.dice.randint(1, limit)]


@pytest.fixture
def here(tmp_path):
    def copy(hidden=()):
        tell = lambda offset, data: said.append((offset, data))  # noqa: E731
        return RemoteTail("log", file, tell=tell, warn=warned.append, hidden=hidden)

    said, warned, file = [], [], tmp_path / "node-0.0000.ab.log"
    parts = lambda: [(path.name, path.read_bytes()) for path in sorted(tmp_path.iterdir())]  # noqa: E731
    return SimpleNamespace(file=file, copy=copy, said=said, warned=warned, parts=parts)


def test_a_burst_over_a_line_that_breaks_arrives_whole_in_bounded_memory(here, monkeypatch):
    monkeypatch.setattr(remote_tail, "PIECE", 1 << 10)
    remote, copy = Remote(random.Random(1).randbytes(300_000), breaks=0.2), here.copy()
    for _ in range(1000):
        try:
            if copy.follow(remote, lambda: True):
                break
        except ConnectionFailed:
            continue
    assert here.file.read_bytes() == remote.data
    assert b"".join(data for _, data in here.said) == remote.data
    assert remote.most == 1 << 10


def test_a_supervisor_that_wakes_up_beside_another_one_doubles_nothing(here):
    """It read a piece before it was stopped, and writes it when the other has written far beyond it."""
    remote = Remote(b"0123456789")
    stale, fresh = here.copy(), here.copy()

    class Stopped:
        def read_from(self, path, offset, limit):
            if offset == 0:
                assert fresh.follow(remote, lambda: True)
            return remote.data[offset : offset + limit]

    assert stale.follow(Stopped(), lambda: True)
    assert here.file.read_bytes() == b"0123456789"


def test_it_stops_between_two_pieces_when_there_is_no_time(here, monkeypatch):
    monkeypatch.setattr(remote_tail, "PIECE", 4)
    remote = Remote(b"0123456789")
    assert here.copy().follow(remote, lambda: False) is False
    assert 0 < here.file.stat().st_size <= 4
    assert here.copy().follow(remote, lambda: True) is True
    assert here.file.read_bytes() == remote.data


def test_a_short_write_is_gone_on_with(here, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:3], offset))
    assert here.copy().follow(Remote(b"0123456789"), lambda: True)
    assert here.file.read_bytes() == b"0123456789"


def test_a_full_disk_here_is_told_and_what_is_missing_comes_later(here, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        here.copy().follow(Remote(b"0123456789"), lambda: True)
    assert ["No space left" in text for text in here.warned] == [True]
    assert here.said == []
    here.copy().follow(Remote(b"0123456789"), lambda: True)
    assert here.file.read_bytes() == b"0123456789"


def test_nothing_to_copy_makes_no_file(here):
    assert here.copy().follow(Remote(), lambda: True)
    assert not here.file.exists()


# --- a file that was emptied on its node ------------------------------------------------------------------------------

FIRST, SECOND = ("node-0.0000.ab.log", b"step 1\nstep 2\n"), "node-0.0001.ab.log"


@pytest.mark.parametrize("again", [False, True], ids=["it itself", "the next supervisor"])
def test_what_comes_after_a_file_was_emptied_is_here_at_once_in_another_part(here, again):
    remote, copy = Remote(FIRST[1]), here.copy()
    assert copy.follow(remote, lambda: True)
    for seen in (b"", b"st", b"step 3\n", b"step 3\nstep 4\n", b"step 3\nstep 4\nstep 5\n"):
        remote.data = seen
        copy = here.copy() if again else copy
        for _ in range(2):
            assert copy.follow(remote, lambda: True)
        assert here.parts() == [FIRST, (SECOND, seen)] if len(seen) > 2 else [FIRST]
    assert b"".join(data for offset, data in here.said) == FIRST[1] + remote.data
    assert [text.partition(" goes on in ")[2] for text in here.warned] == [str(here.file.with_name(SECOND))]


def test_a_file_that_was_emptied_and_is_long_again_before_anybody_looks_is_here_whole(here):
    """A run that was left for a night."""
    assert here.copy().follow(Remote(FIRST[1]), lambda: True)
    copy, second = here.copy(), b"step 8\nstep 9\nstep 10\n"
    for seen in (second, second + b"step 11\n"):
        assert copy.follow(Remote(seen), lambda: True)
        assert here.parts() == [FIRST, (SECOND, seen)]


def test_a_file_that_is_emptied_twice_has_three_parts(here):
    copy = here.copy()
    for data in (b"one, and more\n", b"two, too\n", b"three\n"):
        assert copy.follow(Remote(data), lambda: True)
    assert [data for _, data in here.parts()] == [b"one, and more\n", b"two, too\n", b"three\n"]


def test_a_supervisor_that_wakes_up_beside_another_one_begins_no_second_part(here):
    stale, fresh = here.copy(), here.copy()
    assert stale.follow(Remote(FIRST[1]), lambda: True)
    assert fresh.follow(Remote(b"step 3\n"), lambda: True)
    assert stale.follow(Remote(b"step 3\n4\n"), lambda: True)
    assert here.parts() == [FIRST, (SECOND, b"step 3\n4\n")]


def test_a_file_that_has_lost_its_end_goes_on_where_it_was(here):
    """A machine that crashed has not written all; a login node may see an older state of a shared folder."""
    secret, copy = SECRETS[0], here.copy(hidden=SECRETS)
    whole = b"token " + secret + b"\nstep 1\nstep 2\n"
    for size in (len(whole), 30, 9, 0, len(whole) + 7):
        assert copy.follow(Remote((whole + b"step 3\n")[:size]), lambda: True)
    assert here.parts() == [(FIRST[0], whole.replace(secret, b"*" * len(secret)) + b"step 3\n")]
    assert here.warned == []


# --- secrets ----------------------------------------------------------------------------------------------------------

SECRETS = (b"hf_0123456789", b"0123456789")


@pytest.mark.parametrize("seed", range(20))
def test_a_secret_is_as_many_asterisks_wherever_pieces_end(here, seed):
    text = b"".join(random.Random(seed).choices([*SECRETS, b"hf_", b"h", b"\n", b"loss 0.5 ", b"01234"], k=200))
    remote, copy = Remote(), here.copy(hidden=SECRETS)
    dice = random.Random(seed)
    while len(remote.data) < len(text):  # as a program writes it
        remote.data = text[: len(remote.data) + dice.randint(1, 40)]
        copy.follow(remote, lambda: True)
    copy.follow(remote, lambda: True)
    copy.follow(remote, lambda: True)
    shown = here.file.read_bytes()
    assert len(shown) == len(text), "the size says where to go on"
    assert b"".join(data for _, data in here.said) == shown
    assert all(b"*" * len(value) in shown for value in SECRETS if value in text)
    assert all(a == b or a == ord("*") for a, b in zip(shown, text, strict=True))


def test_what_is_a_secret_in_one_piece_never_shows(here):
    remote, copy = Remote(), here.copy(hidden=SECRETS)
    remote.read_from = lambda _path, offset, _limit: remote.data[offset:]
    for text in (b"token: hf_01", b"23456789 loss", b" 0.5 h", b"f_0123456789\n"):
        remote.data += text
        copy.follow(remote, lambda: True)
    assert here.file.read_bytes() == b"token: ************* loss 0.5 *************\n"


def test_the_end_of_a_log_is_not_kept_back_for_ever(here):
    remote, copy = Remote(b"the end h"), here.copy(hidden=SECRETS)
    remote.read_from = lambda _path, offset, _limit: remote.data[offset:]
    copy.follow(remote, lambda: True)
    assert here.file.read_bytes() == b"the end "
    copy.follow(remote, lambda: True)
    assert here.file.read_bytes() == b"the end h"


def test_short_values_and_variables_that_are_not_set_hide_nothing():
    environ = {"A": "1234567", "B": "12345678", "C": " 123456789\n", "D": ""}
    assert remote_tail.values(["A", "B", "C", "D", "E"], environ) == (b"123456789", b"12345678")
