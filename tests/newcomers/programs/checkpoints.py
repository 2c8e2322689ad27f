# As docs/checkpoints.md asks for it: a folder aside, then its name.
import os
from pathlib import Path

folder = Path(os.environ["MGPU_CHECKPOINT_DIR"])
if os.environ["RANK"] == "0":
    aside = folder / ".step-5"
    aside.mkdir()
    (aside / "model.pt").write_bytes(b"weights")
    aside.rename(folder / "step-5")
