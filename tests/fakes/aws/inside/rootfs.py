"""What a fake machine sees as its disk: the host's own root under an overlay, without what is the operator's.

All that a machine writes lies in one memory file system with a limit, which dies with it. The folders that hold the
operator's things are covered by empty ones; the interpreter that has torch is laid over them, read-only, and also
appears as /opt/pytorch, as on the machine image that is rented.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PYTORCH = "/opt/pytorch"
CLOUD_INIT = "/usr/local/lib/fake-machine/cloudinit.py"
SETPRIV = "/usr/local/lib/fake-machine/setpriv"
DOCKERD = "/usr/local/lib/fake-machine/dockerd"
TOOLKIT = "/usr/bin/nvidia-container-runtime-hook"  # under this name on PATH the engine looks for it
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
SYSRQ = "/proc/sysrq-trigger"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_NOSUID, _NODEV, _RDONLY, _REMOUNT, _BIND, _REC, _DETACH = 2, 4, 1, 32, 4096, 16384, 2
_DROP_BOUNDING = 24
_MKNOD = 27  # an engine makes its containers' devices
_DROPPED = (16, 17, 25, _MKNOD, 34)  # SYS_MODULE, SYS_RAWIO, SYS_TIME, SYSLOG: the host's, not the machine's
_LIBC = ctypes.CDLL(None, use_errno=True)

_SSHD_CONFIG = """\
Include /etc/ssh/sshd_config.d/*.conf
KbdInteractiveAuthentication no
UsePAM yes
PrintMotd no
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
"""
# what a power-off is asked for with; anything else is what the host's own program says to a machine without systemd
_POWER = """\
#!/bin/sh
name=${0##*/}
case "$name $* " in
    systemctl*" poweroff "* | systemctl*" halt "* | poweroff* | halt* | shutdown*" now "* | shutdown*" +0 "*)
        exec /bin/kill -38 1 ;;
esac
[ "$name" = systemctl ] && [ -x /usr/bin/systemctl ] && exec /usr/bin/systemctl "$@"
echo "$name: this fake machine can only be powered off, at once" >&2
exit 1
"""
# Docker as the machine image has it, less what the host's network would have to do; its words go to the console
_DOCKERD = """\
#!/bin/sh
export SSL_CERT_FILE=/usr/local/lib/fake-machine/ca.pem PATH=%s
exec dockerd --config-file=/etc/docker/fake-machine.json --cgroup-parent=%s \\
    --bridge=none --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false
"""
# where the host has no sudo: the passwordless one of a rented machine's user, with the options that programs use
_SUDO = """\
#!/bin/sh
while :; do
    case ${1-} in
        --) shift; break ;;
        -u | --user) [ "$2" = root ] || exit 1; shift 2 ;;
        -*) shift ;;
        *) break ;;
    esac
done
export HOME=/root USER=root LOGNAME=root PATH=%s
exec %s --reuid=0 --regid=0 --init-groups -- "$@"
"""


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2). OSError names the target."""
    if _LIBC.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)


def bind(source: str, target: str, read_only: bool = False) -> None:
    """Shows a file or folder at a second place."""
    mount(source, target, flags=_BIND | _REC)
    if read_only:
        mount("", target, flags=_BIND | _REMOUNT | _RDONLY)


def build(config: dict[str, Any]) -> dict[str, str]:
    """Makes the file system and moves into it; returns the environment of the machine's processes."""
    scratch = Path(config["scratch"])
    mount("machine", str(scratch), "tmpfs", _NODEV, f"size={config['disk_mib']}m,mode=755")
    os.chdir(scratch)
    for name in ("upper", "work", "root", "masks"):
        Path(name).mkdir()
    mount("overlay", "root", "overlay", data="lowerdir=/,upperdir=upper,workdir=work")
    root = scratch / "root"
    mask(root, config["masked"])
    for source, target in config["shared"]:
        (root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
        bind(source, f"{root}{target}", read_only=True)
    (root / "var/log/cloud-init-output.log").touch()
    bind(config["console"], f"{root}/var/log/cloud-init-output.log")
    kernel(root)
    environment = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", **config["environment"]}
    _identity(root, config, environment)
    _programs(root, config["cloud_init"])
    if config["engine"]:
        _engine(root, config)
    enter(root)
    drop(each for each in _DROPPED if each != _MKNOD or not config["engine"])
    return environment


def drop(capabilities: Iterable[int]) -> None:
    """What this process starts has these capabilities no more, whoever it is."""
    for each in capabilities:
        _LIBC.prctl(_DROP_BOUNDING, each, 0, 0, 0)


def mask(root: Path, folders: list[str]) -> None:
    """Covers folders by empty ones, which lie in the folder `masks` of the current one."""
    for number, folder in enumerate(sorted(folders)):
        inside = root / folder.lstrip("/")
        if not inside.is_dir() or inside.is_symlink():
            continue
        cover = Path("masks", str(number)).absolute()
        cover.mkdir()
        cover.chmod(0o1777 if folder in ("/tmp", "/var/tmp") else 0o755)
        bind(str(cover), str(inside))


def kernel(root: Path, shm: str = "50%") -> None:
    """Mounts /proc, /sys and /dev, with shared memory of this size, as a machine of its own sees them."""
    mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV)
    bind(f"{root}/proc/sys", f"{root}/proc/sys", read_only=True)
    if (root / SYSRQ.lstrip("/")).exists():  # the real one would switch the host off; init reads this one
        os.mkfifo("masks/sysrq", 0o600)
        bind(str(Path("masks/sysrq").absolute()), f"{root}{SYSRQ}")
    mount("sysfs", f"{root}/sys", "sysfs", _RDONLY | _NOSUID | _NODEV)
    mount("dev", f"{root}/dev", "tmpfs", _NOSUID, "size=1m,mode=755")
    for name in DEVICES:
        (root / "dev" / name).touch()
        bind(f"/dev/{name}", f"{root}/dev/{name}")
    for name, kind, data in (
        ("pts", "devpts", "newinstance,gid=5,mode=620,ptmxmode=666"),
        ("shm", "tmpfs", f"size={shm}"),
    ):
        (root / "dev" / name).mkdir()
        mount(name, f"{root}/dev/{name}", kind, _NOSUID, data)
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
    for name, target in links.items():
        (root / "dev" / name).symlink_to(target)
    for folder in ("run/sshd", "run/lock"):
        (root / folder).mkdir(parents=True, exist_ok=True)


def _write(root: Path, path: str, text: str, mode: int = 0o644) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # perhaps a link to somewhere in /run
    file.write_text(text)
    file.chmod(mode)


def _identity(root: Path, config: dict[str, Any], environment: dict[str, str]) -> None:
    name, address = config["hostname"], config["private_address"]
    _write(root, "etc/hostname", f"{name}\n")
    _write(root, "etc/hosts", f"127.0.0.1 localhost\n{address} {name}.ec2.internal {name}\n")
    _write(root, "etc/resolv.conf", "# nothing is resolved here but /etc/hosts\n")
    _write(root, "etc/machine-id", hashlib.sha256(config["id"].encode()).hexdigest()[:32] + "\n")
    _write(
        root, "etc/environment", "".join(f'{key}="{value}"\n' for key, value in environment.items() if key != "HOME")
    )
    for file in (root / "etc/ssh").glob("ssh_host_*"):
        file.unlink()
    shutil.rmtree(root / "etc/ssh/sshd_config.d", ignore_errors=True)
    (root / "etc/ssh/sshd_config.d").mkdir(parents=True)
    _write(root, "etc/ssh/sshd_config", _SSHD_CONFIG)
    _user(root, "ubuntu")


def _user(root: Path, name: str) -> None:
    """The user of the machine image, who may become root."""
    lines = [line.split(":") for line in (root / "etc/passwd").read_text().splitlines() if line]
    own = next((line for line in lines if line[0] == name), None)
    taken = {int(line[2]) for line in lines}
    number = int(own[2]) if own else next(free for free in range(1000, 60000) if free not in taken)
    if own is None:
        for file, line in (("passwd", f"x:{number}:{number}::/home/{name}:/bin/bash"), ("group", f"x:{number}:")):
            _write(root, f"etc/{file}", (root / "etc" / file).read_text() + f"{name}:{line}\n")
        _write(root, "etc/shadow", (root / "etc/shadow").read_text() + f"{name}:!:19000:0:99999:7:::\n", 0o640)
    home = root / "home" / name
    home.mkdir(mode=0o755)
    os.chown(home, number, number)
    _write(root, "etc/sudoers.d/90-cloud-init-users", f"{name} ALL=(ALL) NOPASSWD:ALL\n", 0o440)


def _programs(root: Path, cloud_init: str) -> None:
    _write(root, CLOUD_INIT.lstrip("/"), cloud_init)
    for folder in ("sbin", "bin"):
        for name in ("poweroff", "halt", "shutdown", "systemctl"):
            _write(root, f"usr/local/{folder}/{name}", _POWER, 0o755)
    if not (root / "usr/bin/sudo").exists():
        shutil.copy(root / "usr/bin/setpriv", root / SETPRIV.lstrip("/"))
        (root / SETPRIV.lstrip("/")).chmod(stat.S_ISUID | 0o755)
        _write(root, "usr/local/bin/sudo", _SUDO % (PATH, SETPRIV), 0o755)


def _engine(root: Path, config: dict[str, Any]) -> None:
    """Docker, and NVIDIA's container toolkit. The control groups are the host's; machines.py removes them."""
    with (root / "etc/hosts").open("a") as hosts:
        hosts.write(config["engine"]["hosts"])
    _write(root, "usr/local/lib/fake-machine/ca.pem", config["engine"]["ca"])
    _write(root, DOCKERD.lstrip("/"), _DOCKERD % (PATH, config["cgroup"]), 0o755)
    _write(root, TOOLKIT.lstrip("/"), f"#!{config['python']} -I\n{config['engine']['toolkit']}", 0o755)
    _write(root, "etc/docker/fake-machine.json", "{}")
    bind("/sys/fs/cgroup", f"{root}/sys/fs/cgroup")
    (root / "var/lib/docker").mkdir(parents=True, exist_ok=True)
    mount("docker", f"{root}/var/lib/docker", "tmpfs", _NODEV, f"size={config['engine_mib']}m,mode=711")


def enter(root: Path) -> None:
    """Makes it the root of all that this process sees."""
    os.chdir(root)
    (root / "mnt/host").mkdir(parents=True, exist_ok=True)
    subprocess.run(["pivot_root", ".", "mnt/host"], check=True, timeout=20)
    os.chdir("/")
    if _LIBC.umount2(b"/mnt/host", _DETACH) != 0:
        raise OSError(ctypes.get_errno(), "the host's file system cannot be left")
    Path("/mnt/host").rmdir()
