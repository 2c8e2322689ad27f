"""What mgpu's images are built from without a network: see scripts/make-base-image.sh and its neighbour."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fakes.engine import Engine

_SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
BASE = "trainer-base:1"
# Debian's base has Python 3.11; torch is not built in, which would be 5 GB, but mounted where the image has its place
ARGS = {"BASE": BASE, "PYTHON_VERSION": "3.11", "TORCH": "", "CUDA": "", "CUDA_COMPAT": ""}
BUILD_S = 600


@dataclass(frozen=True)
class Index:
    """Wheels on loopback."""

    url: str
    asked: list[str]


@contextmanager
def serving(wheels: Path) -> Iterator[Index]:
    """An index of these, while the block runs."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            asked.append(str(args[0]))

    handler = functools.partial(Handler, directory=str(wheels))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Index(f"http://127.0.0.1:{server.server_address[1]}/", asked)
        server.shutdown()


def context(source: Path, folder: Path, index: Index, more: Mapping[str, str], certificate: str = "") -> Path:
    """A shipped context, and what is for the build alone, as mgpu.image.build.archive packs it."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    secrets = folder / ".build" / "secrets"
    secrets.mkdir(parents=True)
    (folder / ".build" / "ca.pem").write_text(certificate)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": index.url, **more}.items():
        (secrets / name).write_text(value)
    return folder


def build(
    engine: Engine, folder: Path, tag: str, args: Mapping[str, str] = ARGS, **more: str
) -> subprocess.CompletedProcess[str]:
    """Builds it with Docker's classic builder."""
    options = [part for name, value in {**args, **more}.items() for part in ("--build-arg", f"{name}={value}")]
    environment = {**os.environ, **engine.env, "DOCKER_BUILDKIT": "0"}
    command = ["docker", "build", "--network", "host", "--tag", tag, *options, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BUILD_S, check=False)


def base(require: Callable[[str, bool, str], None]) -> Path:
    """The base's file system, for `docker import`."""
    return _kept("make-base-image.sh", require)


def wheels(require: Callable[[str, bool, str], None]) -> Path:
    """The folder of the lock file's packages."""
    return _kept("fetch-image-wheels.sh", require)


def buildx(require: Callable[[str, bool, str], None]) -> Path:
    """Docker's program for BuildKit."""
    return _kept("setup-go-tools.sh", require, "buildx", "docker-buildx")


def _kept(script: str, require: Callable[[str, bool, str], None], capability: str = "trainer", *what: str) -> Path:
    """What a script of set-up has made; nothing is made or fetched here."""
    done = subprocess.run(["sh", _SCRIPTS / script, "--kept", *what], capture_output=True, text=True, check=False)
    require(capability, done.returncode == 0, f"run `{' '.join([f'scripts/{script}', *what])}` first")
    return Path(done.stdout.strip())
