"""`mgpu checkpoints export`: a checkpoint's weights as safetensors, for everything that is not mgpu."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mgpu.cli.checkpoints import source
from mgpu.cli.checkpoints.pull import Pulled, folder_of, newest_whole
from mgpu.cli.checkpoints.source import Source
from mgpu.cli.common import parameters
from mgpu.console import Console
from mgpu.errors import InputError
from mgpu.words import amount, count

if TYPE_CHECKING:
    from mgpu_train.checkpoint.formats.export import ExportReport, Format
    from mgpu_train.checkpoint.log.manifest import Manifest


@click.command()
@source.options
@click.option("--step", type=click.IntRange(min=0), help="Take this step's (default: the newest that verifies).")
@click.option("--to", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder that is made.")
@click.option("--keys", default="model", show_default=True, help="What is exported of a program's state; '' is all.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["safetensors", "peft"]),
    default="safetensors",
    show_default=True,
    help="peft: adapters that task hf has learned, as peft loads them.",
)
@parameters.json_option
def export(
    run: str, url: str | None, profile: str | None, step: int | None, to: Path, keys: str, form: Format, as_json: bool
) -> None:
    """Write a checkpoint's weights as safetensors.

    DIR gets model.safetensors and a config.json that says where they come from. The checkpoint is downloaded and
    verified first. Shards of the bundled trainer, or of torch.distributed.checkpoint, are put together without
    PyTorch; safetensors pass through.
    """
    console = Console(as_json=as_json)
    if not to.name or to.is_symlink() or (to.exists() and any(to.iterdir())):
        raise InputError(f"{to} is there already", "Nothing is written over.", "Name a folder that is not there yet.")
    found = source.find(run, url, profile)
    with _aside(to) as aside:
        pulled = newest_whole(
            found, found.commits(step), console, lambda _commit: aside / "checkpoint", _refuse_others,
            local=lambda commit: folder_of(found) / f"step-{commit.step}", durable=False,
        )  # fmt: skip
        report = _convert(found, pulled, keys, form, to, console)
    if as_json:
        from mgpu.cli import results

        told = {"files": len(report.files), "bytes": report.bytes, "folder": str(to)}
        console.result(results.Exported(**pulled.told | told, names=list(report.files), tensors=report.tensors))
        return
    console.say(f"{count(report.tensors, 'tensor')}, {amount(report.bytes)}: {', '.join(report.files)}")
    console.text(str(to))


def _refuse_others(manifest: Manifest) -> None:
    """Raises InputError for a checkpoint whose files are of no kind that can be exported."""
    names = [file.path for file in manifest.files]
    if ".metadata" in names or any("/" not in name and name.endswith(".safetensors") for name in names):
        return
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    raise InputError(
        f"{manifest.checkpoint_id} cannot be exported: it holds {some}",
        "What can be exported is a folder of torch.distributed.checkpoint, or one with *.safetensors in it.",
        "`mgpu checkpoints pull` downloads it as the program wrote it.",
    )


@contextmanager
def _aside(to: Path) -> Iterator[Path]:
    """A folder beside `to`, on the same disk, that is gone afterwards."""
    from mgpu_train.store.base import ASIDE

    folder = to.with_name(f"{ASIDE}pull-{to.name}")
    shutil.rmtree(folder, ignore_errors=True)  # of a command that was killed
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{to} cannot be written", str(error), "Name another folder.") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _convert(found: Source, pulled: Pulled, keys: str, form: Format, to: Path, console: Console) -> ExportReport:
    from mgpu_train.checkpoint.formats.archives import Unsupported
    from mgpu_train.checkpoint.formats.export import export as convert
    from mgpu_train.checkpoint.formats.export import size
    from mgpu_train.store import StoreError

    commit = pulled.commit
    origin = {"run_id": found.run_id, "checkpoint_id": commit.checkpoint_id, "manifest_sha256": commit.manifest_sha256}
    try:
        with console.transfer("writing safetensors", size(pulled.folder, keys=keys, form=form)) as add:
            return convert(pulled.folder, to, keys=keys, form=form, provenance=origin, progress=add)
    except Unsupported as error:
        raise InputError(
            f"{commit.checkpoint_id} cannot be exported",
            str(error),
            "Another part of it is named by `--keys`; `mgpu checkpoints pull` downloads it as the program wrote it.",
        ) from error
    except StoreError as error:  # every byte of it is what was committed
        raise InputError(f"{commit.checkpoint_id} was not exported", str(error), "Nothing was left of it.") from error
