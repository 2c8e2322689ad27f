"""`python3 -m mgpu_train`: the node's agent, and the bundled trainer."""

from __future__ import annotations

import argparse
import sys

from mgpu_train.agent import commands


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code. `argv` is without the program's name."""
    parser = argparse.ArgumentParser(prog="mgpu_train", description="the node side of mgpu")
    verbs = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(verbs)
    verbs.add_parser("train", help="the bundled trainer, in this process; see `pydoc mgpu_train.loop`")
    arguments = parser.parse_args(argv)
    if arguments.command == "train":
        from mgpu_train.loop import main as train  # torch: seconds that the agent does not need

        return train()
    return commands.call(arguments)


if __name__ == "__main__":
    sys.exit(main())
