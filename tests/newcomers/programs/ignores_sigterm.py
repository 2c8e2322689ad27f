import signal
import time
from pathlib import Path

signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path("runs").mkdir()
Path("runs/metrics.csv").write_text("step,loss\n1,0.5\n")
while True:
    print("ready", flush=True)
    time.sleep(0.2)
