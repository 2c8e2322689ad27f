"""The metadata service of the fake answers as EC2's does."""

from __future__ import annotations

import http.client
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fakes.aws import metadata
from fakes.aws.machines import Machine
from fakes.aws.metadata import Metadata

TTL = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN = "X-aws-ec2-metadata-token"
MACHINE = Machine(
    id="i-0123456789abcdef0",
    private_address="127.0.0.1",
    public_address="198.51.100.7",
    user_data=b"#!/bin/sh\n\xff",
    region="eu-west-1",
    zone="eu-west-1b",
    instance_type="g5.12xlarge",
    account="123456789012",
    role="mgpu-node",
    market="spot",
    hop_limit=2,
)


@pytest.fixture
def service():
    service = Metadata("127.0.0.1", 0)
    service.add(MACHINE)
    yield service
    service.close()


def ask(service: Metadata, method: str, path: str, timeout: float = 10, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=timeout)
    connection.request(
        method, f"/latest/{path}", headers={name.replace("_", "-"): text for name, text in headers.items()}
    )
    answer = connection.getresponse()
    return answer.status, answer.read()


def token(service: Metadata, ttl: str = "60") -> str:
    status, body = ask(service, "PUT", "api/token", **{TTL: ttl})
    assert status == 200
    return body.decode()


def get(service: Metadata, path: str, **more: float) -> tuple[int, bytes]:
    return ask(service, "GET", path, **more, **{TOKEN: token(service)})


def test_nothing_without_a_token(service):
    assert ask(service, "GET", "meta-data/instance-id")[0] == 401
    assert ask(service, "GET", "meta-data/instance-id", **{TOKEN: "made up"})[0] == 401
    assert get(service, "meta-data/instance-id") == (200, MACHINE.id.encode())


def test_a_token_ends(service, monkeypatch):
    held = token(service, "5")
    assert ask(service, "GET", "user-data", **{TOKEN: held}) == (200, MACHINE.user_data)
    now = time.monotonic()
    monkeypatch.setattr(metadata.time, "monotonic", lambda: now + 6)
    assert ask(service, "GET", "user-data", **{TOKEN: held})[0] == 401


@pytest.mark.parametrize("ttl", ["", "0", "-1", "21601", "long"])
def test_a_token_wants_a_life_time(service, ttl):
    assert ask(service, "PUT", "api/token", **({TTL: ttl} if ttl else {}))[0] == 400


def test_a_proxy_gets_no_token(service):
    assert ask(service, "PUT", "api/token", **{TTL: "60", "X-Forwarded-For": "10.0.0.1"})[0] == 403


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("meta-data/placement/region", "eu-west-1"),
        ("meta-data/placement/availability-zone", "eu-west-1b"),
        ("meta-data/instance-type", "g5.12xlarge"),
        ("meta-data/instance-life-cycle", "spot"),
        ("meta-data/public-ipv4", "198.51.100.7"),
        ("meta-data/local-ipv4", "127.0.0.1"),
        ("meta-data/iam/security-credentials/", "mgpu-node"),
    ],
)
def test_what_a_machine_is(service, path, said):
    assert get(service, path) == (200, said.encode())


@pytest.mark.parametrize(
    "path",
    [
        "meta-data/spot/instance-action",
        "meta-data/events/recommendations/rebalance",
        "meta-data/no-such-thing",
        "meta-data/iam/security-credentials/another-role",
        "../etc",
    ],
)
def test_nothing_is_404(service, path):
    assert get(service, path) == (404, b"")


def test_credentials_of_the_role_last(service):
    credentials = json.loads(get(service, "meta-data/iam/security-credentials/mgpu-node")[1])
    ends = time.strptime(credentials["Expiration"], "%Y-%m-%dT%H:%M:%SZ")
    assert ends > time.gmtime(time.time() + 3600)
    assert {"AccessKeyId", "SecretAccessKey", "Token", "LastUpdated"} < credentials.keys()


def test_an_address_that_is_no_machines_is_told_nothing(service):
    service.remove(MACHINE)
    assert ask(service, "PUT", "api/token", **{TTL: "60"})[0] == 404


def test_a_service_that_hangs_lets_go_when_its_machine_does(service):
    service.entry("127.0.0.1").fault = "hang"
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, service, "PUT", "api/token", **{TTL: "60"})
        with pytest.raises(TimeoutError):
            asked.result(0.3)
        service.remove(MACHINE)
        with pytest.raises(http.client.RemoteDisconnected):
            asked.result()


@pytest.mark.parametrize(("hop_limit", "arrives"), [(1, False), (2, True)])
def test_the_token_lives_for_as_many_hops_as_the_instance_says(hop_limit, arrives):
    """A peer that takes nothing with less than two hops left stands for one that is a hop away."""
    service = Metadata("127.0.0.1", 0)
    service.add(Machine(**{**vars(MACHINE), "hop_limit": hop_limit}))
    with socket.create_connection(("127.0.0.1", service.port)) as link:
        link.setsockopt(socket.IPPROTO_IP, 21, 2)  # IP_MINTTL
        link.settimeout(10 if arrives else 1)
        link.sendall(f"PUT /latest/api/token HTTP/1.0\r\n{TTL}: 60\r\n\r\n".encode())
        if arrives:
            assert b" 200 " in link.recv(20)
        else:
            with pytest.raises(TimeoutError):
                link.recv(20)
    service.close()
