"""Who visits the fake's machines from inside their network: SSH with a key of its own, and what they say."""

from __future__ import annotations

import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakes.aws import world

LOGIN_S = 20
NO_SSH = 255  # the exit status of a client that has no session
Answer = subprocess.CompletedProcess[str]

METADATA = """
import sys, urllib.error, urllib.request
def ask(method, path, **headers):
    names = {key.replace("_", "-"): value for key, value in headers.items()}
    asked = urllib.request.Request("http://169.254.169.254/latest/" + path, method=method, headers=names)
    try:
        return urllib.request.urlopen(asked, timeout=2).read().decode()
    except urllib.error.HTTPError as error:
        return str(error.code)
    except OSError as error:
        return "no answer"
token = ask("PUT", "api/token", X_aws_ec2_metadata_token_ttl_seconds="60")
for path in sys.argv[1:]:
    print(ask("GET", path, X_aws_ec2_metadata_token=token))
"""


class Visitor:
    """A key, and commands that run in the network of the process `pid`, the fake's server."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid, self.folder = pid, folder
        self.key = folder / "visitor"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "visitor", "-f", self.key], check=True)
        self.public_key = self.key.with_suffix(".pub").read_text().strip()

    @property
    def letting_in(self) -> str:
        """User data that lets the key in, as user `ubuntu`."""
        folder = "/home/ubuntu/.ssh"
        return (
            f"#cloud-boothook\n#!/bin/sh\nset -eu\nmkdir -p -m 700 {folder}\n"
            f"echo '{self.public_key}' >{folder}/authorized_keys\nchown -R ubuntu: {folder}\n"
        )

    def inside(self, *command: str, seconds: float = 60) -> Answer:
        """Runs a command in the world's network, as an operator does."""
        words = [*world.prefix(self.pid), *command]
        return subprocess.run(words, capture_output=True, text=True, timeout=seconds)


@dataclass
class Node:
    """One machine of the fake, of which these `facts` are known: id, private_address, public_address, ..."""

    visitor: Visitor
    facts: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.facts[name]
        except KeyError:
            raise AttributeError(name) from None

    def run(self, *words: str, address: str = "", seconds: float = LOGIN_S) -> str:
        """What a command prints, by SSH; the words go through the machine's shell one by one."""
        answer = self.ssh(" ".join(map(shlex.quote, words)), address=address, seconds=seconds)
        assert answer.returncode == 0, answer
        return answer.stdout.strip()

    def ssh(self, command: str, address: str = "", seconds: float = LOGIN_S) -> Answer:
        """Runs a command; a machine that boots refuses connections first, so it is asked until `seconds` are over."""
        to = address or self.public_address or self.private_address
        options = [
            *("BatchMode=yes", "IdentitiesOnly=yes", "IdentityAgent=none", "LogLevel=ERROR", "ConnectTimeout=2"),
            *("StrictHostKeyChecking=accept-new", f"UserKnownHostsFile={self.known_hosts}", "HashKnownHosts=no"),
        ]
        words = ["ssh", "-n", "-F", "none", "-i", str(self.visitor.key), *(f"-o{each}" for each in options)]
        end = time.monotonic() + seconds
        # The shell stays: ssh ends with 255 for a command that died of a signal too, and that is no failed login.
        words += [f"ubuntu@{to}", f"{command}\nexit $?"]
        while (done := self.visitor.inside(*words, seconds=max(60, seconds))).returncode == NO_SSH:
            if time.monotonic() >= end:
                raise ConnectionError(done.stderr.strip())
            time.sleep(0.02)
        return done

    def metadata(self, *paths: str) -> list[str]:
        """What its metadata service says, in one line each; a status where that is not 200."""
        return self.run("python3", "-c", METADATA, *paths).split("\n")

    @property
    def known_hosts(self) -> Path:
        """The host key that it showed first, as OpenSSH keeps it."""
        return self.visitor.folder / f"{self.id}.known-hosts"

    @property
    def console(self) -> str:
        """What its boot and its user data have said so far."""
        return (self.visitor.folder / "machines" / self.id / "console.log").read_text()
