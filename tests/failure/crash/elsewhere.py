"""`mgpu` on another machine than the one it runs on, as far as provider `local` lets it be another: its machines are
processes of this one, so no namespace may hide processes.

    python elsewhere.py reconcile     and whatever that starts

A process of another machine cannot be seen, so nobody here may know that it is dead: `space` is another one. That the
host's name is another one, and that the first machine's files are not there, is up to who starts this.
"""

from __future__ import annotations

import sys

from mgpu.run.record import shared
from mgpu.schedule import supervisors

shared._space = lambda: "elsewhere"
_command = supervisors._command
supervisors._command = lambda *need: [sys.executable, "-P", __file__, *_command(*need)[3:]]

if __name__ == "__main__":
    from mgpu.cli import main

    main(sys.argv[1:])
