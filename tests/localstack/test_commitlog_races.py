"""F30, F31 on LocalStack's S3: one winner a number, and nothing of a zombie."""

from __future__ import annotations

import boto3
import pytest
from fakes import lograces
from mgpu_train.store import open_store


@pytest.mark.parametrize("scenario", lograces.SCENARIOS, ids=lambda each: each.__name__)
def test_twenty_threads_on_one_log(aws, scenario, monkeypatch):
    lograces.small_index(monkeypatch)
    bucket = f"races-{scenario.__name__.replace('_', '-')}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    scenario(open_store(f"s3://{bucket}/runs"))
