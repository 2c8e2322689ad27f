"""The trainer's context, images/trainer/ with mgpu-train's own sources in it: as mgpu ships it, or the user's copy."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from pathlib import Path

import mgpu_train

import mgpu
from mgpu import paths

_CARRIED = Path(mgpu.__file__).parent / "_data"
_CHECKOUT = Path(mgpu.__file__).parent.parent
_TRAIN = Path(mgpu_train.__file__).parent
_OWN = Path("images", "trainer")
_SOURCES = (".py", ".pyi", ".sh", ".txt", ".typed")  # what of mgpu-train is part of it


def copy_to(project: Path) -> Path:
    """Gives a project its own copy of images/trainer/, to change: `own` finds it. Raises OSError."""
    copied = project / _OWN
    shutil.copytree(_shipped(), copied, ignore=shutil.ignore_patterns("__pycache__"))
    return copied


def own(base: Path) -> Path | None:
    """The user's copy of images/trainer/: in the folder `base`, or in one above it as far as the Pulumi project's."""
    for folder in (base.resolve(), *base.resolve().parents):
        if (folder / _OWN / "Dockerfile").is_file():
            return folder / _OWN
        if (folder / "Pulumi.yaml").is_file():
            break
    return None


def trainer_context(source: Path | None = None) -> Path:
    """The folder that the trainer's image is built from, in the cache, named by content; made where it is not there.
    `source`: the user's copy of images/trainer/ (default: mgpu's own).

    The same version of mgpu makes the same folder everywhere, content and modes alike. Two processes may do so at once.

    Raises:
        OSError: the cache cannot be written.
    """
    files, programs = _files(source), _programs(source)
    folder = paths.cache_dir() / "images" / f"trainer-{_digest(files, programs)}"
    if not folder.is_dir() or _kept(folder) != files:
        _write(folder, files, programs)
    return folder


def _write(folder: Path, files: dict[str, bytes], programs: set[str]) -> None:
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    for name, content in files.items():
        path = aside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o755 if name in programs else 0o644)
    for path in (aside, *aside.rglob("*/")):
        path.chmod(0o755)
    try:
        aside.rename(folder)
    except OSError:  # it is there: another process was faster, or somebody has changed what is in it
        shutil.rmtree(folder, ignore_errors=True)
        _put(aside, folder)


def _put(aside: Path, folder: Path) -> None:
    try:
        aside.rename(folder)
    except OSError:
        shutil.rmtree(aside)
        if not folder.is_dir():
            raise


def _shipped() -> Path:
    """A wheel carries it as package data; in a checkout it lies beside the package."""
    carried = _CARRIED / _OWN
    return carried if carried.is_dir() else _CHECKOUT / _OWN


def _files(source: Path | None) -> dict[str, bytes]:
    return _kept(source or _shipped()) | {
        f"mgpu_train/{name}": content for name, content in _kept(_TRAIN, _SOURCES).items()
    }


def _programs(source: Path | None) -> set[str]:
    """What a user has made executable; of mgpu's own files nothing has to be."""
    return {name for name in _kept(source) if (source / name).stat().st_mode & stat.S_IXUSR} if source else set()


def _kept(folder: Path, suffixes: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Relative path -> content, in order; what Python compiles is left out."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and (not suffixes or path.suffix in suffixes)
    }


def _digest(files: dict[str, bytes], programs: set[str]) -> str:
    whole = hashlib.sha256()
    for name, content in files.items():
        whole.update(f"{name}\0{'x' * (name in programs)}{len(content)}\0".encode() + content)
    return whole.hexdigest()[:16]
