"""The interpreter that runs the agent on a machine. It is run there: `<python> -I python_env.py ready|find|lacks ...`.

Standard library only, Python 3.8 or newer. An interpreter that has all that the agent needs is taken as it is. Else an
environment is made in `~/.mgpu/base`, once for each interpreter and list of packages: it has the packages of
`node-requirements.txt`, and behind them it sees all that the interpreter sees, torch above all. Either way `python`
beside the package, a program of two lines, starts the one that was found: whoever comes later need not know which.
`find` is for inside a container: the environment is made in another folder, and `container.py` writes the program.

A node trains for one run at a time, or for several that have other slots of it. A run claims the node before it changes
anything there, and its agent starts only while nobody else has claimed it since. While an agent lives, which its lock
says in whatever container it is, nobody else can.

A result is one line of JSON. So is a problem, {"problem": the kind of it, "why": ...}, with exit status 3.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import venv
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, Iterator, List, NamedTuple, Optional, Tuple  # noqa: UP035 - for the Python 3.8 of older images

NEEDS = {"awscrt": (0, 27), "boto3": (1, 40), "pydantic": (2, 11)}
OLDEST = (3, 11)
PROBLEM = 3  # exit status
LIST = Path(__file__).resolve().with_name("node-requirements.txt")
LIBRARY = Path(__file__).resolve().parents[3]  # ~/.mgpu/lib/<digest>
_DONE = "installed"  # a file in a finished environment
_CLAIM, _CLAIM_LOCK = Path(".mgpu", "claim.json"), Path(".mgpu", "claim.lock")
_LIVES = "*/agent.lock"  # in `runs`: an agent holds its own for life
_ENDING_S = 30.0  # for an agent that has said its last word
_LOOK_S = 0.2
_LAST_LINES = 6


class ProblemKind(str, Enum):  # noqa: UP042 - StrEnum is of Python 3.11
    """Why a machine cannot run the agent; below BUSY: why its container cannot. The operator has the cures."""

    USED = "used"  # by another run
    OLD = "old"  # Python
    TORCH = "torch"  # is not there
    PIP = "pip"  # is not there, or venv
    PACKAGES = "packages"
    BUSY = "busy"  # somebody else is about it
    DOCKER = "docker"
    PERMISSION = "permission"  # of the user, to speak to Docker
    GPU = "gpu"
    DISK = "disk"
    ABSENT = "absent"  # from its registry
    DENIED = "denied"
    LIMIT = "limit"  # of pulls
    PULL = "pull"
    UNPACK = "unpack"
    DIGEST = "digest"
    PLATFORM = "platform"
    REFERENCE = "reference"
    MOUNT = "mount"
    RUN = "run"


class Problem(Exception):
    """This machine cannot run the agent. `run`: by which it is used."""

    def __init__(self, kind: ProblemKind, why: str, run: str = "") -> None:
        super().__init__(why)
        self.kind, self.run = kind, run

    @property
    def answer(self) -> Any:
        """As it is printed."""
        return {"problem": self.kind.value, "why": str(self), **({"run": self.run} if self.run else {})}


class Claim(NamedTuple):
    """Whose a node is."""

    run: str = ""
    owner: str = ""
    host: str = ""  # where the run is supervised
    slots: Tuple[int, ...] = ()  # noqa: UP006 - of the node that the run has, beside others; empty: all of it


def lacking() -> List[str]:  # noqa: UP006
    """What this very interpreter lacks of `NEEDS`, with the version that is there."""
    found = []
    for name, least in NEEDS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.append(name)
            continue
        if tuple(int(part) for part in re.findall(r"\d+", version)[: len(least)]) < least:
            found.append(f"{name} (has {version})")
    return found


def ready(seconds: float, mine: Claim, *, torch: bool) -> Any:
    """Finds or makes the interpreter, within so many seconds, and writes the program that starts it."""
    until, home = time.monotonic() + seconds, LIBRARY.parents[2]
    answer = find(seconds, home / ".mgpu" / "base", torch=torch)
    claim(home, mine, until)
    with claimed(home, mine.run, until, mine.slots):
        write_program(f'exec {shlex.quote(answer["python"])} "$@"')
    return answer


def find(seconds: float, base: Path, *, torch: bool) -> Any:
    """Finds the interpreter, or makes it in `base`, within so many seconds."""
    until = time.monotonic() + seconds
    if sys.version_info[:2] < OLDEST:
        raise Problem(ProblemKind.OLD, f"{sys.executable} is Python {sys.version.split()[0]}")
    if torch and importlib.util.find_spec("torch") is None:
        raise Problem(ProblemKind.TORCH, f"{sys.executable} has no torch")
    lacks = lacking()
    python, fresh = environment(base, until) if lacks else (sys.executable, False)
    return {"python": python, "installed": fresh}


def write_program(line: str) -> None:
    """Puts the program `python` beside the package: a shell's one line."""
    program = LIBRARY / f".python.{os.getpid()}"
    program.write_bytes(os.fsencode(f"#!/bin/sh\n{line}\n"))
    program.chmod(0o700)
    program.replace(LIBRARY / "python")


def environment(base: Path, until: float) -> Any:
    """The interpreter of an environment that has the list's packages, and whether it was made just now."""
    text = LIST.read_text(encoding="utf-8")
    folder = base / hashlib.sha256("\0".join((text, sys.version, sys.prefix)).encode()).hexdigest()[:16]
    python = folder / "bin" / "python"
    with locked(folder.with_suffix(".lock"), until):
        if (folder / _DONE).exists():
            return str(python), False
        # not made aside and renamed: programs in an environment name it by its path
        shutil.rmtree(folder, ignore_errors=True)
        make(folder)
        install(python, until)
        (folder / _DONE).touch()
    return str(python), True


def make(folder: Path) -> None:
    """An empty environment that sees this interpreter's packages behind its own."""
    try:
        venv.EnvBuilder(symlinks=True, with_pip=importlib.util.find_spec("pip") is None).create(folder)
    except (OSError, subprocess.SubprocessError) as error:
        raise Problem(ProblemKind.PIP, f"{sys.executable} makes no environment with pip: {error}") from error
    # --system-site-packages of an environment that was made from another one shows only the base
    sites = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages") and Path(path).is_dir()]
    for site in (folder / "lib").glob("python*/site-packages"):
        lines = (f"import site; site.addsitedir({path!r})\n" for path in sites)
        (site / "_machine_packages.pth").write_bytes(os.fsencode("".join(lines)))


def install(python: Path, until: float) -> None:
    """The list's packages, each with its hash, and nothing else."""
    command = [
        *(str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-color", "-q"),
        *("--ignore-installed", "--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(LIST)),
    ]
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(
            command,
            env=clean,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=max(1.0, until - time.monotonic()),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Problem(ProblemKind.PACKAGES, "pip did not end in time") from error
    if done.returncode:
        raise Problem(ProblemKind.PACKAGES, "\n".join(done.stdout.decode(errors="replace").splitlines()[-_LAST_LINES:]))
    lacks = json.loads(
        subprocess.run([str(python), "-I", __file__, "lacks"], stdout=subprocess.PIPE, check=True).stdout
    )
    if lacks:
        raise Problem(ProblemKind.PACKAGES, f"pip has installed them, and {python} still lacks {', '.join(lacks)}")


def claim(home: Path, mine: Claim, until: float) -> None:
    """Makes the node `mine`, from whoever had it last. An agent of another run that lives is left alone.

    Raises:
        Problem: used, or busy.
    """
    end = min(until, time.monotonic() + _ENDING_S)
    with locked(home / _CLAIM_LOCK, until):
        while True:
            other = _living(home, mine.run, mine.slots)
            if other is None:
                break
            if not _ending(other) or time.monotonic() > end:
                raise _used(other.name, _claim(home), "trains there")
            time.sleep(_LOOK_S)
        aside = home / _CLAIM.with_name(f".{_CLAIM.name}.{os.getpid()}")
        aside.write_text(json.dumps(mine._asdict()) + "\n", encoding="utf-8")
        aside.replace(home / _CLAIM)


@contextmanager
def claimed(home: Path, run: str, until: float, slots: Any = ()) -> Iterator[int]:
    """While the block runs nobody else claims the node. What nobody has claimed is anybody's. Yields the lock's fd.
    `slots`: of the node, that the run has; others may have other ones.

    Raises:
        Problem: used, by a run that has claimed it after this one; or busy.
    """
    with locked(home / _CLAIM_LOCK, until) as lock:
        holder = _claim(home)
        if holder.run not in ("", run) and collide(slots, holder.slots):
            raise _used(holder.run, holder, "has come there since this run began")
        yield lock


def _claim(home: Path) -> Claim:
    try:
        return Claim(**json.loads((home / _CLAIM).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):  # nobody's; or torn, by a machine that went down
        return Claim()


def _living(home: Path, but: str, slots: Any) -> Optional[Path]:  # noqa: UP045
    """The folder of another run whose agent lives, or is being started, and that has some of these slots."""
    for lock in sorted((home / "runs").glob(_LIVES)):
        if lock.parent.name != but and _held(lock) and collide(slots, _slots(lock.parent)):
            return lock.parent
    return None


def collide(some: Any, others: Any) -> bool:
    """Whether two runs cannot have these slots of a node at once; empty: all of it."""
    return not some or not others or not set(some).isdisjoint(others)


def _slots(folder: Path) -> Any:
    """Of the node, that a run has, by its job."""
    try:
        return (json.loads((folder / "job.json").read_text(encoding="utf-8")).get("share") or {})["slots"]
    except (OSError, ValueError, LookupError, AttributeError):  # all of it
        return ()


def _held(path: Path) -> bool:
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _ending(folder: Path) -> bool:
    """True for an agent whose status is final: its process ends next."""
    try:
        return json.loads((folder / "status.json").read_text(encoding="utf-8"))["phase"] in ("done", "failed")
    except (OSError, ValueError, KeyError):
        return False


def _used(run: str, holder: Claim, how: str) -> Problem:
    known = holder if holder.run == run else Claim()
    who = ", ".join(f"{name} {value}" for name, value in (("owner", known.owner), ("from", known.host)) if value)
    return Problem(ProblemKind.USED, f"Run {run}{f' ({who})' if who else ''} {how}.", run)


@contextmanager
def locked(path: Path, until: float) -> Iterator[int]:
    """Holds a lock, of one environment say: two operators may come at once. Yields its fd; raises Problem, busy, when
    time is over."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise Problem(ProblemKind.BUSY, f"somebody else has held {path} for too long") from None
                time.sleep(0.2)
        yield lock
    finally:
        os.close(lock)


def main(verb: str, *arguments: str) -> int:
    """Returns the exit status."""
    if verb == "lacks":
        sys.stdout.write(json.dumps(lacking()) + "\n")
        return 0
    torch = "torch" in arguments
    try:
        if verb == "find":
            answer = find(float(arguments[0]), Path(arguments[1]), torch=torch)
        else:
            answer = ready(float(arguments[0]), Claim(**json.loads(arguments[1])), torch=torch)
    except Problem as problem:
        answer = problem.answer
    except OSError as error:
        answer = Problem(ProblemKind.PACKAGES, str(error)).answer
    sys.stdout.write(json.dumps(answer) + "\n")
    return PROBLEM if "problem" in answer else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
