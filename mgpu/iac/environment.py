"""What plain `pulumi` needs: `.mgpu/env`, the passphrase, the folder of a backend.

Everything that outlives a checkout follows the XDG folders:

    $XDG_CONFIG_HOME/mgpu/passphrase    encrypts the secrets in stack state; made once, 0600, never overwritten
    $XDG_STATE_HOME/mgpu/pulumi/        the state of every stack, where no other backend is named; 0700
    $XDG_CACHE_HOME/mgpu/pulumi-home/   PULUMI_HOME: plug-ins, workspaces; the user's own ~/.pulumi stays as it is

Standard library only.
"""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mgpu import paths
from mgpu.backend import location
from mgpu.errors import StackError

STACK = "dev"
"""The stack that plain `pulumi up` in a checkout works on."""

HARD_CAP = "MGPU_HARD_CAP_AT"
"""Tells the plugin until when the run that wants a fleet may have one, in UNIX seconds."""

MAX_USD = "MGPU_MAX_USD"
"""Tells the plugin what a fleet that is made anew may cost, in US dollars."""

RANKED_UP_TO = "MGPU_RANKED_UP_TO"
"""Tells the plugin up to which rank (`mgpu.plan.rank.Rank`, as a list in JSON) the offers are of a fleet that is made:
those of another provider follow there."""

SEARCHES = "MGPU_SEARCHES"
"""Tells the plugin how many searches for the machines of the run that wants a fleet have come to their end before: the
next one asks by other tokens, on whichever machine. Of a stack of the user's it is not told: the backend counts."""

IMAGE = "MGPU_IMAGE"
"""Tells the plugin which image the run that wants a fleet has settled on, repository@sha256:...: no other is built."""

PYTHON = "MGPU_PYTHON"
"""Tells `python.sh` which Python runs the Pulumi program."""

AMBIENT_PASSPHRASE = "PULUMI_CONFIG_PASSPHRASE"  # noqa: S105  a variable's name
"""Must not be set beside the passphrase file: Pulumi prefers it, even when it is empty."""

_PYTHON = Path(__file__).with_name("python.sh")


def pulumi_home() -> Path:
    """PULUMI_HOME of every engine that mgpu starts."""
    return paths.cache_dir() / "pulumi-home"


def passphrase_file() -> Path:
    """The file that holds the passphrase of stacks."""
    return paths.config_dir() / "passphrase"


def engine_env(engine_path: Sequence[Path], venv: Path | None = None) -> dict[str, str]:
    """What the engine needs in its environment. PATH holds only the folders that must come first; `venv` is the
    environment that runs the Pulumi program (default: the one that runs this).
    """
    programs = (venv or Path(sys.prefix)) / "bin"
    return {
        # The language host runs the first Python on PATH, whatever Pulumi.yaml says of a virtual environment.
        "PATH": os.pathsep.join(str(folder) for folder in (programs, *engine_path)),
        # An installer that lost the script's mode costs half a second for each operation, and nothing else.
        "PULUMI_PYTHON_CMD": str(_PYTHON if os.access(_PYTHON, os.X_OK) else programs / "python"),
        PYTHON: str(programs / "python"),
        location.VARIABLE: location.current().url,
        "PULUMI_CONFIG_PASSPHRASE_FILE": str(passphrase_file()),
        "PULUMI_HOME": str(pulumi_home()),
        "PULUMI_SKIP_UPDATE_CHECK": "1",
        "PULUMI_STACK": STACK,
    }


def process_env(variables: dict[str, str]) -> dict[str, str]:
    """This process's environment with `variables` of `engine_env` laid over it: for starting `pulumi`.

    Pulumi fills tables whenever it starts; by Go's default of 100 the collector takes a tenth of a second of CPU more
    meanwhile. A GOGC of the user's own stands.
    """
    path = os.pathsep.join(part for part in (variables["PATH"], os.environ.get("PATH", "")) if part)
    ambient = {k: v for k, v in os.environ.items() if k != AMBIENT_PASSPHRASE}
    return {"GOGC": "400"} | ambient | variables | {"PATH": path}


def write_env(project: Path, variables: dict[str, str]) -> Path:
    """Writes `.mgpu/env`, for a POSIX shell to read: `. .mgpu/env`. Returns its path."""
    lines = ["# Written by mgpu's set-up, which overwrites it. Read it into a shell:  . .mgpu/env"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items() if name != "PATH"]
    lines += [f'export PATH={shlex.quote(variables["PATH"])}${{PATH:+":$PATH"}}']
    lines += [f"unset {AMBIENT_PASSPHRASE}  # Pulumi would prefer it to the file, even empty"]
    target = project / ".mgpu" / "env"
    target.parent.mkdir(exist_ok=True)
    replace(target, "\n".join(lines) + "\n")
    return target


def make_backend_dir() -> None:
    """Makes the folder of a backend that is one, for this user only; one that was there stays as it is, if it is not
    mgpu's own."""
    here = location.current()
    if here.folder is None:
        return
    there = here.folder.exists()
    here.folder.mkdir(parents=True, exist_ok=True)
    if not there or here.root == paths.state_dir():
        here.folder.chmod(0o700)


def make_passphrase() -> Path:
    """The passphrase file, made if absent; StackError if it is there and empty. Never overwrites one."""
    path = passphrase_file()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _create_once(path, secrets.token_urlsafe(32) + "\n")
    if not path.read_bytes().strip():  # it may be a user's own, in any encoding
        raise StackError(
            f"The passphrase file {path} is empty.",
            "An empty passphrase protects nothing: the secrets in every stack's state would lie open.",
            f"If no stack was ever made with it, delete it and do the set-up again (rm {shlex.quote(str(path))}); "
            "else put the passphrase of those stacks back into it.",
        )
    path.chmod(0o600)
    return path


def replace(target: Path, text: str) -> None:
    """Writes aside and renames, unless the file says so already: a reader sees the old text or the new one, and on a
    full disk the old one stays."""
    if target.exists() and target.read_bytes() == os.fsencode(text):
        return
    aside = _write_aside(target, text)
    aside.chmod(0o644)
    aside.rename(target)


def _create_once(target: Path, text: str) -> None:
    """Creates a whole 0600 file, or leaves the one that another process created first."""
    aside = _write_aside(target, text)
    try:
        os.link(aside, target)
    except FileExistsError:
        pass  # the other's passphrase is the passphrase
    finally:
        aside.unlink()


def _write_aside(target: Path, text: str) -> Path:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")  # mkstemp makes it 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(os.fsencode(text))  # it names paths, for a shell
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        Path(name).unlink()
        raise
    return Path(name)
