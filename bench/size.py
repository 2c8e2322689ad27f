"""What the operator alone brings along, beside the peers."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from bench.tools import PEERS, ROOT, UV, peer


def main() -> None:
    """Prints packages and MB of `pip install mgpu`, and of the peers."""
    with tempfile.TemporaryDirectory() as folder:
        requirements, home = Path(folder, "requirements.txt"), Path(folder, "env")
        export = [*UV, "export", "-q", "--frozen", "--no-dev", "--package", "mgpu", "--no-emit-workspace", "-o"]
        subprocess.run([*export, str(requirements)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        subprocess.run([*UV, "venv", "-q", str(home)], check=True)
        python = str(home / "bin" / "python")
        subprocess.run([*UV, "pip", "install", "-q", "--python", python, "-r", str(requirements)], check=True)
        print("operator's environment: packages, MB on disk")
        packages, megabytes = _measure(home)
        print(f"  mgpu      {packages + 2:4d} {megabytes:6.0f}   (limits 60, 200)")
    for name in PEERS:
        command = peer(name)
        if command:
            theirs, size = _measure(command.parent.parent)
            print(f"  {name:<9} {theirs:4d} {size:6.0f}   {theirs / packages:.1f} x, {size / megabytes:.1f} x ours")


def _measure(home: Path) -> tuple[int, float]:
    packages = len(list(home.glob("lib/python*/site-packages/*.dist-info")))
    seen: dict[int, int] = {}
    for path in home.rglob("*"):
        if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts:
            seen[path.stat().st_ino] = path.stat().st_blocks * 512
    return packages, sum(seen.values()) / 1e6
