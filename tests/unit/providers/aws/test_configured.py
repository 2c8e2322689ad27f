"""Who has AWS set up is asked what is billed there, also where a machine's role is all there is (I7)."""

from __future__ import annotations

import os
from typing import Any

import pytest

from mgpu.providers.aws import provider
from mgpu.providers.aws.provider import AwsProvider


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Any:
    """A machine of this vendor, whose metadata service has a role or none; nothing else says who the user is."""
    from botocore.utils import InstanceMetadataFetcher

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    asked: list[str] = []

    def of(vendor: str, *, role: bool) -> list[str]:
        keys = {
            "role_name": "r",
            "access_key": "A",
            "secret_key": "s",
            "token": "t",
            "expiry_time": "2099-01-01T00:00:00Z",
        }
        answer = keys if role else {}
        monkeypatch.setattr(
            InstanceMetadataFetcher, "retrieve_iam_role_credentials", lambda _: asked.append(vendor) or answer
        )
        (tmp_path / "vendor").write_text(f"{vendor}\n")
        monkeypatch.setattr(provider, "_VENDOR", tmp_path / "vendor")
        return asked

    return of


@pytest.mark.parametrize("role", [True, False])
def test_on_a_machine_of_ec2s_its_role_counts(machine, role):
    machine("Amazon EC2", role=role)
    assert AwsProvider().configured() is role


def test_other_machines_are_asked_for_no_role(machine):
    """An address that answers nobody costs seconds, and another cloud's metadata service is there as well."""
    asked = machine("QEMU", role=True)
    assert not AwsProvider().configured()
    assert asked == []


def test_who_has_turned_the_metadata_service_off_has_no_role(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / "vendor").write_text("Amazon EC2")
    monkeypatch.setattr(provider, "_VENDOR", tmp_path / "vendor")
    assert not AwsProvider().configured()


def test_a_machine_that_does_not_say_who_made_it_has_none(machine, monkeypatch, tmp_path):
    machine("Amazon EC2", role=True)
    monkeypatch.setattr(provider, "_VENDOR", tmp_path / "absent")
    assert not AwsProvider().configured()
