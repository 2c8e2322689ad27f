"""`python -m bench [startup] [overhead] [recovery] [size] [aws]`: all of them by default. Prints medians and ratios."""

from __future__ import annotations

import sys

from bench import aws_scale, overhead, recovery, size, startup

BENCHES = {
    "startup": startup.main,
    "overhead": overhead.main,
    "recovery": recovery.main,
    "size": size.main,
    "aws": aws_scale.main,
}


def main() -> int:
    """Runs the named benches."""
    wanted = sys.argv[1:] or list(BENCHES)
    unknown = [name for name in wanted if name not in BENCHES]
    if unknown:
        print(f"no bench {', '.join(unknown)}; there are {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    for name in wanted:
        BENCHES[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
