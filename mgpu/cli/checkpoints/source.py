"""Which run a command is about: by its record on this machine, or from any machine by the address of its store."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mgpu.cli.common import parameters, wiring
from mgpu.errors import InputError, MgpuError
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Record, load

if TYPE_CHECKING:
    from mgpu_train.checkpoint.log.commit_log import CommitLog
    from mgpu_train.checkpoint.log.lines import Commit, Line
    from mgpu_train.config import Retention
    from mgpu_train.store.base import Store

F = TypeVar("F", bound=Callable[..., Any])

_SHOWN = 5  # runs that an error names


class DamagedCheckpoint(MgpuError):
    """A checkpoint does not verify, or the log of a run cannot be read."""

    exit_code = 6


@dataclass(frozen=True)
class Source:
    """The checkpoints of one run. `record`: what is known of it here; None where only its store is, opened with
    `profile` where one was named."""

    run_id: str
    store: Store
    log: CommitLog
    record: Record | None
    profile: str | None = None

    @property
    def arguments(self) -> str:
        """What another command about this run is given."""
        if self.record:
            return shlex.join([self.run_id])
        profile = ["--profile", self.profile] if self.profile else []
        return shlex.join(["--store", self.store.url, *profile, self.run_id])

    @cached_property
    def lines(self) -> list[Line]:
        """The commit log as it is now, oldest first; read once.

        Raises:
            InputError: the store cannot be read.
            DamagedCheckpoint: most of the log is missing.
        """
        with readable(self.store.url), usable_log(self.run_id):
            return self.log.read()

    @property
    def gaps(self) -> list[str]:
        """What is wrong with the log itself: entries that are missing or damaged."""
        from mgpu_train.checkpoint.log.lines import Unreadable

        return [line.problem for line in self.lines if isinstance(line, Unreadable)]

    def commits(self, step: int | None = None) -> list[Commit]:
        """The committed checkpoints, newest first; of one step alone, if it is given.

        Raises:
            InputError: there is no checkpoint of this step; and what `lines` raises.
        """
        from mgpu_train.checkpoint.log.lines import standing

        found = standing(self.lines)
        wanted = [each for each in found if step in (None, each.step)]
        if step is not None and not wanted:
            there = ", ".join(str(each.step) for each in found[:_SHOWN]) or "none"
            raise InputError(
                f"run {self.run_id}: no checkpoint of step {step} is committed",
                f"Committed steps, newest first: {there}{', ...' if len(found) > _SHOWN else ''}.",
                f"See `mgpu checkpoints ls {self.arguments}`.",
            )
        return wanted

    def retention(self) -> Retention | None:
        """What the run file says is kept; None: there is no record here that says it."""
        from mgpu.run.job.request import resolve
        from mgpu.spec.load import accepted

        path = Folder(self.run_id).run_file
        if self.record is None or not path.exists():
            return None
        spec = accepted(path.read_text(encoding="utf-8"), str(path))
        request = resolve(spec, self.run_id, Path(self.record.project_base), timeouts=wiring.timeouts())
        return request.checkpoint


def options(command: F) -> F:
    """RUN, --store and --profile."""
    profile = click.option(
        "--profile", help="Opens --store, as `aws: {profile: ...}` of a run file (default: that of the one here)."
    )
    store = click.option(
        "--store",
        "url",
        metavar="URL",
        help="Where checkpoints are, as in s3://bucket/prefix: no record needed.",
    )
    return parameters.run_argument(store(profile(command)))


def find(run: str, url: str | None, profile: str | None = None) -> Source:
    """The run `run` (default: the newest, or the only one of a store; the beginning of an id is enough).

    A store is opened with `profile`, or as the run file of this folder says.

    Raises:
        InputError: there is no such run, it has no checkpoints, or the store cannot be read.
    """
    if url is None:
        if profile is not None:
            cure = "Leave it out, or name a store: `--store s3://bucket/prefix`."
            raise InputError("--profile opens what --store names", "A run's record says what opens its own.", cure)
        return of(_recorded(run))
    with readable(url):
        from mgpu.run.job import operator_store

        store = operator_store.for_address(url.rstrip("/"), Path(wiring.RUN_FILE), profile)
        return replace(_source(_named(store, run), store, None), profile=profile)


def of(record: Record) -> Source:
    """The checkpoints of a run that has a record here."""
    if record.store is None:
        raise InputError(
            f"run {record.run_id} has no checkpoints",
            "Its run file says `checkpoint: none`, it never began, or its store has gone with the demo.",
            f"See `mgpu status {record.run_id}`.",
        )
    from mgpu.run.job import operator_store

    with readable(record.store):
        return _source(record.run_id, operator_store.for_record(record.store, record), record)


def _source(run_id: str, store: Store, record: Record | None) -> Source:
    from mgpu_train.checkpoint.log.commit_log import CommitLog

    return Source(run_id, store, CommitLog(store, run_id), record)


def _recorded(run: str) -> Record:
    try:
        return load(run)
    except InputError as error:
        hint = "A run of another machine is found by its store: `--store s3://bucket/prefix`."
        raise InputError(error.what, error.why, f"{error.next_step} {hint}") from error


def _named(store: Store, run: str) -> str:
    """The one run of a store whose id begins with `run`. Raises InputError, and StoreError."""
    prefix = "" if run == "last" else run
    if prefix and _is_run(store, prefix):
        return prefix
    known = list(islice(_runs(store, prefix), _SHOWN + 1))
    if len(known) == 1:
        return known[0]
    what = f"no run `{prefix}`" if prefix else "no run"
    if known:
        what = f"`{prefix}` fits several runs" if prefix else "several runs"
    known = known or list(islice(_runs(store, ""), _SHOWN + 1))
    some = ", ".join([*sorted(known[:_SHOWN]), *(["..."] if len(known) > _SHOWN else [])]) or "none"
    raise InputError(f"{what} in {store.url}", f"Runs there: {some}.", "Name one of them, or another address.")


def _runs(store: Store, prefix: str) -> Iterator[str]:
    """The ids of the runs in a store that begin with `prefix`; two requests each, however many objects they have."""
    after = ""
    while (stat := next(iter(store.list(prefix, after=after)), None)) is not None:
        name, slash, _ = stat.key.partition("/")
        if slash and _is_run(store, name):
            yield name
        after = f"{name}0" if slash else stat.key  # "0" follows "/": past everything below this name


def _is_run(store: Store, name: str) -> bool:
    from mgpu_train.checkpoint.log import keys

    return next(iter(store.list(keys.commits(name))), None) is not None


@contextmanager
def readable(url: str, what: str = "cannot be read") -> Iterator[None]:
    """Tells a store that cannot be read, or `what` else of it does not go, from a checkpoint that is damaged."""
    from mgpu_train.store import Damaged, NotFound, StoreError

    try:
        yield
    except (Damaged, NotFound):
        raise
    except StoreError as error:
        cure = "Check the address and the credentials; `--profile` beside `--store` names others."
        raise InputError(f"{url} {what}", str(error), cure) from error


@contextmanager
def usable_log(run_id: str) -> Iterator[None]:
    """A log that is damaged beyond use is an error for the user."""
    from mgpu_train.store import Damaged

    try:
        yield
    except Damaged as error:
        raise DamagedCheckpoint(
            f"run {run_id}: its commit log cannot be used",
            str(error),
            "Bring its objects back from the bucket's versions or a copy, or start a new run.",
        ) from error


def damaged(found: Source, names: Sequence[str], whole: Sequence[Commit] = ()) -> DamagedCheckpoint:
    """The error for checkpoints that are not what was committed; `whole`: those that are, newest first."""
    if whole:
        next_step = f"The newest that verifies: `mgpu checkpoints pull --step {whole[0].step} {found.arguments}`."
    else:
        next_step = f"Which ones verify is said by `mgpu checkpoints verify --deep {found.arguments}`."
    return DamagedCheckpoint(
        f"run {found.run_id}: {', '.join(names)} damaged or incomplete",
        "What the store holds is not what the commit log says was written. It is left in place.",
        next_step,
    )
