"""ECR's registry in the fake's home region: Debian's docker-registry under ECR's name, by TLS, for moto's token.

It listens in the world's network (world.py, entered first) and ends with the fake. Whoever is to find it has `hosts` as
/etc/hosts and trusts `ca.pem`: a command by `prefix`, a machine as its machine image says.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from fakes.aws import world

ACCOUNT, REGION = "123456789012", "us-east-1"  # moto's
HOST = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com"
_PORT = 443
# the registry lives as long as the pipe to this shell
_SERVE = '"$1" serve "$2" <&- & read -r _; kill -9 $!; wait'
_IN_HOSTS = 'mount --bind "$0" /etc/hosts && exec "$@"'


def ca_file(folder: Path) -> Path:
    """The certificate to trust."""
    return folder / "ecr" / "ca.pem"


def log(folder: Path) -> Path:
    """What the registry says, a request a line of JSON."""
    return folder / "ecr" / "log"


def data(folder: Path) -> Path:
    """What it keeps."""
    return folder / "ecr" / "data"


def hosts(folder: Path) -> Path:
    """Names and addresses, as /etc/hosts has them."""
    return folder / "ecr" / "hosts"


def prefix(folder: Path) -> list[str]:
    """The words before a command that find the registry by its name."""
    return ["unshare", "--mount", "--propagation=private", "sh", "-c", _IN_HOSTS, str(hosts(folder))]


def serve(folder: Path) -> subprocess.Popen[bytes]:
    """Starts it; `folder` is the fake's. RuntimeError: it is not installed."""
    import bcrypt

    from fakes.registries import certificate

    program = shutil.which("docker-registry", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin")
    if program is None:
        raise RuntimeError("docker-registry is not installed")
    own = folder / "ecr"
    own.mkdir(mode=0o755)
    public, private = certificate(HOST)
    ca_file(folder).write_bytes(public)
    (own / "key.pem").write_bytes(private)
    password = bcrypt.hashpw(f"{ACCOUNT}-auth-token".encode(), bcrypt.gensalt(4)).decode()
    (own / "htpasswd").write_text(f"AWS:{password}\n")
    hosts(folder).write_text(f"127.0.0.1 localhost\n{entry()}")
    (own / "config.yml").write_text(_config(own))
    with log(folder).open("wb") as out:
        return subprocess.Popen(
            ["sh", "-c", _SERVE, "sh", program, str(own / "config.yml")],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def entry() -> str:
    """The line of a machine's /etc/hosts."""
    return f"{world.GATEWAY} {HOST}\n"


def _config(own: Path) -> str:
    tls = {"certificate": str(own / "ca.pem"), "key": str(own / "key.pem")}
    config = {
        "version": "0.1",
        "log": {"level": "info", "formatter": "json"},
        "storage": {"filesystem": {"rootdirectory": str(data(own.parent))}},
        "http": {"addr": f"{world.GATEWAY}:{_PORT}", "tls": tls},
        "auth": {"htpasswd": {"realm": "ECR", "path": str(own / "htpasswd")}},
    }
    return json.dumps(config)  # YAML, too
