"""DESIGN section 6: one node never opens a file of another, though provider `local` has them on one file system."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from mgpu.paths import state_dir

# in every Python process of a node: where it looks, and which node it belongs to
HOOK = """
import os, sys

_log = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_node = os.environ.get("MGPU_INSTANCE", "?")
_watched = {{"open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir", "os.link", "os.chmod"}}


def _hook(event, args):
    if event in _watched and args and isinstance(args[0], (str, bytes, os.PathLike)):
        path = os.path.abspath(os.fsdecode(args[0]))
        if {root!r} in path:
            os.write(_log, f"{{_node}}\\t{{path}}\\n".encode())


sys.addaudithook(_hook)
"""


def watched_python(folder: Path, log: Path, root: Path) -> Path:
    """An interpreter that sees the packages of this one, and tells of every file that it opens under `root`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "watch_opens.py").write_text(HOOK.format(log=str(log), root=str(root)))
    (packages / "watch_opens.pth").write_text(f"{sysconfig.get_path('purelib')}\nimport watch_opens\n")
    return folder / "bin" / "python"


def test_no_node_opens_a_file_of_another(project, tmp_path):
    log, root = tmp_path / "opens.tsv", state_dir() / "local" / "nodes"
    python = watched_python(tmp_path / "venv", log, root)
    train = "{task: lm, strategy: fsdp, steps: 4, global_batch: 4, seq_len: 16, model: {layers: 1, dim: 16, heads: 2}}"
    text = (
        "name: apart\nprovider: local\nnodes: 2\nmax_price_usd_per_hour: 1\nmax_hours: 0.2\n"
        f"train: {train}\ncheckpoint: {{every_steps: 2}}\nlocal: {{python: {python}}}\n"
    )
    (project.folder / "mgpu.yaml").write_text(text)
    done = project.mgpu("launch", "--yes", timeout=600)
    assert done.returncode == 0, done.stderr

    opens = [line.split("\t") for line in log.read_text().splitlines()]
    places = {(node, Path(path).relative_to(root).parts[0]) for node, path in opens if Path(path) != root}
    nodes = {node for node, _ in places}
    assert len(nodes) == 2, "both nodes' processes were watched"
    kinds = {Path(path).name for _, path in opens}
    assert {"status.json", "job.json", "meta.json"} <= kinds, "agents and ranks were watched"
    assert {(node, place) for node, place in places if place != node} == set()
