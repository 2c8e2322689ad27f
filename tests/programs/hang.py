"""A program that says one line and then hangs, and will not be asked to end."""

from __future__ import annotations

import signal
import time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("hanging from here on", flush=True)
while True:
    time.sleep(3600)
