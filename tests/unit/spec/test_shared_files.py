"""`file://` addresses go where nodes and operator see one file system, as the provider's block says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu.errors import SpecError
from mgpu.spec.load import load

RUN_FILE = """name: shared
provider: slurm
nodes: 2
max_price_usd_per_hour: 1
max_hours: 1
train: {{task: lm, strategy: fsdp, steps: 10, global_batch: 4}}
checkpoint: {checkpoint}
{block}
"""


def written(folder: Path, checkpoint: str = "{to: file:///shared/runs}", block: str = "") -> Path:
    path = folder / "mgpu.yaml"
    path.write_text(RUN_FILE.format(checkpoint=checkpoint, block=block))
    return path


def test_on_the_login_node_a_shared_folder_is_a_store(tmp_path: Path):
    assert load(written(tmp_path)).checkpoint.to == "file:///shared/runs"


def test_from_elsewhere_it_is_not(tmp_path: Path):
    with pytest.raises(SpecError, match="do not see this machine's files: use s3://"):
        load(written(tmp_path, block="slurm: {login: me@cluster}"))


def test_which_folder_is_shared_has_to_be_said(tmp_path: Path):
    with pytest.raises(SpecError, match=r"checkpoint\.to: is needed with provider slurm"):
        load(written(tmp_path, checkpoint="{keep_last: 2}"))
