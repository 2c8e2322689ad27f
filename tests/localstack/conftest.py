"""What the tests of this folder mean by AWS."""

from __future__ import annotations

import pytest
from fakes.aws import FOREIGN
from fakes.localstack import LocalStack


@pytest.fixture
def aws(localstack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> LocalStack:
    """What this test's environment means by AWS."""
    for name in FOREIGN:
        monkeypatch.delenv(name, raising=False)
    for name, value in localstack.env.items():
        monkeypatch.setenv(name, value)
    return localstack
