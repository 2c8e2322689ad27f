"""`mgpu checkpoints`: what a run's commit log holds, and what the store still has of it."""

from __future__ import annotations

import click

from mgpu.cli.checkpoints.export import export
from mgpu.cli.checkpoints.ls import list_
from mgpu.cli.checkpoints.prune import prune
from mgpu.cli.checkpoints.pull import pull
from mgpu.cli.checkpoints.verify import verify


@click.group()
def checkpoints() -> None:
    """List, verify, download, export or give up the checkpoints of a run.

    RUN is the newest run unless another one is named; the beginning of its id is enough. From a machine that has no
    record of it: --store s3://bucket/prefix.
    """


for _command in (list_, verify, pull, export, prune):
    checkpoints.add_command(_command)
