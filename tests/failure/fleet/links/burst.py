"""Prints so many MiB of noise: every byte there is, escapes, and hardly a newline. `burst.py MIB SEED GO`.

The second half waits for the file GO.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

noise = random.Random(int(sys.argv[2]))
mib = int(sys.argv[1])
for number in range(mib):
    while number == mib // 2 and not Path(sys.argv[3]).exists():
        time.sleep(0.01)
    block = noise.randbytes((1 << 20) - 16) + b"\x1b[2J\x1b]52;c;aGk=\x07"
    while block:
        block = block[os.write(1, block) :]
