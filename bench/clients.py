"""The programs that the bench measures, each in a process of its own: `python -m bench.clients NAME URL FOLDER`.

Prints one line of JSON: `wall_s` and `cpu_s` of the transfer alone, as a program that runs anyway would have it.
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

RUN = "bench"


def boto3_upload(url: str, folder: Path) -> Callable[[], None]:
    """boto3 as it is shipped: one transfer manager for all files."""
    manager, bucket, prefix = _transfer_manager(url)

    def work() -> None:
        with manager:
            for path in sorted(folder.iterdir()):
                manager.upload(str(path), bucket, f"{prefix}/{path.name}")

    return work


def boto3_download(url: str, folder: Path) -> Callable[[], None]:
    """The same the other way; `url` is a prefix."""
    manager, bucket, prefix = _transfer_manager(url)
    from boto3 import client

    def work() -> None:
        pages = client("s3").get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
        with manager:
            futures = [
                manager.download(bucket, each["Key"], str(folder / Path(each["Key"]).name))
                for page in pages
                for each in page["Contents"]
            ]
            for future in futures:
                future.result()

    return work


def ours_upload(url: str, folder: Path) -> Callable[[], None]:
    """A node's part of a checkpoint, as the agent sends it; its sidecar with it."""
    from mgpu_train.checkpoint.upload import upload_part

    store = _store(url)

    def work() -> None:
        upload_part(store, RUN, "a001-step-1", folder=folder, attempt=1, node=0, step=1, world_size=1, meta={"step": 1})

    return work


PROGRAMS = {
    "boto3-upload": boto3_upload,
    "boto3-download": boto3_download,
    "ours-upload": ours_upload,
}


def main() -> None:
    """Prepares what a running program has anyway, does the work, and prints what the work cost."""
    name, url, folder = sys.argv[1:]
    work = PROGRAMS[name](url, Path(folder))
    begin, used = time.perf_counter(), cpu_s(os.getpid())
    work()
    print(json.dumps({"wall_s": time.perf_counter() - begin, "cpu_s": cpu_s(os.getpid()) - used}), flush=True)


def _store(url: str) -> Any:
    from mgpu_train.store import open_store

    return open_store(url)


def _transfer_manager(url: str) -> tuple[Any, str, str]:
    import boto3
    from boto3.s3.transfer import TransferConfig, create_transfer_manager

    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return create_transfer_manager(boto3.client("s3"), TransferConfig()), bucket, prefix


if __name__ == "__main__":
    main()
