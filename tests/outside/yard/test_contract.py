"""Provider yard keeps what providers promise. A file like this one is all that it takes to ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes.cloud import KEY as API_KEY
from fakes.cloud import serving
from fakes.cloud.machines import Paper
from mgpu_yard.keyless import Keyless
from mgpu_yard.provider import YardProvider

pytest.register_assert_rewrite("mgpu.testing.provider")
from mgpu.testing.provider import *  # noqa: E402, F403
from mgpu.testing.provider import Harness, end_all  # noqa: E402


@pytest.fixture(params=[YardProvider, Keyless])
def harness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    monkeypatch.setenv("YARD_API_KEY", API_KEY)
    with serving(Paper()) as cloud:
        cloud.keys = request.param is YardProvider
        harness = Harness(
            make=lambda: request.param({"endpoint": cloud.endpoint}),
            kill=cloud.machines.take,
            billed=lambda: cloud.billed,
            answers=False,  # nobody listens at the addresses of this account
            sold_out=lambda: cloud.capacity.update(dict.fromkeys(cloud.capacity, 1)),
        )
        yield harness
        end_all(harness)
        assert cloud.billed == []
