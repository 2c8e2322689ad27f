import os
from pathlib import Path

Path("out").mkdir(exist_ok=True)
os.chdir("out")
Path("result.txt").write_text("42")
