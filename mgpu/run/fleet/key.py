"""The key that logs in to a run's machines, on a machine that has not rented them."""

from __future__ import annotations

import os
from pathlib import Path

from mgpu import paths
from mgpu.backend import location
from mgpu.context import Context
from mgpu.errors import StackError
from mgpu.iac.naming import file_name
from mgpu.run.fleet.stack import stack_of
from mgpu.run.record.record import Record


def bring(record: Record, context: Context) -> None:
    """Writes the key that the stack's state has into a file of this machine's, where the record names one of another
    machine, and names that one in the record. Where the backend is a folder, the file is where it was written.

    Raises:
        StackError: the state has none, or cannot be read.
    """
    if record.fleet is None or location.current().folder:
        return
    if Path(record.fleet["private_key_file"]).expanduser().exists():
        return
    file = paths.state_dir() / "keys" / file_name(record.fleet.get("owner", ""), record.fleet_name) / "id_ed25519"
    if not file.exists():
        text = stack_of(record, context).private_key()
        if text is None:
            why = f"The machines of run {record.run_id} can be ended from here, and not be logged in to."
            raise StackError(f"stack {record.stack} has no SSH key in its state", why)
        _write(file, text)
    record.fleet["private_key_file"] = str(file)


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        out.write(text)
    aside.replace(file)
