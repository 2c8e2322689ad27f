# It knows where checkpoints go, and makes none.
import os

print(os.environ["MGPU_CHECKPOINT_DIR"])
