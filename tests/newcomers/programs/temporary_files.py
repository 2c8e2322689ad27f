import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "x").write_text("x")
print("home", Path.home().is_dir())
