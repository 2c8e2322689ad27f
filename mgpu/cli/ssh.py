"""`mgpu ssh`: log in on a node with the system's ssh client and our pinned host keys."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import click

from mgpu.cli import common
from mgpu.console import Console
from mgpu.errors import InputError
from mgpu.run.record import Folder, Record, load


@click.command(context_settings={"ignore_unknown_options": True})
@common.run_argument
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--node", type=int, default=0, help="node_rank to log in on (default: 0).")
@click.option("--config", "only_config", is_flag=True, help="Only print the path of the ssh configuration.")
def ssh(run: str, command: tuple[str, ...], node: int, only_config: bool) -> None:
    """Log in on a node of RUN, or run COMMAND there: `mgpu ssh RUN -- nvidia-smi`."""
    record = load(run)
    config = write_config(record)
    if only_config:
        Console().text(str(config))
        return
    if not 0 <= node < record.nodes:
        raise InputError(f"--node {node}: the run has nodes 0 to {record.nodes - 1}")
    client = shutil.which("ssh")
    if client is None:
        raise InputError(
            "no ssh client on PATH",
            f"`mgpu ssh` starts the system's own one with the configuration {config}.",
            "Install OpenSSH's client, e.g. `apt install openssh-client`.",
        )
    os.execv(client, [client, "-F", str(config), f"{record.run_id}-{node}", *command])  # noqa: S606 - no shell is in it


def write_config(record: Record) -> Path:
    """Writes the run's ssh configuration and its pinned host keys; also for `ssh -F` and editors."""
    if record.fleet is None or record.teardown == "confirmed":
        raise InputError(f"run {record.run_id} has no machines", "", "See `mgpu ls`.")
    from mgpu.iac.outputs import StackOutput
    from mgpu.remote.sshconfig import ssh_config
    from mgpu.run.reach import targets

    fleet = StackOutput.model_validate(record.fleet)
    folder = Folder(record.run_id).root
    known_hosts_file, path = folder / "known_hosts", folder / "ssh_config"
    key_file = Path(fleet.private_key_file).expanduser()
    config, known_hosts = ssh_config(targets(fleet), key_file, record.run_id, known_hosts_file)
    known_hosts_file.write_text(known_hosts)
    path.write_text(config)
    return path
