"""The fake AWS as a test holds it: a process that lives as long as this object's pipe to it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakes.aws import control

READY_S = 60.0
HOME_REGION = "us-east-1"
# credentials of moto's root user; a user's own configuration is shielded off
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "AKIAFAKEFAKEFAKEFAKE", "AWS_SECRET_ACCESS_KEY": "fake"}
SHIELD = {
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}
# what has to be absent, since an empty value means something
FOREIGN = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SESSION_TOKEN", "AWS_ROLE_ARN")


@dataclass(frozen=True)
class Row:
    """One line of the bill; times in UNIX seconds."""

    id: str
    instance_type: str
    market: str
    region: str
    zone: str
    owner: str | None
    usd_per_hour: float
    launched_at: float
    ended_at: float | None


@dataclass(frozen=True)
class Called:
    """One request that came; `at` in UNIX seconds, `parameters` as boto3 takes them."""

    at: float
    service: str
    action: str
    region: str
    parameters: dict[str, Any]


class FakeAws:
    """A running fake; `with FakeAws.start(folder) as aws:`."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], port: int) -> None:
        self.folder, self._process, self._port = folder, process, port
        self.prefix: list[str] = []
        self.endpoint = f"http://127.0.0.1:{port}"

    @classmethod
    def start(cls, folder: Path, machines: bool = False) -> FakeAws:
        """Starts one; what it complains about goes to `folder`/fake-aws.log."""
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "fakes.aws", str(folder), *(["--machines"] if machines else [])]
        with (folder / "fake-aws.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_own_environment(),
                start_new_session=True,  # Ctrl-C is the test's, which closes the fake afterwards
            )
        try:
            return cls(folder, process, _ready(process, folder)["port"])
        except BaseException:
            _end(process)
            raise

    def __enter__(self) -> FakeAws:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it and all that it made."""
        _end(self._process)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    @property
    def env(self) -> dict[str, str]:
        """What to lay over os.environ, less the names of `FOREIGN`, so that AWS means this fake alone."""
        region = {"AWS_REGION": HOME_REGION, "AWS_DEFAULT_REGION": HOME_REGION}  # boto3 reads the second alone
        return {**CREDENTIALS, **SHIELD, **region, "AWS_ENDPOINT_URL": self.endpoint}

    @property
    def options(self) -> dict[str, str]:
        """For provider `aws`."""
        return {"endpoint_url": self.endpoint}

    def client(self, service: str, region: str = HOME_REGION, **credentials: str) -> Any:
        """A boto3 client of this process; `credentials` as boto3.client takes them."""
        from botocore.config import Config
        from botocore.session import Session

        given = {
            "aws_access_key_id": CREDENTIALS["AWS_ACCESS_KEY_ID"],
            "aws_secret_access_key": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            **credentials,
        }
        config = Config(retries={"total_max_attempts": 1}, proxies={})
        endpoint = f"http://127.0.0.1:{self._port}"
        unconfigured = Session(session_vars={"profile": (None, None, None, None)})
        return unconfigured.create_client(service, region, endpoint_url=endpoint, config=config, **given)

    def ask(self, verb: str, **arguments: Any) -> Any:
        """A verb of the control API; `control.Refused` if it cannot be done."""
        return control.ask(self.folder, verb, **arguments)

    def reset(self) -> None:
        """All of moto, the rules, the calls and the bill as new."""
        self.ask("reset")

    def calls(self, action: str | None = None) -> list[Called]:
        """The requests that came since the last reset, oldest first."""
        return [Called(**each) for each in self.ask("calls") if action in (None, each["action"])]

    def bill(self) -> list[Row]:
        """What AWS would bill, ended or not."""
        return [Row(**each) for each in self.ask("bill")]

    def alive(self) -> list[str]:
        """The ids of all that is billed now."""
        return [row.id for row in self.bill() if row.ended_at is None]


def _own_environment() -> dict[str, str]:
    """Of the fake's process: moto uses botocore, and shall not find the user's configuration either."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "MOTO_"))}
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**kept, **SHIELD, "PYTHONPATH": path}


def _ready(process: subprocess.Popen[bytes], folder: Path) -> dict[str, Any]:
    assert process.stdout
    line = process.stdout.readline() if select.select([process.stdout], [], [], READY_S)[0] else b""
    if not line:
        raise RuntimeError(f"the fake AWS did not start: {(folder / 'fake-aws.log').read_text()[-2000:]}")
    return json.loads(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
