"""`mgpu init`: make a folder a project."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import click

from mgpu.cli import common
from mgpu.console import Console

TEMPLATES = ("mgpu.yaml", "train.py")
IGNORED = (".mgpu/", "mgpu-runs/", "Pulumi.*.yaml", "__pycache__/")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path())
@common.json_option
def init(folder: Path, as_json: bool) -> None:
    """Write a run file, an example train.py, Pulumi.yaml, infra/ and images/ into FOLDER (default: this one); set up
    the engine.

    Files that are there already are left as they are.
    """
    from mgpu.iac.engine import install
    from mgpu.iac.engine.project import project_files
    from mgpu.image.build import shipped

    console = Console(as_json=as_json)
    common.made(folder)
    wrote: list[Path] = []
    kept = [folder / name for name in (*TEMPLATES, "images") if (folder / name).exists()]
    for path in (folder / name for name in TEMPLATES if folder / name not in kept):
        path.write_text(files("mgpu").joinpath("templates", path.name).read_text())
        wrote.append(path)
    _ignore(folder / ".gitignore")
    program = [folder / name for name in ("Pulumi.yaml", "infra") if (folder / name).exists()]
    wrote += () if program else project_files(folder)
    wrote += () if folder / "images" in kept else (shipped.copy_to(folder),)
    for path in wrote:
        console.say(f"wrote {path}")
    if kept or program:
        console.say(f"kept what was there: {', '.join(map(str, (*kept, *program)))}")
    install.set_up(folder, console.say)
    if as_json:
        from mgpu.cli.results import Initialised

        names = [str(each) for each in (*kept, *program)]
        console.result(Initialised(folder=str(folder), wrote=[str(each) for each in wrote], kept=names))
    console.next(
        f"{_cd(folder)}mgpu plan       what it would rent",
        "mgpu launch     rent, train, give back",
    )


def _ignore(path: Path) -> None:
    lines = path.read_text().splitlines() if path.exists() else []
    missing = [line for line in IGNORED if line not in lines]
    if missing:
        path.write_text("\n".join([*lines, *missing]) + "\n")


def _cd(folder: Path) -> str:
    return "" if folder == Path() else f"cd {folder} && "
