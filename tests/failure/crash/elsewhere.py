"""`mgpu` on another machine than the one it runs on, as far as provider `local` lets it be another: its machines are
processes of this one, so no namespace may hide processes.

    python elsewhere.py reconcile     and whatever that starts; MGPU_DIE_AT names where it dies (operator.py)

A process of another machine cannot be seen, so nobody here may know that it is dead: `space` is another one. That the
host's name is another one, and that the first machine's files are not there, is up to who starts this.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from mgpu.run.record import shared
from mgpu.schedule import supervisors

shared._space = lambda: "elsewhere"
_command = supervisors._command
supervisors._command = lambda *need: [sys.executable, "-P", __file__, *_command(*need)[3:]]

if __name__ == "__main__":
    if point := os.environ.get("MGPU_DIE_AT"):
        operator = runpy.run_path(str(Path(__file__).with_name("operator.py")))
        operator["install"](operator["Points"](None, point))
    from mgpu.cli import main

    main(sys.argv[1:])
