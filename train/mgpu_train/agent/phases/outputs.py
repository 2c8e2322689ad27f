"""Files that the run file names as outputs, brought to safety when an attempt has ended, however it did.

They are linked into the run's folder, where a list of them tells the operator what to fetch, and uploaded beside the
run's checkpoints, also what this disk has no room to keep: `<run>/outputs/a<attempt>/<node_rank>/<path>`, each
attempt's for themselves: a machine of an older one may live on, and end last. An attempt ends as it ended, whatever
becomes of them.
"""

from __future__ import annotations

import os
import shutil
import threading
import unicodedata
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from mgpu_train.agent.attempt.attempt import Attempt
from mgpu_train.agent.status.log import clean
from mgpu_train.agent.status.words import count
from mgpu_train.config import OutputFile, OutputList
from mgpu_train.store import Store, StoreError, open_store
from mgpu_train.store.base import key_problem

_AT_ONCE = 8  # uploads


@dataclass
class Kept:
    """What became of them so far; read by others while it grows."""

    to: str | None = None  # the store; None: they are kept here alone
    files: list[OutputFile] = field(default_factory=list)
    uploaded: int = 0
    left: list[str] = field(default_factory=list)  # what could not be kept here, and is where the program wrote it
    alone: int = 0  # of these, in the store
    problems: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)  # patterns that name no file here
    cancelled: threading.Event = field(default_factory=threading.Event)

    def __str__(self) -> str:
        size = sum(each.size for each in self.files)
        stored = [f"{self.uploaded} of them in {self.to}"] if self.to else []
        stored += [f"{self.alone} more there alone"] if self.alone else []
        told = f"outputs: {count(len(self.files), 'file')}, {count(size, 'byte')}"
        return "; ".join([told, *stored, *self.problems[:3]])


def key(run_id: str, attempt: int, node_rank: int, path: str) -> str:
    """Under which the store has an output of a node."""
    return f"{run_id}/outputs/a{attempt:03d}/{node_rank}/{path}"


def found(work: Path, patterns: Iterable[str]) -> dict[str, list[str]]:
    """By pattern, in order: the files below `work` that it names, or links to files. Patterns are globs relative to
    it, `**` for any folders; a folder means all that is in it."""
    return {pattern: sorted(_matches(work, os.path.normpath(pattern))) for pattern in patterns}


def _matches(work: Path, pattern: str) -> set[str]:
    paths = set[str]()
    for path in [work] if pattern == "." else work.glob(pattern):
        paths.update(_below(work, path))
    return paths


def _below(work: Path, path: Path) -> Iterator[str]:
    if path.is_dir() and not path.is_symlink():
        for folder, _, names in os.walk(path):
            yield from (os.path.relpath(Path(folder, each), work) for each in names if Path(folder, each).is_file())
    elif path.is_file():
        yield os.path.relpath(path, work)


def why_not(work: Path, path: str) -> str | None:
    """Why a file that a pattern names does not come home; None: it does."""
    try:
        path.encode()
    except UnicodeEncodeError:  # Linux takes any bytes for a name; what is sent and stored is text
        return "its name is not UTF-8"
    if any(unicodedata.category(letter) == "Cc" for letter in path):
        return "its name has control characters"
    if not (work / path).resolve().is_relative_to(work.resolve()):
        return "a link that leaves the folder of the code"
    return None


def keep(attempt: Attempt, kept: Kept) -> None:
    """Links, lists and uploads; what goes wrong with one file is told in `kept`.

    Raises:
        OSError: nothing could be kept, and there is no store.
        StoreError: the store cannot be opened; the files are there for the operator.
    """
    job, named = attempt.job, found(attempt.work, attempt.job.outputs)
    kept.unmatched = [pattern for pattern, paths in named.items() if not paths]
    wanted = list[str]()
    for path in sorted({path for paths in named.values() for path in paths}):
        if why := why_not(attempt.work, path):
            kept.problems.append(clean(f"{os.fsencode(path).decode(errors='replace')}: {why}"))
        else:
            wanted.append(path)
    try:
        _keep_here(attempt, wanted, kept)
    except OSError as error:
        if kept.to is None:
            raise
        kept.problems.append(f"outputs could not be kept here: {error}")
        kept.files, kept.left = [], wanted
    if job.checkpoint is not None and kept.to is not None and wanted and not kept.cancelled.is_set():
        store = open_store(
            job.checkpoint.to,
            attempt.secrets.store,
            timeouts=attempt.times,
            max_bytes_per_s=job.checkpoint.max_bytes_per_s,
        )
        _upload(attempt, store, kept)


def _keep_here(attempt: Attempt, wanted: Iterable[str], kept: Kept) -> None:
    """Raises OSError: there is no folder or list of them."""
    folder = Path(attempt.layout.outputs)
    aside = folder.with_name(".outputs")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for path in wanted:
        try:
            _link(attempt.work / path, aside / path)
            kept.files.append(OutputFile(path=path, size=(aside / path).stat().st_size))
        except (OSError, ValueError) as error:
            kept.problems.append(f"{path}: {error}")
            if (attempt.work / path).is_file():
                kept.left.append(path)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    _list(attempt, kept)


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source = source.resolve()
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        try:
            shutil.copyfile(source, target)
        except OSError:  # no room for all of it: others may have theirs
            target.unlink(missing_ok=True)
            raise


def _list(attempt: Attempt, kept: Kept) -> None:
    told = OutputList(
        attempt=attempt.job.attempt,
        files=tuple(kept.files),
        problems=tuple(kept.problems),
        unmatched=tuple(kept.unmatched),
    )
    path = Path(attempt.layout.outputs_list)
    aside = path.with_name(f".{path.name}")
    aside.write_text(told.model_dump_json(), encoding="utf-8")
    aside.replace(path)


def _upload(attempt: Attempt, store: Store, kept: Kept) -> None:
    job, folder = attempt.job, Path(attempt.layout.outputs)

    def stored(path: str, source: Path) -> bool:
        name = key(job.run_id, job.attempt, job.node_rank, path)
        if kept.cancelled.is_set():
            return False
        try:
            if problem := key_problem(name):
                raise StoreError(f"its name {problem}")
            store.put_file(name, source)
        except (StoreError, OSError) as error:
            kept.problems.append(attempt.public(f"{path} is not in the store: {error}"))
            return False
        return True

    def of_kept(path: str) -> None:
        if stored(path, folder / path):
            kept.uploaded += 1

    def of_left(path: str) -> None:
        if stored(path, (attempt.work / path).resolve()):
            kept.alone += 1

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="outputs") as pool:
        for one, paths in ((of_kept, [each.path for each in kept.files]), (of_left, kept.left)):
            list(pool.map(one, paths))
