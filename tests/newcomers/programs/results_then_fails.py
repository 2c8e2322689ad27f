# What it had found out is wanted all the same.
from pathlib import Path

Path("runs/first").mkdir(parents=True)
Path("runs/first/metrics.csv").write_text("step,loss\n1,0.5\n")
raise RuntimeError("CUDA error: an illegal memory access was encountered")
