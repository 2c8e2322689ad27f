"""Whose credentials the operator opens the store with."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from mgpu_train.store import StoreError

from mgpu.run.job import operator_store
from mgpu.run.record.record import Record
from mgpu.spec.model import RunSpec


@pytest.fixture
def signers(tmp_path, monkeypatch) -> Iterator[list[str]]:
    """The ids of the keys that requests to AWS are signed with; a profile `lab`, and other keys in the environment."""
    asked: list[str] = []

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.extend(re.findall(r"Credential=([^/]+)/", self.headers["Authorization"]))
            self.send_response(403)
            self.end_headers()

        def log_message(self, *_) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = of-lab\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    yield asked
    server.shutdown()
    server.server_close()


def spec(**aws: str) -> RunSpec:
    limits = {"max_hours": 1, "max_price_usd_per_hour": 1}
    return RunSpec.model_validate({"name": "r", "provider": "aws", **limits, "aws": aws})


def test_a_profile_opens_the_store_as_it_opens_ec2(signers):
    with pytest.raises(StoreError):
        list(operator_store.for_spec("s3://bucket/runs", spec(profile="lab")).list(""))
    assert set(signers) == {"of-lab"}


def test_a_run_that_is_remembered_is_read_by_its_own_profile(signers):
    record = Record("r", "r", "p", "/", "mgpu.yaml", "s", True, "s", "aws", 1, options={"profile": "lab"})
    with pytest.raises(StoreError):
        list(operator_store.for_record("s3://bucket/runs", record).list(""))
    assert set(signers) == {"of-lab"}


RUN_FILE = (
    "{name: r, provider: aws, max_price_usd_per_hour: 1, max_hours: 1, command: [a.py], checkpoint: none, aws: %s}"
)


@pytest.mark.parametrize(
    ("aws", "profile", "signer"),
    [
        ("{profile: lab}", None, "of-lab"),
        ("{}", None, "of-environment"),
        ("{}", "lab", "of-lab"),
        ("{profile: other}", "lab", "of-lab"),
        ("{profile: lab}, matrix: {env.SEED: [a, b]}", None, "of-lab"),
        ("{odd: key}", None, "of-environment"),
        (None, None, "of-environment"),
        (None, "lab", "of-lab"),
    ],
)
def test_an_address_alone_is_opened_as_it_is_said_or_as_the_run_file_here_has_it(
    signers, tmp_path, aws, profile, signer
):
    (tmp_path / "a.py").touch()
    run_file = tmp_path / "mgpu.yaml"
    if aws is not None:
        run_file.write_text(RUN_FILE % aws)
    with pytest.raises(StoreError):
        list(operator_store.for_address("s3://bucket/runs", run_file, profile).list(""))
    assert set(signers) == {signer}


def test_without_a_profile_the_environment_counts(signers):
    with pytest.raises(StoreError):
        list(operator_store.for_spec("s3://bucket/runs", spec()).list(""))
    assert set(signers) == {"of-environment"}


def test_a_store_elsewhere_has_keys_of_its_own(signers, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", os.environ["AWS_ENDPOINT_URL"])
    with pytest.raises(StoreError):
        list(operator_store.for_spec("s3://bucket/runs", spec(profile="lab")).list(""))
    assert set(signers) == {"of-environment"}
