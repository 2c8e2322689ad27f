"""A small image that the agent runs in: a shell, this session's Python, and the packages that the agent needs."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from fakes.engine import Engine, Registry

# the agent imports these; of the others it only asks for the version, where no store is used
PACKAGES = ("awscrt", "pydantic", "pydantic_core", "annotated-types", "typing_extensions", "typing-inspection")
NAMES = ("boto3",)
_LEFT_OUT = ("test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "tkinter", "config-*", "*.a")


def build(engine: Engine, folder: Path, name: str = "python:1") -> None:
    """Makes the image; `folder` is an empty one that it is put together in."""
    root = folder / "root"
    program, library = Path(sys.executable).resolve(), Path(sysconfig.get_path("stdlib"))
    shutil.copytree(library, root / str(library).lstrip("/"), ignore=shutil.ignore_patterns(*_LEFT_OUT))
    (root / "bin").mkdir(exist_ok=True)
    (root / "bin" / "python3").symlink_to(program)
    _copy_packages(root / _site_packages().lstrip("/"))
    _copy_libraries(root, program)
    dockerfile(engine, folder, name, "FROM base:1\nCOPY root /\n")
    shutil.rmtree(root)


def dockerfile(engine: Engine, folder: Path, name: str, text: str) -> None:
    """Builds an image of this text, without a network."""
    (folder / "Dockerfile").write_text(text)
    env = {**os.environ, **engine.env, "DOCKER_BUILDKIT": "0"}
    engine.docker("build", "--network=none", "--quiet", f"--tag={name}", str(folder), env=env)


def push(engine: Engine, registry: Registry, name: str) -> str:
    """Pushes an image, forgets its copy here, and returns its reference by digest."""
    there = f"{registry.address}/{name}"
    engine.docker("tag", name, there)
    if registry.user:
        entry = ["login", f"--username={registry.user}", "--password-stdin", registry.address]
        engine.docker(*entry, input=registry.password)
    digest = re.search(r"sha256:[0-9a-f]{64}", engine.docker("push", there).stdout)
    assert digest
    if registry.user:
        engine.docker("logout", registry.address)
    for each in (there, name):
        engine.docker("rmi", each)
    return f"{there.rpartition(':')[0]}@{digest[0]}"


def _copy_libraries(root: Path, program: Path) -> None:
    """The interpreter, and the shared libraries of all that is there."""
    needed = {str(program)}
    for binary in (program, *root.rglob("*.so")):
        said = subprocess.run(["ldd", binary], capture_output=True, text=True).stdout
        needed |= set(re.findall(r"(/\S+) \(0x", said))
    for path in needed:
        there = root / path.lstrip("/")
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, there)


def _site_packages() -> str:
    code = "import site; print(site.getsitepackages()[0])"
    base = Path(sys.executable).resolve()
    return subprocess.run([base, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _copy_packages(into: Path) -> None:
    for name in (*PACKAGES, *NAMES):
        for file in importlib.metadata.distribution(name).files or ():
            if name in PACKAGES or file.name == "METADATA":
                there = into / file
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), there)
