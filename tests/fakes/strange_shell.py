"""A login shell that is no POSIX shell, `strange_shell.py -c LINE`: it refuses what csh refuses or fish does, and reads
in quotes what they read there. Else it starts the line's one command."""

from __future__ import annotations

import os
import re
import sys

PROGRAM = (sys.executable, "-IS", __file__)
SAFE = re.compile(r"[\w@%+=:,./-]+")


def words(line: str) -> list[str]:
    found, at = [""], 0
    while at < len(line):
        mark = line[at]
        if mark in "'\"":
            end = at + 1
            while line[end : end + 1] != mark:
                if line[end : end + 1] in ("", "\n"):
                    sys.exit(f"Unmatched '{mark}'.")  # csh
                if line[end] == "!":
                    sys.exit("Event not found.")  # csh
                if line[end] == "\\" and line[end + 1 : end + 2] in ("\\", mark):
                    end += 1  # fish
                found[-1] += line[end]
                end += 1
            at = end + 1
        elif mark == " ":
            found.append("")
            at += 1
        elif plain := SAFE.match(line, at):
            found[-1] += plain[0]
            at = plain.end()
        else:
            sys.exit(f"what is {mark!r}?")
    if "=" in found[0]:
        sys.exit(f"{found[0]}: Command not found.")
    return found


if __name__ == "__main__":
    command = words(sys.argv[2])
    os.execvp(command[0], command)  # noqa: S606 - no shell is in it
