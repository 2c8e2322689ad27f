"""`mgpu reservations`: capacity that is reserved for a time: found, bought, listed."""

from __future__ import annotations

import click

from mgpu.cli.reservations.buy import buy
from mgpu.cli.reservations.find import find
from mgpu.cli.reservations.ls import list_


@click.group()
def reservations() -> None:
    """Find, buy or list machines that are reserved for a time.

    A run file rents in one by its id: `aws: {reservation: cr-...}`. `find` and `ls` buy nothing.
    """


for _command in (find, buy, list_):
    reservations.add_command(_command)
