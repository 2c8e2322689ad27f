"""`mgpu checkpoints pull`: a checkpoint on this disk, every byte of it checked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mgpu.cli.checkpoints import source
from mgpu.cli.checkpoints.source import Source
from mgpu.cli.common import parameters, wiring
from mgpu.console import Console
from mgpu.errors import InputError
from mgpu.words import amount, count

if TYPE_CHECKING:
    from mgpu_train.checkpoint.log.lines import Commit
    from mgpu_train.checkpoint.log.manifest import Manifest
    from mgpu_train.checkpoint.transfer.fetch import FetchReport


@dataclass(frozen=True)
class Pulled:
    """A checkpoint on this disk, and the newer ones that were passed over for it: id and problem."""

    commit: Commit
    folder: Path
    report: FetchReport
    passed_over: dict[str, str] = field(default_factory=dict)

    @property
    def told(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "checkpoint_id": self.commit.checkpoint_id, "step": self.commit.step, "folder": str(self.folder),
            "files": self.report.files, "bytes": self.report.bytes, "reused": self.report.reused,
            "passed_over": self.passed_over,
        }  # fmt: skip


@click.command()
@source.options
@click.option("--step", type=click.IntRange(min=0), help="Take this step's (default: the newest that verifies).")
@click.option("--to", type=click.Path(path_type=Path, file_okay=False), help="Folder (default: ./mgpu-runs/RUN).")
@parameters.json_option
def pull(run: str, url: str | None, profile: str | None, step: int | None, to: Path | None, as_json: bool) -> None:
    """Download a checkpoint of RUN, verified.

    It goes into DIR/step-<n>, which has its name once every byte was checked, and holds nothing else. Where the
    newest is damaged, the one before it is taken, with a warning.
    """
    console = Console(as_json=as_json)
    found = source.find(run, url, profile)
    pulled = pull_into(found, step, to or folder_of(found), console)
    if as_json:
        from mgpu.cli import results

        console.result(results.Pulled(**pulled.told))
    else:
        console.text(str(pulled.folder))


def folder_of(found: Source) -> Path:
    """Where a run's checkpoints go when nobody says so."""
    return Path("mgpu-runs") / found.run_id


def pull_into(found: Source, step: int | None, to: Path, console: Console) -> Pulled:
    """Fetches a checkpoint into `to/step-<n>`: this step's, or the newest that verifies.

    Raises:
        InputError: there is none; the store, or this disk, does not work.
        DamagedCheckpoint: not one verifies.
    """
    return newest_whole(
        found,
        found.commits(step),
        console,
        lambda commit: to / f"step-{commit.step}",
        lambda manifest: _refuse_more(to / f"step-{manifest.step}", manifest),
    )


def _refuse_more(folder: Path, manifest: Manifest) -> None:
    """Raises InputError where the folder holds what is not of the checkpoint: it would go with the old one."""
    paths = (Path(above, name) for above, _, names in os.walk(folder) for name in names)
    others = sorted({path.relative_to(folder).as_posix() for path in paths} - {file.path for file in manifest.files})
    if others:
        raise InputError(
            f"{folder} holds what is not of {manifest.checkpoint_id}: {', '.join(others[:3])}",
            "The folder is replaced by the checkpoint; nothing was changed.",
            "Move it away, or name another folder with `--to`.",
        )


def newest_whole(
    found: Source,
    commits: Sequence[Commit],
    console: Console,
    into: Callable[[Commit], Path],
    suits: Callable[[Manifest], None] = lambda _manifest: None,
    local: Callable[[Commit], Path] | None = None,
    durable: bool = True,
) -> Pulled:
    """Fetches the first of these checkpoints that verifies; each that does not is reported, and left in place.

    `suits` may raise before the first byte of one is asked for; `local` is a folder that may have it already. Without
    `durable` nothing waits for the disk.

    Raises as `pull_into`.
    """
    from mgpu_train.store import Damaged, NotFound

    if not commits:
        raise InputError(
            f"run {found.run_id}: no checkpoint is committed", "", f"See `mgpu checkpoints ls {found.arguments}`."
        )
    bad: dict[str, str] = {}
    for gap in found.gaps:
        console.say(f"warning: {gap}; a checkpoint may stand there that is not shown", "yellow")
    for commit in commits:
        try:
            with source.readable(found.store.url):
                manifest = found.log.manifest(commit)
            suits(manifest)
            given = (local(commit),) if local else ()
            report = _fetch(found, manifest, into(commit), console, local=given, durable=durable)
        except (Damaged, NotFound) as error:
            bad[commit.checkpoint_id] = str(error)
            console.say(f"warning: {commit.checkpoint_id} does not verify: {error}", "bold yellow")
            continue
        if bad:
            back = commits[0].step - commit.step
            console.say(
                f"warning: {commit.checkpoint_id} is taken instead, {count(back, 'step')} before", "bold yellow"
            )
        return Pulled(commit, into(commit), report, bad)
    raise source.damaged(found, list(bad))


def _fetch(
    found: Source, manifest: Manifest, folder: Path, console: Console, *, local: Sequence[Path], durable: bool
) -> FetchReport:
    """Raises Damaged and NotFound for what the store has; InputError when store or disk do not work."""
    from mgpu_train.checkpoint.transfer.fetch import fetch
    from mgpu_train.store import Damaged, NotFound, StoreError

    began = time.monotonic()
    wiring.made(folder.parent)
    try:
        with console.transfer(manifest.checkpoint_id, manifest.bytes) as add:
            report = fetch(found.store, found.run_id, manifest, folder, local=local, progress=add, durable=durable)
    except (Damaged, NotFound):
        raise
    except StoreError as error:
        raise InputError(
            f"{manifest.checkpoint_id} of run {found.run_id} was not downloaded",
            str(error),
            "Nothing of it was left on this disk. Call it again when that is mended.",
        ) from error
    what = f"{count(report.files, 'file')}, {amount(report.bytes)}"
    reused = f", {report.reused} from this disk" if report.reused else ""
    console.say(
        f"{manifest.checkpoint_id}: {what} in {time.monotonic() - began:.1f} s{reused}; every byte verified", "dim"
    )
    return report
