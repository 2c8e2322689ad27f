"""`mgpu ssh`: log in on a node with the system's ssh client and our pinned host keys."""

from __future__ import annotations

import os
import sys

import click

from mgpu import writer
from mgpu.cli import complete
from mgpu.cli.common import parameters, wiring
from mgpu.console import Console


@click.command(cls=parameters.AfterDashes, context_settings={"ignore_unknown_options": True})
@parameters.run_argument
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--stack", shell_complete=complete.stacks, help="A stack of this folder's project instead of a run.")
@click.option("--node", type=int, default=0, help="node_rank to log in on (default: 0).")
@click.option("--config", "only_config", is_flag=True, help="Only print the path of the ssh configuration.")
def ssh(run: str, command: tuple[str, ...], stack: str | None, node: int, only_config: bool) -> None:
    """Log in on a node of RUN, or run COMMAND there: `mgpu ssh RUN -- nvidia-smi`."""
    route = wiring.ssh_route_to(run, stack)
    if only_config:
        Console().text(str(route.config))
        return
    argv = route.argv(route.one(node))
    writer.settle(sys.stderr)  # this process writes no more
    os.execv(argv[0], [*argv, *command])  # noqa: S606 - no shell is in it
