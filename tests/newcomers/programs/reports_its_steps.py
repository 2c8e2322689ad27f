# As docs/quickstart.md shows it.
import json
import os

for step in range(1, 10):
    with open(f"{os.environ['MGPU_METRICS_DIR']}/rank-{os.environ['RANK']}.jsonl", "a") as file:
        print(json.dumps({"kind": "step", "step": step, "steps": 9, "loss": 1 / step}), file=file)
