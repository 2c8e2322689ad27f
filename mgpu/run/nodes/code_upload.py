"""The code of a run: kept as it was when the run was submitted, and sent by every attempt and every supervisor.

Records share files: `<state>/code/<two characters>/<sha-256>` holds each content once, read-only, and a run's `work/`
is made of links to it. What no run links to any more is removed by `prune`.
"""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mgpu_train.agent.host.layout import RunLayout

from mgpu import paths
from mgpu.errors import InputError, RemoteError
from mgpu.events import Event, Note, Warned
from mgpu.remote.ignored import GIT_FILE, IGNORE_FILE
from mgpu.remote.snapshot import Snapshot, scan
from mgpu.run.job import saving
from mgpu.run.job.images import in_image
from mgpu.run.job.request import Request
from mgpu.run.record.folder import Folder
from mgpu.words import amount, count

if TYPE_CHECKING:
    from mgpu.remote.node import Node
    from mgpu.remote.nodeset import NodeSet
    from mgpu.run.record.session import Session

LARGE = 100 << 20  # bytes of a folder of code that are worth a warning
NAMED = 3  # files or folders that a line names


def look(request: Request) -> list[Event]:
    """Reads the folder as it would be sent, before anything is rented; what the user should know of it.

    Raises:
        InputError: files that cannot be sent; the program itself is left out.
    """
    folder = _folder(request)
    if folder is None:
        return []
    snapshot = scan(folder)
    _require_program(request, snapshot)
    return [*_told(snapshot), *map(Warned, _unread(request, folder)), *map(Warned, saving.doubts(request, snapshot))]


def _folder(request: Request) -> Path | None:
    """The folder whose files are the run's code; None: it has none, or the image holds it."""
    return None if in_image(request.spec) else request.workdir


def _require_program(request: Request, snapshot: Snapshot) -> None:
    if request.spec.command is None:
        return
    program = PurePosixPath(request.spec.command[0])
    gone = next((each for each in snapshot.left_out if program.is_relative_to(each.rstrip("/"))), None)
    if gone is not None:
        raise InputError(
            f"command: {program} would not be sent",
            f"{snapshot.folder}: {gone} is left out by {GIT_FILE} or {IGNORE_FILE}.",
            f"Write `!{gone}` into {snapshot.folder / IGNORE_FILE}: it has the last word.",
        )


def _unread(request: Request, folder: Path) -> Iterator[str]:
    """That this machine's Python does not understand the program; the nodes' may be a newer one."""
    program = folder / request.spec.command[0] if request.spec.command else None
    if program is None or program.suffix != ".py":
        return
    try:
        ast.parse(program.read_bytes())
    except SyntaxError as error:
        ours = f"{sys.version_info.major}.{sys.version_info.minor}"
        yield f"{program.name}, line {error.lineno}: {error.msg}, says this machine's Python {ours}"
    except (OSError, ValueError):  # it is not here, or holds NUL: the nodes say it
        return


def _told(snapshot: Snapshot) -> list[Event]:
    files, size = count(len(snapshot.entries), "file"), amount(snapshot.size)
    said = f"code: {files} ({size}) of {snapshot.folder}"
    if snapshot.left_out:
        said += f"; left out by {GIT_FILE} or {IGNORE_FILE}: {_some(snapshot.left_out)}"
    told: list[Event] = [Note(said)]
    if snapshot.size > LARGE:
        largest = sorted(snapshot.entries, key=lambda path: snapshot.entries[path].size, reverse=True)
        words = _some([f"{path} ({amount(snapshot.entries[path].size)})" for path in largest])
        cure = f"What is not code can be named in {IGNORE_FILE}; data has keys of its own (`data:`)."
        told.append(Warned(f"{size} is sent to each node, and kept with the run. The largest: {words}. {cure}"))
    return told


def _some(names: list[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def send(session: Session, request: Request, nodes: NodeSet) -> None:
    """Makes every node hold the run's code as it was kept; a node that has it is sent nothing. With a task of ours
    there is none.

    Raises:
        RemoteError: a node could not be reached, or refused.
    """
    kept = session.folder.work
    if request.workdir is None:
        return
    if not kept.exists():  # submitted by an mgpu that kept it later
        with set_aside(request) as code, suppress(OSError):  # another process may have kept it meanwhile
            if code is not None:
                code.replace(kept)
    # what was left out when it was kept is not there: nothing more is to be left out
    snapshot = scan(kept, (), ignore_files=False)
    here, others = str(RunLayout(request.run_id).work), str(RunLayout("*").work)
    shares = bool(session.record.slots)  # the machines with runs whose programs write while this one's does
    reports = nodes.sync(snapshot, here, like=others, apart=shares)
    sent = [report.sent for report in reports]
    most, all_of_them = max(sent), count(len(sent), "node")
    words = (
        f"each of {all_of_them}" if most == min(sent) else f"{sent.count(most)} of {all_of_them}, fewer to the others"
    )
    session.emit(Note(f"code: {count(reports[0].files, 'file')}, {most} sent to {words}"))


def take_away(session: Session, request: Request, nodes: NodeSet, lost: tuple[int, ...]) -> None:
    """Removes what `send` has put on the nodes, but for those that are lost; what the program has written stays. Of a
    node that has not done it within `command_s` it is told, and no more: the machines' lease runs meanwhile."""
    if request.workdir is None:
        return
    nothing, work = Snapshot(session.folder.work, {}), str(RunLayout(request.run_id).work)

    def take(node: Node) -> None:
        if node.target.rank in lost:
            return
        try:
            node.sync(nothing, work, within_s=session.timeouts.command_s)
        except RemoteError as error:
            session.emit(Warned(f"the run's code may be left on the fleet, in {work}: {error.what}"))

    nodes.each(take)


@contextmanager
def set_aside(request: Request, kept: Path | None = None) -> Iterator[Path | None]:
    """The code as it is now, in a folder beside `kept` (default: the run's own): whoever has got it moves it there.
    None: it has none.

    Raises:
        InputError: files that cannot be sent, or not be kept here.
    """
    folder = _folder(request)
    if folder is None:
        yield None
        return
    snapshot, kept = scan(folder), kept or Folder(request.run_id).work
    aside = kept.with_name(f".work.{os.getpid()}")
    try:
        try:
            aside.mkdir(mode=0o700, parents=True)
            snapshot.write_to(aside)
            _share(snapshot, aside)
        except OSError as error:
            raise InputError(
                f"the code of run {request.run_id} cannot be kept in {kept}",
                f"{error.strerror}: {error.filename}",
                f"Make room there, or name large files in {IGNORE_FILE}: data has keys of its own (`data:`).",
            ) from error
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _pool() -> Path:
    return paths.state_dir() / "code"


def _share(snapshot: Snapshot, folder: Path) -> None:
    """Makes the copies links to contents that are kept already. Where a disk has no links they stay copies."""
    for path, entry in snapshot.entries.items():
        kind, digest = entry.identity.split(":", 1)
        if kind == "l" or not entry.size:
            continue
        copy, one = folder / path, _pool() / digest[:2] / (digest + (".x" if kind == "x" else ""))
        copy.chmod(0o500 if kind == "x" else 0o400)  # who changes one changes it in every run
        try:
            one.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _link(copy, one, digest)
        except OSError:
            continue


def _link(copy: Path, one: Path, digest: str) -> None:
    try:
        os.link(copy, one)
        return
    except FileExistsError:
        whole = _sha256(one) == digest  # after a power cut, or by somebody's hand, it may not be
    source, other = (one, copy) if whole else (copy, one)
    aside = other.with_name(f".{other.name}.{os.getpid()}")
    os.link(source, aside)
    aside.replace(other)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def prune() -> int:
    """Removes contents that no run has any more; the bytes that it freed. What another process links to meanwhile is
    that one's own file: it loses nothing."""
    freed = 0
    for one in _pool().glob("*/*"):
        with suppress(FileNotFoundError):  # another process was faster
            found = one.stat()
            if found.st_nlink == 1:
                one.unlink()
                freed += found.st_size
    return freed
