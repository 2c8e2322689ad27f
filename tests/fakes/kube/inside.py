"""Process 1 of a pod: makes what the pod sees of files and network, and becomes the container's command.

Started by shim.py. Standard input brings one line, the pod's configuration as JSON. Standard output carries process 1's
number in the host's eyes, standard error is the container's log. What went wrong goes to a pipe, the one argument; it
closes when the command has taken over. The exit code is the container's.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "aws" / "inside"))

import rootfs

FAILED = 128  # as containerd reports a container that could not be started
_PDEATHSIG, _NO_NEW_PRIVS = 1, 38
_NAMESPACES = 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000  # files, host name, IPC, processes, network
_PRIVATE = 16384 | 1 << 18  # no mount of the pod's is seen outside
_CAPABILITIES = (  # in the kernel's order
    *("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP"),
    *("LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER"),
    *("SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE"),
    *("SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP"),
)
_USUAL = (  # of containers, in Docker and containerd
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "NET_BIND_SERVICE"),
    *("NET_RAW", "SYS_CHROOT", "MKNOD", "AUDIT_WRITE", "SETFCAP"),
)
_LAST = 41


def connect(config: dict[str, Any]) -> None:
    """Brings the pod's loopback and `eth0` up."""
    v6 = Path("/proc/sys/net/ipv6/conf/all/disable_ipv6")
    if v6.exists():
        v6.write_text("1")
    commands = (
        "link set lo up",
        "link set eth0 up",
        f"addr add {config['address']}/{config['prefix']} dev eth0",
        f"route add default via {config['gateway']}",
    )
    subprocess.run(["ip", "-batch", "-"], input="\n".join(commands).encode(), check=True, timeout=20)


def furnish(config: dict[str, Any]) -> None:
    """Makes the pod's file system, and moves into it."""
    scratch = Path(config["scratch"])
    rootfs.mount("pod", str(scratch), "tmpfs", data=f"size={config['disk_mib']}m,mode=755")
    os.chdir(scratch)
    for name in ("upper", "work", "root", "masks"):
        Path(name).mkdir()
    rootfs.mount("overlay", "root", "overlay", data=f"lowerdir={config['image']['root']},upperdir=upper,workdir=work")
    root = scratch / "root"
    rootfs.mask(root, config["image"]["masked"])
    for source, target in config["image"]["shared"]:
        (root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
        rootfs.bind(source, f"{root}{target}", read_only=True)
    rootfs.kernel(root, "64m")  # of shared memory, as containers have it
    for name, text in {"hostname": f"{config['hostname']}\n", "hosts": config["hosts"], "resolv.conf": ""}.items():
        file = root / "etc" / name
        file.unlink(missing_ok=True)  # perhaps a link
        file.write_text(text)
    for each in config["mounts"]:
        _mount(root, each)
    rootfs.enter(root)


def _mount(root: Path, each: dict[str, Any]) -> None:
    place = within(root, each["target"])
    source = Path(each["source"]) if each["source"] else None
    if source is None or source.is_dir():
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    if source is None:
        rootfs.mount("memory", str(place), "tmpfs", data=f"mode=1777,size={each['bytes'] or '50%'}")
    else:
        rootfs.bind(str(source), str(place), read_only=each["read_only"])


def within(root: Path, path: str) -> Path:
    """A path as who has this root sees it: its links, too, lead to where they do there."""
    place, parts = root, path.split("/")
    while parts:
        part = parts.pop(0)
        if part == "..":
            place = place.parent if place != root else root
        elif (place / part).is_symlink():
            target = str((place / part).readlink())
            place = root if target.startswith("/") else place
            parts = [*target.split("/"), *parts]
        else:
            place /= part
    return place


def become(config: dict[str, Any]) -> None:
    """Gives up what a container has not, and runs its command. Does not return."""
    usual = _USUAL if config["usual_capabilities"] else ()
    kept = {_CAPABILITIES.index(name) for name in (*usual, *config["capabilities"])}
    rootfs.drop(each for each in range(_LAST) if each not in kept)
    libc = ctypes.CDLL(None)
    os.setgroups(config["groups"])
    os.setgid(config["group"])
    os.setuid(config["user"])
    libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # which a change of user has taken back
    if config["no_new_privileges"]:
        libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.chdir(config["directory"])
    for signum in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(signum, signal.SIG_DFL)
    os.execvpe(config["argv"][0], config["argv"], config["environment"])  # noqa: S606


def main() -> None:
    """Enters namespaces of the pod's own, and stays outside of them to see its end."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NAMESPACES) != 0:
        raise OSError(ctypes.get_errno(), "a pod's namespaces cannot be made")
    rootfs.mount("none", "/", flags=_PRIVATE)
    first = os.fork()
    if first == 0:
        libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # the pod ends with who waits for it
        begin()
    for descriptor in (0, 1):
        os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    os._exit(code if code >= 0 else 128 - code)  # `unshare --fork` cannot tell of a SIGKILL


def begin() -> None:
    """A pod's first process. Does not return."""
    told, say = os.fdopen(os.dup(0)), os.open(sys.argv[1], os.O_WRONLY)  # neither is inherited
    os.write(1, bytes(Path("/proc/self").readlink()) + b"\n")  # the host's /proc still, so the host's number
    os.dup2(2, 1)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.setsid()
    try:
        config = json.loads(told.readline())
        socket.sethostname(config["hostname"])
        connect(config)
        furnish(config)
        become(config)
    except BaseException as error:  # noqa: BLE001  it is told to the kubelet
        os.write(say, f"{type(error).__name__}: {error}".encode())
        os._exit(FAILED)


if __name__ == "__main__":
    main()
