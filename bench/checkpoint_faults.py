"""What each client makes of a byte that flipped at rest, and of a server that refuses, loses, resets or goes silent."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.gateway import BUCKET, sink, versitygw
from bench.measure import Cost
from bench.race import client, empty, files, s5cmd, scratch
from bench.report import Report

SIZE, FILES = 2 << 30, 16
FAULTS = {
    "none": "",
    "SlowDown on 30 %": "slowdown=0.3",
    "lost answers on 30 %": "lost=0.3",
    "resets on 10 %": "reset=0.1",
    "all of them": "slowdown=0.2,lost=0.2,reset=0.1",
}
# a tenth of what they are, so that the bench ends; they are deadlines, and hold in proportion
_TIMEOUTS = {"store_connect_s": 1, "store_read_s": 3, "store_retry_s": 6, "store_stall_s": 6}
DEADLINE_S = 30.0
_FLIP_FILES = {"large.bin": 64 << 20, "middle.bin": 12 << 20, "small.bin": 16 << 10}


def flip(report: Report) -> None:
    """One byte of each object, flipped in the server's own folder: who says so, and who hands it out as good."""
    with versitygw() as server, scratch() as source, scratch() as to:
        for name, size in _FLIP_FILES.items():
            (source / name).write_bytes(random.Random(name).randbytes(size))
        s5cmd(server, "cp", f"{source}/*", f"s3://{BUCKET}/plain/")
        client(server, "boto3-upload", f"s3://{BUCKET}/boto3", source)
        client(server, "ours-upload", f"s3://{BUCKET}/ours", source)
        clients: dict[str, Callable[[], Cost]] = {
            "plain": lambda: s5cmd(server, "cp", f"s3://{BUCKET}/plain/*", f"{to}/", may_fail=True),
            "boto3": lambda: client(server, "boto3-download", f"s3://{BUCKET}/boto3", to, may_fail=True),
            "ours": lambda: client(server, "ours-download", f"s3://{BUCKET}/ours", to / "checkpoint", may_fail=True),
        }
        print("\na byte flipped at rest, versitygw")
        for name, fetch in clients.items():
            for stored in sorted(each for each in (server.folder / name).rglob("*") if _is_body(each)):
                with _flipped(stored):
                    error = fetch().reason
                wrong = not error and any(path.is_file() for path in to.rglob("*"))
                empty(to)
                what = f"{'s5cmd' if name == 'plain' else name}, {stored.name} of {stored.stat().st_size} bytes"
                print(f"  {what:<46} {'NOT NOTICED' if wrong else 'noticed'}  {error[-120:]}", flush=True)
                if name == "ours":
                    report.holds(f"a flipped byte: {what}", "", met=bool(error))


def faults(report: Report) -> None:
    """2 GiB to the TLS sink while it misbehaves; the same fast path as without faults."""
    with files(FILES, SIZE // FILES) as folder:
        print(f"\nupload of {SIZE >> 20} MiB in {FILES} files under faults, TLS sink, once each, wall seconds")
        for name, how in FAULTS.items():
            with sink(faults=how) as server:
                clients: dict[str, Callable[[], Cost]] = {
                    "s5cmd": lambda: s5cmd(server, "cp", f"{folder}/*", f"s3://{BUCKET}/s5cmd/", may_fail=True),
                    "boto3": lambda: client(server, "boto3-upload", f"s3://{BUCKET}/boto3", folder, may_fail=True),
                    "ours": lambda: client(server, "ours-upload", f"s3://{BUCKET}/ours", folder, may_fail=True),
                }
                for who, upload in clients.items():
                    cost = upload()
                    print(f"  {name:<22} {who:<6} {cost.wall_s:7.1f}  {cost.reason[-150:] or 'done'}", flush=True)
                    empty(server.folder)
                    if who == "ours":
                        report.holds(f"upload under faults: {name}", f"{cost.wall_s:.1f} s", met=not cost.error)


def deadlines(report: Report) -> None:
    """A server that never answers, and one that takes 1 KB/s: a named failure, in a tenth of our deadlines."""
    with files(FILES, SIZE // FILES, sparse=True) as folder:
        for name, how in {"a silent server": "silent=1", "1 KB/s": "slow=1"}.items():
            with sink(faults=how) as server:
                scaled = ("MGPU_TIMEOUTS", json.dumps(_TIMEOUTS))
                cost = client(server, "ours-upload", f"s3://{BUCKET}/ours", folder, scaled, may_fail=True)
            print(f"\n{name}: {cost.wall_s:.1f} s, {cost.error}")
            named = cost.error.startswith("Unavailable: ")
            report.holds(f"{name} is a named failure", "yes" if named else "no", met=named)
            report.at_most(f"{name}: until it is, deadlines a tenth of ours", cost.wall_s, DEADLINE_S, " s")


def _is_body(path: Path) -> bool:
    return path.is_file() and path.suffix != ".json"


@contextmanager
def _flipped(path: Path) -> Iterator[None]:
    """One bit in the middle of a file is another one while the block runs."""
    _flip(path)
    try:
        yield
    finally:
        _flip(path)


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
