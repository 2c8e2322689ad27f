"""`python -m bench [NAME...]`: prints medians and ratios. Without a name, all but those that take long.

`python -m bench checkpoint --only upload` runs one part of such a one; an unknown part names them all.
"""

from __future__ import annotations

import argparse
import sys

from bench import (
    aws_scale,
    checkpoint,
    cron,
    fanout,
    gpu,
    image,
    overhead,
    reconcile,
    recovery,
    size,
    startup,
    sync,
    train,
    up,
)

BENCHES = {
    "startup": startup.main,
    "overhead": overhead.main,
    "reconcile": reconcile.main,
    "recovery": recovery.main,
    "size": size.main,
    "aws": aws_scale.main,
    "image": image.main,
    "sync": sync.main,
    "up": up.main,
    "fanout": fanout.main,
    "cron": cron.main,
}
LONG = {"checkpoint": checkpoint.main, "gpu": gpu.main, "train": train.main}  # in parts


def main() -> int:
    """Runs the named benches."""
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("names", nargs="*", help=", ".join((*BENCHES, *LONG)))
    parser.add_argument("--only", action="append", default=[], help=f"a part of {' or '.join(LONG)}; may be repeated")
    asked = parser.parse_args()
    wanted = asked.names or list(BENCHES)
    unknown = [name for name in wanted if name not in (*BENCHES, *LONG)]
    if unknown:
        print(f"no bench {', '.join(unknown)}; there are {', '.join((*BENCHES, *LONG))}", file=sys.stderr)
        return 2
    if asked.only and (whole := [name for name in wanted if name not in LONG]):
        print(f"--only: no parts in {', '.join(whole)}; {', '.join(LONG)} have some", file=sys.stderr)
        return 2
    for name in wanted:
        if name in LONG:
            LONG[name](asked.only)
        else:
            BENCHES[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
