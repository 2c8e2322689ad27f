"""Set-up: the Pulumi engine, found or installed. `python -m mgpu.iac.engine.install` does all of set-up.

The engine is three files in one folder: the CLI `pulumi`, the language host `pulumi-language-python`, and the script
`pulumi-language-python-exec` which the host starts. No package index carries them, so they are taken from the first
of these that has them:

1. `pulumi` on PATH, new enough, with its Python language host beside it
2. our cache, `$XDG_CACHE_HOME/mgpu/pulumi/<version>/`
3. the official release archive, checked against the official list of SHA-256 sums. Both come over TLS from one
   origin: the sum guards against a damaged download, not against an origin that has been taken over.
4. the published Go modules, which Go checks against its public checksum database

It imports little, so that it starts in no time.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mgpu import paths
from mgpu.errors import StackError
from mgpu.iac import environment
from mgpu.iac.engine.sources import (
    FILES,
    VERSION,
    NoRoom,
    Origin,
    Outside,
    Report,
    SourceUnavailable,
    from_modules,
    from_release,
    no_room,
)

MINIMUM = (3, 259, 0)
"""The oldest engine taken from PATH: our provider's interface is experimental, and nothing older was tried with it."""

VERSION_S = 30.0
STACK_S = 60.0


@dataclass(frozen=True)
class PulumiEngine:
    """An engine that can be used: `pulumi` is the CLI, `host_dir` the folder of its Python language host."""

    pulumi: Path
    host_dir: Path
    version: str
    origin: Origin

    @property
    def path(self) -> tuple[Path, ...]:
        """The folders that PATH needs, each once."""
        return tuple(dict.fromkeys((self.pulumi.parent, self.host_dir)))


def find_engine(outside: Outside | None = None) -> PulumiEngine | None:
    """The engine that is here already, on PATH or in the cache; None when there is none. Needs no network."""
    return _on_path(outside or Outside()) or _in_folder(cache_dir() / VERSION, "cache")


def install_engine(report: Report, outside: Outside | None = None) -> PulumiEngine:
    """The engine, installed into the cache if it is not here; StackError when no source has it."""
    outside = outside or Outside()
    return find_engine(outside) or _install(report, outside)


def cache_dir() -> Path:
    """The folder of the engines that mgpu installed, one folder a version."""
    return paths.cache_dir() / "pulumi"


def _on_path(outside: Outside) -> PulumiEngine | None:
    pulumi = outside.which("pulumi")
    if pulumi is None:
        return None
    try:
        version = _ask_version(pulumi, outside)
    except SourceUnavailable:
        return None
    # A package manager often puts a link on PATH and keeps the host beside the real file.
    hosts = (folder for folder in (pulumi.parent, pulumi.resolve().parent) if _executable(folder, FILES[1:]))
    host = next(hosts, None)
    return PulumiEngine(pulumi, host, version, "PATH") if host and _new_enough(version) else None


def _ask_version(pulumi: Path, outside: Outside) -> str:
    # Even this question leaves a log in PULUMI_HOME; the user's own ~/.pulumi is not ours to write to.
    env = {**os.environ, "PULUMI_SKIP_UPDATE_CHECK": "1", "PULUMI_HOME": str(environment.pulumi_home())}
    return outside.run([pulumi, "version"], VERSION_S, env=env).strip().removeprefix("v")


def _new_enough(version: str) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers is None:
        return False
    parsed = tuple(int(number) for number in numbers.groups())
    return parsed[0] == MINIMUM[0] and parsed >= MINIMUM


def _in_folder(folder: Path, origin: Origin) -> PulumiEngine | None:
    return PulumiEngine(folder / FILES[0], folder, VERSION, origin) if _executable(folder, FILES) else None


def _executable(folder: Path, names: Sequence[str]) -> bool:
    return all(os.access(folder / name, os.X_OK) for name in names)


def _install(report: Report, outside: Outside) -> PulumiEngine:
    with _locked(cache_dir(), report) as root:
        # Another set-up may have finished while this one waited.
        finished = _in_folder(root / VERSION, "cache")
        return finished or _install_first_of((from_release, from_modules), root, report, outside)


Source = Callable[[Path, Report, Outside], Origin]


def _install_first_of(sources: Sequence[Source], root: Path, report: Report, outside: Outside) -> PulumiEngine:
    reasons: list[str] = []
    for source in sources:
        try:
            with tempfile.TemporaryDirectory(dir=root, prefix=_SCRATCH) as scratch:
                return _install_from(source, Path(scratch), root, report, outside)
        except NoRoom as reason:
            raise _full(str(reason), root) from reason
        except OSError as error:
            if no_room(error):
                raise _full(str(error), root) from error
            raise
        except SourceUnavailable as reason:
            report(f"no: {reason}")
            reasons.append(str(reason))
    raise StackError(
        f"The Pulumi engine {VERSION} is not on this machine and could not be installed.",
        "; ".join(reasons),
        "Install it by hand (https://www.pulumi.com/docs/install/), "
        f"{VERSION} or newer, so that `pulumi` is on PATH; or install Go 1.25 or newer; then do the set-up again.",
    )


def _full(reason: str, root: Path) -> StackError:
    folders = dict.fromkeys((root, Path(tempfile.gettempdir())))
    free = ", ".join(f"{shutil.disk_usage(folder).free / 1e6:.0f} MB in {folder}" for folder in folders)
    return StackError(
        f"The Pulumi engine {VERSION} could not be installed: there is no room.",
        f"{reason}. Free now: {free}.",
        "Make room, then do the set-up again.",
    )


def _install_from(source: Source, scratch: Path, root: Path, report: Report, outside: Outside) -> PulumiEngine:
    staged = scratch / "engine"
    staged.mkdir()
    origin = source(staged, report, outside)
    if not _executable(staged, FILES):
        raise SourceUnavailable(f"the {origin} made no complete engine: {', '.join(FILES)}")
    if (says := _ask_version(staged / "pulumi", outside)) != VERSION:
        raise SourceUnavailable(f"the engine calls itself {says!r}, expected {VERSION}")
    _publish(staged, root / VERSION, scratch)
    report(f"the Pulumi engine {VERSION} is in {root / VERSION}")
    return PulumiEngine(root / VERSION / FILES[0], root / VERSION, VERSION, origin)


_SCRATCH = ".making-"


@contextmanager
def _locked(root: Path, report: Report) -> Iterator[Path]:
    """One set-up at a time; what a killed one left half made is cleared away."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another set-up on this machine to finish with the Pulumi engine")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in root.glob(f"{_SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield root


def _publish(staged: Path, target: Path, scratch: Path) -> None:
    """Moves a complete folder into place: at any moment `target` is whole or absent."""
    for path in (*staged.iterdir(), staged):
        _fsync(path)
    if target.exists():  # somebody took a file out of it, or it would have been found
        target.rename(scratch / "broken")
    staged.rename(target)
    _fsync(target.parent)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- all of set-up


def set_up(project: Path, report: Report, outside: Outside | None = None) -> PulumiEngine:
    """The passphrase, the backend, the engine, `.mgpu/env` and the stack `dev`: each made only if it is absent."""
    outside = outside or Outside()
    environment.make_passphrase()
    environment.make_backend_dir()
    engine = install_engine(report, outside)
    environment.write_env(project, environment.engine_env(engine.path))
    make_stack(project, engine, outside)
    return engine


def make_stack(project: Path, engine: PulumiEngine, outside: Outside) -> None:
    """Creates the stack `dev` if the backend has none of this project; does nothing in a folder without Pulumi.yaml."""
    program = project / "Pulumi.yaml"
    if not program.exists() or _has_stack(program):
        return
    env = environment.process_env(environment.engine_env(engine.path))
    try:
        outside.run([engine.pulumi, "stack", "init", environment.STACK, "--non-interactive"], STACK_S, project, env)
    except SourceUnavailable as reason:
        if _has_stack(program):  # another set-up was faster
            return
        raise StackError(
            f"The stack {environment.STACK} of {program} could not be made.",
            str(reason),
            "Mend that, then do the set-up again. "
            f"(An old Pulumi.{environment.STACK}.yaml needs the passphrase it was made with: else move it away.)",
        ) from reason


def _has_stack(program: Path) -> bool:
    from mgpu.iac.engine import state_file

    # Read from the backend itself: asking the CLI takes ten times as long as all the rest of a second set-up.
    name = re.search(r"^name:\s*[\"']?([\w.-]+)", program.read_text(encoding="utf-8"), re.MULTILINE)
    return name is not None and state_file.state_key(name[1], environment.STACK) is not None


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m mgpu.iac.engine.install [--project DIR]`; the exit code is StackError's when there is no engine."""
    parser = argparse.ArgumentParser(prog="python -m mgpu.iac.engine.install", description="Sets up the Pulumi engine.")
    parser.add_argument("--project", type=Path, default=Path(), help="folder of Pulumi.yaml (default: this one)")
    project = parser.parse_args(argv).project.resolve()
    try:
        set_up(project, lambda line: _to_stderr(f"set-up: {line}"))
    except StackError as error:
        _to_stderr(str(error))
        return error.exit_code
    except OSError as error:  # no room, no permission: not a bug, and the folder is in the message
        _to_stderr(f"Set-up stopped.\n{error}\nMend that, then do the set-up again.")
        return StackError.exit_code
    return 0


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  set-up runs before there is a console


if __name__ == "__main__":
    sys.exit(main())
