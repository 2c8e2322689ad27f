"""Runs the tests and says which lines and branches of mgpu, mgpu_train and infra they have passed: `make coverage`.

Most of what is tested runs in processes of its own: the command, the Pulumi plug-in, node processes, agents, trainers.
Many are started with an environment of a few names, where what coverage.py offers for subprocesses does not reach them.
So while this runs, a file in .venv has each Python process of this checkout measure itself. It is removed at the end.
If this was killed before that, the file measures nothing: it looks whether somebody still holds the lock.

Each process also says which test it served, which it has by its environment or by its nearest ancestor that runs tests.
A run of all tests writes anew which slow ones `make test` never leaves out (tests/draw.py).

Not measured: what a process did that ended by SIGKILL, and Python outside .venv. Files that mgpu sends to others'
machines, which run there alone, by those machines' Python, are left out.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import sysconfig
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".coverage.d"
SETTINGS = FOLDER / "settings"
SENT = [
    ROOT / "mgpu/providers" / file for file in ("keeper.py", "hosts/on_host.py", "kubernetes/pod.py", "slurm/node.py")
]
PACKAGES = {"mgpu": ROOT / "mgpu", "mgpu_train": ROOT / "train/mgpu_train", "infra": ROOT / "infra"}
SITE = Path(sysconfig.get_path("purelib"))
HOOK = SITE / "mgpu_coverage_hook.py"
SECONDS = ROOT / ".pytest_cache" / "v" / "mgpu" / "alone"  # of each test; tests/figures.py
STARTS_IT = SITE / "mgpu_coverage_hook.pth"

# `sigterm`: what ends by a signal writes down what it has seen before it does. `fork`, `_exit`: forked servers.
CONFIGURATION = f"""
[run]
branch = true
parallel = true
data_file = {FOLDER}/data
sigterm = true
patch = _exit, fork
include = {",".join(f"{path}/*" for path in PACKAGES.values())},*/mgpu_train/*,*/infra/__main__.py
omit = {",".join(map(str, SENT))}
disable_warnings = include-ignored,module-not-measured,no-data-collected

[paths]
mgpu_train =
    {PACKAGES["mgpu_train"]}
    */mgpu_train
infra =
    {PACKAGES["infra"]}
    */infra
"""

# Nothing that fails here may change what a process does. The variable is not left to the processes' own children.
MEASURES = f"""
import fcntl, os

RUNS = {str(FOLDER / "runs")!r}  # .<process>: the test that it runs

def begin():
    with open({str(SETTINGS)!r}) as settings:
        try:
            fcntl.flock(settings, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return  # nobody measures any more
        except BlockingIOError:
            pass
    import coverage

    def save(self, really=coverage.Coverage.save):
        try:
            really(self)
        except Exception:  # a full disk, say
            pass

    coverage.Coverage.save = save
    os.environ["COVERAGE_PROCESS_START"] = {str(SETTINGS)!r}
    try:
        measured = coverage.process_startup()
    finally:
        del os.environ["COVERAGE_PROCESS_START"]
    if measured is None:
        return
    for name in ("execv", "execve"):
        def saved_before(*given, really=getattr(os, name)):
            measured.save()
            really(*given)
        setattr(os, name, saved_before)
    serve(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0])
    os.register_at_fork(after_in_child=serve)

def serve(test=""):
    try:
        import coverage
        test = test or of_ancestors(os.getpid())
        if test:
            coverage.Coverage.current().switch_context(test)
    except Exception:
        pass

def of_ancestors(pid):
    while pid > 1:
        try:
            with open(RUNS + "." + str(pid)) as told:
                return told.read()
        except FileNotFoundError:
            with open("/proc/" + str(pid) + "/stat") as stat:
                pid = int(stat.read().rpartition(")")[2].split()[1])
    return ""

def pytest_runtest_logstart(nodeid, location):  # this is pytest's plug-in, too
    with open(RUNS + ".new" + str(os.getpid()), "w") as told:
        told.write(nodeid)
    os.rename(told.name, RUNS + "." + str(os.getpid()))
    serve(nodeid)

try:
    begin()
except Exception:
    pass  # a process that cannot be measured runs as it would without
"""


def main() -> int:
    """Measures pytest with the arguments given; its exit code."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    SETTINGS.write_text(CONFIGURATION, encoding="utf-8")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with SETTINGS.open("r+", encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            HOOK.write_text(MEASURES, encoding="utf-8")
            STARTS_IT.write_text("import mgpu_coverage_hook\n", encoding="utf-8")
            pytest = [sys.executable, "-m", "pytest", "-p", HOOK.stem, *sys.argv[1:]]
            tested = subprocess.run(pytest, cwd=ROOT, check=False).returncode
        finally:
            STARTS_IT.unlink(missing_ok=True)
            HOOK.unlink(missing_ok=True)
    report()
    narrowed = [word for word in sys.argv[1:] if (ROOT / word.partition("::")[0]).exists()]
    if os.environ.get("MGPU_DRAW", "") in ("", "all") and not narrowed:
        sys.path.append(str(ROOT / "tests"))
        print(importlib.import_module("draw").list_sole(passed(), json.loads(SECONDS.read_text(encoding="utf-8"))))
    return tested


def passed() -> dict[str, set[tuple[int, int, int]]]:
    """By test what it has passed: file, and from which line to which; "" has what belongs to none."""
    found = defaultdict[str, set[tuple[int, int, int]]](set)
    with closing(sqlite3.connect(FOLDER / "data")) as data:
        rows = data.execute("SELECT context, file_id, fromno, tono FROM arc JOIN context ON context.id = context_id")
        for test, *arc in rows:
            found[test].add(tuple(arc))
    return found


def report() -> None:
    """Puts together what all processes have seen, and prints it by folder."""
    untouched = coverage.Coverage(config_file=str(SETTINGS), source=[str(path) for path in PACKAGES.values()])
    untouched.start()
    importlib.import_module("mgpu")  # where nothing is measured, files that nobody has imported would not be counted
    untouched.stop()
    untouched.save()
    processes = list(FOLDER.glob("data.*"))
    for cut in processes:
        if not cut.stat().st_size:  # killed as it began to write
            cut.unlink()
    together = coverage.Coverage(config_file=str(SETTINGS))
    together.combine()
    together.save()
    result = FOLDER / "result.json"
    together.json_report(outfile=str(result))
    folders = defaultdict[str, list[int]](lambda: [0] * 4)
    for file, found in json.loads(result.read_text(encoding="utf-8"))["files"].items():
        parts = (ROOT / file).relative_to(ROOT).parts
        name = "/".join(part for part in parts[:-1] if part != "train")
        for row in ("/".join(name.split("/")[:2]), "all"):
            for at, key in enumerate(("covered_lines", "num_statements", "covered_branches", "num_branches")):
                folders[row][at] += found["summary"][key]
    each = f".venv/bin/coverage report -m --rcfile {SETTINGS.relative_to(ROOT)}"
    print(f"\n{len(processes)} processes wrote down what they passed. The lines one by one: {each}\n")
    print(f"| {'folder':22} | {'lines':>6} | passed | {'branches':>8} | passed |")
    print(f"|{'-' * 24}|{'-' * 7}:|{'-' * 7}:|{'-' * 9}:|{'-' * 7}:|")
    for name, (lines, of_lines, branches, of_branches) in sorted(
        folders.items(), key=lambda row: (row[0] == "all", row)
    ):
        told = f"{_share(lines, of_lines)} | {of_branches:8} | {_share(branches, of_branches)}"
        print(f"| {name:22} | {of_lines:6} | {told} |")


def _share(passed: int, of: int) -> str:
    return f"{passed / of:6.1%}" if of else "     -"


if __name__ == "__main__":
    sys.exit(main())
