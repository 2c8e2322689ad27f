"""Which addresses the nodes' own role opens: what runs keep in the account's base, and nothing that looks so."""

from __future__ import annotations

import pytest

from mgpu.providers.aws import names
from mgpu.providers.aws.iam.store_role import opened_by_role
from mgpu.providers.aws.options import Options

ACCOUNT = "123456789012"


class Account:
    def id(self) -> str:
        return ACCOUNT


@pytest.mark.parametrize(
    ("url", "opened"),
    [
        (f"s3://{names.bucket(ACCOUNT, 'us-east-1')}/runs", True),
        (f"s3://{names.bucket(ACCOUNT, 'eu-west-2')}/runs/", True),
        (f"s3://{names.bucket(ACCOUNT, 'us-east-1')}/runs/of-mine", True),
        (f"s3://{names.bucket(ACCOUNT, 'us-east-1')}", False),
        (f"s3://{names.bucket(ACCOUNT, 'us-east-1')}/runs-of-mine", False),
        (f"s3://{names.bucket(ACCOUNT, 'us-east-1')}/other/runs", False),
        (f"s3://{names.bucket('999999999999', 'us-east-1')}/runs", False),
        (f"s3://x{names.bucket(ACCOUNT, 'us-east-1')}/runs", False),
        ("s3://my-bucket/runs", False),
    ],
)
def test_only_what_runs_keep_in_the_accounts_base_is_opened(url, opened):
    assert opened_by_role(Account(), Options(), url) is opened  # type: ignore[arg-type]


def test_of_a_role_that_the_run_file_names_nothing_is_known():
    url = f"s3://{names.bucket(ACCOUNT, 'us-east-1')}/runs"
    assert not opened_by_role(Account(), Options(instance_profile="mine"), url)  # type: ignore[arg-type]
