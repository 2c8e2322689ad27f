"""The Pulumi program that mgpu carries, and how a user's folder gets a copy of it."""

from __future__ import annotations

import re
import shutil
import sysconfig
from itertools import count
from pathlib import Path

import yaml

import mgpu
from mgpu import paths
from mgpu.errors import InputError, StackError
from mgpu.iac.environment import backend_dir
from mgpu.iac.naming import BASE_PROJECT, PROJECT

_BASE = "base"  # the folder of stack base in infra/
_CARRIED = Path(mgpu.__file__).parent / "_data"
_CHECKOUT = Path(mgpu.__file__).parent.parent


def project_files(dest: Path, *, overwrite: bool = False) -> tuple[Path, ...]:
    """Writes `Pulumi.yaml` and `infra/` into a folder, for the user to own; the paths that were written.

    Raises:
        InputError: one of them is there already, and `overwrite` is false: nothing was written.
    """
    program, settings = dest / "infra", dest / "Pulumi.yaml"
    there = [path for path in (settings, program) if path.exists()]
    if there and not overwrite:
        names = " and ".join(path.name for path in there)
        raise InputError(f"{dest} has {names} already", "They may hold changes of yours.", "Move them away first.")
    dest.mkdir(parents=True, exist_ok=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_source(), program, dirs_exist_ok=True, ignore=ignored)
    settings.write_text(_settings(_new_name(dest), "Machines for distributed training, one fleet a stack", "infra/"))
    (program / _BASE / "Pulumi.yaml").write_text(_base_settings())
    return settings, program


def base_program(start: Path) -> Path:
    """The Pulumi program of stack `base`: the user's own, in the nearest folder above `start` that has one; else a copy
    of the one that mgpu carries, in the state folder."""
    for folder in (start.resolve(), *start.resolve().parents):
        if (folder / "infra" / _BASE / "Pulumi.yaml").is_file():
            return folder / "infra" / _BASE
    copy = paths.state_dir() / "base" / "program"
    shutil.copytree(_source() / _BASE, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "Pulumi.yaml").write_text(_base_settings())
    return copy


def project_name(project: Path) -> str:
    """The name in a folder's Pulumi.yaml.

    Raises:
        StackError: there is none.
    """
    try:
        return str(yaml.safe_load((project / "Pulumi.yaml").read_text())["name"])
    except (OSError, yaml.YAMLError, TypeError, KeyError) as error:
        raise StackError(
            f"{project} is not a Pulumi project",
            f"Its Pulumi.yaml cannot be read: {error}",
            "Run `mgpu init` there: it writes Pulumi.yaml and infra/.",
        ) from error


def _source() -> Path:
    """A wheel carries `infra/` as package data; in a checkout it lies beside the package."""
    carried = _CARRIED / "infra"
    return carried if carried.is_dir() else _CHECKOUT / "infra"


def _new_name(dest: Path) -> str:
    """A project name that the backend does not have yet: two projects of one name would share their stacks."""
    base = re.sub(r"[^a-z0-9]+", "-", dest.resolve().name.lower()).strip("-")[:24] or PROJECT
    taken = backend_dir() / ".pulumi" / "stacks"
    names = (base if n == 1 else f"{base}-{n}" for n in count(1))
    return next(name for name in names if name not in (PROJECT, BASE_PROJECT) and not (taken / name).exists())


def _base_settings() -> str:
    return _settings(BASE_PROJECT, "What machines at AWS stand on, one stack for each account and region")


def _settings(name: str, description: str, main: str = "") -> str:
    # The folder of our own plugin is named: found on PATH alone, the engine would warn at every command.
    plugin = {"name": "mgpu", "path": sysconfig.get_path("scripts")}
    settings = {
        "name": name,
        "description": description,
        "runtime": "python",
        **({"main": main} if main else {}),
        "plugins": {"providers": [plugin]},
    }
    return yaml.safe_dump(settings, sort_keys=False)
