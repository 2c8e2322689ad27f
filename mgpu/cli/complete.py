"""Values that a shell completes: runs, newest first, stacks, GPUs. Asked at every Tab, so nothing heavy is imported, no
network is used, and what cannot be read completes nothing.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def runs(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids of runs that this machine knows, with their states."""
    from click.shell_completion import CompletionItem

    from mgpu.errors import MgpuError
    from mgpu.run.record import shared
    from mgpu.run.record.record import every

    found: list[CompletionItem] = []
    with suppress(MgpuError, OSError), shared.as_known():
        found = [CompletionItem(each.run_id, help=str(each.state)) for each in reversed(every())]
    return [each for each in (*found, CompletionItem("last", help="the newest")) if each.value.startswith(incomplete)]


def stacks(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of stacks: those that the backend has, if it is a folder, else those of runs that this machine knows."""
    from click.shell_completion import CompletionItem

    from mgpu.backend import location
    from mgpu.errors import MgpuError
    from mgpu.iac.engine import state_file
    from mgpu.run.record import shared
    from mgpu.run.record.record import every

    names = set[str]()
    with suppress(MgpuError, OSError), shared.as_known():
        in_folder = location.current().folder is not None
        names = {stack for _, stack, _ in state_file.stacks()} if in_folder else {each.stack for each in every()}
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


def gpus(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """GPU types in the offers that come with mgpu."""
    import gzip

    from click.shell_completion import CompletionItem

    from mgpu import providers

    names = set[str]()
    for path in Path(providers.__file__).parent.glob("**/offers.json.gz"):
        with suppress(OSError, ValueError, KeyError), gzip.open(path) as file:
            names |= {machine["gpu"] for machine in json.load(file)["machines"].values()}
    return [CompletionItem(name) for name in sorted(names) if name.lower().startswith(incomplete.lower())]
