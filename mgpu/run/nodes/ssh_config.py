"""How the system's own ssh client gets to the nodes of a run or a stack: a configuration with our pinned host keys."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mgpu_train.agent.host.layout import RunLayout

from mgpu import paths
from mgpu.context import Context
from mgpu.errors import InputError
from mgpu.iac.outputs import StackOutput
from mgpu.remote.sshconfig import ssh_config
from mgpu.remote.targets import login_line
from mgpu.run.fleet.stack import open_stack
from mgpu.run.job.stack_output import targets
from mgpu.run.record import files
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Record


@dataclass(frozen=True)
class SshRoute:
    """To every node of a fleet, over SSH. `work` is the run's work folder on each, under the user's home; `through`:
    something is before a node, a jump host or a proxy command."""

    config: Path
    alias: str  # node k is the host `<alias>-<k>` of the configuration
    ranks: tuple[int, ...]
    work: str | None = None
    through: bool = False

    def one(self, node: int) -> int:
        """Raises InputError for a node_rank that the fleet does not have."""
        if node not in self.ranks:
            raise InputError(f"--node {node}: there are nodes 0 to {self.ranks[-1]}")
        return node

    def argv(self, rank: int, *options: str) -> list[str]:
        """The client's command line to a node, less the command that runs there. Raises InputError without a client."""
        client = shutil.which("ssh")
        if client is None:
            raise InputError(
                "no ssh client on PATH",
                f"The system's own one is started, with the configuration {self.config}.",
                "Install OpenSSH's client, e.g. `apt install openssh-client`.",
            )
        return [client, "-F", str(self.config), *options, f"{self.alias}-{rank}"]

    def script(self, command: Sequence[str], then: str) -> str:
        """What the login shell is given: one argument is a line for it, of several each arrives as it is. `then`: what
        `sh` does with its exit status, `$code`."""
        begin = f"cd {shlex.quote(self.work)} 2>/dev/null; " if self.work else ""
        run = '"${SHELL:-/bin/sh}" -c "$1"' if len(command) == 1 else '"$@"'
        return login_line(["sh", "-c", f"{begin}( {run} ); code=$?; {then}", "sh", *command])


def to_run(record: Record) -> SshRoute:
    """How a run's machines are reached. Raises InputError when it has none."""
    if record.fleet is None or record.teardown == "confirmed":
        raise InputError(f"run {record.run_id} has no machines", "", "See `mgpu ls`.")
    work = str(RunLayout(record.run_id).work)
    return _route(record.fleet_output(), record.run_id, Folder(record.run_id).root, work)


def to_stack(project: Path, name: str, context: Context) -> SshRoute:
    """How the machines of a stack that is up are reached. Raises InputError when it has none."""
    fleet = open_stack(project, name, project / "mgpu.yaml", None, context).outputs()
    if fleet is None:
        raise InputError(f"stack {name} of the project in {project} has no machines", "", "See `mgpu ls`.")
    return _route(fleet, fleet.fleet, paths.state_dir() / "stacks" / name, None)


def _route(fleet: StackOutput, alias: str, folder: Path, work: str | None) -> SshRoute:
    folder.mkdir(parents=True, exist_ok=True)
    known_hosts_file, path = folder / "known_hosts", folder / "ssh_config"
    nodes = targets(fleet)
    config, known_hosts = ssh_config(nodes, Path(fleet.private_key_file).expanduser(), alias, known_hosts_file)
    for file, text in ((known_hosts_file, known_hosts), (path, config)):
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            files.replace(file, text.encode())  # whole: another command's ssh may read it now
    return SshRoute(path, alias, tuple(node.rank for node in nodes), work, any(node.via for node in nodes))
