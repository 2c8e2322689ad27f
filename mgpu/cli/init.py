"""`mgpu init`: make a folder a project."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import nullcontext
from importlib.resources import files
from pathlib import Path

import click

from mgpu.backend import location
from mgpu.cli.common import parameters, wiring
from mgpu.console import Console

RUN_FILE, EXAMPLE = "mgpu.yaml", "train.py"
COMMAND = re.compile(r"command: \[[^]]*\]")
_OF_TOOLS = ("setup.py", "conftest.py", "noxfile.py", "__init__.py")  # which tools find by their names
IGNORED = (".mgpu/", "mgpu-runs/", "Pulumi.*.yaml", "__pycache__/")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path())
@click.option(
    "--backend", metavar="URL", help="Keep records and stacks' state there: s3://bucket/prefix, or file://..."
)
@click.option("--secrets-provider", metavar="URL", help="Who encrypts stacks' secrets in a bucket: awskms://...")
@parameters.json_option
def init(folder: Path, backend: str | None, secrets_provider: str | None, as_json: bool) -> None:
    """Write a run file, Pulumi.yaml, infra/ and images/ into FOLDER (default: this one); set up the engine.

    The run file runs the program that is there: train.py, main.py, or the only Python file. Where none is, an example
    train.py is written, too. Files that are there already are left as they are.
    """
    from mgpu.iac.engine import install
    from mgpu.iac.engine.project import name_backend, project_files
    from mgpu.image.build import shipped

    console = Console(as_json=as_json)
    wiring.made(folder)
    wiring.choose_backend(folder)
    if backend or secrets_provider:
        _reach(backend, secrets_provider)
    wrote: list[Path] = []
    kept = [folder / name for name in (RUN_FILE, "images") if (folder / name).exists()]
    program = _program(folder)
    with wiring.writing(folder):
        for path in (folder / name for name in ((RUN_FILE,) if program else (RUN_FILE, EXAMPLE))):
            if path not in kept:
                path.write_text(_run_file(program) if program else _template(path.name), encoding="utf-8")
                wrote.append(path)
        _ignore(folder / ".gitignore")
        kept += [folder / name for name in ("Pulumi.yaml", "infra") if (folder / name).exists()]
        wrote += () if {folder / "Pulumi.yaml", folder / "infra"} & set(kept) else project_files(folder)
        wrote += () if folder / "images" in kept else (shipped.copy_to(folder),)
        if backend:
            name_backend(folder, backend)
    for path in wrote:
        runs = f", which runs {program.name}" if program and path.name == RUN_FILE else ""
        console.say(f"wrote {path}{runs}")
    if kept:
        console.say(f"kept what was there: {', '.join(map(str, kept))}")
    with location.using(backend) if backend else nullcontext():
        install.set_up(folder, console.say)
    if as_json:
        from mgpu.cli.results import Initialised

        names = [[str(each) for each in paths] for paths in (wrote, kept)]
        console.result(Initialised(folder=str(folder), wrote=names[0], kept=names[1]))
    console.next(
        f"{_cd(folder)}mgpu plan       what it would rent",
        "mgpu launch     rent, train, give back",
    )


def _reach(backend: str | None, secrets_provider: str | None) -> None:
    """Tries a backend before a file names it."""
    from mgpu.backend import settings
    from mgpu.backend.owner import owner

    with location.using(backend) if backend else nullcontext():
        if secrets_provider:
            settings.choose_secrets_provider(secrets_provider)
        owner()


def _program(folder: Path) -> Path | None:
    """The user's own, which the run file is to run."""
    found = sorted(each for each in folder.glob("*.py") if each.name not in _OF_TOOLS)
    named = [folder / name for name in (EXAMPLE, "main.py") if folder / name in found]
    return named[0] if named else found[0] if len(found) == 1 else None


def _run_file(program: Path) -> str:
    """For a program that is there already: it saves as mgpu expects, or it names the variable nowhere and does not."""
    from mgpu.run.job.saving import names_variable

    text = COMMAND.sub(
        lambda _: f"command: [{json.dumps(program.name)}]",
        _template(RUN_FILE if names_variable(program) else "own.yaml"),
    )
    needs = program.with_name("requirements.txt")
    return f"{text}code: {{requirements: {needs.name}}}\n" if needs.exists() else text


def _template(name: str) -> str:
    return files("mgpu").joinpath("templates", name).read_text(encoding="utf-8")


def _ignore(path: Path) -> None:
    lines = path.read_text("utf-8", "surrogateescape").splitlines() if path.exists() else []
    missing = [line for line in IGNORED if line not in lines]
    if missing:
        path.write_text("\n".join([*lines, *missing]) + "\n", "utf-8", "surrogateescape")


def _cd(folder: Path) -> str:
    return "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
