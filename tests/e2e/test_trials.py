"""`mgpu launch --smoke` and `--tune` on machines of provider local: rows, exit code, run file, bill."""

from __future__ import annotations

TEXT = """\
name: tiny
provider: local
nodes: {nodes}
market: spot
max_price_usd_per_hour: 0.20
max_hours: 0.2
train: {{{train}}}
"""
SMALL = "seq_len: 16, global_batch: 4, model: {layers: 1, dim: 16, heads: 2}"


def test_tune_finds_the_fastest_and_writes_it_into_the_run_file(project):
    axes = "matrix={train.micro_batch: [4, 1], train.strategy: [single, hsdp]}"
    (project.folder / "mgpu.yaml").write_text(TEXT.format(nodes=1, train=f"strategy: ddp, {SMALL}"))
    done = project.mgpu("launch", "--tune", "--write", "--set", axes, "--yes", "--json", timeout=600)
    run = project.result(done)
    assert done.returncode == 0, done.stderr
    assert [row["outcome"] for row in run["trials"]] == ["ok", "refused", "ok", "refused"]
    assert run["trials"][0]["usd_per_million"] > 0
    best = max((row for row in run["trials"] if row["units_per_s"]), key=lambda row: row["units_per_s"])
    text = (project.folder / "mgpu.yaml").read_text()
    assert f"micro_batch: {best['train']['micro_batch']}, " in text
    assert "strategy: single, " in text
    assert run["checkpoint_id"] is None
    assert project.billed() == 0


def test_smoke_says_where_it_breaks_and_ends_with_6(project):
    (project.folder / "own.py").write_text(
        "import os\n"
        "from mgpu_train.tasks.lm import LM\n\n"
        "class Hermit(LM):\n"
        "    def model(self):\n"
        "        if os.environ['WORLD_SIZE'] == '2':\n"
        "            raise ValueError('two are too many')\n"
        "        return super().model()\n"
    )
    (project.folder / "mgpu.yaml").write_text(TEXT.format(nodes=2, train="task: own:Hermit, global_batch: 4"))
    done = project.mgpu("launch", "--smoke", "--yes", "--json", timeout=600)
    run = project.result(done)
    assert done.returncode == 6, done.stderr
    assert [row["outcome"] for row in run["trials"]] == ["ok", "failed"]
    assert "breaks with 2 nodes, 2 processes" in run["reason"]
    assert "two are too many" in run["reason"]
    assert project.billed() == 0
