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
def init(folder: Path) -> None:
    """Write a run file, an example train.py, Pulumi.yaml, infra/ and images/ into FOLDER (default: this one); set up
    the engine.

    Files that are there already are left as they are.
    """
    from mgpu.iac import install
    from mgpu.iac.project import project_files
    from mgpu.image import shipped

    console = Console()
    common.made(folder)
    for name in TEMPLATES:
        _once(console, folder / name, files("mgpu").joinpath("templates", name).read_text())
    _ignore(folder / ".gitignore")
    if (folder / "Pulumi.yaml").exists() or (folder / "infra").exists():
        console.say(f"kept the Pulumi program in {folder}: it was there")
    else:
        for path in project_files(folder):
            console.say(f"wrote {path}")
    if (folder / "images").exists():
        console.say(f"kept the images in {folder}: they were there")
    else:
        console.say(f"wrote {shipped.copy_to(folder)}")
    install.set_up(folder, console.say)
    console.next(
        f"{_cd(folder)}mgpu plan       what it would rent",
        "mgpu launch     rent, train, give back",
    )


def _once(console: Console, path: Path, text: str) -> None:
    if path.exists():
        console.say(f"kept {path}: it was there")
        return
    path.write_text(text)
    console.say(f"wrote {path}")


def _ignore(path: Path) -> None:
    lines = path.read_text().splitlines() if path.exists() else []
    missing = [line for line in IGNORED if line not in lines]
    if missing:
        path.write_text("\n".join([*lines, *missing]) + "\n")


def _cd(folder: Path) -> str:
    return "" if folder == Path() else f"cd {folder} && "
