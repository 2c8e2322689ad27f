import os
from pathlib import Path

rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
Path("out").mkdir(exist_ok=True)
Path(f"out/rank-{rank}-of-{world}.txt").write_text(os.environ["MASTER_ADDR"])
