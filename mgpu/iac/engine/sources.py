"""Where an engine comes from when none is here: the official release archive, and the published Go modules.

Each source fills a folder with the three `FILES` or raises `SourceUnavailable`. What they touch outside that folder
goes through `Outside`, which tests replace.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import platform
import re
import shutil
import subprocess
import tarfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

VERSION = "3.259.0"
"""The engine that is installed: the version of the SDK that pyproject.toml pins."""

FILES = ("pulumi", "pulumi-language-python", "pulumi-language-python-exec")
"""The CLI, the Python language host, and the script that the host starts; they lie in one folder."""

RELEASES = "https://get.pulumi.com/releases/sdk"
CONNECT_S = 5.0  # for the small file of sums: a machine without a way out learns it soon
DOWNLOAD_S = 60.0  # without a byte
MODULES_S = 900.0
BUILD_S = 3600.0  # 4 minutes on 2 cores; a small machine may need many more

Report = Callable[[str], None]
Origin = Literal["PATH", "cache", "release", "modules"]


class SourceUnavailable(Exception):
    """One source has no engine for this machine; the next one is tried."""


class NoRoom(SourceUnavailable):
    """A disk is full, or a quota is used up: the next source would fail, too, after minutes."""


def no_room(error: BaseException) -> bool:
    """Whether this error is that of a disk without room."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


class Outside:
    """Everything that set-up asks of the world: programs and the network. Tests pass a fake."""

    def which(self, name: str) -> Path | None:
        """Where PATH has the program `name`."""
        found = shutil.which(name)
        return Path(found) if found else None

    def run(
        self,
        argv: Sequence[str | Path],
        timeout_s: float,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """The standard output of a program; SourceUnavailable with its last words when it fails or takes too long."""
        try:
            done = subprocess.run(
                argv,
                cwd=cwd,
                env=env,
                timeout=timeout_s,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SourceUnavailable(str(error)) from error
        if done.returncode:
            raise _failed(f"`{Path(argv[0]).name} {argv[1]}` failed", done.stderr or done.stdout)
        return done.stdout

    def open(self, url: str, timeout_s: float) -> tuple[IO[bytes], int | None]:
        """The body behind `url` and its size in bytes, if told; OSError when it cannot be had."""
        answer = urllib.request.urlopen(url, timeout=timeout_s)  # noqa: S310  the caller's URL is a constant https one
        return answer, answer.length


# ---- the official release archive


def from_release(into: Path, report: Report, outside: Outside) -> Origin:
    """Fills `into` from the official release archive, once its SHA-256 sum is the one on the official list."""
    name = f"pulumi-v{VERSION}-{_platform()}.tar.gz"
    report(f"looking for the official Pulumi engine {VERSION} at {RELEASES}")
    archive = into.parent / name
    try:
        expected = _expected_sum(name, outside)
        _download(f"{RELEASES}/{name}", archive, report, outside)
        _check_sum(archive, expected)
        _unpack(archive, into)
    except (OSError, http.client.HTTPException, tarfile.TarError, EOFError) as error:
        kind = NoRoom if no_room(error) else SourceUnavailable
        raise kind(f"the official release could not be had ({getattr(error, 'reason', error)})") from error
    return "release"


def _platform() -> str:
    systems = {"Linux": "linux", "Darwin": "darwin"}
    machines = {"x86_64": "x64", "aarch64": "arm64", "arm64": "arm64"}
    try:
        return f"{systems[platform.system()]}-{machines[platform.machine()]}"
    except KeyError as unknown:
        raise SourceUnavailable(f"there is no official release for {unknown}") from unknown


def _expected_sum(name: str, outside: Outside) -> str:
    stream, _ = outside.open(f"{RELEASES}/pulumi-{VERSION}-checksums.txt", CONNECT_S)
    with stream:
        sums = {words[-1]: words[0] for line in stream.read().decode().splitlines() if (words := line.split())}
    try:
        return sums[name]
    except KeyError as absent:
        raise SourceUnavailable(f"the official list of checksums does not name {name}") from absent


def _download(url: str, to: Path, report: Report, outside: Outside) -> None:
    stream, size = outside.open(url, DOWNLOAD_S)
    about = f"{size / 1e6:.0f} MB, " if size else ""
    report(f"downloading {url} ({about}done once, then cached)")
    with stream, to.open("wb") as file:
        shutil.copyfileobj(stream, file, 1 << 20)


def _check_sum(archive: Path, expected: str) -> None:
    with archive.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise SourceUnavailable(
            f"{archive.name} has SHA-256 {actual}, the official list says {expected}: it was thrown away"
        )


def _unpack(archive: Path, into: Path) -> None:
    """Takes the three files that are needed, by name: the archive holds the hosts of six more languages."""
    with tarfile.open(archive) as tar:
        for name in FILES:
            try:
                member = tar.extractfile(f"pulumi/{name}")
            except KeyError:
                member = None
            if member is None:
                raise SourceUnavailable(f"{archive.name} holds no pulumi/{name}")
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


def from_modules(into: Path, report: Report, outside: Outside) -> Origin:
    """Fills `into` by building the two programs from their published Go modules; needs Go, and no C compiler."""
    go = outside.which("go")
    if go is None:
        raise SourceUnavailable("no Go on PATH to build it from its published modules")
    report(
        "building the Pulumi engine from its published Go modules (about 4 minutes on 2 cores; done once, then cached)"
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
    needs = f"{program.module} {program.version}"
    (folder / "go.mod").write_text(f"module mgpu.invalid/engine\n\ngo 1.25\n\nrequire {needs}\n", encoding="utf-8")
    # A build tag that is never set: the import makes `go mod tidy` keep the requirement.
    (folder / "tools.go").write_text(
        f'//go:build tools\n\npackage tools\n\nimport _ "{program.package}"\n', encoding="utf-8"
    )
    env = _go_env()
    outside.run([go, "mod", "tidy"], MODULES_S, folder, env)
    build = [go, "build", "-trimpath", "-buildvcs=false", "-ldflags", program.ldflags, "-o", into / program.name]
    outside.run([*build, program.package], BUILD_S, folder, env)
    return folder


def _module_dir(program: _GoProgram, folder: Path, go: Path, outside: Outside) -> Path:
    listed = outside.run([go, "list", "-m", "-f", "{{.Dir}}", program.module], MODULES_S, folder, _go_env())
    return Path(listed.strip())


def _go_env() -> dict[str, str]:
    """The user's environment without their own workspace and flags; without cgo no C compiler is needed. Go finds no
    place for what it downloads where nothing names a home."""
    return {"HOME": str(Path.home()), **os.environ, "GOWORK": "off", "GOFLAGS": "", "CGO_ENABLED": "0"}


_FULL = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)


def _failed(what: str, words: str) -> SourceUnavailable:
    """With the program's last line; or with the one about a full disk, which is seldom the last."""
    lines = [line.strip() for line in words.strip().splitlines()] or ["it said nothing"]
    full = [line for line in lines if _FULL.search(line)]
    return NoRoom(f"{what}: {full[-1]}") if full else SourceUnavailable(f"{what}: {lines[-1]}")
