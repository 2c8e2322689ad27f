"""What a run that has succeeded leaves on a machine that stays, and nobody needs there. This file is run there:
`<python> -I leftovers.py RUN ATTEMPT SECONDS STEP:FILES:BYTES...`, with what the store has of this node's part of each
of the attempt's checkpoints.

Standard library only, Python 3.8 or newer. The log, the outputs and what the program has written beside its checkpoints
stay. So does all that only this machine may have: a checkpoint that the caller does not name, or that has got more
since it was stored; a fetched file that was changed.

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
from typing import Any, List, Tuple  # noqa: UP035 - for the Python 3.8 of older machines

LIBRARY = Path(__file__).resolve().parents[3]  # ~/.mgpu/lib/<digest>
if __name__ == "__main__":
    sys.path.insert(0, str(LIBRARY))  # -I has left it out

from mgpu_train.agent.host.layout import FETCHED, RunLayout  # noqa: E402
from mgpu_train.agent.host.python_env import PROBLEM, Problem, ProblemKind, locked  # noqa: E402

DOOMED = ".aside-old-"  # as `mgpu_train.checkpoint.local.discard` calls it


def clear(home: Path, run_id: str, attempt: int, parts: List[str], until: float) -> List[str]:  # noqa: UP006
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
        gone = [each for each in [Path(layout.resume)] if each.is_dir() and not each.is_symlink()]
        for step, files, size in (map(int, part.split(":")) for part in parts):
            folder = Path(layout.checkpoints) / f"step-{step}"
            if folder.is_dir() and not folder.is_symlink() and _sizes(folder) == (files, size):
                gone.append(folder)
        # they lose their names before the first file goes; the files, when nobody has to wait for it any more
        doomed = [_renamed(each) for each in gone]
        if job["workdir"] in (None, str(RunLayout(run_id).work)):  # else it was in a container, and went with it
            gone += [each for item in job["data"] for each in _fetched(Path(layout.work), item["to"])]
    for each in doomed:
        shutil.rmtree(str(each), ignore_errors=True)
    return [str(each.relative_to(layout.root)) for each in gone]


def _sizes(folder: Path) -> Tuple[int, int]:  # noqa: UP006
    """How many files it has, and their bytes."""
    sizes = [path.lstat().st_size for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return len(sizes), sum(sizes)


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
    fetched = {}
    for line in listing.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            key, _, changed_ns = json.loads(line)
            fetched[str(key)] = changed_ns
        except (ValueError, TypeError):  # empty, cut off by a kill, or of an older mgpu
            continue
    for key, changed_ns in fetched.items():
        path = folder / key
        ours = path.is_file() and not path.is_symlink() and _inside(folder, path.parent)
        if ours and path.stat().st_ctime_ns == changed_ns:
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


def main(run_id: str, attempt: str, seconds: str, *parts: str) -> int:
    """Returns the exit status."""
    try:
        until = time.monotonic() + float(seconds)
        answer: Any = {"removed": clear(LIBRARY.parents[2], run_id, int(attempt), [*parts], until)}
    except Problem as problem:
        answer = problem.answer
    except (OSError, ValueError, LookupError) as error:
        answer = Problem(ProblemKind.DISK, str(error)).answer
    sys.stdout.write(json.dumps(answer) + "\n")
    return PROBLEM if "problem" in answer else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
