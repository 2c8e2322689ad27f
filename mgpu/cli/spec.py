"""`mgpu spec`: the JSON schema of the run file."""

from __future__ import annotations

import click

from mgpu.console import Console


@click.command()
def spec() -> None:
    """Print the JSON schema of the run file: every key with unit and default. Editors complete and check with it."""
    from mgpu.spec.schema import schema

    Console().data(schema())
