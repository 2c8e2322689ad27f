"""As in test_crash_points.py another machine brings it to its end; the backend is a bucket of the fake AWS, whose
server answers conditional writes as AWS does, one at a time.

The moments are some of those that the other test takes to versitygw: those at which a write decides who has the run,
and those at which an engine is at work.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from failure.crash import test_crash_points as crash
from failure.crash.test_crash_points import CUT, KNOWN_ELSEWHERE, POWER, Story
from fakes import gateway
from fakes.aws.fake import FakeAws
from mgpu_train.store import Store, open_store

_LARGEST = 1 << 20  # bytes of a record
MOMENTS = (
    f"nothing > after S#Store.put_if_absent records/#.json{CUT}",
    f"up > machines touched by pulumi up{POWER}",
    f"start > after Node.run env mgpu_train agent start{CUT}",
    f"state succeeded > before S#Store.replace records/#.json{CUT}",
)


class Bucket(crash.Bucket):
    """What is in it only S3 says."""

    def _store(self, name: str) -> Store:
        return open_store(f"s3://{self.folder.name}/{name}", dict(self.env))

    def records(self, name: str) -> list[dict[str, Any]]:
        store = self._store(name)
        return [json.loads(store.get(each.key, _LARGEST)) for each in store.list("mgpu/records/")]

    def stacks(self, name: str) -> list[str]:
        keys = [each.key for each in self._store(name).list(".pulumi/")]
        return [key for key in keys if fnmatch(key, ".pulumi/stacks/*.json*") or fnmatch(key, ".pulumi/locks/*.json")]


@pytest.fixture(scope="module")
def server(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """The environment that opens its S3."""
    with FakeAws.start(tmp_path_factory.mktemp("aws"), scale=1.0) as aws:
        yield {name: value for name, value in aws.env.items() if name.startswith("AWS_")}


@pytest.fixture
def bucket(server: Mapping[str, str]) -> Bucket:
    return Bucket(Path(gateway.make_bucket(server, f"backend-{uuid.uuid4().hex[:12]}")), server)


@pytest.mark.drawn("moments to kill a launch at, its backend on the fake AWS", "tests/failure/crash/elsewhere.py")
@pytest.mark.parametrize("point", MOMENTS)
def test_on_s3_as_aws_has_it_another_machine_brings_it_to_its_end(new_world, bucket, point):
    tell = crash.cut_off if point.endswith(CUT) else crash.taken_on
    story = tell(bucket.world(new_world, "aws"), Story([point]), bucket)
    assert not story.problems, str(story)


def test_the_moments_are_those_of_a_launch():
    """The other test writes them down."""
    known = KNOWN_ELSEWHERE.read_text().splitlines()
    assert [point for point in MOMENTS if point.removesuffix(CUT).removesuffix(POWER) not in known] == []
