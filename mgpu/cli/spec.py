"""`mgpu spec`: the keys of the run file."""

from __future__ import annotations

import click

from mgpu.console import Console
from mgpu.errors import InputError


@click.command()
@click.argument("key", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the JSON schema, with which editors complete and check.")
def spec(key: str | None, as_json: bool) -> None:
    """Print every key of the run file with its type, default and meaning; with KEY, that one and those in its block."""
    from mgpu.spec import schema

    console = Console(as_json=as_json)
    if as_json:
        console.data(schema.schema())
        return
    known = schema.keys()
    found = [each for each in known if key is None or f"{each.name}.".startswith((f"{key}.", f"{key}[]."))]
    if not found:
        from difflib import get_close_matches

        near = get_close_matches(key or "", [each.name for each in known], n=1)
        raise InputError(f"no key `{key}`", f"Did you mean `{near[0]}`?" if near else "", "`mgpu spec` prints all.")
    rows = [tuple(cell.replace("`", "") for cell in each) for each in found]
    console.table(("key", "type", "default", "meaning"), rows)
