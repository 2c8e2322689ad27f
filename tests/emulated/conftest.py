"""The fake AWS: one process for the session, as new for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes.aws import FOREIGN, FakeAws


@pytest.fixture(scope="session")
def aws_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeAws]:
    with FakeAws.start(tmp_path_factory.mktemp("aws")) as aws:
        yield aws


@pytest.fixture
def aws(aws_server: FakeAws, monkeypatch: pytest.MonkeyPatch) -> FakeAws:
    """As new, and what this test's environment means by AWS."""
    aws_server.reset()
    for name in FOREIGN:
        monkeypatch.delenv(name, raising=False)
    for name, value in aws_server.env.items():
        monkeypatch.setenv(name, value)
    return aws_server
