"""All of a backend moved to another one: the state of stacks, runs with their files, the owner's tag. What was moved is
read back; until all of it is there the old one counts, and from then on the new one alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mgpu_train.store import NotFound

from mgpu import paths
from mgpu.backend import location, outbox, settings
from mgpu.backend.location import MOVED, Backend
from mgpu.backend.owner import owner
from mgpu.errors import InputError, StackError
from mgpu.iac.engine import state_file
from mgpu.run.record import files, shared
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import ids, load, supervised

_LARGEST = 1 << 30  # bytes of an object
_SCHEDULES, _SUBMISSIONS = "schedules/", "submissions/"
_ALONE = ("limits.json", "removed.json", "searches.json")
_NOT_MOVED = ("lock", "ssh_config", "known_hosts")  # of a run's folder: they are this machine's


@dataclass(frozen=True)
class Moved:
    """What was moved."""

    stacks: int
    runs: int


def move(source_url: str, target_url: str, tell: Callable[[str], None]) -> Moved:
    """Moves all; again is the same, and goes on with what was cut off.

    Raises:
        InputError: both are one, somebody is at work there, or the new one has something else under a name.
        StackError: one of them does not answer, or does not have what was written.
    """
    with location.using(target_url) as target:
        pass
    with location.using(source_url) as source:
        if source.address.rstrip("/") == target.address.rstrip("/"):
            raise InputError(f"{source.address} is the backend already", "", "Name another one.")
        runs, tag = ids(), owner()
        _require_quiet(source, runs)
    with _marked(source, target):
        tell("moving the state of stacks")
        stacks = _move_states(source, target)
        _move_owner(target, tag)
        _move_settings(source, target)
        for run in runs:
            tell(f"moving run {run}")
            _move_run(source, target, run)
        _move_schedules(source, target)
        for key in _ALONE:
            _move_object(source, target, key)
    return Moved(stacks, len(runs))


def _require_quiet(source: Backend, runs: list[str]) -> None:
    at_work = [run for run in runs if supervised(run)]
    with source.asking("asked for locks"):
        locks = [found.key for found in source.state.list(".pulumi/locks/") if found.key.endswith(".json")]
    if at_work or locks:
        raise InputError(
            f"the backend {source.address} is at work",
            "\n".join([*(f"run {run} is being supervised" for run in at_work), *(f"{key} is there" for key in locks)]),
            "Let it end, or stop it; then do this again. Nothing was moved.",
        )


@contextmanager
def _marked(source: Backend, target: Backend) -> Iterator[None]:
    """Nobody begins anything at the source from here on, unless the block fails; the target is free for all."""
    _mark(source, target.url)
    try:
        yield
    except BaseException:
        _mark(source, None)
        raise
    _mark(target, None)


def _mark(backend: Backend, to: str | None) -> None:
    with backend.asking("written"):
        if to is None:
            backend.ours.delete(MOVED)
        else:
            backend.ours.put(MOVED, to.encode())


def _move_states(source: Backend, target: Backend) -> int:
    moved = set[str]()
    with source.asking("read"), target.asking("written"):
        for found in source.state.list(".pulumi/"):
            key = found.key
            if key.startswith(".pulumi/locks/") or key.endswith(".attrs"):
                continue  # attributes are a folder's; it needs none
            data = source.state.get(key, _LARGEST)
            _put(target, key, data)
            if key.startswith(state_file.STACKS) and key.endswith((".json", ".json.gz")):
                moved.add(key)
    return len(moved)


def _put(target: Backend, key: str, data: bytes) -> None:
    try:
        there = target.state.get(key, _LARGEST)
    except NotFound:
        target.state.put(key, data)
        there = target.state.get(key, _LARGEST)
        if there != data:
            raise StackError(f"the backend {target.address} does not have what was written: {key}") from None
    if there != data:
        why = "Two stacks of one name cannot become one."
        raise InputError(f"the backend {target.address} has another {key}", why, "Name an empty prefix, or folder.")


def _move_owner(target: Backend, tag: str) -> None:
    with location.using(target.url):
        if target.shared is None:
            there = paths.keep_owner(target.root, tag)
        else:
            with target.asking("written"):
                target.shared.put_if_absent("owner", f"{tag}\n".encode())
            there = owner()
    if there != tag:
        raise InputError(
            f"the backend {target.address} has an owner of its own",
            f"What is rented is found by its owner's tag: {there} there, {tag} here.",
            "Name an empty prefix, or folder.",
        )


def _move_run(source: Backend, target: Backend, run_id: str) -> None:
    with location.using(source.url):
        files.bring(run_id)
        here, record = Folder(run_id).root, load(run_id)
        text = Folder(run_id).record.read_bytes()
    there = target.root / "runs" / run_id
    if not (there / "record.json").exists():
        _copy(here, there, (*_NOT_MOVED, "record.json"))
        shutil.copy2(here / "record.json", there)  # last: a run whose record is there is whole
    (there / "record.json").touch()  # it is under way: nobody takes it for one that never came
    with location.using(target.url):
        if load(run_id) != record:
            raise _another(target, f"run {run_id}")
        files.keep(run_id)
        files.send(run_id)
        try:
            shared.push(run_id, text, settled=record.settled and not record.untold)
        except shared.Lost:
            raise _another(target, f"run {run_id}") from None
    _move_messages(source, target, f"runs/{run_id}")


def _move_messages(source: Backend, target: Backend, whose: str) -> None:
    """Those that wait, and the marks of those that were delivered."""
    with source.asking("read"):
        keys = outbox.keys(source.ours, whose)
    for key in keys:
        _move_object(source, target, key)


def _copy(source: Path, target: Path, but: Collection[str] = ()) -> None:
    """All of a folder but these names in it, and what is this machine's own, which has a dot; below it all counts."""

    def ours(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if name in but or name.startswith(".")] if Path(folder) == source else []

    shutil.copytree(source, target, ignore=ours, dirs_exist_ok=True, symlinks=True)


def _move_schedules(source: Backend, target: Backend) -> None:
    """With what they submit: a folder has it as it is, a bucket in archives."""
    with source.asking("read"):
        found = [each.key for each in source.ours.list(_SCHEDULES)]
        kept = {"/".join(each.key.split("/", 2)[:2]) for each in source.ours.list(_SUBMISSIONS)}
    for at in sorted(kept):
        with location.using(source.url):
            files.bring_folder(source.root / at, f"{at}/")
        shutil.rmtree(target.root / at, ignore_errors=True)
        _copy(source.root / at, target.root / at)
        with location.using(target.url):
            files.keep_folder(target.root / at, f"{at}/")
        _move_messages(source, target, at)
    for key in found:  # last: one that is there is whole
        _move_object(source, target, key)


def _move_object(source: Backend, target: Backend, key: str) -> None:
    with source.asking("read"):
        try:
            data = source.ours.get(key, _LARGEST)
        except NotFound:
            return
    with target.asking("written"):
        target.ours.put_if_absent(key, data)
        if target.ours.get(key, _LARGEST) != data:
            raise _another(target, key)


def _move_settings(source: Backend, target: Backend) -> None:
    """Who encrypts the secrets of stacks to come; a folder's are encrypted with its machine's passphrase."""
    with location.using(source.url):
        whose = settings.secrets_provider()
    if target.shared is not None and whose != settings.PASSPHRASE:
        with location.using(target.url):
            settings.choose_secrets_provider(whose)


def _another(target: Backend, what: str) -> InputError:
    return InputError(f"the backend {target.address} has another {what}", "", "Name an empty prefix, or folder.")
