"""What mgpu's own images are built from, with its own sources in it: images/trainer/, as mgpu ships it or as the user's
copy, and images/operator/.
"""

from __future__ import annotations

import hashlib
import shutil
import stat
import tempfile
from importlib.metadata import distribution
from pathlib import Path

import mgpu_train

import mgpu
from mgpu import paths

_OPERATOR = Path(mgpu.__file__).parent
_CARRIED = _OPERATOR / "_data"
_CHECKOUT = _OPERATOR.parent
_TRAIN = Path(mgpu_train.__file__).parent
_OWN = Path("images", "trainer")
_CARRIES = ("images", "infra")  # what a wheel has in `_data`
_METADATA = ("METADATA", "entry_points.txt")  # what an installed package is found by
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

    The same version of mgpu makes the same folder everywhere, content and modes alike. Several may do so at once.

    Raises:
        OSError: the cache cannot be written.
    """
    return _folder("trainer", _files(source), _programs(source))


def operator_context() -> Path:
    """The folder that the image with mgpu itself is built from, as `trainer_context`: what is installed here, with the
    packages' metadata.

    Raises:
        OSError: the cache cannot be written.
    """
    site = _below("mgpu", _kept(_OPERATOR)) | _below("mgpu_train", _kept(_TRAIN))
    for name in () if _CARRIED.is_dir() else _CARRIES:
        site |= _below(f"mgpu/_data/{name}", _kept(_CHECKOUT / name))
    for name in ("mgpu", "mgpu-train"):
        found = distribution(name)
        kept = {each: (found.read_text(each) or "").encode() for each in _METADATA}
        site |= _below(f"{name.replace('-', '_')}-{found.version}.dist-info", kept)
    files = _kept(_shipped("operator")) | _below("site", site)
    return _folder("operator", files, {name for name in files if name.endswith(".sh")})


def _folder(name: str, files: dict[str, bytes], programs: set[str]) -> Path:
    folder = paths.cache_dir() / "images" / f"{name}-{_digest(files, programs)}"
    if not folder.is_dir() or _kept(folder) != files:
        _write(folder, files, programs)
    return folder


def _write(folder: Path, files: dict[str, bytes], programs: set[str]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, content in files.items():
            path = aside / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(0o755 if name in programs else 0o644)
        for path in (aside, *aside.rglob("*/")):
            path.chmod(0o755)
        if folder.is_dir() and _kept(folder) != files:  # somebody has changed what is in it
            shutil.rmtree(folder, ignore_errors=True)
        _put(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _put(aside: Path, folder: Path) -> None:
    try:
        aside.rename(folder)
    except OSError:  # another one was faster, and may be at work in there
        shutil.rmtree(aside)
        if not folder.is_dir():
            raise


def _shipped(name: str = "trainer") -> Path:
    """A wheel carries it as package data; in a checkout it lies beside the package."""
    own = Path("images", name)
    carried = _CARRIED / own
    return carried if carried.is_dir() else _CHECKOUT / own


def _files(source: Path | None) -> dict[str, bytes]:
    return _kept(source or _shipped()) | _below("mgpu_train", _kept(_TRAIN, _SOURCES))


def _below(folder: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{folder}/{name}": content for name, content in files.items()}


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
    for name, content in sorted(files.items()):
        whole.update(f"{name}\0{'x' * (name in programs)}{len(content)}\0".encode() + content)
    return whole.hexdigest()[:16]
