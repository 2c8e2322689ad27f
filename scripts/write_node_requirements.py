"""Writes the list of packages that a node without them gets, pinned and hashed, from uv.lock. Run after changing that.

Linux wheels alone: nothing is built on a rented machine.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "train" / "mgpu_train" / "agent" / "host" / "node-requirements.txt"
_WHEEL = re.compile(r"-(py2\.py3-none-any|py3-none-any|cp31[1-4]-(cp31[1-4]|abi3)-manylinux\S*_(x86_64|aarch64))\.whl$")


def closure(packages: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The packages of these names and all that they need."""
    found: dict[str, Any] = {}
    while names:
        name = names.pop()
        if name in found:
            continue
        found[name] = packages[name]
        for needed in packages[name].get("dependencies", ()):
            if "marker" in needed:
                raise SystemExit(f"{name} needs {needed['name']} only where {needed['marker']}: teach this script")
            names.append(needed["name"])
    return found


def lines(lock: dict[str, Any]) -> Iterator[str]:
    """The list, in alphabetical order."""
    packages = {package["name"]: package for package in lock["package"]}
    needed = [dependency["name"] for dependency in packages["mgpu-train"]["dependencies"]]
    for name, package in sorted(closure(packages, needed).items()):
        hashes = sorted(wheel["hash"] for wheel in package["wheels"] if _WHEEL.search(wheel["url"]))
        if not hashes:
            raise SystemExit(f"{name} has no wheel for Linux")
        yield " \\\n    ".join([f"{name}=={package['version']}", *(f"--hash={found}" for found in hashes)])


def text() -> str:
    """The whole file."""
    with (ROOT / "uv.lock").open("rb") as lock:
        return "# written by scripts/write_node_requirements.py\n" + "\n".join(lines(tomllib.load(lock))) + "\n"


if __name__ == "__main__":
    LIST.write_text(text(), encoding="utf-8")
