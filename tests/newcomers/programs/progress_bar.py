# As tqdm draws: one line, redrawn, its end at the very end, on stderr.
import sys
import time

for percent in range(0, 101, 5):
    sys.stderr.write(f"\r{percent:3}%|{'#' * (percent // 10):10}| {percent}/100")
    sys.stderr.flush()
    time.sleep(0.05)
sys.stderr.write("\n")
