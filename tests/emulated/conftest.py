"""What the tests of provider aws share beside the fake itself, which is in tests/conftest.py."""

from __future__ import annotations

import pytest
from fakes.aws import FakeAws
from fakes.booted import boot as boot

from mgpu.providers.aws.options import Options
from mgpu.providers.aws.session import Account


@pytest.fixture(scope="module")
def reached(aws_server: FakeAws) -> Account:
    """One for all tests of a module: to make the clients of all regions takes longer than most of them."""
    return Account(Options.of(aws_server.options), attempts=1)
