"""Token files: made of every kind of text, side by side, through kills; and read as they were made."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from mgpu_train.data import token_index, tokenize
from mgpu_train.data.corpus import Corpus
from mgpu_train.data.tokens import open_tokens
from mgpu_train.errors import TrainError
from mgpu_train.store import disk
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from waiting import until

SEQ_LEN, PIECE, END = 16, 2000, "<|endoftext|>"


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Programs of this folder, each cut into a few documents; one has every kind of character."""
    whole = [path.read_text() for path in sorted(Path(__file__).parents[1].glob("fakes/*.py"))[:6]]
    parts = [text[begin : begin + 900] for text in whole for begin in range(0, len(text), 900)]
    return ["ä → 𝄞\r\n\u2028\x00", *parts[:30]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """A byte-level BPE that is trained here, saved with a truncation that nobody wants."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, special_tokens=[END], initial_alphabet=alphabet)
    )
    made.enable_truncation(8)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def write(folder: Path, kind: str, texts: list[str]) -> Path:
    folder.mkdir()
    half = len(texts) // 2
    for number, some in enumerate((texts[:half], texts[half:])):
        path = folder / f"{number}.{kind}"
        if kind == "jsonl":  # with lines that are empty, and one without an end
            path.write_text("\n\n".join(json.dumps({"id": 1, "text": text}) for text in some))
        elif kind == "parquet":
            table = pa.table({"id": list(range(len(some))), "text": some})
            parquet.write_table(table, path, row_group_size=3)
        else:
            for place, text in enumerate(some):
                (folder / f"{number}-{place:02}.txt").write_bytes(text.encode())
    return folder


def put(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def made(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def make(corpus: Path, out: Path, tokenizer: Path, **options: Any) -> token_index.Index:
    return tokenize.tokenize(corpus, out, tokenizer, **{"piece_bytes": PIECE, "held_out": 4, **options})


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_samples_are_those_of_all_documents_in_memory(tmp_path, texts, tokenizer, kind):
    """Each in one split, in order, each with an end; whatever pieces they are cut into."""
    corpus = write(tmp_path / "corpus", kind, texts)
    index = make(corpus, tmp_path / "out", tokenizer)
    assert len(index.shards) > 6
    plain = Tokenizer.from_file(str(tokenizer))
    plain.no_truncation()
    parts = open_tokens(str(tmp_path / "out"), SEQ_LEN, index.vocabulary)
    decoded: list[str] = []
    for part, split in zip(parts, ("train", "validation"), strict=True):
        count = (len(part) - 1) // SEQ_LEN
        assert part.samples(SEQ_LEN) == count
        rows = part.tensor(range(count), SEQ_LEN)
        assert rows.shape == (count, SEQ_LEN + 1)
        assert np.array_equal(rows[1:, 0], rows[:-1, -1]), "a sample begins with what follows the one before"
        shards = [each for each in index.shards if each.split == split]
        flat = np.concatenate([np.fromfile(tmp_path / "out" / each.file, "<u2") for each in shards])
        assert np.array_equal(rows[:, :-1].flatten(), flat[: count * SEQ_LEN])
        documents = np.split(flat, np.flatnonzero(flat == index.end) + 1)[:-1]
        assert len(documents) == sum(each.documents for each in shards)
        found = [plain.decode(each[:-1].tolist()) for each in documents]
        assert [each[:-1].tolist() for each in documents] == [plain.encode(text).ids for text in found]
        assert part.text_bytes == sum(len(text.encode()) for text in found)
        assert [texts.index(text) for text in found] == sorted(texts.index(text) for text in found)
        decoded += found
    assert sorted(decoded) == sorted(texts)


def test_rows_are_split_alike_wherever_they_stand(tmp_path, texts, tokenizer):
    """By the text, so that a document that is there twice is not learned and validated on."""
    splits = []
    for kind, some in (("jsonl", texts), ("parquet", [*reversed(texts), *texts])):
        folder = tmp_path / kind
        make(write(tmp_path / f"{kind}-corpus", kind, some), folder, tokenizer)
        held = b"".join(data for name, data in sorted(made(folder).items()) if name.startswith("validation"))
        end = np.frombuffer(held, "<u2") == Tokenizer.from_file(str(tokenizer)).token_to_id(END)
        splits.append({each.tobytes() for each in np.split(np.frombuffer(held, "<u2"), np.flatnonzero(end) + 1)})
    assert splits[0] == splits[1]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
@pytest.mark.parametrize("size", [1, 77, 1000, 1 << 30])
def test_pieces_of_any_size_hold_each_document_once(tmp_path, texts, kind, size):
    corpus = Corpus(write(tmp_path / "corpus", kind, texts), "text")
    found = [document.text for piece in corpus.pieces(size) for document in corpus.read(piece)]
    assert found == texts


# ends the process by SIGKILL in place of the rename, or the line of the journal, that is the so manyth
KILLED = """
import itertools, os, pathlib, signal, sys
from mgpu_train.data import tokenize

def fatal(kind, name, number):
    real, calls = getattr(kind, name), itertools.count(1)
    def call(*given):
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given)
    setattr(kind, name, call)

corpus, out, tokenizer = map(pathlib.Path, sys.argv[1:4])
workers, rename, line = map(int, sys.argv[4:])
fatal(pathlib.Path, "replace", rename)
fatal(tokenize.Journal, "add", line)
tokenize.tokenize(corpus, out, tokenizer, piece_bytes=2000, held_out=4, workers=workers)
"""


def killed(corpus: Path, out: Path, tokenizer: Path, *, workers: int = 1, rename: int = 0, line: int = 0) -> None:
    """`run` waits for all that have its output, which workers have, too."""
    given = [KILLED, corpus, out, tokenizer, workers, rename, line]
    ended = subprocess.run(
        [sys.executable, "-c", *map(str, given)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == -9, ended.stderr


@pytest.mark.parametrize("rename", [1, 2, 5, -1])
def test_killed_before_a_file_has_its_name_it_goes_on_to_the_same_bytes(tmp_path, texts, tokenizer, rename):
    """The journal, the first file, one in the middle, the index."""
    corpus, out = write(tmp_path / "corpus", "jsonl", texts), tmp_path / "out"
    shards = [each.file for each in make(corpus, tmp_path / "whole", tokenizer).shards]
    killed(corpus, out, tokenizer, rename=rename if rename > 0 else len(shards) + 2)
    files = {name for name in made(out) if not name.startswith(".")}
    assert files == set(shards if rename < 0 else shards[: max(0, rename - 2)])
    times = {name: (out / name).stat().st_mtime_ns for name in files}
    make(corpus, out, tokenizer)
    assert made(out) == made(tmp_path / "whole"), "and nothing of what was begun is left"
    again = [name for name, at in times.items() if (out / name).stat().st_mtime_ns != at]
    assert len(again) <= 2, "files of one piece at most are made again"


def test_killed_beside_its_workers_it_leaves_none_and_goes_on_to_the_same_bytes(tmp_path, texts, tokenizer):
    corpus, out = write(tmp_path / "corpus", "parquet", texts), tmp_path / "out"
    make(corpus, tmp_path / "whole", tokenizer)
    killed(corpus, out, tokenizer, workers=2, line=3)
    assert len((out / tokenize.JOURNAL).read_text().splitlines()) == 3
    make(corpus, out, tokenizer, workers=2)
    assert made(out) == made(tmp_path / "whole")


def test_what_is_torn_missing_or_damaged_is_made_anew(tmp_path, texts, tokenizer):
    corpus, out = write(tmp_path / "corpus", "jsonl", texts), tmp_path / "out"
    killed(corpus, out, tokenizer, rename=5)
    with (out / tokenize.JOURNAL).open("ab") as journal:
        journal.write(b'{"piece": 3, "sha')
    (shard, other, *_) = make(corpus, out, tokenizer).shards
    whole = made(out)
    (out / shard.file).write_bytes(whole[shard.file][:-2] + b"xx")
    (out / other.file).unlink()
    make(corpus, out, tokenizer)
    assert made(out) == whole


def test_a_folder_that_is_whole_is_left_as_it_is_also_where_a_piece_holds_no_document(tmp_path, texts, tokenizer):
    """Its readers would find no index meanwhile."""
    corpus, out = write(tmp_path / "corpus", "jsonl", texts), tmp_path / "out"
    put(corpus / "-blank.jsonl", b"\n" * (PIECE + 1))
    index = make(corpus, out, tokenizer)
    assert min(int(each.file[-9:-4]) for each in index.shards) == 1, "the first piece is empty"
    seen = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.iterdir()}
    assert make(corpus, out, tokenizer) == index
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.iterdir()} == seen


def other_settings(corpus: Path, out: Path, tokenizer: Path) -> dict[str, Any]:
    make(corpus, out, tokenizer)
    return {"held_out": 5}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda corpus, *_: put(corpus / "x.txt", b"a\xff"), r"x.txt is no text in UTF-8, at byte 1: take it out"),
        (
            lambda corpus, *_: put(corpus / "x.jsonl", b'{"text": "a"}\n{"t": 1}'),
            r"x.jsonl, the line at byte 14: there is no text under 'text', only 't': `--key`",
        ),
        (lambda corpus, *_: put(corpus / "x.jsonl", b"{"), r"x.jsonl, the line at byte 0: no JSON"),
        (lambda corpus, *_: put(corpus / "x.parquet", b"PAR1"), r"x.parquet is no Parquet file"),
        (
            lambda corpus, *_: write(corpus / "p", "parquet", ["a", "b"]) and {"key": "body"},
            r"0.parquet has no column 'body', only id, text: `--key`",
        ),
        (lambda *_: {"end": "<eot>"}, r"the tokenizer has no <eot> to end documents with: `--end TOKEN`"),
        (lambda *_: {"held_out": 1}, r"documents of .* are for one split: `--held-out 2`"),
        (lambda *given: put(given[2], b"{}") or {"tokenizer": given[2]}, r"is no tokenizer.json"),
        (other_settings, r"has token files of other texts, another tokenizer or other options: name another"),
    ],
    ids=["utf-8", "key", "json", "parquet", "column", "end", "split", "tokenizer", "settings"],
)  # fmt: skip
def test_what_cannot_be_is_said_in_one_line(tmp_path, texts, tokenizer, spoil, message):
    corpus = write(tmp_path / "corpus", "txt", texts)
    options = spoil(corpus, tmp_path / "out", tmp_path / "tokenizer.json" if "tokenizer.json" in message else tokenizer)
    with pytest.raises(TrainError, match=message) as caught:
        make(corpus, tmp_path / "out", **{"tokenizer": tokenizer, **(options or {})})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("owner", "call", "name", "kind", "message"),
    [
        (Path, "stat", "corpus", "txt", "cannot read {}: Permission denied"),
        (Path, "read_bytes", "0-00.txt", "txt", "cannot read {}: Permission denied"),
        (parquet, "ParquetFile", "0.parquet", "parquet", "cannot read {}: Permission denied"),
        (disk, "checksum", "tokenizer.json", "txt", "cannot read {}: Permission denied"),
        (os, "open", "out", "txt", "{}: it cannot be written: Permission denied"),
    ],
)
def test_an_error_of_reading_is_not_told_as_one_of_writing(
    tmp_path, texts, tokenizer, monkeypatch, caplog, owner, call, name, kind, message
):
    real, refused = getattr(owner, call), list[Path]()

    def refuse(path, *given, **named):
        if Path(path).name != name:
            return real(path, *given, **named)
        refused.append(path)
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    corpus = write(tmp_path / "corpus", kind, texts)
    monkeypatch.setattr(owner, call, refuse)
    assert tokenize.main([str(corpus), str(tmp_path / "out"), "--tokenizer", str(tokenizer), "--workers", "1"]) == 1
    (said,) = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert said.startswith(message.format(refused[0]))


def test_a_tokenizer_that_is_absent_is_no_bad_tokenizer_and_one_behind_a_link_is_one(tmp_path, texts, tokenizer):
    corpus = write(tmp_path / "corpus", "txt", texts)
    with pytest.raises(TrainError, match=r"cannot read .*absent.json: No such file or directory"):
        make(corpus, tmp_path / "out", tmp_path / "absent.json")
    (tmp_path / "link.json").symlink_to(tokenizer)
    assert make(corpus, tmp_path / "out", tmp_path / "link.json") == make(corpus, tmp_path / "out", tokenizer)


# says when it is at the third piece, and hangs there
SLOW = """
import sys, time
from mgpu_train.data import tokenize

real = tokenize.Work.piece
def piece(work, number, parts):
    if number == 2:
        print("under way", flush=True)
        time.sleep(100)
    return real(work, number, parts)
tokenize.Work.piece = piece
whole = tokenize.tokenize
tokenize.tokenize = lambda *given, **named: whole(*given, **{**named, "piece_bytes": 2000})
if __name__ == "__main__":
    sys.exit(tokenize.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_is_one_line_and_130_and_the_next_call_goes_on(tmp_path, texts, tokenizer, workers):
    """It comes to all processes of the terminal; none of them is left."""
    corpus, out, program = write(tmp_path / "corpus", "jsonl", texts), tmp_path / "out", tmp_path / "slow.py"
    program.write_text(SLOW)  # a worker imports it
    given = [str(corpus), str(out), "--tokenizer", str(tokenizer), "--workers", str(workers)]
    command = [sys.executable, str(program), *given]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "under way\n"
            os.killpg(process.pid, signal.SIGINT)
            said = process.communicate(timeout=60)[1].splitlines()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 130
    assert said[-1] == "interrupted: the same command goes on where this one was"
    assert not [line for line in said if "Traceback" in line]
    until(lambda: not alive(process.pid), 60)
    make(corpus, out, tokenizer, held_out=10)
    make(corpus, tmp_path / "whole", tokenizer, held_out=10)
    assert made(out) == made(tmp_path / "whole")


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_token_files_do_not_lie_among_what_they_are_made_of(tmp_path, texts, tokenizer):
    """The next call would read them."""
    corpus = write(tmp_path / "corpus", "txt", texts)
    with pytest.raises(TrainError, match="name a folder beside it"):
        make(corpus, corpus / "tokens", tokenizer=tokenizer)
    assert not (corpus / "tokens").exists()


def test_only_one_process_makes_a_folder(tmp_path, texts, tokenizer):
    corpus = write(tmp_path / "corpus", "txt", texts)
    with tokenize._alone(tmp_path / "out"), pytest.raises(TrainError, match="another process is making"):
        make(corpus, tmp_path / "out", tokenizer)


@pytest.mark.parametrize(("package", "kind"), [("tokenizers", "txt"), ("pyarrow", "parquet")])
def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path, texts, tokenizer, monkeypatch, package, kind):
    corpus = write(tmp_path / "corpus", kind, texts)
    tokenize._load.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        TrainError, match=rf"read by {package}, which is not installed here: `pip install 'mgpu-train\["
    ):
        make(corpus, tmp_path / "out", tokenizer)


def test_the_command_says_what_to_write_into_the_run_file(tmp_path, texts, tokenizer, caplog):
    corpus, out = write(tmp_path / "corpus", "jsonl", texts), tmp_path / "out"
    given = [str(corpus), str(out), "--tokenizer", str(tokenizer), "--held-out", "4", "--end", ""]
    caplog.set_level("INFO", "mgpu_train")
    assert tokenize.main([*given, "--workers", "1"]) == 0
    assert caplog.messages[-1] == f"train: {{task: lm, tokens: {out}, model: {{vocabulary: 400}}}}"
    index = token_index.read(out)
    assert index is not None
    assert (index.end, index.token_bytes, index.vocabulary) == (None, 2, 400)
    assert tokenize.main([*given, "--key", "body"]) == 1
    assert "has token files of other texts" in caplog.messages[-1]


# --- token files that others made -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocabulary", "kind"), [(50257, "<u2"), (128256, "<u4")])
def test_train_and_val_bin_are_read_without_an_index(tmp_path, vocabulary, kind):
    tokens = np.arange(1000) * (vocabulary // 1000)
    for name, some in (("train", tokens), ("val", tokens[::-1])):
        some.astype(kind).tofile(tmp_path / f"{name}.bin")
    training, validation = open_tokens(str(tmp_path), SEQ_LEN, vocabulary)
    assert training.tensor([3], SEQ_LEN).tolist() == [tokens[3 * SEQ_LEN : 4 * SEQ_LEN + 1].tolist()]
    assert validation.tensor([0], SEQ_LEN)[0, 0] == tokens[-1]
    assert training.per_byte is None
    assert training.fingerprint != validation.fingerprint


def short(folder: Path, index: token_index.Index) -> None:
    path = folder / index.shards[0].file
    path.write_bytes(path.read_bytes()[:-2])


def foreign(folder: Path, index: token_index.Index) -> None:
    path = folder / next(each.file for each in index.shards if each.split == "train")
    path.write_bytes(b"\xff" * path.stat().st_size)


@pytest.mark.parametrize(
    ("spoil", "vocabulary", "message"),
    [
        (short, 400, r"bytes, and by index.json it has \d+: fetch the folder anew"),
        (foreign, 400, r"holds token 65535, and `model.vocabulary` says that there are 400"),
        (lambda *_: None, 300, r"are of a vocabulary of 400, and `model.vocabulary` is 300: set it to 400"),
        (lambda folder, _: put(folder / "index.json", b"{}"), 400, r"index.json is no index of .*\(token_bytes"),
        (lambda folder, _: (folder / "index.json").unlink(), 400, r"there is no .*train.bin .*: `train.tokens`"),
    ],
    ids=["short", "foreign", "vocabulary", "index", "none"],
)  # fmt: skip
def test_token_files_that_are_not_as_they_should_be_are_told_of(tmp_path, texts, tokenizer, spoil, vocabulary, message):
    index = make(write(tmp_path / "corpus", "jsonl", texts), tmp_path / "out", tokenizer)
    spoil(tmp_path / "out", index)
    with pytest.raises(TrainError, match=message):
        open_tokens(str(tmp_path / "out"), SEQ_LEN, vocabulary)[0].tensor([0], SEQ_LEN)


def test_too_few_tokens_are_told_of(tmp_path, texts, tokenizer):
    index = make(write(tmp_path / "corpus", "jsonl", texts), tmp_path / "out", tokenizer)
    with pytest.raises(TrainError, match="holds too few tokens"):
        open_tokens(str(tmp_path / "out"), 100_000, index.vocabulary)


def test_the_fingerprint_tells_tokens_of_one_size_apart(tmp_path, tokenizer):
    digits, prints = [str(number % 10) for number in range(60)], set[str]()
    for number, some in enumerate((digits, digits[::-1], digits)):
        out = tmp_path / f"out-{number}"
        index = make(write(tmp_path / f"corpus-{number}", "txt", some), out, tokenizer, piece_bytes=9)
        prints.add(open_tokens(str(out), SEQ_LEN, index.vocabulary)[0].fingerprint)
    assert len(prints) == 2
