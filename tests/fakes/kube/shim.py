"""Starts a pod's one container, waits for its end, and writes that down; outlives the kubelet, as containerd's shim.

    python shim.py FOLDER      the pod's folder, in which `config.json` says what to run

It adds `log`; `pid`, once the command runs; `exit`, when it has ended. Each is there whole or not at all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

INSIDE = Path(__file__).with_name("inside.py")
WIRE_S = 20.0


def write(path: Path, text: str) -> None:
    """Makes a file at once."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)


def lay_wire(config: dict[str, Any], pid: int) -> None:
    """From the pods' bridge to the `eth0` of the network of a process."""
    commands = (
        f"link add {config['link']} type veth peer name eth0 netns {pid}",
        f"link set {config['link']} master {config['bridge']} up",
    )
    words = ["nsenter", f"--net=/proc/{config['fabric']}/ns/net", "ip", "-batch", "-"]
    subprocess.run(words, input="\n".join(commands).encode(), check=True, timeout=WIRE_S, capture_output=True)


def main(folder: Path) -> None:
    """The life of a container."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "disk").mkdir(exist_ok=True)
    ready, writer = os.pipe()  # not inherited: who waits for the pod would hold it open
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-E", "-s", "-S", "-B", str(INSIDE), f"/proc/{os.getpid()}/fd/{writer}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd="/",
        )
    assert process.stdin
    assert process.stdout
    trouble = ""
    try:
        number = process.stdout.readline()
        os.close(writer)
        if number:
            lay_wire(config, int(number))
            process.stdin.write(json.dumps(config).encode() + b"\n")
            process.stdin.close()
            with os.fdopen(ready, errors="replace") as says:
                trouble = says.read()  # ends when the command has taken over
            if not trouble:
                write(folder / "pid", number.decode())
    except (OSError, subprocess.SubprocessError) as error:
        trouble = f"{error} {getattr(error, 'stderr', '')}"
        process.kill()
    code = process.wait()
    ended = {"code": code if code >= 0 else 128 - code, "at": time.time(), "trouble": trouble}
    write(folder / "exit", json.dumps(ended))


if __name__ == "__main__":
    os.umask(0o022)
    main(Path(sys.argv[1]))
