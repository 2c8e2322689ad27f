"""Files that a run file names for a cluster are found by every process, wherever it works."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu.plan import rank
from mgpu.spec.load import load

IMAGE = f"image: {{reference: 'r.test/t@sha256:{'0' * 64}'}}\n"


@pytest.mark.parametrize(
    ("provider", "key", "block", "more"),
    [("slurm", "ssh_config", "login: me@c, ", ""), ("kubernetes", "kubeconfig", "", IMAGE)],
)
def test_they_are_named_from_the_run_files_folder(provider, key, block, more, tmp_path: Path, monkeypatch):
    text = "name: a\nmax_hours: 1\nmax_price_usd_per_hour: 1\ncommand: [t.py]\ncheckpoint: none\n"
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "t.py").touch()
    monkeypatch.chdir(tmp_path)
    for said, found in (("cluster", folder / "cluster"), ("~/cluster", Path.home() / "cluster")):
        (folder / "a.yaml").write_text(f"{text}{more}provider: {provider}\n{provider}: {{{block}{key}: {said}}}\n")
        for path in (Path("runs", "a.yaml"), folder / "a.yaml"):
            assert rank.requirements(load(path)).provider_options[key] == str(found)
