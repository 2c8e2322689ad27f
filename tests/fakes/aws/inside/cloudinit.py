"""cloud-init for a fake machine: its user data, from the metadata service, in the order of the real one.

1. boothooks run; 2. the host keys of a cloud-config are installed, or else new ones made: keys that were there before
are deleted; 3. sshd may start; 4. scripts run. Parts may be gzip'd and may come as a MIME multipart message. Of a
cloud-config only `ssh_keys`, `ssh_authorized_keys`, `bootcmd` and `runcmd` are known; anything else is refused aloud.
"""

from __future__ import annotations

import email
import gzip
import http.client
import os
import pwd
import signal
import subprocess
import sys
import time
from email.message import Message
from pathlib import Path
from typing import Any

import yaml

METADATA = "169.254.169.254"
CONSOLE = "/var/log/cloud-init-output.log"
FOLDER = Path("/var/lib/cloud/instance")
SSH = Path("/etc/ssh")
USER = "ubuntu"
PATIENCE_S = 120.0
KNOWN = {"ssh_keys", "ssh_authorized_keys", "ssh_deletekeys", "ssh_genkeytypes", "bootcmd", "runcmd"}


def ask(method: str, path: str, headers: dict[str, str]) -> bytes | None:
    """One answer of the metadata service; None where it has nothing. OSError."""
    connection = http.client.HTTPConnection(METADATA, timeout=5)
    connection.request(method, f"/latest/{path}", headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    if answer.status == 404:
        return None
    if answer.status != 200:
        raise OSError(f"the metadata service answers {method} {path} with {answer.status}")
    return body


def user_data() -> bytes:
    """What this machine was started with, unpacked; a metadata service that fails is asked again for a while."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return fetched()
        except (OSError, http.client.HTTPException) as error:
            print(f"no user data yet: {error}", flush=True)  # noqa: T201
            if time.monotonic() > end:
                raise
            time.sleep(0.5)


def fetched() -> bytes:
    """The user data, if the service gives it now."""
    token = ask("PUT", "api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}) or b""
    return unpacked(ask("GET", "user-data", {"X-aws-ec2-metadata-token": token.decode()}) or b"")


def unpacked(data: bytes) -> bytes:
    """Undoes gzip where it was used."""
    return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data


def parts(data: bytes) -> list[bytes]:
    """The parts of a multipart message, or the one that it is."""
    if not data.lower().startswith((b"content-type:", b"mime-version:")):
        return [data] if data.strip() else []
    message: Message = email.message_from_bytes(data)
    payloads = [part.get_payload(decode=True) for part in message.walk() if not part.is_multipart()]
    return [unpacked(payload) for payload in payloads if isinstance(payload, bytes)]


def execute(number: int, script: bytes) -> None:
    """Runs one script to its end; what it fails with is written down, and the machine goes on, as with cloud-init."""
    path = FOLDER / f"part-{number:03}"
    path.write_bytes(script)
    path.chmod(0o700)
    status = subprocess.run([path], stdin=subprocess.DEVNULL, cwd="/").returncode
    if status != 0:
        print(f"{path} failed: exit status {status}", flush=True)  # noqa: T201


def commands(listed: list[Any]) -> None:
    """Runs the commands of `bootcmd` or `runcmd`: a list of words, or a line for the shell."""
    for command in listed:
        words = [str(word) for word in command] if isinstance(command, list) else ["sh", "-c", command]
        subprocess.run(words, stdin=subprocess.DEVNULL, cwd="/")


def host_keys(given: dict[str, str]) -> None:
    """The keys that were given and no others, or else new ones."""
    for file in SSH.glob("ssh_host_*"):
        file.unlink()
    for name, text in given.items():
        kind, half = name.rsplit("_", 1)
        file = SSH / (f"ssh_host_{kind}_key" + {"private": "", "public": ".pub"}[half])
        file.write_text(text.rstrip("\n") + "\n")
        file.chmod(0o600 if half == "private" else 0o644)
    if not given:
        new = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", SSH / "ssh_host_ed25519_key"]
        subprocess.run(new, check=True)


def authorize(keys: list[str]) -> None:
    """Lets these keys in as the image's user."""
    user = pwd.getpwnam(USER)
    folder = Path(user.pw_dir, ".ssh")
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / "authorized_keys"
    with file.open("a") as lines:
        lines.writelines(f"{key}\n" for key in keys)
    file.chmod(0o600)
    for path in (folder, file):
        os.chown(path, user.pw_uid, user.pw_gid)


def main() -> None:
    """Boots once."""
    console = os.open(CONSOLE, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(console, descriptor)
    FOLDER.mkdir(parents=True, exist_ok=True)
    found = parts(user_data())
    scripts: list[tuple[int, bytes]] = []
    config: dict[str, Any] = {}
    for number, part in enumerate(found, 1):
        if part.startswith(b"#cloud-boothook"):
            execute(number, part.removeprefix(b"#cloud-boothook").lstrip())
        elif part.startswith(b"#cloud-config"):
            config |= yaml.safe_load(part) or {}
        elif part.startswith(b"#!"):
            scripts.append((number, part))
        else:
            print(f"part {number} is of no kind that this fake knows: {part[:40]!r}", flush=True)  # noqa: T201
    unknown = sorted(config.keys() - KNOWN)
    if unknown:
        print(f"cloud-config keys that this fake does not know: {', '.join(unknown)}", flush=True)  # noqa: T201
    commands(config.get("bootcmd", []))
    host_keys(config.get("ssh_keys", {}))
    authorize(config.get("ssh_authorized_keys", []))
    os.kill(1, signal.SIGUSR1)
    commands(config.get("runcmd", []))
    for number, script in scripts:
        execute(number, script)
    print("cloud-init finished", flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
