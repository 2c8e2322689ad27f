"""The programs that the bench measures, each in a process of its own: `python -m bench.clients NAME URL FOLDER`.

Prints one line of JSON: `wall_s` and `cpu_s` of the work alone, as a program that runs anyway would have it, and
`error` where it failed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.measure import cpu_s

RUN, CHECKPOINT = "bench", "a001-step-1"
DURABLE = "BENCH_DURABLE"  # a variable of the environment
Work = Callable[[], int | None]  # may return a number to report


def boto3_upload(url: str, folder: Path) -> Work:
    """boto3 as it is shipped: one transfer manager for all files."""
    manager, bucket, prefix = _transfer_manager(url)

    def work() -> None:
        with manager:
            futures = [manager.upload(str(path), bucket, f"{prefix}/{path.name}") for path in sorted(folder.iterdir())]
            for future in futures:
                future.result()

    return work


def boto3_download(url: str, folder: Path) -> Work:
    """The same the other way; `url` is a prefix."""
    manager, bucket, prefix = _transfer_manager(url)
    from boto3 import client

    def work() -> None:
        pages = client("s3").get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
        found = [each["Key"] for page in pages for each in page.get("Contents", ())]
        with manager:
            for future in [manager.download(bucket, key, str(folder / Path(key).name)) for key in found]:
                future.result()

    return work


def ours_upload(url: str, folder: Path) -> Work:
    """A node's part of a checkpoint, as the agent sends it; its sidecar with it."""
    from mgpu_train.checkpoint.transfer.upload import upload_part

    store = _store(url)

    def work() -> None:
        upload_part(store, RUN, CHECKPOINT, folder=folder, attempt=1, node=0, step=1, world_size=1, meta={"step": 1})

    return work


def ours_download(url: str, folder: Path) -> Work:
    """A checkpoint, as a node fetches it; without the flush to disk, as others do, unless DURABLE is set."""
    from mgpu_train.checkpoint.transfer.fetch import fetch

    store = _store(url)
    manifest = manifest_of(store)
    return lambda: fetch(store, RUN, manifest, folder, durable=DURABLE in os.environ).bytes


def ours_list(url: str, _folder: Path) -> Work:
    """All commits of a run, by a process that knows nothing of it."""
    from mgpu_train.checkpoint.log.commit_log import CommitLog

    log = CommitLog(_store(url), RUN)
    return lambda: len(log.checkpoints())


def manifest_of(store: Any) -> Any:
    """Of what `ours_upload` sent. Raises StoreError."""
    from mgpu_train.checkpoint.transfer.upload import assemble, gather

    return assemble(gather(store, RUN, CHECKPOINT, [0]) or (), run_id=RUN, nodes=1, created_at=0.0)


PROGRAMS = {
    "boto3-upload": boto3_upload,
    "boto3-download": boto3_download,
    "ours-upload": ours_upload,
    "ours-download": ours_download,
    "ours-list": ours_list,
}


def main() -> None:
    """Prepares what a running program has anyway, does the work, and prints what the work cost."""
    from mgpu_train.store import StoreError

    name, url, folder = sys.argv[1:]
    work = PROGRAMS[name](url, Path(folder))
    says: dict[str, Any] = {}
    begin, used = time.perf_counter(), cpu_s(os.getpid())
    try:
        says["result"] = work()
    except StoreError as error:
        says["error"] = f"{type(error).__name__}: {error}"
    says |= {"wall_s": time.perf_counter() - begin, "cpu_s": cpu_s(os.getpid()) - used}
    print(json.dumps(says), flush=True)


def _store(url: str) -> Any:
    from mgpu_train.store import open_store
    from mgpu_train.timeouts import Timeouts

    return open_store(url, timeouts=Timeouts.of_environment(os.environ))


def _transfer_manager(url: str) -> tuple[Any, str, str]:
    import boto3
    from boto3.s3.transfer import TransferConfig, create_transfer_manager

    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return create_transfer_manager(boto3.client("s3"), TransferConfig()), bucket, prefix


if __name__ == "__main__":
    main()
