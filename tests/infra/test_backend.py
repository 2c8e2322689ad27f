"""Stacks whose state lies in a bucket: the real engine, and a real S3 server."""

from __future__ import annotations

import json
import os
import pwd
import socket
from datetime import UTC, datetime
from pathlib import Path

import boto3
import pytest
from fakes import gateway

from mgpu.backend import location, settings
from mgpu.iac import environment
from mgpu.iac.engine import process, state_file
from mgpu.iac.engine.project import project_name


@pytest.fixture
def in_bucket(require, project, tmp_path, monkeypatch):
    """The project of which the engine keeps the state in a bucket."""
    program = gateway.program()
    require("versitygw", program is not None, "it is not built: scripts/setup-go-tools.sh versitygw")
    folder = tmp_path / "s3"
    folder.mkdir()
    with gateway.serving(str(program), folder) as env:
        bucket = gateway.make_bucket(env)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv(location.VARIABLE, gateway.backend(env, bucket, "team"))
        yield project


@pytest.fixture
def aws(require, monkeypatch):
    """S3 and KMS in one, in the environment; a bucket in it."""
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    env = {**gateway.ACCESS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    bucket = gateway.make_bucket(env, "of-this-test")
    monkeypatch.setenv(location.VARIABLE, gateway.backend(env, bucket, "team"))
    yield env
    server.stop()


def test_secrets_of_stacks_are_a_kms_keys_and_need_no_passphrase(project, aws):
    key = boto3.client("kms", endpoint_url=aws["AWS_ENDPOINT_URL"], region_name="us-east-1").create_key()
    settings.choose_secrets_provider(f"awskms://{key['KeyMetadata']['KeyId']}?region=us-east-1")
    project.stack.init()
    project.stack.up()
    file = Path(project.stack.outputs().private_key_file)
    environment.passphrase_file().unlink()
    assert project.open().private_key() == file.read_text()
    project.open().destroy()
    assert not project.billed


def test_a_stack_is_made_repaired_and_ended_in_a_bucket(in_bucket):
    stack, name = in_bucket.stack, project_name(in_bucket.folder)
    stack.init()
    assert stack.exists()
    stack.up()
    assert set(in_bucket.ids()) == in_bucket.billed.keys()
    assert (name, "demo-1") in {known[:2] for known in state_file.stacks()}
    store = location.current().state
    lock = f"{state_file.lock_prefix(name, 'demo-1')}of-a-dead-process.json"
    mine = {"username": pwd.getpwuid(os.getuid()).pw_name, "hostname": socket.gethostname()}
    ended = next(process.note(0).parent.iterdir())  # of the CLIs that this machine has had
    then = datetime.fromtimestamp(float(ended.read_text().split()[0]) + 0.01, UTC).isoformat()
    store.put(lock, json.dumps({"pid": int(ended.name), **mine, "timestamp": then}).encode())
    in_bucket.open().up()
    assert store.stat(lock) is None
    in_bucket.open().destroy()
    assert not in_bucket.billed
    in_bucket.open().remove()
    assert not list(state_file.stacks())
