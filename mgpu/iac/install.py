"""Set-up, part one: the Pulumi engine, found or installed. `python -m mgpu.iac.install` does all of set-up.

The engine is three files in one folder: the CLI `pulumi`, the language host `pulumi-language-python`, and the script
`pulumi-language-python-exec` which the host starts. No package index carries them, so they are taken from the first
of these that has them:

1. `pulumi` on PATH, new enough, with its Python language host beside it
2. our cache, `$XDG_CACHE_HOME/mgpu/pulumi/<version>/`
3. the official release archive, checked against the official list of SHA-256 sums. Both come over TLS from one
   origin: the sum guards against a damaged download, not against an origin that has been taken over.
4. the published Go modules, which Go checks against its public checksum database

Standard library only: it runs on what a bare `uv sync` leaves, and fast.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import http.client
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from mgpu.errors import StackError
from mgpu.iac import environment

VERSION = "3.259.0"
"""The engine that is installed: the version of the SDK that pyproject.toml pins."""

MINIMUM = (3, 259, 0)
"""The oldest engine taken from PATH: our provider's interface is experimental, and nothing older was tried with it."""

FILES = ("pulumi", "pulumi-language-python", "pulumi-language-python-exec")
RELEASES = "https://get.pulumi.com/releases/sdk"
CONNECT_S = 5.0  # for the small file of sums: a machine without a way out learns it soon
DOWNLOAD_S = 60.0  # without a byte
VERSION_S = 30.0
MODULES_S = 900.0
BUILD_S = 3600.0  # 4 minutes on 2 cores; a small machine may need many more

Report = Callable[[str], None]
Origin = Literal["PATH", "cache", "release", "modules"]


@dataclass(frozen=True)
class Engine:
    """An engine that can be used: `pulumi` is the CLI, `host_dir` the folder of its Python language host."""

    pulumi: Path
    host_dir: Path
    version: str
    origin: Origin

    @property
    def path(self) -> tuple[Path, ...]:
        """The folders that PATH needs, each once."""
        return tuple(dict.fromkeys((self.pulumi.parent, self.host_dir)))


class Unavailable(Exception):
    """One source has no engine for this machine; the next one is tried."""


class Outside:
    """Everything that set-up asks of the world: programs and the network. Tests pass a fake."""

    def which(self, name: str) -> Path | None:
        """Where PATH has the program `name`."""
        found = shutil.which(name)
        return Path(found) if found else None

    def run(
        self, argv: Sequence[str | Path], timeout_s: float, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> str:
        """The standard output of a program; Unavailable with its last words when it fails or takes too long."""
        try:
            done = subprocess.run(  # noqa: S603  an argument list, no shell
                argv, cwd=cwd, env=env, timeout=timeout_s, capture_output=True, text=True, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(str(error)) from error
        if done.returncode:
            raise Unavailable(f"`{Path(argv[0]).name} {argv[1]}` failed: {_last_line(done.stderr or done.stdout)}")
        return done.stdout

    def open(self, url: str, timeout_s: float) -> tuple[IO[bytes], int | None]:
        """The body behind `url` and its size in bytes, if told; OSError when it cannot be had."""
        answer = urllib.request.urlopen(url, timeout=timeout_s)  # noqa: S310  the caller's URL is a constant https one
        return answer, answer.length


def find_engine(outside: Outside | None = None) -> Engine | None:
    """The engine that is here already, on PATH or in the cache; None when there is none. Needs no network."""
    return _on_path(outside or Outside()) or _in_folder(cache_dir() / VERSION, "cache")


def install_engine(report: Report, outside: Outside | None = None) -> Engine:
    """The engine, installed into the cache if it is not here; StackError when no source has it."""
    outside = outside or Outside()
    return find_engine(outside) or _install(report, outside)


def cache_dir() -> Path:
    """The folder of the engines that mgpu installed, one folder a version."""
    return environment.xdg("XDG_CACHE_HOME", ".cache") / "mgpu" / "pulumi"


def _on_path(outside: Outside) -> Engine | None:
    pulumi = outside.which("pulumi")
    if pulumi is None:
        return None
    try:
        version = outside.run([pulumi, "version"], VERSION_S).strip().removeprefix("v")
    except Unavailable:
        return None
    # A package manager often puts a link on PATH and keeps the host beside the real file.
    hosts = (folder for folder in (pulumi.parent, pulumi.resolve().parent) if _executable(folder, FILES[1:]))
    host = next(hosts, None)
    return Engine(pulumi, host, version, "PATH") if host and _new_enough(version) else None


def _new_enough(version: str) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers is None:
        return False
    parsed = tuple(int(number) for number in numbers.groups())
    return parsed[0] == MINIMUM[0] and parsed >= MINIMUM


def _in_folder(folder: Path, origin: Origin) -> Engine | None:
    return Engine(folder / FILES[0], folder, VERSION, origin) if _executable(folder, FILES) else None


def _executable(folder: Path, names: Sequence[str]) -> bool:
    return all(os.access(folder / name, os.X_OK) for name in names)


def _install(report: Report, outside: Outside) -> Engine:
    with _locked(cache_dir(), report) as root:
        # Another set-up may have finished while this one waited.
        return _in_folder(root / VERSION, "cache") or _install_first_of((_from_release, _from_modules), root, report, outside)


Source = Callable[[Path, Report, Outside], Origin]


def _install_first_of(sources: Sequence[Source], root: Path, report: Report, outside: Outside) -> Engine:
    reasons: list[str] = []
    for source in sources:
        try:
            with tempfile.TemporaryDirectory(dir=root, prefix=_SCRATCH) as scratch:
                return _install_from(source, Path(scratch), root, report, outside)
        except Unavailable as reason:
            report(f"not so: {reason}")
            reasons.append(str(reason))
    raise StackError(
        f"The Pulumi engine {VERSION} is not on this machine and could not be installed.",
        "; ".join(reasons),
        "Install it by hand (https://www.pulumi.com/docs/install/), "
        f"{VERSION} or newer, so that `pulumi` is on PATH; or install Go 1.25 or newer; then do the set-up again.",
    )


def _install_from(source: Source, scratch: Path, root: Path, report: Report, outside: Outside) -> Engine:
    staged = scratch / "engine"
    staged.mkdir()
    origin = source(staged, report, outside)
    says = outside.run([staged / "pulumi", "version"], VERSION_S).strip().removeprefix("v")
    if says != VERSION:
        raise Unavailable(f"the engine calls itself {says!r}, expected {VERSION}")
    _publish(staged, root / VERSION, scratch)
    report(f"the Pulumi engine {VERSION} is in {root / VERSION}")
    engine = _in_folder(root / VERSION, origin)
    if engine is None:
        raise Unavailable(f"{root / VERSION} lacks one of {', '.join(FILES)}")
    return engine


_SCRATCH = ".making-"


@contextmanager
def _locked(root: Path, report: Report) -> Iterator[Path]:
    """One set-up at a time; what a killed one left half made is cleared away."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as lock:
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


# ---- the official release archive


def _from_release(into: Path, report: Report, outside: Outside) -> Origin:
    name = f"pulumi-v{VERSION}-{_platform()}.tar.gz"
    report(f"looking for the official Pulumi engine {VERSION} at {RELEASES}")
    archive = into.parent / name
    try:
        expected = _expected_sum(name, outside)
        _download(f"{RELEASES}/{name}", archive, report, outside)
        _check_sum(archive, expected)
        _unpack(archive, into)
    except (OSError, http.client.HTTPException, tarfile.TarError, EOFError) as error:
        raise Unavailable(f"the official release could not be had ({getattr(error, 'reason', error)})") from error
    return "release"


def _platform() -> str:
    systems = {"Linux": "linux", "Darwin": "darwin"}
    machines = {"x86_64": "x64", "aarch64": "arm64", "arm64": "arm64"}
    try:
        return f"{systems[platform.system()]}-{machines[platform.machine()]}"
    except KeyError as unknown:
        raise Unavailable(f"there is no official release for {unknown}") from unknown


def _expected_sum(name: str, outside: Outside) -> str:
    stream, _ = outside.open(f"{RELEASES}/pulumi-{VERSION}-checksums.txt", CONNECT_S)
    with stream:
        sums = {words[-1]: words[0] for line in stream.read().decode().splitlines() if (words := line.split())}
    try:
        return sums[name]
    except KeyError as absent:
        raise Unavailable(f"the official list of checksums does not name {name}") from absent


def _download(url: str, to: Path, report: Report, outside: Outside) -> None:
    stream, size = outside.open(url, DOWNLOAD_S)
    about = f"{size / 1e6:.0f} MB, " if size else ""
    report(f"downloading {url} ({about}done once, cached in {cache_dir()})")
    with stream, to.open("wb") as file:
        shutil.copyfileobj(stream, file, 1 << 20)


def _check_sum(archive: Path, expected: str) -> None:
    with archive.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise Unavailable(f"{archive.name} has SHA-256 {actual}, the official list says {expected}: it was thrown away")


def _unpack(archive: Path, into: Path) -> None:
    """Takes the three files that are needed, by name: the archive holds the hosts of six more languages."""
    with tarfile.open(archive) as tar:
        for name in FILES:
            try:
                member = tar.extractfile(f"pulumi/{name}")
            except KeyError:
                member = None
            if member is None:
                raise Unavailable(f"{archive.name} holds no pulumi/{name}")
            with member, (into / name).open("wb") as file:
                shutil.copyfileobj(member, file)
            (into / name).chmod(0o755)


# ---- the published Go modules


@dataclass(frozen=True)
class _GoProgram:
    name: str
    module: str
    version: str
    package: str
    ldflags: str = "-s -w"


_SDK = "github.com/pulumi/pulumi/sdk/v3"
_CLI = _GoProgram(
    "pulumi",
    "github.com/pulumi/pulumi/pkg/v3",
    f"v{VERSION}",
    "github.com/pulumi/pulumi/pkg/v3/cmd/pulumi",
    f"-s -w -X {_SDK}/go/common/version.Version=v{VERSION}",
)
# The newest published version of the module that still holds the Python language host.
_HOST = _GoProgram("pulumi-language-python", _SDK, "v3.79.0", f"{_SDK}/python/cmd/pulumi-language-python")


def _from_modules(into: Path, report: Report, outside: Outside) -> Origin:
    go = outside.which("go")
    if go is None:
        raise Unavailable("no Go on PATH to build it from its published modules")
    report(
        "building the Pulumi engine from its published Go modules "
        f"(about 4 minutes on 2 cores; done once, cached in {cache_dir()})"
    )
    for program in (_CLI, _HOST):
        folder = _build(program, into, go, outside)
    script = _module_dir(_HOST, folder, go, outside) / "python" / "cmd" / FILES[2]
    shutil.copyfile(script, into / FILES[2])
    (into / FILES[2]).chmod(0o755)
    return "modules"


def _build(program: _GoProgram, into: Path, go: Path, outside: Outside) -> Path:
    """Builds one program in a scratch module of its own and returns that module's folder."""
    folder = into.parent / f"module-{program.name}"
    folder.mkdir()
    (folder / "go.mod").write_text(f"module mgpu.invalid/engine\n\ngo 1.25\n\nrequire {program.module} {program.version}\n")
    # A build tag that is never set: the import makes `go mod tidy` keep the requirement.
    (folder / "tools.go").write_text(f'//go:build tools\n\npackage tools\n\nimport _ "{program.package}"\n')
    env = _go_env()
    outside.run([go, "mod", "tidy"], MODULES_S, folder, env)
    build = [go, "build", "-trimpath", "-buildvcs=false", "-ldflags", program.ldflags, "-o", into / program.name]
    outside.run([*build, program.package], BUILD_S, folder, env)
    return folder


def _module_dir(program: _GoProgram, folder: Path, go: Path, outside: Outside) -> Path:
    listed = outside.run([go, "list", "-m", "-f", "{{.Dir}}", program.module], MODULES_S, folder, _go_env())
    return Path(listed.strip())


def _go_env() -> dict[str, str]:
    """The user's environment without their own workspace and flags; without cgo no C compiler is needed."""
    return {**os.environ, "GOWORK": "off", "GOFLAGS": "", "CGO_ENABLED": "0"}


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"


# ---- all of set-up


def make_stack(project: Path, engine: Engine, outside: Outside | None = None) -> bool:
    """Creates the stack `dev` if the project has none; False when the folder holds no Pulumi program."""
    program = project / "Pulumi.yaml"
    if not program.exists():
        return False
    name = re.search(r"^name:\s*[\"']?([\w.-]+)", program.read_text(), re.MULTILINE)
    folder = environment.backend_dir() / ".pulumi" / "stacks" / (name[1] if name else "")
    if not any(folder.glob(f"{environment.STACK}.json*")):
        env = environment.process_env(environment.engine_env(engine.path))
        argv = [engine.pulumi, "stack", "init", environment.STACK, "--non-interactive"]
        try:
            (outside or Outside()).run(argv, VERSION_S, project, env)
        except Unavailable as reason:
            raise StackError(
                f"The stack {environment.STACK} of {program} could not be made.",
                str(reason),
                "Mend what the line above names, then do the set-up again.",
            ) from reason
    return True


def set_up(project: Path, report: Report, outside: Outside | None = None) -> Engine:
    """The engine, the passphrase, the backend, `.mgpu/env` and the stack `dev`: each made only if it is absent."""
    environment.make_passphrase()
    environment.make_backend_dir()
    engine = install_engine(report, outside)
    environment.write_env(project, environment.engine_env(engine.path))
    make_stack(project, engine, outside)
    return engine


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m mgpu.iac.install [--project DIR]`; the exit code is StackError's when there is no engine."""
    parser = argparse.ArgumentParser(prog="python -m mgpu.iac.install", description="Sets up the Pulumi engine.")
    parser.add_argument("--project", type=Path, default=Path(), help="folder of Pulumi.yaml (default: this one)")
    project = parser.parse_args(argv).project.resolve()
    try:
        set_up(project, lambda line: print(f"mgpu: {line}", file=sys.stderr, flush=True))  # noqa: T201  runs before mgpu
    except StackError as error:
        print(error, file=sys.stderr)  # noqa: T201  the console module needs packages that may not be here yet
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
