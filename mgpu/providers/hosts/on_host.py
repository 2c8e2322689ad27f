"""What a host does for provider `hosts`. Its own Python runs it, 3.8 or newer, with the standard library alone.

Whoever holds the flock on LOCK holds the host: the watch of a run and its clock, and nothing else, so that a machine
that boots anew lets go of it. None of this is in a home: hosts may share one.

    /var/tmp/mgpu-hosts.lock/      anybody's, and stays
    /var/tmp/mgpu-hosts-<uid>/     this user's, and stays:
        holder.json                who holds the host, for everybody to read
        host.py, lease.sh          this script, and the clock that calls it: here until the very last of a run has ended
        <key>                      link to the folder of the run: the same path on all hosts, for authorized_keys
        ended/<name>.json          what has ended here, and why: no token makes anything twice
    <folder>/<name>/               of the run: home, tmp

A run's processes have MARK in their environment, or are below one that has: `session` adopts what leaves its parents.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

BASE, MARK, LABEL = Path("/var/tmp"), "MGPU_INSTANCE", "mgpu-hosts:"  # noqa: S108 - owners are looked at
LOCK = BASE / "mgpu-hosts.lock"
MINE = BASE / f"mgpu-hosts-{os.getuid()}"
HOLDER, ENDED = MINE / "holder.json", MINE / "ended"
_TERM_S, _KILL_S, _POLL_S, _KEPT_S, _SMI_S = 2.0, 8.0, 5, 30 * 86400, 60
_FULL = "it was ended while the disk was full"  # and nothing could be noted
_LATE_S, _KEYS_S = 60, 30  # a take that waited longer is not expected any more; a change of keys takes far less
_SFTP = ("lib/openssh", "libexec/openssh", "lib/ssh", "libexec", "lib64/ssh", "lib/misc")
_WATCH = 'while :; do /bin/sh "$0" "$@"; sleep 1; done'  # fd 9 is the lock: a clock without its watch holds it, too


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Answers one request. Raises OSError."""
    facts = {"now": time.time(), **(_facts(asked["facts"]) if asked.get("facts") else {})}
    asked["since"] = time.time()
    with _alone():
        _keep_fresh()
        _settle()
        done = {"look": _look, "take": _take, "end": _end_for_good}[asked["verb"]](asked)
        held = _read(HOLDER) or None
        notes = [path for path in ENDED.glob("*.json") if {path.stem, _gang(path.stem)} & {*asked["names"]}]
        ended = [{"ended": _FULL, **_read(path)} for path in notes]
        busy = None if held else _busy()
    reached = [each for each in asked.get("reach", ()) if not _reaches(*each)]
    return {"held": held, "ended": ended, "busy": busy, "unreached": reached, **facts, **done}


def _look(_: dict[str, Any]) -> dict[str, Any]:
    return {}  # what everybody is told


def _gang(name: str) -> str:
    return name.partition("-")[0]


def _keep_fresh() -> None:
    """Systemd removes what nobody has touched in /var/tmp for 30 days."""
    for path in MINE.iterdir():
        with suppress(OSError):
            os.utime(path, follow_symlinks=False)


# --- taking and letting go ------------------------------------------------------------------------------------------


def _take(asked: dict[str, Any]) -> dict[str, Any]:
    """Takes the host, unless it is held, or was by this token. `record` says for whom."""
    record = asked["record"]
    gang = _gang(record["name"])
    late = time.time() - asked["since"] > _LATE_S  # whoever asked has given it up
    if late or HOLDER.exists() or any(ENDED.glob(f"{gang}-*.json")):
        return {}
    lock = _locked()
    if lock is None:
        return {}
    folder = Path(asked["folder"]).expanduser().resolve() / record["name"]
    for each in (folder, folder / "home" / ".mgpu", folder / "tmp"):
        each.mkdir(parents=True, exist_ok=True, mode=0o700)
    up, now = _uptime(), time.time()
    record.update(folder=str(folder), user=pwd.getpwuid(os.getuid()).pw_name, since=now, boot=_boot(), watch=None)
    hard_cap_s = min(asked["hard_cap_s"], max(0.0, asked["ends_by"] - now) if asked["ends_by"] else asked["hard_cap_s"])
    record.update(hard_cap_at=int(now + hard_cap_s), link=_link(asked["key"]))
    _write(HOLDER, record)  # from here on it is found, and ended
    lease, script, clock = folder / "home" / ".mgpu" / "lease", MINE / "host.py", MINE / "lease.sh"
    lease.write_text(f"{int(up + asked['lease_s'])}\n", encoding="utf-8")
    script.write_text(asked["source"], encoding="utf-8")
    clock.write_text(asked["lease_script"], encoding="utf-8")
    python = f"'{sys.executable}' -I -S '{script}'"
    (folder / "enter").write_bytes(os.fsencode(f"{MARK}={record['name']} exec {python} session '{folder}'\n"))
    link = MINE / record["link"]
    if link.is_symlink():
        link.unlink()
    link.symlink_to(folder)
    _let_in(record, asked["key"])
    os.dup2(lock, 9)
    until = [str(lease), str(int(up + hard_cap_s)), str(_POLL_S)]
    watch = subprocess.Popen(
        ["/bin/sh", "-c", _WATCH, str(clock), *until, sys.executable, "-I", "-S", str(script), "end", record["name"]],
        pass_fds=(9,),
        cwd="/",
        env={**os.environ, MARK: record["name"]},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    record["watch"] = _process(watch.pid)
    _write(HOLDER, record)
    return {}


def _link(key: str) -> str:
    """The name of the link that sessions of a key go by. Hosts that share a home have the lines of each other in one
    file, and sshd takes the first one of a key: it has to lead to the right folder on all of them."""
    return hashlib.sha256(" ".join(key.split()[:2]).encode()).hexdigest()[:10]


def _end_for_good(asked: dict[str, Any]) -> dict[str, Any]:
    gone = [_end(name, asked["reason"], keep=not asked.get("forget")) for name in asked["names"]]
    return {"gone": all(gone)}


def _end(name: str, reason: str, *, keep: bool = True, known: dict[str, Any] | None = None) -> bool:
    """Ends all that a run has here; absent is success. False: a process or a container is left, and the host stays
    held. A file that cannot be removed holds nobody up: it is told. `keep`: its token is used up. `known`: what there
    is to know of it, where its own file says nothing."""
    record = known or _read(HOLDER)
    ours = record.get("name") == name
    if ours and not record.get("ending"):
        record["ending"] = reason
        with suppress(OSError):  # a full disk: what runs is ended all the same
            _write(HOLDER, record)
    watch = record.get("watch") if ours else None
    begun = time.monotonic()
    told: set[int] = set()
    while (running := _running(name, watch)) and time.monotonic() - begun < _KILL_S:
        late = time.monotonic() - begun > _TERM_S
        for pid in [pid for pid in running if not _adopts(pid)] or running:
            if late or pid not in told:
                _signal(pid, signal.SIGKILL if late else signal.SIGTERM)
                _signal(pid, signal.SIGCONT)
            told.add(pid)
        time.sleep(0.02)
    if running:
        return False
    if not ours:
        return True
    folder = Path(record["folder"])
    if not _without_containers(folder / "home"):
        return False
    left = [] if _removed(folder) else [str(folder)]
    try:
        _let_out(name)
    except OSError as error:  # sshd refuses it after its hard cap, and it leads nowhere
        left.append(f"the run's line in authorized_keys ({error})")
    if keep:
        reason = f"{record['ending']}; not removed: {', '.join(left)}" if left else record["ending"]
        with suppress(OSError):
            _note_end(ENDED / f"{name}.json", {**record, "ended": reason})
    if record.get("link"):  # else it was cut off before there was one
        _unlink(MINE / record["link"])
    _unlink(HOLDER)
    for pid in _running(name, None, spare_me=False):  # the watch: the lock goes with it
        _signal(pid, signal.SIGKILL)
    for _ in range(100):
        if not watch or _process(watch[0]) != watch:
            break
        time.sleep(0.01)
    return True


def _note_end(path: Path, record: dict[str, Any]) -> None:
    ENDED.mkdir(exist_ok=True)
    try:
        _write(path, record)
    except OSError:  # a full disk takes another name for what is there: the token is used up
        HOLDER.replace(path)
    for old in [each for each in ENDED.iterdir() if time.time() - each.stat().st_mtime > _KEPT_S]:
        old.unlink()


def _removed(folder: Path) -> bool:
    """Removes it. What a program has made unreadable or read-only needs a second try."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        with suppress(OSError):
            folder.chmod(0o700)
        for above, names, _files in os.walk(folder):  # each is opened before it is gone into
            for path in (Path(above, name) for name in names):
                if not path.is_symlink():
                    with suppress(OSError):
                        path.chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def _unlink(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.unlink()


def _settle() -> None:
    """Ends what is left of a run whose watch is gone: nobody would end it any more."""
    record = _read(HOLDER)
    if not record and HOLDER.is_file():
        _forget()
    elif record and not _watched(record):
        boot = record["boot"] == _boot()
        _end(record["name"], record.get("ending") or ("its watch was ended" if boot else "the host was started anew"))


def _forget() -> None:
    """Ends a run of which a host that has lost its power knows nothing but a link to its folder: its file is empty."""
    lock = _locked()
    if lock is None:  # its watch lives
        return
    os.close(lock)
    gone = True
    for link in [each for each in MINE.iterdir() if each.is_symlink()]:
        folder = Path(os.readlink(link))  # noqa: PTH115 - its own has Python 3.9
        known = {"name": folder.name, "folder": str(folder), "link": link.name, "ending": "its file is empty"}
        gone &= _end(folder.name, "", keep=False, known=known)
    if gone:
        _unlink(HOLDER)
    else:
        HOLDER.touch()  # held, until the next request


def _watched(record: dict[str, Any]) -> bool:
    watch = record.get("watch")
    return bool(watch) and record.get("boot") == _boot() and _process(watch[0]) == watch


def _locked() -> int | None:
    """The lock, as a descriptor; None: somebody else has it."""
    if not LOCK.exists():
        try:
            LOCK.mkdir()
            LOCK.chmod(0o755)
        except FileExistsError:
            pass
    for _ in range(10):  # somebody may only be looking
        lock = os.open(LOCK, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino == LOCK.stat().st_ino:  # not one that was removed, and made anew
                return lock
        os.close(lock)
        time.sleep(0.02)
    return None


def _busy() -> dict[str, Any] | None:
    """Who else holds the host; None: nobody."""
    lock = _locked()
    if lock is not None:
        os.close(lock)
        return None
    for path in BASE.glob("mgpu-hosts-*/holder.json"):
        record = _read(path)
        if _watched(record):
            return {key: record.get(key) for key in ("user", "fleet", "since", "hard_cap_at")}
    return {}


@contextmanager
def _alone() -> Iterator[None]:
    """One request of this user at a time."""
    MINE.mkdir(exist_ok=True)
    if MINE.is_symlink() or MINE.stat().st_uid != os.getuid():
        raise OSError(f"{MINE} is not this user's own folder")
    MINE.chmod(0o755)
    with (MINE / "mutex").open("w", encoding="utf-8") as mutex:
        fcntl.flock(mutex, fcntl.LOCK_EX)
        yield


# --- the run's key ---------------------------------------------------------------------------------------------------


def _let_in(record: dict[str, Any], key: str) -> None:
    """Adds the key, for this run's sessions alone; sshd refuses it some time after the hard cap, whatever happens here:
    an hour later, because its time is local, and an hour of each autumn has two ends."""
    until = time.strftime("%Y%m%d%H%M%S", time.localtime(record["hard_cap_at"] + 3660))
    command = f"[ -O {MINE} ] && exec /bin/sh {MINE}/{record['link']}/enter"
    line = f'restrict,pty,port-forwarding,expiry-time="{until}",command="{command}" '
    line += " ".join(key.split()[:2]) + f" {LABEL}{record['name']}"
    with _keys() as path:
        old = path.read_bytes() if path.exists() else b""
        _replace(path, old + (b"" if old.endswith(b"\n") or not old else b"\n") + line.encode() + b"\n")


def _let_out(name: str) -> None:
    with _keys() as path:
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        left = [line for line in lines if not line.rstrip().endswith(f" {LABEL}{name}".encode())]
        if len(left) < len(lines):
            _replace(path, b"".join(left))


def _replace(path: Path, content: bytes) -> None:
    aside = path.with_name(f"{path.name}.mgpu-{os.getpid()}")
    try:
        aside.touch(mode=0o600)
        if path.exists():
            shutil.copymode(path, aside)
        aside.write_bytes(content)
        aside.replace(path)
    finally:
        _unlink(aside)  # cut off by a full disk


@contextmanager
def _keys() -> Iterator[Path]:
    """The file of keys, for one host at a time: a folder is made once on every file system, also on a shared one.
    Raises OSError: somebody has it all the time."""
    path = Path("~/.ssh/authorized_keys").expanduser().resolve()
    path.parent.mkdir(mode=0o700, exist_ok=True)
    lock, begun = path.parent / ".mgpu-hosts.lock", time.monotonic()
    while True:
        try:
            lock.mkdir()
            break
        except FileExistsError:
            if time.monotonic() - begun > _KEYS_S + 10:
                raise
            with suppress(FileNotFoundError):
                if time.time() - lock.stat().st_mtime > _KEYS_S:  # whoever made it has died; of two, one breaks it
                    aside = lock.with_name(f"{lock.name}.{socket.gethostname()}-{os.getpid()}")
                    lock.rename(aside)
                    aside.rmdir()
            time.sleep(0.05)
    try:
        yield path
    finally:
        with suppress(FileNotFoundError):
            lock.rmdir()


def session(folder: Path) -> int:
    """What sshd starts in place of the command that was asked for: the same, in the run's home. Whatever that leaves
    behind becomes a child of this program's second half, which has the run's mark and ends with the last of it."""
    home, asked = folder / "home", os.environ.pop("SSH_ORIGINAL_COMMAND", "")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}  # the user's own
    environment.update({"HOME": str(home), "TMPDIR": str(folder / "tmp")})
    argv = ["/bin/sh", "-c", asked] if asked else [os.environ.get("SHELL", "/bin/sh"), "-l"]
    if asked == "internal-sftp" or Path(asked.split(" ")[0]).name == "sftp-server":
        servers = [f"/usr/{each}/sftp-server" for each in _SFTP]
        argv = [next(filter(os.path.exists, servers), servers[0])]
    os.chdir(home)
    ours, theirs = os.pipe()
    if os.fork():
        os.close(theirs)
        _ignore(signal.SIGINT, signal.SIGQUIT)  # a terminal's are for the command
        status = int(os.read(ours, 16) or 9)
        if os.WIFSIGNALED(status):
            if os.WTERMSIG(status) in (signal.SIGINT, signal.SIGQUIT):
                signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
            os.kill(os.getpid(), os.WTERMSIG(status))
        return os.WEXITSTATUS(status)
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    command = os.fork()
    if not command:
        for each in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # Python handles or ignores them
            signal.signal(each, signal.SIG_DFL)
        try:
            os.execve(argv[0], argv, environment)  # noqa: S606 - what sshd would start
        except OSError as error:
            os.write(2, f"{argv[0]}: {error}\n".encode())
        os._exit(127)
    _ignore(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    nothing = os.open(os.devnull, os.O_RDWR)
    for each in range(3):
        os.dup2(nothing, each)
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            os._exit(0)
        if pid == command:
            os.write(theirs, str(status).encode())
            os.close(theirs)


def _ignore(*signals: int) -> None:
    for each in signals:
        signal.signal(each, signal.SIG_IGN)


# --- processes, files, facts -----------------------------------------------------------------------------------------


def _running(name: str, watch: list[int] | None, *, spare_me: bool = True) -> list[int]:
    """The living processes of a run, but this one, and, as long as it has one, its watch and what that has started."""
    entry = f"{MARK}={name}".encode()
    parents: dict[int, int] = {}
    found: list[int] = []
    for pid in [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]:
        stat = _stat(pid)
        if stat is not None:
            parents[pid] = int(stat[1])
            try:
                marked = entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:  # it has ended, or is somebody else's
                marked = False
            found += [pid] * marked
    spared = {os.getpid(), *(watch or [])[:1], *({os.getppid()} & set(found) if spare_me else ())}

    def below(pid: int | None, roots: set[int]) -> bool:
        while pid is not None and pid not in roots:
            pid = parents.get(pid)
        return pid is not None

    return [pid for pid in parents if below(pid, set(found)) and not below(pid, spared)]


def _adopts(pid: int) -> bool:
    """Whether it is a `session`: it goes last, and by itself, because what it has adopted is known by it alone."""
    try:
        return b"host.py\0session\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _process(pid: int) -> list[int] | None:
    """A living process, known by its pid and start time."""
    stat = _stat(pid)
    return [pid, int(stat[19])] if stat else None


def _stat(pid: int) -> list[str] | None:
    """State, parent and so on of a living process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _without_containers(home: Path) -> bool:
    """Removes those of the run; False: Docker does not do it. Where none was begun nobody asks it."""
    if not (home / ".mgpu" / "container.lock").exists():
        return True
    try:
        found = _run("docker", "ps", "--all", "--quiet", f"--filter=label=dev.mgpu.home={home}", HOME=str(home)).split()
        if found:
            _run("docker", "rm", "--force", "--volumes", *found, HOME=str(home))
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _run(*command: str, **environment: str) -> str:
    nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
    given = {**os.environ, **environment}
    done = subprocess.run(command, timeout=_SMI_S, check=True, stdin=nothing, stdout=pipe, stderr=nothing, env=given)
    return done.stdout.decode(errors="replace")


def _printed(*command: str) -> str:
    try:
        return _run(*command)
    except (OSError, subprocess.SubprocessError):
        return ""


def _facts(asked: dict[str, Any]) -> dict[str, Any]:
    """What the machine is made of, and what a run needs of it."""
    folder = Path(asked["folder"]).expanduser().resolve()
    above = next(each for each in (folder, *folder.parents) if each.exists())
    smi = "nvidia-smi", "--format=csv,noheader,nounits"
    gpus = [line.split(", ") for line in _printed(*smi, "--query-gpu=name,memory.total,driver_version").splitlines()]
    version = _printed(asked["python"], "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    manager = "org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager"
    return {
        "gpus": [
            # one whose memory is the host's own, or that fails, says `[N/A]`
            {"name": each[0], "memory_mib": each[1] if each[1].isdecimal() else "0", "driver": each[2]}
            for each in gpus
            if len(each) == 3
        ],
        "gpu_programs": len(_printed(*smi, "--query-compute-apps=pid").split()),
        "vcpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "disk_gib": round(shutil.disk_usage(above).free / 2**30, 1) if os.access(above, os.W_OK) else 0,
        "python": version,
        "kills_at_logout": _printed("busctl", "get-property", *manager, "KillUserProcesses").strip() == "b true",
        "address": os.environ.get("SSH_CONNECTION", "").split(" ")[2:3],
        "host_keys": [
            path.read_text(encoding="utf-8") for path in Path("/etc/ssh").glob("*_key.pub") if os.access(path, os.R_OK)
        ],
    }


def _reaches(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=3).close()
    except OSError:
        return False
    return True


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def _uptime() -> float:
    return float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, value: dict[str, Any]) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(json.dumps(value), encoding="utf-8")
        aside.chmod(0o644)
        aside.replace(path)
    finally:
        _unlink(aside)  # cut off by a full disk


if __name__ == "__main__" and sys.argv[1:]:
    if sys.argv[1] == "session":
        sys.exit(session(Path(sys.argv[2])))
    with _alone():
        _end(sys.argv[2], "its lease or its hard cap has ended")
