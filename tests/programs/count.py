"""`count.py LAST PAUSE_S [SAVE_S [EVERY]]`: a program without torch. It counts, saves every tenth number, or as often
as it is told, by renaming a folder, goes on from where it was, and saves and stops on SIGTERM. Where COUNT_UNTIL names
a file, it does not come to the last number before that is there."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

stop: list[int] = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
root = Path(os.environ.get("MGPU_CHECKPOINT_DIR", "."))
resume = os.environ.get("MGPU_RESUME_DIR")
first = int(Path(resume, "count.txt").read_text()) if resume else 0
given = dict(enumerate(sys.argv))
last, pause, save, every = int(given[1]), float(given[2]), float(given.get(3, 0)), int(given.get(4, 10))
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} from {first}", flush=True)
for step in range(first + 1, last + 1):
    time.sleep(pause)
    while step == last and not stop and not Path(os.environ.get("COUNT_UNTIL", ".")).exists():
        time.sleep(pause)
    if step % every == 0 or step == last or stop:
        print(f"step {step}", flush=True)
        if os.environ["RANK"] == "0":
            aside = root / f".tmp-step-{step}"
            aside.mkdir(parents=True)
            time.sleep(save)
            (aside / "count.txt").write_text(str(step))
            aside.rename(root / f"step-{step}")
    if stop:
        break
