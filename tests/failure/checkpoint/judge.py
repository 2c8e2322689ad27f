"""What is demanded of a store and of the nodes' disks, whoever was killed while he saved there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from failure.checkpoint.saver import NODES, differs
from mgpu_train.checkpoint.local import finished
from mgpu_train.checkpoint.log import keys
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.checkpoint.newest import newest_verified
from mgpu_train.checkpoint.transfer.upload import gather
from mgpu_train.checkpoint.transfer.verify import verify
from mgpu_train.store import Store
from mgpu_train.store.base import ASIDE


@dataclass
class Place:
    """The disks of a run's nodes, and its part of a store."""

    world: Path
    store: Store
    env: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        self.run = self.world.name
        self.log = CommitLog(self.store, self.run)

    @property
    def given(self) -> dict[str, Any]:
        """What a saver is told."""
        return {"world": str(self.world), "run": self.run, "url": self.store.url, "env": self.env and dict(self.env)}

    @property
    def newest(self) -> int:
        """The step that a run would go on from; every byte is looked at. Raises Damaged when there is none left."""
        found = newest_verified(self.store, self.run, deep=True, report=lambda _problem: None)
        return 0 if found is None else found.step

    def broken(self) -> list[str]:
        """What is committed and does not verify; what is half there, in the store or on a disk, and looks whole."""
        standing = self.log.checkpoints()
        problems = [f"{each.checkpoint_id} is committed: {why}" for each in standing for why in self._verify(each)]
        problems += [f"{key} lies: {why}" for key, why in self._lying()]
        for node in range(NODES):
            for step, folder in finished(self.world / f"node-{node}"):
                problems += differs(folder, {node: step})
        return problems

    def _verify(self, commit: Any) -> tuple[str, ...]:
        return verify(self.store, self.run, self.log.manifest(commit), deep=True)

    def _lying(self) -> Iterator[tuple[str, str]]:
        """A part that has its sidecar is whole, while it is made and while it is deleted."""
        for stat in list(self.store.list(keys.checkpoints(self.run))):
            name, _, rest = stat.key.removeprefix(keys.checkpoints(self.run)).partition("/")
            if rest.endswith(".json") and "/" not in rest:
                try:
                    gather(self.store, self.run, name, [int(rest.removeprefix("node-").removesuffix(".json"))])
                except Exception as error:  # noqa: BLE001 - whatever it is, it is not whole
                    yield stat.key, str(error)

    def left(self) -> list[str]:
        """The checkpoints that have a byte in the store, and what lies unfinished on the disks.

        Beside the commit log a folder keeps what a killed writer had no time to link: a few bytes that nobody lists.
        """
        steps = {keys.checkpoint_of(self.run, stat.key) for stat in self.store.list(keys.checkpoints(self.run))}
        asides = [path for path in self.world.rglob(f"{ASIDE}*") if path.parent.name != "commits"]
        return sorted(steps) + [path.name for path in asides] + self._unfinished()

    def _unfinished(self) -> list[str]:
        """Uploads in parts that were begun and neither completed nor given up."""
        if self.env is None:
            return []
        client = boto3.client(
            "s3",
            endpoint_url=self.env["AWS_ENDPOINT_URL"],
            region_name=self.env["AWS_REGION"],
            aws_access_key_id=self.env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.env["AWS_SECRET_ACCESS_KEY"],
        )
        bucket, prefix = self.store.url.removeprefix("s3://").split("/")
        found = client.list_multipart_uploads(Bucket=bucket, Prefix=f"{prefix}/{self.run}/")
        return [each["Key"] for each in found.get("Uploads", ())]
