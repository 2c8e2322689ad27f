"""One account: whose credentials, which regions, clients that give up in time."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.aws import FakeAws

from mgpu.errors import AuthError, InputError, RateLimited, Transient
from mgpu.providers.aws.failures import calling
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.session import Account

ACCOUNT = "123456789012"  # moto's


def account(aws: FakeAws, **more: str) -> Account:
    return Account(Options.of({**aws.options, **more}), connect_s=2, read_s=2)


def test_the_account_is_asked_for_once(aws: FakeAws):
    ours = account(aws)
    assert ours.id() == ours.id() == ACCOUNT
    assert len(aws.calls("GetCallerIdentity")) == 1


def test_a_wrong_account_is_refused_before_any_other_call(aws: FakeAws):
    ours = account(aws, account="999999999999")
    for ask in (ours.id, ours.regions, lambda: ours.client("ec2", "us-east-1")):
        with pytest.raises(InputError) as caught:
            ask()
        assert ACCOUNT in caught.value.what
        assert "999999999999" in caught.value.what
    assert {call.action for call in aws.calls()} == {"GetCallerIdentity"}


def test_the_right_account_passes(aws: FakeAws):
    assert account(aws, account=ACCOUNT).regions()


def test_all_enabled_regions_in_order(aws: FakeAws):
    regions = account(aws).regions()
    assert {"us-east-1", "eu-west-1"} <= set(regions)
    assert list(regions) == sorted(regions)


def test_the_home_region_is_the_environments_then_the_profiles_then_a_fixed_one(
    aws: FakeAws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    assert account(aws).home_region == "eu-west-3"
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    assert account(aws).home_region == "us-east-1"
    (tmp_path / "config").write_text("[profile work]\nregion = sa-east-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert account(aws, profile="work").home_region == "sa-east-1"


def test_a_profile_that_does_not_exist_is_an_auth_error(aws: FakeAws):
    with pytest.raises(AuthError, match="could not be found"):
        account(aws, profile="nobody").id()


def test_no_credentials_are_an_auth_error_with_a_next_step(aws: FakeAws, monkeypatch: pytest.MonkeyPatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(AuthError) as caught:
        account(aws).id()
    assert "aws configure" in caught.value.next_step


def test_credentials_that_expired_are_read_again(aws: FakeAws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    keys = tmp_path / "credentials"
    keys.write_text("[default]\naws_access_key_id = AKIAOLDOLDOLDOLDOLD1\naws_secret_access_key = x\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    ours = account(aws)
    ours.regions()
    assert used(ours) == "AKIAOLDOLDOLDOLDOLD1"
    aws.expire()
    with pytest.raises(AuthError, match="expired"):
        ours.regions()
    aws.calm()
    keys.write_text("[default]\naws_access_key_id = AKIANEWNEWNEWNEWNEW1\naws_secret_access_key = x\n")
    ours.regions()
    assert used(ours) == "AKIANEWNEWNEWNEWNEW1"


def used(account: Account) -> str:
    return account.client("ec2", "us-east-1")._request_signer._credentials.access_key


def test_clients_are_made_once_each(aws: FakeAws):
    ours = account(aws)
    assert ours.client("ec2", "us-east-1") is ours.client("ec2", "us-east-1")
    assert ours.client("ec2", "us-east-1") is not ours.client("ec2", "us-west-2")


def test_every_page_is_read(aws: FakeAws):
    aws.quick()
    ec2 = aws.client("ec2")
    ec2.run_instances(ImageId=aws.image(), InstanceType="g5.xlarge", MinCount=5, MaxCount=5)
    aws.pages(2)
    ours = account(aws)
    found = list(ours.pages(ours.client("ec2", "us-east-1"), "describe_instances", "Reservations"))
    assert sum(len(reservation["Instances"]) for reservation in found) == 5
    assert len(aws.calls("DescribeInstances")) > 1


def test_a_service_that_hangs_is_given_up_in_time(aws: FakeAws):
    aws.hang("DescribeRegions", 30)
    ours = Account(Options.of(aws.options), connect_s=1, read_s=0.3, attempts=2)
    with pytest.raises(Transient):  # else there is an answer in the end
        ours.regions()
    assert len(aws.calls("DescribeRegions")) <= 2


def test_nothing_that_listens_is_transient(aws: FakeAws):
    ours = Account(Options.of({"endpoint_url": "http://127.0.0.1:9"}), connect_s=1, attempts=1)
    with pytest.raises(Transient), calling("asking", "us-east-1"):
        ours.regions()


def test_throttling_is_tried_again_a_few_times_and_no_more(aws: FakeAws):
    aws.throttle(action="DescribeRegions")
    with pytest.raises(RateLimited):
        account(aws).regions()
    assert 2 <= len(aws.calls("DescribeRegions")) <= 3


def test_what_hardly_changes_is_asked_for_once_but_an_error_is_not_kept(aws: FakeAws):
    ours, answers = account(aws), iter([Transient("busy"), "a", "b"])

    def ask() -> str:
        answer = next(answers)
        if isinstance(answer, Transient):
            raise answer
        return answer

    with pytest.raises(Transient):
        ours.once("question", ask)
    assert [ours.once("question", ask) for _ in range(3)] == ["a"] * 3
