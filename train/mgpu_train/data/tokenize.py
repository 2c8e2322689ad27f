"""Text files, JSON lines, Parquet and TFRecord -> token files for task lm:

    python -m mgpu_train.data.tokenize corpus/ tokens/ --tokenizer tokenizer.json

Pieces of the input are tokenized side by side, each into a file a split. A file has its name once it is whole on disk,
and a journal says which pieces are done, so the same command goes on after a kill, and makes the same bytes as without
one. `index.json` comes last. Called again it looks at all checksums, and makes anew what is missing or damaged.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mgpu_train.data import token_index
from mgpu_train.data.corpus import Corpus, Part, readable
from mgpu_train.data.token_index import Index, Shard
from mgpu_train.errors import TrainError
from mgpu_train.store import disk
from mgpu_train.store.base import ASIDE

log = logging.getLogger("mgpu_train")

JOURNAL = ".progress.jsonl"
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>")  # of GPT-2, Llama 3 and Llama 2
_AT_ONCE = 64  # documents that the tokenizer is given


@dataclass(frozen=True)
class Work:
    """What a worker is told."""

    corpus: Path
    key: str
    out: Path
    tokenizer: Path
    end: int | None
    width: int  # bytes a token
    held_out: int  # one document in so many is for validation

    def piece(self, number: int, parts: Sequence[Part]) -> tuple[Shard, ...]:
        """Makes the files of one piece; those without tokens are none. Raises TrainError: it cannot be read."""
        tokenizer = _load(self.tokenizer)
        ids: dict[str, list[np.ndarray]] = {"train": [], "validation": []}
        of_text = dict.fromkeys(ids, 0)
        end = np.array([] if self.end is None else [self.end], f"<u{self.width}")
        documents = (each for each in _corpus(self.corpus, self.key).read(parts) if each.text)
        while some := list(islice(documents, _AT_ONCE)):
            encoded = tokenizer.encode_batch_fast([each.text for each in some], add_special_tokens=False)
            for document, found in zip(some, encoded, strict=True):
                split = "validation" if document.hashed % self.held_out == 0 else "train"
                ids[split].append(np.concatenate((np.array(found.ids, f"<u{self.width}"), end)))
                of_text[split] += len(document.text.encode())
        return tuple(self._write(number, split, found, of_text[split]) for split, found in ids.items() if found)

    def _write(self, number: int, split: Any, documents: Sequence[np.ndarray], text_bytes: int) -> Shard:
        path, tokens = self.out / f"{split}-{number:05}.bin", np.concatenate(documents)
        with disk.written(path) as descriptor:
            disk.write_all(descriptor, tokens.tobytes())
        _, checksum = disk.checksum(path)
        return Shard(
            file=path.name,
            split=split,
            tokens=len(tokens),
            documents=len(documents),
            text_bytes=text_bytes,
            crc64nvme=checksum,
        )

    def whole(self, shard: Shard) -> bool:
        """Whether its file is there as it was made."""
        try:
            return disk.checksum(self.out / shard.file) == (shard.tokens * self.width, shard.crc64nvme)
        except OSError:
            return False


def tokenize(
    corpus: Path,
    out: Path,
    tokenizer: Path,
    *,
    key: str = "text",
    end: str | None = None,
    held_out: int = 10,
    piece_bytes: int = 64 << 20,
    workers: int = 1,
) -> Index:
    """Makes the folder `out`, or what is missing of it.

    `end`: the token that ends each document, by its name; "": none does; None: one that is known by its name. With one
    of `workers` all is done in this process.

    Raises TrainError: something cannot be read, `out` is another corpus's, or another process is at it.
    """
    if out.resolve().is_relative_to(corpus.resolve()):
        raise TrainError(f"{out} lies in {corpus}, and would be read as texts the next time: name a folder beside it")
    texts = Corpus(corpus, key)
    with readable(tokenizer):
        tokenizer = tokenizer.resolve()  # a hub's cache has links
        _, checksum = disk.checksum(tokenizer)
    known = _load(tokenizer)
    ended = _end(known, end)
    vocabulary = 1 + max(known.get_vocab(with_added_tokens=True).values())
    width = 2 if vocabulary <= 1 << 16 else 4
    said = repr((texts.files, key, ended, held_out, piece_bytes, checksum))
    settings = f"{zlib.crc32(said.encode()):08x}"
    pieces = texts.pieces(piece_bytes)
    work = Work(texts.root, key, out, tokenizer, ended, width, held_out)
    journal = Journal(out / JOURNAL)
    with _alone(out):
        before = token_index.read(out)
        made = {
            number: shards
            for number, shards in _made(out, before, journal, settings, len(pieces)).items()
            if all(work.whole(each) for each in shards)
        }
        rest = [number for number in range(len(pieces)) if number not in made]
        if rest:
            journal.start(settings, made)
            (out / token_index.NAME).unlink(missing_ok=True)
        began, size = time.monotonic(), 0
        with closing(_run(work, pieces, rest, min(workers, len(rest)))) as done:
            for count, (number, shards) in enumerate(done, len(pieces) - len(rest) + 1):
                made[number] = shards
                journal.add(number, shards)
                size += sum(each.text_bytes for each in shards)
                speed = size / 1e6 / max(1e-9, time.monotonic() - began)
                log.info("%d of %d pieces, %.1f MB of text a second", count, len(pieces), speed)
        index = Index(
            token_bytes=2 if width == 2 else 4,
            vocabulary=vocabulary,
            end=ended,
            tokenizer=checksum,
            settings=settings,
            shards=tuple(each for number in range(len(pieces)) for each in made[number]),
        )
        if {each.split for each in index.shards} != {"train", "validation"}:
            raise TrainError(
                f"all {sum(each.documents for each in index.shards)} documents of {texts.root} are for one split: "
                "`--held-out 2` holds back more of them, or split them into more documents"
            )
        if rest or before is None:
            with disk.written(out / token_index.NAME) as descriptor:
                disk.write_all(descriptor, index.model_dump_json(indent=1).encode())
        journal.remove()
    return index


class Journal:
    """Which pieces are done, a line each."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[dict[str, Any]]:
        """All lines up to one that a kill has torn; none where there is no journal."""
        lines: list[dict[str, Any]] = []
        with readable(self._path), suppress(FileNotFoundError, ValueError):
            for line in self._path.read_bytes().split(b"\n"):
                lines.append(json.loads(line))
        return lines

    def start(self, settings: str, made: Mapping[int, tuple[Shard, ...]]) -> None:
        """Anew, with what is known."""
        lines = [{"settings": settings}, *(_done(number, shards) for number, shards in made.items())]
        with disk.written(self._path) as descriptor:
            disk.write_all(descriptor, b"".join(json.dumps(line).encode() + b"\n" for line in lines))

    def add(self, number: int, shards: tuple[Shard, ...]) -> None:
        """One piece more, on disk."""
        with self._path.open("ab") as file:
            file.write(json.dumps(_done(number, shards)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """All is done."""
        self._path.unlink(missing_ok=True)


def _done(number: int, shards: tuple[Shard, ...]) -> dict[str, Any]:
    return {"piece": number, "shards": [each.model_dump() for each in shards]}


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """No other process makes this folder meanwhile. Raises TrainError: one does."""
    out.mkdir(parents=True, exist_ok=True)
    folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for aside in out.glob(f"{ASIDE}*"):  # of one that was killed
            aside.unlink()
        yield
    except BlockingIOError as error:
        raise TrainError(f"another process is making {out}: wait for it, or name another folder") from error
    finally:
        os.close(folder)


def _made(out: Path, index: Index | None, journal: Journal, settings: str, pieces: int) -> dict[int, tuple[Shard, ...]]:
    """By piece, what an earlier call has made. Raises TrainError: it was of other settings."""
    first, *lines = journal.read() or [{}]
    before = index.settings if index else first.get("settings")
    if before not in (None, settings):
        raise TrainError(
            f"{out} has token files of other texts, another tokenizer or other options: name another folder, or remove "
            "this one"
        )
    if index is None:
        return {line["piece"]: tuple(map(Shard.model_validate, line["shards"])) for line in lines}
    made: dict[int, tuple[Shard, ...]] = dict.fromkeys(range(pieces), ())  # of which some hold no document
    for shard in index.shards:
        number = int(Path(shard.file).stem.rpartition("-")[2])
        made[number] = (*made[number], shard)
    return made


def _run(
    work: Work, pieces: Sequence[tuple[Part, ...]], numbers: Sequence[int], workers: int
) -> Generator[tuple[int, tuple[Shard, ...]]]:
    """Pieces as they are done. Left early, it ends what is under way."""
    if workers <= 1:
        yield from ((number, work.piece(number, pieces[number])) for number in numbers)
        return
    strangers, done = set(multiprocessing.active_children()), False
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin)
    try:
        with _no_interrupt():  # a worker would tell of it in its first moments
            futures = {pool.submit(work.piece, number, pieces[number]): number for number in numbers}
        for future in as_completed(futures):
            yield futures[future], future.result()
        done = True
    except BrokenProcessPool as error:
        raise TrainError(
            "a worker was ended from outside, most likely for its memory: fewer `--workers` or a smaller `--piece-mib` "
            "need less. The same number of workers goes on where this one was"
        ) from error
    finally:
        if not done:  # what is under way would be in no journal
            for worker in set(multiprocessing.active_children()) - strangers:
                worker.kill()
        pool.shutdown(cancel_futures=True)


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """Ctrl-C comes afterwards; processes that are started meanwhile never get it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    """In a worker: it is one of many, and ends with the process that has started it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is started with that blocked
    parent = multiprocessing.parent_process()
    assert parent is not None  # noqa: S101 - a worker has one

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@cache
def _corpus(root: Path, key: str) -> Corpus:
    """One for all pieces of a process: it lists what there is."""
    return Corpus(root, key)


@cache
def _load(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise TrainError(
            f"{path} is read by tokenizers, which is not installed here: `pip install 'mgpu-train[tokens]'`"
        ) from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # it raises no class of its own
        raise TrainError(f"{path} is no tokenizer.json of Hugging Face's tokenizers: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _end(tokenizer: Any, name: str | None) -> int | None:
    """The number of the token that ends documents. Raises TrainError: the tokenizer has none of this name."""
    if name == "":
        return None
    names = _ENDS if name is None else (name,)
    found = [number for number in map(tokenizer.token_to_id, names) if number is not None]
    if not found:
        raise TrainError(
            f"the tokenizer has no {' and no '.join(names)} to end documents with: `--end TOKEN` names one that it "
            "has, `--end ''` ends them with none"
        )
    return found[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs it; returns the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(
        "python -m mgpu_train.data.tokenize",
        description="text files, JSON lines, Parquet and TFRecord -> token files for task lm",
    )
    parser.add_argument("corpus", type=Path, help="folder or file: text files, *.jsonl, *.parquet, *.tfrecord")
    parser.add_argument("out", type=Path, help="folder of the token files; made, or gone on with")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--key", default="text", help="of the text in JSON lines, Parquet and TFRecord (default: text)")
    parser.add_argument("--end", help=f"token that ends each document; '': none (default: {', '.join(_ENDS)})")
    parser.add_argument("--held-out", type=_count, default=10, help="one document in so many is for validation (10)")
    parser.add_argument("--piece-mib", type=_count, default=64, help="text that becomes one file, about (64)")
    parser.add_argument("--workers", type=_count, default=os.cpu_count() or 1, help="processes (default: the cores)")
    given = parser.parse_args(argv)
    try:
        index = tokenize(
            given.corpus,
            given.out,
            given.tokenizer,
            key=given.key,
            end=given.end,
            held_out=given.held_out,
            piece_bytes=given.piece_mib << 20,
            workers=given.workers,
        )
    except KeyboardInterrupt:
        log.error("interrupted: the same command goes on where this one was")
        return 130
    except TrainError as error:
        log.error("%s", error)
        return 1
    except OSError as error:  # of reading it is a TrainError
        log.error("%s: %s", given.out, disk.meaning("it cannot be written", error))
        return 1
    counts = {
        split: sum(each.tokens for each in index.shards if each.split == split) for split in ("train", "validation")
    }
    log.info("%(train)d tokens for training, %(validation)d for validation", counts)
    log.info("train: {task: lm, tokens: %s, model: {vocabulary: %d}}", given.out, index.vocabulary)
    return 0


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
