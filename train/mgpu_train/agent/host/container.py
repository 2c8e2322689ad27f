"""The container that the agent runs in on a machine. This file is run there: `<python> -I container.py up|down`.

Standard library only, Python 3.8 or newer. What is wanted comes as JSON on standard input, a registry's password with
it. A node has one container for the run that has claimed it (`python_env.py`). The container only holds
(`container_init.py`); whoever speaks to the agent goes on calling `python` beside the package, which then starts the
image's interpreter in there. So a container that was killed comes back empty when the agent is asked for, and the agent
is seen dead.

A result is one line of JSON. So is a problem, {"problem": the kind of it, "why": ...}, with exit status 3.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import pwd
import re
import secrets
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

LIBRARY = Path(__file__).resolve().parents[3]  # ~/.mgpu/lib/<digest>
if __name__ == "__main__":
    sys.path.insert(0, str(LIBRARY))  # -I has left it out

from mgpu_train.agent.host import docker_cli as engines  # noqa: E402
from mgpu_train.agent.host import ecr  # noqa: E402
from mgpu_train.agent.host.docker_cli import DockerCli, Done, Login  # noqa: E402
from mgpu_train.agent.host.layout import AMAZON, AMAZON_OF_MACHINE, RunLayout  # noqa: E402
from mgpu_train.agent.host.python_env import (  # noqa: E402
    PROBLEM,
    Claim,
    Problem,
    ProblemKind,
    claim,
    claimed,
    locked,
    write_program,
)

HOME = LIBRARY.parents[2]
HERE = LIBRARY / "mgpu_train" / "agent" / "host"
LABEL = "dev.mgpu."
_START_S = 180.0  # a driver that no program uses takes long to wake eight GPUs
_INFINIBAND = Path("/dev/infiniband")
_CDI = ("/etc/cdi", "/var/run/cdi")  # where NVIDIA's toolkit describes the GPUs to engines
# of the caller's environment: the library, the mark of a node that is no machine, and the ways out of a closed network
_PASSED = [
    "PYTHONPATH",
    "MGPU_INSTANCE",
    *(name for each in ("http", "https", "no") for name in (f"{each}_proxy", f"{each.upper()}_PROXY")),
]
_COUNT_GPUS = "import glob; print(len(glob.glob('/dev/nvidia[0-9]*')))"


class Wanted(NamedTuple):
    """What `up` reads; `down` reads owner, run, seconds and stop_s."""

    owner: str
    seconds: float
    stop_s: float  # from SIGTERM to SIGKILL
    boot_s: float = 0.0  # for an engine that starts with its machine
    run: str = ""
    host: str = ""  # where it is supervised
    fleet: str = ""
    reference: str = ""
    bytes: int | None = None  # of the compressed layers
    gpus: int = 0
    torch: bool = False
    writable: tuple[str, ...] = ()  # folders beside the home, or in the run's code
    login: Login | None = None
    role_login: dict[str, str] | None = None  # of `ecr.login`: the machine's own role pulls


def up(wanted: Wanted) -> dict[str, Any]:
    """Makes the run's container stand, and the program that starts the agent in it. What stands already is kept."""
    begin = time.monotonic()
    engine = DockerCli(begin + wanted.seconds)
    info = engine.ready(wanted.boot_s)
    if wanted.gpus:
        _require_gpus(info)
    with locked(HOME / ".mgpu" / "container.lock", engine.until):
        claim(HOME, Claim(wanted.run, wanted.owner, wanted.host), engine.until)
        login = ecr.login(**wanted.role_login) if wanted.role_login else wanted.login
        image, pulled = engines.image(engine, info, wanted.reference, wanted.bytes, login)
        name, made, memlock = _stand(engine, wanted, image)
        try:
            found = _equip(engine, wanted, name, image)
            _count_gpus(engine, wanted, name)
            with claimed(HOME, wanted.run, engine.until):
                write_program(_program(engine, name, found["python"]))
        except BaseException:
            if made:
                _remove(engine, name, 0)
            raise
    capped = not memlock and _locks_memory(wanted)
    answer = {"container": name, "made": made, "pulled": pulled, "capped": capped, **found}
    return {**answer, "seconds": round(time.monotonic() - begin, 1)}


def down(wanted: Wanted) -> dict[str, Any]:
    """Ends what this run has here: SIGTERM, the grace, SIGKILL; nothing there is success."""
    try:
        engine = DockerCli(time.monotonic() + wanted.seconds)
    except Problem:  # no docker, no container
        return {"removed": 0}
    engine.info()
    with locked(HOME / ".mgpu" / "container.lock", engine.until):
        ours = _ours(engine, wanted.owner, f"run={wanted.run}")
        for container in ours:
            _remove(engine, container, wanted.stop_s)
    return {"removed": len(ours)}


def _ours(engine: DockerCli, owner: str, *more: str) -> list[str]:
    """Ids of the owner's containers that have this home, and these labels: names may be anybody's."""
    labels = (f"owner={owner}", f"home={HOME}", *more)
    found = (f"--filter=label={LABEL}{label}" for label in labels)
    done = engine.call("ps", "--all", "--quiet", "--no-trunc", *found)
    if done.status:
        raise Problem(ProblemKind.DOCKER, done.error)
    return done.out.split()


def _remove(engine: DockerCli, container: str, grace_s: float) -> None:
    """Stops and removes one; absent is success."""
    engine.call("stop", "-t", f"{grace_s:.0f}", container, seconds=grace_s + engines.ASK_S)
    done = engine.call("rm", "--force", "--volumes", container, seconds=2 * engines.ASK_S)
    if done.status and "No such container" not in done.error:
        raise Problem(ProblemKind.DOCKER, done.error)


def _stand(engine: DockerCli, wanted: Wanted, image: str) -> Any:
    """The container's name, whether it was made just now, and whether its programs may lock memory without limit."""
    options = _options(wanted)
    settings = hashlib.sha256(json.dumps([image, *options]).encode()).hexdigest()[:32]
    kept = None
    for container in _ours(engine, wanted.owner):
        known = engine.inspect("container", container)
        if kept is None and known is not None and _fits(known, settings, image):
            kept = known
        else:
            _remove(engine, container, wanted.stop_s)
    if kept is not None:
        limits = {limit["Name"] for limit in kept["HostConfig"]["Ulimits"] or ()}
        return kept["Name"].lstrip("/"), False, "memlock" in limits
    name = f"mgpu-{wanted.run}-{secrets.token_hex(3)}"  # for people; a name that somebody else has is in nobody's way
    return name, True, _run(engine, wanted.reference, name, [*options, f"--label={LABEL}settings={settings}"])


def _fits(known: dict[str, Any], settings: str, image: str) -> bool:
    state = known["State"]
    same = known["Config"]["Labels"].get(f"{LABEL}settings") == settings and known["Image"] == image
    return same and state["Running"] and not state["Paused"]


def _run(engine: DockerCli, reference: str, name: str, options: list[str]) -> bool:
    """Starts the container; False: an engine without the right to it could not lift the limit of locked memory."""
    for memlock in (True, False):
        limit = ["--ulimit=memlock=-1"] if memlock else []  # InfiniBand's buffers are locked
        command = [
            "run",
            "--detach",
            f"--name={name}",
            *limit,
            *options,
            reference,
            "-I",
            str(HERE / "container_init.py"),
        ]
        done = engine.call(*command, seconds=_START_S)
        if done.status == 0:
            return memlock
        _remove(engine, name, 0)
        if "rlimit" not in done.error:
            break
    raise _failed(done.error)


def _locks_memory(wanted: Wanted) -> bool:
    """Whether a limit of locked memory may be in its programs' way: drivers of GPUs and InfiniBand have buffers."""
    return wanted.gpus > 0 or _INFINIBAND.exists()


def _failed(error: str) -> Problem:
    """Why a container did not start, by what the engine, the toolkit and the container's init say."""
    if re.search(r"could not select device driver|nvidia-container|CDI device", error):
        return Problem(ProblemKind.GPU, error)
    absent = re.search(r"python3\W+(executable file not found|failed: No such file)", error)
    return Problem(ProblemKind.OLD if absent else ProblemKind.RUN, error)


def _options(wanted: Wanted) -> list[str]:
    """How the container is made; another one of these makes another container."""
    user, work = _user(), HOME / RunLayout(wanted.run).work
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    who = {"owner": wanted.owner, "fleet": wanted.fleet, "run": wanted.run, "home": str(HOME)}
    return [
        *("--pull=never", "--init", "--entrypoint=python3", "--network=host", "--restart=no"),
        *(f"--label={LABEL}{key}={value}" for key, value in who.items()),
        *("--ipc=private", f"--shm-size={memory // 2}"),  # loaders and NCCL pass tensors there; Linux's own default
        "--ulimit=stack=67108864",
        *(f"--user={os.getuid()}:{os.getgid()}", *(f"--group-add={group}" for group in sorted(os.getgroups()))),
        # the image knows no such user, and libraries ask for its name
        *(f"--env=HOME={HOME}", f"--env=USER={user}", f"--env=LOGNAME={user}", f"--workdir={HOME}"),
        *(_mount(HOME), _mount(_made(work), "readonly"), *(_mount(_made(work / path)) for path in wanted.writable)),
        *(["--gpus=all"] if wanted.gpus else []),
        *([f"--device={_INFINIBAND}"] if _INFINIBAND.exists() else []),
        # EFA's libraries fit the machine's driver; beside the image's own, which come first
        *([_mount(AMAZON, "readonly", at=AMAZON_OF_MACHINE)] if _INFINIBAND.exists() and AMAZON.is_dir() else []),
        *("--log-driver=json-file", "--log-opt=max-size=10m", "--log-opt=max-file=3"),
        f"--stop-timeout={wanted.stop_s:.0f}",
        "--stop-signal=SIGTERM",  # what `container_init.py` waits for; an image may name another
    ]


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # of a directory that this moment does not answer
        return str(os.getuid())


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Problem(
            ProblemKind.MOUNT, f"{folder} is to be seen in the container, and cannot be made: {error}"
        ) from error
    return folder


def _mount(folder: Path, *more: str, at: Path | None = None) -> str:
    """A folder, at its own path or `at` another; the list is CSV, and a path may hold a comma."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(["type=bind", f"source={folder}", f"target={at or folder}", *more])
    return f"--mount={line.getvalue()}"


def _equip(engine: DockerCli, wanted: Wanted, name: str, image: str) -> dict[str, Any]:
    """The image's interpreter, or an environment of this image's that has what the agent needs: `python_env.py`
    says.
    """
    base = HOME / ".mgpu" / "base" / image.rpartition(":")[2][:16]
    left = engine.until - time.monotonic()
    script = [str(HERE / "python_env.py"), "find", f"{left:.0f}", str(base), *(["torch"] if wanted.torch else [])]
    done = _inside(engine, name, ["-I", *script], seconds=left)
    try:
        answer = json.loads(done.out)
    except ValueError:
        raise _dead(engine, name, done) from None
    if "problem" in answer:
        raise Problem(ProblemKind(answer["problem"]), answer["why"])
    return answer


def _dead(engine: DockerCli, name: str, done: Done) -> Problem:
    """Why the interpreter in there has not answered."""
    logs = engine.call("logs", "--tail=6", name)
    return _failed("\n".join(filter(None, (logs.out.strip(), logs.error, done.error))))


def _require_gpus(info: dict[str, Any]) -> None:
    """Before an image is pulled for nothing."""
    described = any(path for folder in _CDI for path in Path(folder).glob("*nvidia*"))
    tools = any(os.access(Path(folder) / "nvidia-container-runtime-hook", os.X_OK) for folder in os.get_exec_path())
    if not described and not tools and "nvidia" not in (info.get("Runtimes") or {}):
        raise Problem(
            ProblemKind.GPU, "The engine knows no runtime `nvidia`, no CDI description, and no toolkit is on PATH."
        )


def _count_gpus(engine: DockerCli, wanted: Wanted, name: str) -> None:
    if wanted.gpus:
        done = _inside(engine, name, ["-I", "-c", _COUNT_GPUS], seconds=engines.ASK_S)
        if not done.out.strip().isdigit() or int(done.out) < wanted.gpus:
            why = f"The container sees {done.out.strip() or 'no'} GPUs of {wanted.gpus}."
            raise Problem(ProblemKind.GPU, "\n".join(filter(None, (why, done.error))))


def _inside(engine: DockerCli, name: str, arguments: list[str], seconds: float) -> Done:
    return engine.call(*_exec(name, "python3"), *arguments, seconds=seconds)


def _exec(name: str, python: str) -> list[str]:
    # a variable that is not set there is not set in there
    return ["exec", "--interactive", f"--workdir={HOME}", *(f"--env={key}" for key in _PASSED), name, python]


def _program(engine: DockerCli, name: str, python: str) -> str:
    """One line of shell. A container that was killed, or whose machine was, is started again: it is empty."""
    start = shlex.join([engine.program, "start", name])
    return f'{start} > /dev/null && exec {shlex.join([engine.program, *_exec(name, python)])} "$@"'


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)  # so that what is left behind is cleared up


def _read(text: str) -> Wanted:
    given = json.loads(text)
    login = given.pop("login", None)
    writable = tuple(given.pop("writable", ()))
    return Wanted(**given, writable=writable, login=Login(**login) if login else None)


def main(verb: str) -> int:
    """Returns the exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _leave)
    wanted = _read(sys.stdin.read())
    try:
        answer = up(wanted) if verb == "up" else down(wanted)
    except Problem as problem:
        answer = problem.answer
    except OSError as error:
        answer = Problem(ProblemKind.RUN, str(error)).answer
    sys.stdout.write(json.dumps(answer) + "\n")
    return PROBLEM if "problem" in answer else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
