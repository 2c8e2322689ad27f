"""What a run that is over has left on a machine that stays, and nobody needs there. This file is run there:
`<python> -I leftovers.py RUN ATTEMPT SECONDS`; standard input says what the store has (`Stored`).

Standard library only, Python 3.8 or newer. The log, the outputs and what the program has written beside its checkpoints
stay. So does all that only this machine may have: a checkpoint that the caller does not name, a fetched file that was
changed.

A result is one line of JSON. So is a problem, {"problem": the kind of it, "why": ...}, with exit status 3.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, List, NamedTuple  # noqa: UP035 - for the Python 3.8 of older machines

LIBRARY = Path(__file__).resolve().parents[3]  # ~/.mgpu/lib/<digest>
if __name__ == "__main__":
    sys.path.insert(0, str(LIBRARY))  # -I has left it out

from mgpu_train.agent.host.layout import FETCHED, RunLayout  # noqa: E402
from mgpu_train.agent.host.python_env import PROBLEM, Problem, ProblemKind, locked  # noqa: E402

DOOMED = ".aside-old-"  # as `mgpu_train.checkpoint.local.discard` calls it


class Stored(NamedTuple):
    """What the store has of the run: checkpoints of the attempt by their steps, and a whole one to go on from."""

    steps: List[int]  # noqa: UP006
    whole: bool


def clear(home: Path, run_id: str, attempt: int, stored: Stored, until: float) -> List[str]:  # noqa: UP006
    """Removes it, unless another attempt has begun meanwhile; what was removed, in the run's folder.

    Raises:
        Problem: busy: an agent of the run lives.
        OSError: the disk refuses.
    """
    layout = RunLayout(run_id, PurePosixPath(home))
    if not Path(layout.job).exists():
        return []
    with locked(Path(layout.lock), until):
        job = json.loads(Path(layout.job).read_text(encoding="utf-8"))
        if job["attempt"] != attempt:
            return []
        folders = [Path(layout.resume)] if stored.whole else []
        if job["node_rank"] == 0 or (job["checkpoint"] or {}).get("writers") == "all":  # it has a part in them
            folders += [Path(layout.checkpoints) / f"step-{step}" for step in stored.steps]
        gone = [each for each in folders if each.is_dir() and not each.is_symlink()]
        # they lose their names before the first file goes; the files, when nobody has to wait for it any more
        doomed = [_renamed(each) for each in gone]
        if job["workdir"] in (None, str(RunLayout(run_id).work)):  # else it was in a container, and went with it
            gone += [each for item in job["data"] for each in _fetched(Path(layout.work), item["to"])]
    for each in doomed:
        shutil.rmtree(str(each), ignore_errors=True)
    return [str(each.relative_to(layout.root)) for each in gone]


def _renamed(folder: Path) -> Path:
    doomed = folder.with_name(f"{DOOMED}{folder.name}")
    shutil.rmtree(str(doomed), ignore_errors=True)
    folder.rename(doomed)
    return doomed


def _fetched(work: Path, to: str) -> List[Path]:  # noqa: UP006
    """Removes what was fetched into a folder of the run's own, as far as it is still that. Others know an absolute
    path, and find there what they would fetch again."""
    folder, gone = Path(os.path.normpath(str(work / to))), []
    listing = folder / FETCHED
    if Path(to).is_absolute() or not _inside(work, folder) or not listing.is_file():
        return []
    newest = listing.stat().st_mtime_ns  # what was fetched was written before its line
    for line in listing.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            key, _ = map(str, json.loads(line))
        except (ValueError, TypeError):  # empty, or cut off by a kill
            continue
        path = folder / key
        ours = path.is_file() and not path.is_symlink() and _inside(folder, path.parent)
        if ours and path.stat().st_mtime_ns <= newest:
            path.unlink()
            gone.append(path)
    listing.unlink()
    within = {parent for path in [*gone, listing] for parent in path.parents if work in parent.parents}
    for each in sorted(within, key=lambda path: len(path.parts), reverse=True):
        with suppress(OSError):  # it is not empty
            each.rmdir()
    return gone


def _inside(folder: Path, path: Path) -> bool:
    """Whether it lies there on the disk, too: a link may lead to a place that others see."""
    real = os.path.realpath(str(folder))
    return os.path.commonpath([real, os.path.realpath(str(path))]) == real


def main(run_id: str, attempt: str, seconds: str) -> int:
    """Returns the exit status."""
    given = json.loads(sys.stdin.read())
    try:
        until = time.monotonic() + float(seconds)
        answer: Any = {"removed": clear(LIBRARY.parents[2], run_id, int(attempt), Stored(**given), until)}
    except Problem as problem:
        answer = problem.answer
    except (OSError, ValueError, LookupError) as error:
        answer = Problem(ProblemKind.DISK, str(error)).answer
    sys.stdout.write(json.dumps(answer) + "\n")
    return PROBLEM if "problem" in answer else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
