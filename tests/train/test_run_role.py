"""The role of a run, taken on by the machine's own, whose metadata service does not always answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from mgpu_train.store import Store, Unavailable, open_store

OWN = {
    "Code": "Success",
    "AccessKeyId": "machine",
    "SecretAccessKey": "s",
    "Token": "t",
    "Expiration": "2100-01-01T00:00:00Z",
}
TAKEN_ON = """<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult><Credentials>
<AccessKeyId>run</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>
<Expiration>2100-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleResult></AssumeRoleResponse>"""
NOTHING = '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><KeyCount>0</KeyCount></ListBucketResult>'


class Aws:
    """Metadata service, STS and S3 at one address."""

    def __init__(self) -> None:
        self.bad: list[tuple[int, str]] = []  # what the metadata service answers, before it answers well
        self.signers: list[str] = []  # of requests to S3
        aws = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self._say(200, "token")

            def do_GET(self) -> None:
                if not self.path.startswith("/latest/"):
                    aws.signers.append(self.headers["Authorization"].partition("Credential=")[2].partition("/")[0])
                    self._say(200, NOTHING)
                elif aws.bad:
                    self._say(*aws.bad.pop())
                else:
                    self._say(200, "own" if self.path.endswith("/") else json.dumps(OWN))

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self._say(200, TAKEN_ON)

            def _say(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def store(self) -> Store:
        role = {"MGPU_STORE_ROLE": "arn:aws:iam::123456789012:role/run", "MGPU_STORE_EXTERNAL_ID": "secret"}
        return open_store("s3://bucket/runs", {"AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": self.url, **role})


@pytest.fixture
def aws(monkeypatch) -> Iterator[Aws]:
    made = Aws()
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", made.url)
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_the_store_is_opened_by_the_role_of_the_run(aws):
    assert list(aws.store().list("")) == []
    assert aws.signers == ["run"]


@pytest.mark.parametrize("bad", [(500, ""), (200, "{malformed"), (404, "")], ids=str)
def test_an_answer_of_the_metadata_service_that_is_no_good_is_asked_for_again(aws, bad):
    aws.bad = [bad]
    assert list(aws.store().list("")) == []


def test_a_metadata_service_that_does_not_answer_is_named_and_passes(aws):
    """A save that comes just then is sent again later: it is no missing right."""
    aws.bad = [(500, "")] * 100
    store = aws.store()
    with pytest.raises(Unavailable, match="metadata service"):
        list(store.list(""))
    aws.bad = []
    assert list(store.list("")) == []
