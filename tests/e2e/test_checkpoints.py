"""A run's checkpoints as a user meets them: listed, verified, damaged at rest, noticed, exported, given up."""

from __future__ import annotations

import json

from mgpu import paths

# what it has counted is saved as safetensors, a tensor of one byte; the pauses are for the uploads between
PROGRAM = """
import json, os, struct, time
from pathlib import Path

root = Path(os.environ["MGPU_CHECKPOINT_DIR"])
header = json.dumps({"count": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
for step in range(1, 6):
    aside = root / f".tmp-{step}"
    aside.mkdir(parents=True)
    (aside / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes([step]))
    (aside / "meta.json").write_text(json.dumps({"loss": 10 - step}))
    aside.rename(root / f"step-{step}")
    time.sleep(1.2)
"""
RETENTION = "checkpoint: {every_steps: 1, keep_last: 8, keep_best: 1, best_metric: loss}\n"


def test_from_committed_to_given_up(project, tmp_path):
    (project.folder / "train.py").write_text(PROGRAM)
    project.write(["train.py"], more=RETENTION)
    launched = project.mgpu("launch", "--yes", "--json")
    assert launched.returncode == 0, launched.stderr
    run_id = project.result(launched)["run_id"]
    store = paths.data_dir() / "checkpoints"

    def ask(*args, code=0):
        done = project.mgpu("checkpoints", *args)
        assert done.returncode == code, done.stderr
        return done

    listed = json.loads(ask("ls", "--json").stdout)["checkpoints"]
    names = [each["checkpoint_id"] for each in listed]
    assert len(names) >= 2, "with a second between them more than one is committed"
    assert (listed[0]["step"], listed[0]["meta"]) == (5, {"loss": 5})
    assert all("newest 8" in each["kept_because"] for each in listed)
    ask("verify")
    ask("verify", "--deep")

    # a bit flips at rest, in the newest
    (pack,) = (store / run_id / "checkpoints" / names[0]).glob("*.pack-*")
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)
    told = ask("verify", "--deep", code=6)
    assert names[0] in told.stderr
    assert names[1] not in told.stderr
    pulled = ask("pull")
    assert pulled.stdout.strip().endswith(f"step-{listed[1]['step']}")
    assert f"{names[0]} does not verify" in pulled.stderr
    ask("pull", "--step", "5", code=6)

    exported = json.loads(ask("export", "--to", "weights", "--json").stdout)
    assert (exported["checkpoint_id"], list(exported["passed_over"])) == (names[1], [names[0]])
    assert (project.folder / "weights/model.safetensors").read_bytes()[-1] == listed[1]["step"]
    assert json.loads((project.folder / "weights/config.json").read_text())["provenance"]["run_id"] == run_id

    # what is left: the newest as it was asked for, and the one that verifies
    options = ("--keep-last", "1", "--keep-best", "0", "--deep")
    plan = json.loads(ask("prune", "--dry-run", "--json", *options).stdout)
    assert (list(plan["keep"]), plan["drop"]) == (names[:2], names[:1:-1])
    assert len(json.loads(ask("ls", "--json").stdout)["checkpoints"]) == len(names)
    ask("prune", *options, code=0 if not plan["drop"] else 2)
    ask("prune", "--yes", *options)
    assert sorted(path.name for path in (store / run_id / "checkpoints").iterdir()) == sorted(names[:2])

    # from a machine that knows nothing of the run
    project.env |= {"XDG_STATE_HOME": str(tmp_path / "elsewhere")}
    there = json.loads(ask("ls", "--json", "--store", f"file://{store}").stdout)["checkpoints"]
    assert [each["checkpoint_id"] for each in there] == names[:2]
    assert "--store" in ask("ls", run_id, code=2).stderr
