"""What a keeper (`mgpu.providers.keeper`) needs on a node, as one archive."""

from __future__ import annotations

import base64
import gzip
import io
import tarfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from mgpu_train.agent.machine import procs
from mgpu_train.system import prctl

from mgpu import providers
from mgpu.providers.local import containers


def packed(files: Mapping[str, str]) -> str:
    """These files by their names, and those of every keeper: a tar archive, compressed, in base64. Equal files make
    equal archives."""
    shared = resources.files(providers)
    modules = {
        "mgpu_train/agent/machine/procs.py": Path(procs.__file__).read_text(encoding="utf-8"),
        "mgpu_train/system/prctl.py": Path(prctl.__file__).read_text(encoding="utf-8"),
        "mgpu/providers/local/containers.py": Path(containers.__file__).read_text(encoding="utf-8"),
        "mgpu/providers/keeper.py": shared.joinpath("keeper.py").read_text(encoding="utf-8"),
    }
    packages = {parent for name in modules for parent in Path(name).parents if parent.name}
    scripts = {name: shared.joinpath(name).read_text(encoding="utf-8") for name in ("lease.sh", "poweroff.sh")}
    every = {**scripts, **modules, **{f"{package}/__init__.py": "" for package in sorted(packages)}, **files}
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, text in every.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text.encode()), 0o600
            tar.addfile(entry, io.BytesIO(text.encode()))
    return base64.b64encode(gzip.compress(archive.getvalue(), mtime=0)).decode()
