"""One attempt's part of the object store, as the uploads want it: every failure a DepotError, every call repeatable."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu_train.agent.attempt.attempt import Attempt
from mgpu_train.agent.attempt.decide import AttemptFailed
from mgpu_train.agent.status.log import clean
from mgpu_train.agent.status.status import Fault
from mgpu_train.agent.uploads.uploads import Announced, CheckpointStoreError, NewerAttempt
from mgpu_train.checkpoint.log.commit_log import CommitLog, Fenced
from mgpu_train.checkpoint.log.manifest import checkpoint_id
from mgpu_train.checkpoint.retention import plan_prune, prune
from mgpu_train.checkpoint.transfer.part import Unkeepable
from mgpu_train.checkpoint.transfer.upload import commit_when_complete, upload_part
from mgpu_train.config import CheckpointTarget
from mgpu_train.store import Changed, Expired, NoCredentials, NotFound, Store, StoreError, Unavailable, open_store

_MAX_ANNOUNCEMENT = 1024  # bytes
_MAX_META = 1 << 20  # bytes
_MAX_META_VALUES = 64
_MAX_META_TEXT = 4096  # characters, of a name or a value
_MAX_REASON = 500  # characters
_MAX_END = 16 << 10  # bytes
# an operator renews credentials, a machine's role comes back, and what writes a checkpoint under its name ends
_PASSING = Unavailable, Expired, NoCredentials, Changed, OSError


@dataclass(frozen=True)
class Said:
    """How another node ended; no `failure`: it is done."""

    failure: AttemptFailed | None


class AttemptStore:
    """The store of a run's checkpoints, with the attempt's own credentials."""

    def __init__(self, attempt: Attempt, target: CheckpointTarget) -> None:
        """Nothing is opened yet."""
        self._attempt, self._job, self._target = attempt, attempt.job, target
        self._store: Store | None = None
        self._log: CommitLog | None = None  # what was read of it need not be read at every save
        self._alarmed: set[str] = set()
        self._opened_by: Mapping[str, str] = {}

    def announce(self, said: Announced) -> None:
        """Overwrites the attempt's one announcement; nobody else writes it."""
        with self._translated() as store:
            store.put(self._key, json.dumps({"step": said.step, "final": said.final}).encode())

    def announced(self) -> Announced | None:
        """Reads it."""
        with self._translated() as store:
            try:
                said = json.loads(store.get(self._key, _MAX_ANNOUNCEMENT))
                return Announced(int(said["step"]), bool(said["final"]))
            except NotFound:
                return None
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointStoreError(f"{self._key} holds no announcement") from error

    def upload(self, step: int, folder: Path) -> None:
        """Uploads this node's files, its sidecar last."""
        job = self._job
        with self._translated() as store:
            upload_part(
                store,
                job.run_id,
                checkpoint_id(job.attempt, step),
                folder=folder,
                attempt=job.attempt,
                node=job.node_rank,
                step=step,
                world_size=job.world_size,
                meta=self._meta(step, folder / "meta.json"),
            )

    def commit(self, step: int) -> str | None:
        """Commits the checkpoint when all parts are there."""
        job = self._job
        with self._translated() as store:
            writers = range(job.nodes) if self._target.writers == "all" else range(1)
            name = checkpoint_id(job.attempt, step)
            try:
                entry = commit_when_complete(
                    store, job.run_id, name, writers=writers, nodes=job.nodes, writer=job.writer, log=self._log
                )
            except Fenced as error:
                raise NewerAttempt(str(error)) from error
            return entry.checkpoint_id if entry else None

    def prune(self) -> None:
        """Removes what the run file does not keep; says once of a checkpoint that it was found damaged."""
        run_id = self._job.run_id
        with self._translated() as store:
            plan = plan_prune(store, run_id, self._target, log=self._log)
            for name, problem in plan.damaged.items():
                if name not in self._alarmed:
                    self._alarmed.add(name)
                    self._attempt.say(f"checkpoint: {name} is damaged in the store: {problem}")
            prune(store, run_id, plan, log=self._log)

    def end(self, failure: AttemptFailed | None) -> None:
        """Writes how this node ended, None: it is done; node 0 writes into the commit log how the attempt did. What it
        says holds no secret.

        Raises:
            DepotError: it could not be written.
            NewerAttempt: another attempt has begun: this one has no say any more.
        """
        job, fault = self._job, str(failure.fault) if failure else None
        reason = clean(self._attempt.public(failure.reason), _MAX_REASON) if failure else None
        with self._translated() as store:
            if job.node_rank != 0:
                store.put(self._end_key(job.node_rank), json.dumps({"fault": fault, "reason": reason}).encode())
                return
            try:
                CommitLog(store, job.run_id).end(
                    job.attempt, job.writer, succeeded=failure is None, fault=fault, reason=reason
                )
            except Fenced as error:
                raise NewerAttempt(str(error)) from error

    def ended(self, node_rank: int) -> Said | None:
        """How another node ended; None: it has said nothing yet.

        Raises:
            DepotError: it could not be read.
        """
        key = self._end_key(node_rank)
        with self._translated() as store:
            try:
                said = json.loads(store.get(key, _MAX_END))
                if said["fault"] is None:
                    return Said(None)
                return Said(AttemptFailed(Fault(said["fault"]), f"node {node_rank}: {said['reason']}"))
            except NotFound:
                return None
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointStoreError(f"{key} does not say how node {node_rank} ended") from error

    def _end_key(self, node_rank: int) -> str:
        return f"{self._folder}/ended-{node_rank}.json"

    def _meta(self, step: int, path: Path) -> dict[str, Any]:
        """What the program says of a checkpoint. What cannot be read is told, and costs the checkpoint nothing."""
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_META + 1)
            if len(text) > _MAX_META:
                raise ValueError(f"it is longer than {_MAX_META >> 20} MiB")
            return described(text, self._target.best_metric)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self._attempt.say(f"checkpoint step-{step}: its meta.json says nothing: {clean(str(error), 200)}")
            return {}

    @property
    def _key(self) -> str:
        return f"{self._folder}/announced.json"

    @property
    def _folder(self) -> str:
        return f"{self._job.run_id}/attempts/{self._job.attempt}"

    def _opened(self) -> Store:
        keys = self._attempt.secrets.store
        if self._store is None or keys is not self._opened_by:  # they may have been renewed
            self._store = open_store(
                self._target.to, keys, timeouts=self._attempt.times, max_bytes_per_s=self._target.max_bytes_per_s
            )
            self._log = CommitLog(self._store, self._job.run_id)
            self._opened_by = keys
        return self._store

    @contextmanager
    def _translated(self) -> Iterator[Store]:
        try:
            yield self._opened()
        except (CheckpointStoreError, NewerAttempt):
            raise
        except (StoreError, OSError) as error:
            if isinstance(error, NoCredentials):  # botocore looks for them once, when a store is opened
                self._store = None
            problem, passing = str(error), isinstance(error, _PASSING)
            public, unkeepable = self._attempt.public(problem), isinstance(error, Unkeepable)
            raise CheckpointStoreError(public, passing=passing, unkeepable=unkeepable) from error
        except Exception as error:  # a bug costs this save, not all that follow
            problem = f"{type(error).__name__}: {error}"
            raise CheckpointStoreError(self._attempt.public(problem), passing=False) from error


def described(text: bytes, first: str) -> dict[str, Any]:
    """The plain values of a program's meta.json that a manifest has room for; the one named `first` is among them.

    Raises ValueError: it is no JSON object.
    """
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    plain = {name: value for name, value in found.items() if _short(name) and _plain(value)}
    leading = {first: plain[first]} if first in plain else {}
    return dict(list({**leading, **plain}.items())[:_MAX_META_VALUES])


def _plain(value: Any) -> bool:
    return _short(value) or type(value) is int or (type(value) is float and math.isfinite(value))


def _short(text: Any) -> bool:
    """True for a text that a manifest can hold; half a surrogate pair is none that can be written."""
    return type(text) is str and len(text) <= _MAX_META_TEXT and not any("\ud800" <= each <= "\udfff" for each in text)
