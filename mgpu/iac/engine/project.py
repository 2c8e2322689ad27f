"""The Pulumi program that mgpu carries, and how a user's folder gets a copy of it."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from itertools import count
from pathlib import Path

import yaml

import mgpu
from mgpu import paths
from mgpu.errors import InputError, StackError
from mgpu.iac import environment
from mgpu.iac.engine import state_file
from mgpu.iac.naming import BASE_PROJECT, PASSES_PROJECT, PROJECT, RUNS_PROJECT

OURS = (PROJECT, BASE_PROJECT, PASSES_PROJECT, RUNS_PROJECT)
_PLUGIN = "mgpu"
# by their folder in infra/: programs of projects of their own
_APART = {
    "base": (BASE_PROJECT, "What machines at AWS stand on, one stack for each account and region"),
    "passes": (PASSES_PROJECT, "What calls mgpu reconcile in an AWS account, one stack for each backend"),
}
_CARRIED = Path(mgpu.__file__).parent / "_data"
_CHECKOUT = Path(mgpu.__file__).parent.parent


def project_files(dest: Path, *, overwrite: bool = False) -> tuple[Path, ...]:
    """Writes `Pulumi.yaml` and `infra/` into a folder, for the user to own; the paths that were written.

    Raises:
        InputError: one of them is there already, and `overwrite` is false: nothing was written.
    """
    infra, settings = dest / "infra", dest / "Pulumi.yaml"
    there = [path for path in (settings, infra) if path.exists()]
    if there and not overwrite:
        names = " and ".join(path.name for path in there)
        raise InputError(f"{dest} has {names} already", "They may hold changes of yours.", "Move them away first.")
    dest.mkdir(parents=True, exist_ok=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_source(), infra, dirs_exist_ok=True, ignore=ignored)
    settings.write_text(
        _settings(_new_name(dest), "Machines for distributed training, one fleet a stack", "infra/"), encoding="utf-8"
    )
    for name, settings_of in _APART.items():
        (infra / name / "Pulumi.yaml").write_text(_settings(*settings_of), encoding="utf-8")
    return settings, infra


def program_apart(name: str, start: Path) -> Path:
    """The Pulumi program `infra/<name>`, `base` or `passes`: the user's own, in the nearest folder above `start` that
    has one; else a copy of the one that mgpu carries, in the state folder."""
    for folder in (start.resolve(), *start.resolve().parents):
        if (folder / "infra" / name / "Pulumi.yaml").is_file():
            return folder / "infra" / name
    return _copied(_source() / name, paths.state_dir() / name / "program", _settings(*_APART[name]))


def program(start: Path) -> Path:
    """The folder of the Pulumi program that rents machines: the nearest one above `start` that has a Pulumi.yaml; else
    a copy of what mgpu carries, in the state folder."""
    for folder in (start.resolve(), *start.resolve().parents):
        if (folder / "Pulumi.yaml").exists():
            return folder
    settings = _settings(RUNS_PROJECT, "Machines for distributed training, one fleet a run", "infra/")
    return _copied(_source(), paths.state_dir() / "program", settings, "infra")


def _copied(source: Path, dest: Path, settings: str, below: str = "") -> Path:
    """A copy of a program; what is the same already is not touched, because an engine may be reading it."""
    wanted = {
        Path(below) / path.relative_to(source): path.read_bytes()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    for name, content in {**wanted, Path("Pulumi.yaml"): settings.encode()}.items():
        path = dest / name
        if path.is_file() and path.read_bytes() == content:
            continue
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.write_bytes(content)
        aside.replace(path)
    return dest


def name_backend(project: Path, url: str) -> None:
    """Has a project's settings name this backend. Raises InputError: they name another one."""
    path = project / "Pulumi.yaml"
    text = path.read_text(encoding="utf-8")
    known = (yaml.safe_load(text).get("backend") or {}).get("url")
    if known is None:
        path.write_text(text.rstrip("\n") + "\n" + yaml.safe_dump({"backend": {"url": url}}), encoding="utf-8")
    elif known != url:
        raise InputError(
            f"--backend {url}: {path} names {known}",
            "A project has one backend, and its stacks are there.",
            "`mgpu backend move` moves them; then change the file.",
        )


def keep_program(project: Path, dest: Path) -> None:
    """A copy of a Pulumi program and its settings, for other machines to end or repair what it has made.

    Raises:
        StackError: it has no settings.
        InputError: a file that cannot be copied.
    """
    from mgpu.remote.snapshot import scan

    project_name(project)
    text = (project / "Pulumi.yaml").read_text(encoding="utf-8")
    settings, root = yaml.safe_load(text), project.resolve()
    main = (root / str(settings.get("main") or ".")).resolve()  # a folder, or the file that is run
    source = main.parent if main.is_file() else main
    inside = source.relative_to(root) if source.is_relative_to(root) else Path("program")
    kept_as = inside / main.relative_to(source)
    shutil.rmtree(dest, ignore_errors=True)
    (dest / inside).mkdir(parents=True, mode=0o700)
    scan(source).write_to(dest / inside)
    if kept_as != Path(str(settings.get("main") or ".")):  # beside the settings, behind a link, a path of this machine
        text = yaml.safe_dump(settings | {"main": str(kept_as)}, sort_keys=False)
    (dest / "Pulumi.yaml").write_text(text, encoding="utf-8")


def settle(project: Path) -> None:
    """Makes the settings of a program that was kept name the plugin of this machine."""
    path = project / "Pulumi.yaml"
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    for plugin in (settings.get("plugins") or {}).get("providers") or ():
        if plugin.get("name") == _PLUGIN and plugin.get("path") != _scripts():
            plugin["path"] = _scripts()
            environment.replace(path, yaml.safe_dump(settings, sort_keys=False))  # an engine may be reading it


def project_name(project: Path) -> str:
    """The name in a folder's Pulumi.yaml.

    Raises:
        StackError: there is none.
    """
    try:
        return str(yaml.safe_load((project / "Pulumi.yaml").read_text(encoding="utf-8"))["name"])
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
    taken = {project for project, _, _ in state_file.stacks()}
    names = (base if n == 1 else f"{base}-{n}" for n in count(1))
    return next(name for name in names if name not in OURS and name not in taken)


def _scripts() -> str:
    return sysconfig.get_path("scripts")


def _settings(name: str, description: str, main: str = "") -> str:
    # The folder of our own plugin is named: found on PATH alone, the engine would warn at every command.
    plugin = {"name": _PLUGIN, "path": _scripts()}
    settings = {
        "name": name,
        "description": description,
        "runtime": "python",
        **({"main": main} if main else {}),
        "plugins": {"providers": [plugin]},
    }
    return yaml.safe_dump(settings, sort_keys=False)
