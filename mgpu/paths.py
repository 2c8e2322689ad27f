"""Where mgpu keeps things on the operator's machine: the XDG folders, read anew at every call. Standard library
only.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def _xdg(variable: str, default: str) -> Path:
    value = os.environ.get(variable, "")
    # the specification: a relative path in these variables is invalid and has to be ignored
    base = Path(value) if value.startswith("/") else Path.home() / default
    return base / "mgpu"


def state_dir() -> Path:
    """Runs, the Pulumi file backend, provider local's nodes and bill: `$XDG_STATE_HOME/mgpu`."""
    return _xdg("XDG_STATE_HOME", ".local/state")


def cache_dir() -> Path:
    """What can be made again: `$XDG_CACHE_HOME/mgpu`."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def config_dir() -> Path:
    """The passphrase: `$XDG_CONFIG_HOME/mgpu`."""
    return _xdg("XDG_CONFIG_HOME", ".config")


def data_dir() -> Path:
    """Checkpoints of provider local, where the run file names no store: `$XDG_DATA_HOME/mgpu`."""
    return _xdg("XDG_DATA_HOME", ".local/share")


def owner(folder: Path | None = None) -> str:
    """The owner tag of all that this user rents: random, made once, kept in the folder (default: the state folder)."""
    folder = folder or state_dir()
    try:
        return (folder / "owner").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return keep_owner(folder, new_owner())


def new_owner() -> str:
    """An owner tag that nobody has."""
    return f"o-{secrets.token_hex(6)}"


def keep_owner(folder: Path, tag: str) -> str:
    """Keeps an owner tag in a folder, for this user alone; the tag that was there first."""
    path = folder / "owner"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_name(f"owner.{os.getpid()}")
    fresh.write_text(f"{tag}\n", encoding="utf-8")
    try:
        os.link(fresh, path)  # two first runs at once: one of them wins
    except FileExistsError:
        pass
    finally:
        fresh.unlink()
    return path.read_text(encoding="utf-8").strip()


def expanded(path: str) -> Path:
    """A path that a user has written, with the home that its `~` means; one of a user that there is not stays as it is
    written, and is a file that nobody finds."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  `Path.expanduser` raises RuntimeError


def near(path: str | Path) -> str:
    """A path as commands of the present folder are given it: relative where it lies in there."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # this process's own folder was deleted
        return str(path)
    return str(Path(path).relative_to(here) if Path(path).is_relative_to(here) else path)
