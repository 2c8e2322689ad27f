"""Who a registry is told that we are: AWS's tokens, docker's configuration, its helpers."""

from __future__ import annotations

import base64
import json
import math
import os
from pathlib import Path

import pytest
from fakes.aws import FakeAws

from mgpu.errors import ImageError
from mgpu.image import place
from mgpu.image.registry import auth
from mgpu.image.registry.auth import Login
from mgpu.providers.aws.options import region_of
from mgpu.providers.aws.provider import AwsProvider
from mgpu.spec.provider import of_registry

ECR = "123456789012.dkr.ecr.eu-west-1.amazonaws.com"
DAY = 86400.0


def test_a_token_is_kept_until_it_is_about_to_end():
    now, given = 1e9, list[Login]()

    def ask() -> Login:
        given.append(Login("AWS", f"canary-{len(given) + 1}", expires_at=now + DAY / 2))
        return given[-1]

    login = auth.Renewed(ask, lambda: now)
    assert login().password == "canary-1"
    now += DAY / 2 - 900 - 1  # a quarter of an hour before its end
    assert login().password == "canary-1"
    now += 2
    assert login().password == "canary-2"
    assert len(given) == 2


def test_aws_gives_tokens_for_its_registries(aws: FakeAws):
    login = auth.of(ECR)()
    assert login is not None
    assert login.username == "AWS"
    assert auth.of(ECR, AwsProvider({"profile": "absent"})) is not None, "it is asked when the login is needed"
    with pytest.raises(ImageError, match="no login for 123456789012") as caught:
        auth.of(ECR, AwsProvider({"profile": "absent"}))()
    assert "absent" in caught.value.why, "the run file's own credentials, not those of the environment"
    assert login.password
    assert login.expires_at < math.inf


def test_an_account_that_gives_no_token_is_an_error_with_a_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ImageError, match="no login for 123456789012") as caught:
        auth.of(ECR)()
    assert "aws sso login" in caught.value.next_step


@pytest.mark.parametrize(
    ("registry", "region"),
    [
        (ECR, "eu-west-1"),
        ("123456789012.dkr.ecr.cn-north-1.amazonaws.com.cn", "cn-north-1"),
        ("123456789012.dkr.ecr-fips.us-east-1.amazonaws.com", "us-east-1"),
        (f"{ECR}.example.com", ""),
        ("public.ecr.aws", ""),
        ("ghcr.io", ""),
    ],
)
def test_ecrs_names_are_known(registry, region):
    assert region_of(registry) == region
    assert (of_registry(registry) is not None) == bool(region)
    assert AwsProvider().pulled_by_role(registry) == ({"region": region, "endpoint": ""} if region else {})
    assert place.pulled_by_role(registry, object()) == {}


def test_docker_login_is_found(docker_config: Path):
    write(docker_config, auths={"r.example:5000": {"auth": base64.b64encode(b"me:canary:1").decode()}})
    assert auth.of("r.example:5000")() == Login("me", "canary:1")
    assert auth.of("other.example")() is None


def test_docker_hub_has_a_name_of_its_own(docker_config: Path):
    write(docker_config, auths={"https://index.docker.io/v1/": {"auth": base64.b64encode(b"me:canary").decode()}})
    assert auth.of("docker.io")() == Login("me", "canary")


def test_without_a_configuration_nobody_is_logged_in(docker_config: Path):
    assert auth.of("r.example")() is None


@pytest.mark.parametrize("key", ["credsStore", "credHelpers"])
def test_a_helper_is_asked(docker_config: Path, key: str):
    helper(docker_config, 'read server; echo "{\\"Username\\": \\"me\\", \\"Secret\\": \\"canary-$server\\"}"')
    write(docker_config, **{key: "test" if key == "credsStore" else {"r.example": "test"}})
    assert auth.of("r.example")() == Login("me", "canary-r.example")


def test_a_helper_may_give_an_identity_token(docker_config: Path):
    helper(docker_config, 'echo "{\\"Username\\": \\"<token>\\", \\"Secret\\": \\"canary\\"}"')
    write(docker_config, credsStore="test")
    login = auth.of("r.example")()
    assert login == Login("", "", identity_token="canary")
    assert login.for_engine() == {"identitytoken": "canary"}


def test_a_helper_that_is_silent_costs_a_deadline(docker_config: Path):
    helper(docker_config, "exec sleep 5")
    write(docker_config, credsStore="test")
    with pytest.raises(ImageError, match="no login") as caught:
        auth.from_docker("r.example", within_s=0.2)
    assert "silent for 0.2 s" in caught.value.why


def test_a_helper_that_is_not_there_is_named(docker_config: Path, recwarn: pytest.WarningsRecorder):
    write(docker_config, credsStore="absent")
    with pytest.raises(ImageError, match="no login") as caught:
        auth.of("r.example")()
    assert "docker-credential-absent" in caught.value.why
    assert "absent" not in " ".join(str(each.message) for each in recwarn)  # the rest is other tests' garbage


def test_a_password_is_shown_nowhere():
    login = Login("me", "canary", "canary")
    assert "canary" not in repr(login)
    assert login.for_engine() == {"identitytoken": "canary"}
    assert Login("me", "canary").for_engine() == {"username": "me", "password": "canary"}


@pytest.fixture
def docker_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def write(folder: Path, **config: object) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def helper(folder: Path, script: str) -> None:
    (folder / "docker-credential-test").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "docker-credential-test").chmod(0o755)
