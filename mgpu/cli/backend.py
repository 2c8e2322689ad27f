"""`mgpu backend`: where the records of runs and the state of stacks are."""

from __future__ import annotations

import sys

import click

from mgpu.backend import location, settings
from mgpu.backend.owner import owner
from mgpu.cli.common import parameters
from mgpu.console import Console
from mgpu.errors import InputError
from mgpu.words import count


@click.group()
def backend() -> None:
    """Show where records of runs and the state of stacks are, or move them.

    It is a folder of this machine, or what PULUMI_BACKEND_URL or `backend: {url: ...}` in Pulumi.yaml names:
    s3://bucket/prefix, which every machine that reaches it can work with.
    """


@backend.command()
@parameters.json_option
def show(as_json: bool) -> None:
    """Show this folder's backend, and what is in it."""
    console = Console(as_json=as_json)
    _tell(console)


@backend.command()
@click.argument("url")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@parameters.json_option
def move(url: str, yes: bool, as_json: bool) -> None:
    """Move all of this folder's backend to URL: a bucket and prefix, or a folder, that is empty.

    Records, logs, code, and the state of stacks are copied and read back. From then on nothing begins at the old one,
    whose files stay. If it is cut off, do it again.
    """
    from mgpu.run.record import transfer

    console, here = Console(as_json=as_json), location.configured()
    if not yes and not console.confirm(f"move everything from {here.address} to {url.partition('?')[0]}?"):
        why = "" if sys.stdin.isatty() else "Standard input is not a terminal."
        raise InputError("not agreed", f"{why} Nothing was moved.".strip(), "Add `--yes` to agree.")
    moved = transfer.move(here.url, url, console.say)
    console.say(f"{count(moved.runs, 'run')} and {count(moved.stacks, 'stack')} moved; {here.address} is as it was")
    with location.using(url):
        _tell(console)
    console.next(f"{location.VARIABLE}='{url}', or in Pulumi.yaml:  backend: {{url: '{url}'}}")


def _tell(console: Console) -> None:
    from mgpu.iac.engine import state_file
    from mgpu.run.record import record

    here = location.current()
    runs, tag = record.every(), owner()
    stacks = {(project, stack) for project, stack, key in state_file.stacks() if key.endswith((".json", ".json.gz"))}
    whose = settings.secrets_provider()
    if console.as_json:
        from mgpu.cli.results import Backend

        shared = here.folder is None
        found = {"url": here.url, "place": here.place, "shared": shared, "owner": tag, "secrets_provider": whose}
        console.result(Backend(**found, runs=len(runs), stacks=len(stacks)))
        return
    rows = [
        ("mgpu's own", here.place),
        ("seen by", "this machine" if here.folder else "every machine that names it"),
        ("holds", f"{count(len(runs), 'run')}, {count(len(stacks), 'stack')}"),
        ("owner's tag", tag),
        ("secrets", whose),
    ]
    console.table(("backend", here.address), rows)
