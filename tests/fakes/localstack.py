"""LocalStack in host mode, on loopback, for the session; `make test-localstack` installs it.

The fixture is tests/conftest.py's, so that a session has one of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from mgpu_train.agent.machine import ports
from waiting import until_it_serves

from fakes.aws.fake import SHIELD

READY_S, END_S = 150.0, 20.0
HERE = "us-east-1"
SCRIPT = Path(__file__).parents[2] / "scripts" / "setup-localstack.sh"
# it ends with its input: whatever becomes of the tests, nothing of it stays
GUARDED = '"$0" -m localstack.runtime.main <&- & read -r _; kill $!; wait'


@dataclass(frozen=True)
class LocalStack:
    """A running one."""

    endpoint: str
    account: str = "000000000000"

    @property
    def env(self) -> dict[str, str]:
        """What to lay over os.environ, less the names of FOREIGN."""
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        return {**SHIELD, **keys, "AWS_REGION": HERE, "AWS_DEFAULT_REGION": HERE, "AWS_ENDPOINT_URL": self.endpoint}


def installed() -> Path | None:
    """The folder of the one that set-up has installed whole; None: there is none to start."""
    kept = subprocess.run(["sh", SCRIPT, "--kept"], capture_output=True, text=True, check=False)
    return Path(kept.stdout.strip()) if kept.returncode == 0 else None


@pytest.fixture(scope="session")
def localstack(require, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = installed()
    require("localstack", folder is not None, "it is not installed; `make test-localstack` does that")
    assert folder is not None
    python = folder / "bin" / "python"
    home = tmp_path_factory.mktemp("localstack")
    endpoint = f"http://127.0.0.1:{_free_port()}"
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            ["sh", "-c", GUARDED, str(python)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(home, endpoint.removeprefix("http://")),
            cwd=home,
            start_new_session=True,
        )
    try:
        until_it_serves(process, lambda: _serves(endpoint), READY_S, lambda: (home / "log").read_text()[-2000:])
        yield LocalStack(endpoint)
    finally:
        assert process.stdin
        process.stdin.close()
        process.wait(END_S)


def _environment(home: Path, listen: str) -> dict[str, str]:
    own = {"HOME": str(home), "TMPDIR": str(home), "XDG_CACHE_HOME": str(home / "cache"), "GATEWAY_LISTEN": listen}
    calm = {"DISABLE_EVENTS": "1", "SKIP_SSL_CERT_DOWNLOAD": "1", "DNS_ADDRESS": "0"}
    return {"PATH": os.environ["PATH"], **own, **calm}


def _serves(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(f"{endpoint}/_localstack/health", timeout=2) as answer:  # noqa: S310  loopback
            return "ec2" in json.load(answer)["services"]
    except (OSError, urllib.error.URLError):
        return False


def _free_port() -> int:
    return ports.free(1)[0]
