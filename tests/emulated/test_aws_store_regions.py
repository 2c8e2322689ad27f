"""Where a bucket is, as S3 tells it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.aws import FakeAws

from mgpu.cli import main
from mgpu.plan.model import Requirements
from mgpu.providers.aws.catalog import store_regions
from mgpu.providers.aws.catalog.store_regions import region_of
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.provider import AwsProvider
from mgpu.providers.aws.session import Account


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_regions, "_told", {})


@pytest.fixture
def silent() -> Iterator[Account]:
    """An account whose S3 takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Account(Options.of({"endpoint_url": f"http://127.0.0.1:{listener.getsockname()[1]}"}))


def test_a_buckets_region_is_asked_for_once_and_without_credentials(aws: FakeAws, monkeypatch):
    place = {"LocationConstraint": "eu-west-1"}
    aws.client("s3", "eu-west-1").create_bucket(Bucket="theirs", CreateBucketConfiguration=place)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    account = Account(Options.of(aws.options))
    assert region_of(account, "s3://theirs/runs") == region_of(account, "s3://theirs") == "eu-west-1"
    assert len(aws.calls("HeadBucket")) == 1


def test_of_a_bucket_that_is_not_there_nothing_is_known(aws: FakeAws):
    assert region_of(Account(Options.of(aws.options)), "s3://no-such-bucket/runs") == ""


@pytest.mark.parametrize("url", ["", "file:///runs", "s3://"])
def test_what_is_no_bucket_has_no_region(aws: FakeAws, url: str):
    assert region_of(Account(Options.of(aws.options)), url) == ""
    assert aws.calls() == []


def test_a_bucket_of_base_has_its_region_in_its_name(silent: Account):
    assert region_of(silent, "s3://mgpu-123456789012-ap-south-1/runs") == "ap-south-1"


def test_an_answer_that_does_not_come_is_not_waited_for_twice(silent: Account):
    assert region_of(silent, "s3://theirs", deadline_s=0.2) == ""
    assert region_of(silent, "s3://theirs", deadline_s=3600) == ""


def test_the_provider_tells_the_traffic_with_a_bucket_elsewhere(aws: FakeAws):
    place = {"LocationConstraint": "eu-west-1"}
    aws.client("s3", "eu-west-1").create_bucket(Bucket="theirs", CreateBucketConfiguration=place)
    provider = AwsProvider(aws.options)
    needed = Requirements(provider="aws", max_price_usd_per_hour=99, max_hours=1, regions=("us-east-1",))
    offer = provider.offers(needed).offers[0]
    there = needed.model_copy(update={"stores": ("s3://theirs/runs",)})
    assert [each.what for each in provider.other_costs(needed, offer, None) if "traffic" in each.what] == []
    (traffic,) = (each for each in provider.other_costs(there, offer, None) if "traffic" in each.what)
    assert "eu-west-1" in traffic.what


@pytest.mark.usefixtures("xdg")
def test_a_plan_shows_what_is_billed_beside_the_machines_and_warns_of_traffic(
    aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    place = {"LocationConstraint": "eu-west-1"}
    aws.client("s3", "eu-west-1").create_bucket(Bucket="theirs", CreateBucketConfiguration=place)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("pass\n")
    keys = {
        "name": "it", "provider": "aws", "gpu": "A10G", "gpus_per_node": 1, "nodes": 2, "market": "on-demand",
        "max_price_usd_per_hour": 99, "max_hours": 10, "command": ["train.py"],
        "checkpoint": {"to": "s3://theirs/runs", "every_minutes": 10}, "aws": aws.options,
    }  # fmt: skip
    (tmp_path / "mgpu.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
    said = {}
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit) as end:
            main(["plan", *more])
        out, err = capfd.readouterr()
        assert end.value.code in (0, None), err
        said[bool(more)] = out if more else " ".join(err.split())
    costs = json.loads(said[True])["costs"]
    assert [each["what"].replace(",", " ").split()[0] for each in costs] == [
        "disks",
        "public",
        "traffic",
        "checkpoints",
    ]
    assert "beside the machines $0.032 per hour" in said[False]
    assert "warning: traffic between us-east-1 and the bucket theirs in eu-west-1" in said[False]
