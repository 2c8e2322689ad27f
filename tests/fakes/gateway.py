"""versitygw, a real S3 server on the file system, as a test starts and ends it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3
from mgpu_train.agent.machine import ports
from waiting import until_it_serves

ACCESS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "canary-5ecret-key", "AWS_REGION": "us-east-1"}
START_S = 30.0


def program() -> str | None:
    """The program: MGPU_VERSITYGW, on PATH, or what scripts/setup-go-tools.sh has built; None: it is not here."""
    script = Path(__file__).parents[2] / "scripts" / "setup-go-tools.sh"
    built = subprocess.run(["sh", script, "--kept", "versitygw"], capture_output=True, text=True, check=False)
    return os.environ.get("MGPU_VERSITYGW") or shutil.which("versitygw") or built.stdout.strip() or None


@contextmanager
def serving(versitygw: str, folder: Path) -> Iterator[Mapping[str, str]]:
    """The environment that opens the server while it runs; every bucket is a folder of `folder`.

    Raises RuntimeError when it does not start.
    """
    port = ports.free(1)[0]
    keys = {"ROOT_ACCESS_KEY": ACCESS["AWS_ACCESS_KEY_ID"], "ROOT_SECRET_KEY": ACCESS["AWS_SECRET_ACCESS_KEY"]}
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(
        [versitygw, "--port", f"127.0.0.1:{port}", "posix", str(folder)],
        env={"PATH": os.environ["PATH"], **keys},
        stdout=quiet,
        stderr=quiet,
    )
    try:
        until_it_serves(process, lambda: _answers(port), START_S, lambda: f"versitygw, exit code {process.poll()}")
        yield {**ACCESS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def make_bucket(env: Mapping[str, str], name: str = "backends") -> str:
    """Makes a bucket there; its name."""
    keys = {"aws_access_key_id": env["AWS_ACCESS_KEY_ID"], "aws_secret_access_key": env["AWS_SECRET_ACCESS_KEY"]}
    client = boto3.client("s3", endpoint_url=env["AWS_ENDPOINT_URL"], region_name=env["AWS_REGION"], **keys)
    client.create_bucket(Bucket=name)
    return name


def backend(env: Mapping[str, str], bucket: str, prefix: str) -> str:
    """The bucket's address as a backend of Pulumi's."""
    return f"s3://{bucket}/{prefix}?region={env['AWS_REGION']}&endpoint={env['AWS_ENDPOINT_URL']}&s3ForcePathStyle=true"


@dataclass
class Team:
    """Machines, each with a state folder of its own, that share a bucket."""

    folder: Path
    environ: Callable[[str, str], None]

    @contextmanager
    def on(self, machine: str) -> Iterator[None]:
        """What the block does is done there."""
        from mgpu.backend import outbox
        from mgpu.run.record import shared

        self.environ("XDG_STATE_HOME", str(self.folder / machine))
        shared._pulled.clear()
        shared._stays.clear()
        shared._seen.clear()
        outbox._seen.clear()
        shared.files._followed.clear()
        yield
