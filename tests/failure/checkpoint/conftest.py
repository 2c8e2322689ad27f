"""Servers that fork savers, and stores for them: a folder, and a real S3 server."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from failure.checkpoint.judge import Place
from failure.checkpoint.servers import Savers
from fakes import gateway as versitygw
from mgpu_train.store import open_store


@dataclass(frozen=True)
class Gateway:
    """A versitygw that runs. A bucket is a folder."""

    folder: Path
    env: Mapping[str, str]

    def bucket(self) -> str:
        """A new one."""
        name = f"b-{uuid.uuid4().hex[:16]}"
        (self.folder / name).mkdir()
        return name


@pytest.fixture(scope="module")
def gateway(require: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    program = versitygw.program()
    require("versitygw", program is not None, "versitygw is not built: scripts/setup-go-tools.sh versitygw")
    folder = tmp_path_factory.mktemp("gateway")
    with versitygw.serving(str(program), folder) as env:
        yield Gateway(folder, env)


@pytest.fixture
def savers(tmp_path: Path) -> Iterator[Callable[[], Savers]]:
    """Each thread of a test asks for a server of its own."""
    made: list[Savers] = []
    lock = threading.Lock()

    def make() -> Savers:
        with lock:
            made.append(Savers(tmp_path / f"savers-{len(made)}.txt"))
            return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def places(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], Callable[[str], Place]]:
    """`places("file")("name")`: an empty place; with "versitygw" all of them are runs in one bucket."""

    def kind(name: str) -> Callable[[str], Place]:
        gateway: Gateway | None = None if name == "file" else request.getfixturevalue("gateway")
        bucket = gateway and open_store(f"s3://{gateway.bucket()}/runs", gateway.env)

        def make(place: str) -> Place:
            world = tmp_path / place
            world.mkdir()
            store = bucket or open_store(f"file://{world}/store")
            return Place(world, store, gateway and gateway.env)

        return make

    return kind
