"""NVIDIA's container toolkit of a fake machine: what the engine runs, as a hook, for a container that asks for GPUs.

The real one shows devices and the driver's libraries to a container, from outside. This machine has neither; what is
shown is a device that does nothing, and the PyTorch of the machine's own environment, read-only at /opt/torch: into an
image it would be 5 GB.
"""

import json
import subprocess
import sys
from pathlib import Path

TORCH = next(Path("/opt/pytorch/lib").glob("python3.*/site-packages"))
SHOW = """
touch "$1/dev/nvidia0"
mount --bind /dev/null "$1/dev/nvidia0"
mkdir -p "$1/opt/torch"
mount --bind "$2" "$1/opt/torch"
mount -o remount,bind,ro "$1/opt/torch"
"""

if sys.argv[1:2] == ["prestart"]:
    state = json.load(sys.stdin)
    bundle = Path(state["bundle"])
    root = bundle / json.loads((bundle / "config.json").read_text())["root"]["path"]
    enter = ["nsenter", f"--mount=/proc/{state['pid']}/ns/mnt", "sh", "-ec", SHOW, "sh", str(root), str(TORCH)]
    subprocess.run(enter, check=True, timeout=20)
