"""Stories on the fake AWS with machines: each has a user and an AWS of its own, and several are told at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fakes.aws.operator import Operator, operator

from mgpu.iac.engine import install

Story = Callable[[Operator], Any]
AT_ONCE = 3


@pytest.fixture(scope="module")
def told(
    request: pytest.FixtureRequest,
    namespaces: None,
    require: Any,
    wanted_stories: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], Any]]:
    """`told("name")`: what the story of that name, of the module's STORIES, came to. All that are wanted begin with the
    first test; a story's own assertions are raised here."""
    require("engine", install.find_engine() is not None, "no Pulumi engine; `make setup` installs one")
    stories: Mapping[str, Story] = request.module.STORIES
    folder = tmp_path_factory.mktemp("told")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        begun = {name: pool.submit(_tell, stories[name], folder / name) for name in wanted_stories}
        yield lambda name: begun[name].result()
        pool.shutdown(wait=False, cancel_futures=True)  # the tests are over, as with -x


def _tell(story: Story, folder: Path) -> Any:
    with operator(folder) as user:
        return story(user)
