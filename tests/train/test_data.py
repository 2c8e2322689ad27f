"""The text, its split by file, and the order of samples: all of it without a process group."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from mgpu_train.data.loader import Loader
from mgpu_train.data.order import Order, Slices
from mgpu_train.data.text import Text, TextFile, open_split
from mgpu_train.errors import TrainError

SEQ_LEN = 16
PINNED = [631, 233, 917, 966, 871]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(40):
        name = tmp_path / f"part-{number % 3}" / f"{number:02}.txt"
        name.parent.mkdir(exist_ok=True)
        name.write_bytes(bytes((number * 7 + i) % 251 for i in range(50 + number)))
    return tmp_path


class TestOrder:
    @pytest.mark.parametrize("samples", [1, 2, 3, 16, 17, 1000])
    def test_every_epoch_holds_each_sample_once(self, samples):
        order = Order(samples, seed=1)
        for epoch in range(3):
            seen = [order[epoch * samples + i] for i in range(samples)]
            assert sorted(seen) == list(range(samples))

    def test_epochs_and_seeds_have_orders_of_their_own(self):
        orders = {tuple(Order(64, seed)[epoch * 64 + i] for i in range(64)) for seed in (1, 2) for epoch in (0, 1, 2)}
        assert len(orders) == 6

    def test_it_looks_like_chance(self):
        values = np.array([Order(10_000, seed=3)[i] for i in range(10_000)])
        assert abs(np.corrcoef(values, np.arange(10_000))[0, 1]) < 0.05
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.05

    def test_it_never_changes(self):
        # checkpoints outlive versions: a resumed run must go on in the order in which it began
        assert [Order(1000, seed=1)[i] for i in (0, 1, 2, 999, 1000)] == PINNED

    def test_a_huge_text_costs_no_table(self):
        assert 0 <= Order(10**12, seed=1)[10**15] < 10**12


class TestSlices:
    @pytest.mark.parametrize("micro", [None, 1, 3, 100])
    @pytest.mark.parametrize("replicas", [1, 2, 3, 5, 8, 24])
    def test_replicas_share_out_each_global_batch_in_its_order(self, replicas, micro):
        """At any number of them, also where they do not divide it; all make as many micro-batches."""
        slices = [Slices(24, micro, rank, replicas) for rank in range(replicas)]
        for consumed in (0, 24, 240):
            cut = [list(each.of(consumed)) for each in slices]
            assert [position for parts in cut for part in parts for position in part] == [
                *range(consumed, consumed + 24)
            ]
            assert {len(parts) for parts in cut} == {slices[0].count}
            assert all(parts[0] for parts in cut)  # only the last ones may be empty
            assert max(len(part) for parts in cut for part in parts) <= min(slices[0].size, micro or 24)


class Numbers:
    """Each sample is its own number and seed."""

    fingerprint = "numbers"

    def __len__(self) -> int:
        return 100

    def batch(self, samples, seeds):
        if 13 in samples:
            raise TrainError("cannot read sample 13")
        return {"samples": torch.tensor(samples), "seeds": torch.tensor([seed >> 1 for seed in seeds])}


class TestLoader:
    @pytest.mark.parametrize("threads", [1, 4])
    def test_batches_come_in_their_order_whoever_makes_them(self, threads):
        loader = Loader(torch.device("cpu"), 1, threads)
        wanted = [range(2), range(2, 2), range(2, 5), *(range(each, each + 1) for each in range(5, 40))]
        found = list(loader.read(Numbers(), lambda position: 99 - position, wanted))
        assert [batch and batch["samples"].tolist() for batch in found] == [
            [99 - position for position in positions] or None for positions in wanted
        ]
        loader.close()

    def test_a_sample_has_the_seed_of_its_position_whoever_reads_it_with_whatever(self):
        def seeds(positions, *, seed=1, threads=1):
            loader = Loader(torch.device("cpu"), seed, threads)
            found = [batch["seeds"].tolist() for batch in loader.read(Numbers(), lambda each: each, positions)]
            loader.close()
            return [each for batch in found for each in batch]

        whole = seeds([range(8)])
        assert seeds([range(3), range(3, 8)], threads=3) == whole
        assert len({*whole, *seeds([range(8)], seed=2)}) == 16

    def test_what_the_data_raises_comes_where_its_batch_would(self):
        batches = Loader(torch.device("cpu"), 1).read(Numbers(), lambda each: each, [range(12, 13), range(13, 14)])
        assert next(batches) is not None
        with pytest.raises(TrainError, match="sample 13"):
            next(batches)


class TestText:
    def test_reads_over_the_ends_of_files(self, folder):
        training, _ = open_split(str(folder), SEQ_LEN)
        whole = b"".join((folder / name).read_bytes() for name, _ in training.files)
        assert training.read(0, len(whole)) == whole
        assert training.read(45, 120) == whole[45:165]
        assert training.read(len(whole) - 3, 10) == whole[-3:]
        assert len(training) == len(whole)

    def test_a_sample_is_its_bytes_and_the_one_after(self, folder):
        training, _ = open_split(str(folder), SEQ_LEN)
        rows = training.tensor([0, 5], SEQ_LEN)
        assert rows.shape == (2, SEQ_LEN + 1)
        assert bytes(rows[1].tolist()) == training.read(5 * SEQ_LEN, SEQ_LEN + 1)
        last = training.samples(SEQ_LEN) - 1
        assert training.tensor([last], SEQ_LEN).shape == (1, SEQ_LEN + 1)

    def test_the_split_is_by_file_without_overlap(self, folder):
        training, validation = open_split(str(folder), SEQ_LEN)
        assert not set(training.files) & set(validation.files)
        assert {name for name, _ in training.files + validation.files} == {
            path.relative_to(folder).as_posix() for path in folder.rglob("*.txt")
        }

    def test_a_file_stays_in_its_part_when_others_come(self, folder):
        _, before = open_split(str(folder), SEQ_LEN)
        for number in range(20):
            (folder / f"new-{number}.txt").write_text("x" * 100)
        _, after = open_split(str(folder), SEQ_LEN)
        assert set(before.files) <= set(after.files)

    def test_two_files_are_enough(self, tmp_path):
        (tmp_path / "a.txt").write_text("a" * 100)
        (tmp_path / "b.txt").write_text("b" * 100)
        training, validation = open_split(str(tmp_path), SEQ_LEN)
        assert len(training.files) == len(validation.files) == 1

    def test_hidden_and_empty_files_are_no_text(self, folder):
        (folder / ".git").mkdir()
        (folder / ".git" / "config").write_text("x" * 100)
        (folder / "empty.txt").touch()
        names = {name for text in open_split(str(folder), SEQ_LEN) for name, _ in text.files}
        assert not names & {".git/config", "empty.txt"}

    def test_a_disk_that_fails_leaves_out_no_text_unnoticed(self, folder, monkeypatch):
        def walk(top, onerror):
            onerror(OSError(errno.EIO, "Input/output error", str(top / "gone")))
            return iter(())

        monkeypatch.setattr(os, "walk", walk)
        with pytest.raises(TrainError, match=r"cannot read .*gone: Input/output error"):
            open_split(str(folder), SEQ_LEN)

    def test_too_little_text_is_said(self, tmp_path):
        (tmp_path / "only.txt").write_text("x" * 1000)
        with pytest.raises(TrainError, match=r"too little text: 1 files.*set `train.text`"):
            open_split(str(tmp_path), SEQ_LEN)

    def test_an_absent_folder_is_said(self, tmp_path):
        with pytest.raises(TrainError, match="no folder on this node"):
            open_split(str(tmp_path / "absent"), SEQ_LEN)

    def test_a_file_that_shrinks_or_goes_is_said(self, folder):
        training, _ = open_split(str(folder), SEQ_LEN)
        first, second = (folder / name for name, _ in training.files[:2])
        first.write_bytes(b"x")
        with pytest.raises(TrainError, match="shorter"):
            training.read(0, 30)
        second.unlink()
        with pytest.raises(TrainError, match="cannot read"):
            training.read(training.files[0].size, 30)

    def test_the_fingerprint_tells_texts_apart(self, folder):
        before = open_split(str(folder), SEQ_LEN)[0].fingerprint
        assert open_split(str(folder), SEQ_LEN)[0].fingerprint == before
        name = open_split(str(folder), SEQ_LEN)[0].files[0].name
        (folder / name).write_bytes(b"x" * 7)
        assert open_split(str(folder), SEQ_LEN)[0].fingerprint != before

    def test_entropies_of_known_texts(self, tmp_path):
        def entropies(data: bytes) -> tuple[float, float]:
            (tmp_path / "text").write_bytes(data)
            return Text(tmp_path, (TextFile("text", len(data)),)).entropies()

        assert entropies(b"a" * 100) == pytest.approx((0, 0))
        assert entropies(b"ab" * 5000) == pytest.approx((math.log(2), 0), abs=1e-3)
        assert entropies(b"aabb" * 5000) == pytest.approx((math.log(2), math.log(2)), abs=1e-3)

    def test_the_standard_library_is_a_real_text(self):
        training, validation = open_split(None, 128)
        assert len(training) > 4 << 20
        assert 0.03 < len(validation) / len(training) < 0.3
        unigram, bigram = validation.entropies()
        assert 3.0 < unigram < 3.5
        assert 2.2 < bigram < 2.7
        assert not any("site-packages" in name or "/tests/" in name for name, _ in training.files + validation.files)
