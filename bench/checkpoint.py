"""Checkpoints on their way to S3 and back, beside s5cmd and boto3: the figures that `make bench-checkpoint` prints.

Everybody speaks TLS 1.3 with AES-128-GCM and checks the certificate; reads and writes the same files in the page cache;
and has its turn in every round. s5cmd is as it is shipped (256 workers, parts of 50 MiB, SHA-256 signed over every
part, no checksum kept). boto3 is one TransferManager with its defaults (CRC32 of every part; none checked on a ranged
read). Ours is what the agent calls, each byte's CRC64NVME checked by the server and by us.

What the columns count: `wall` and `CPU` are the transfer's alone, `(all)` is the whole program's with start and
imports; `server` and `strangers` are the CPU seconds of the server and of everything else on the machine meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from mgpu_train.store import crc

from bench import checkpoint_faults, checkpoint_log
from bench.clients import DURABLE
from bench.gateway import BUCKET, Server, sink, versitygw
from bench.measure import Cost, touch
from bench.race import client, empty, files, race, s5cmd, scratch
from bench.report import Report

SIZE, FILES = 2 << 30, 16
DOWNLOADS = 5  # rounds: who fills the page cache depends on what the kernel has at hand
SMALL_FILES, SMALL_SIZE = 20_000, 16 << 10
MEMORY_GIB = (0.5, 2, 8)


def main(only: Sequence[str] = ()) -> None:
    """Runs the named parts, or all of them, and prints every target with its figure."""
    if unknown := set(only) - set(PARTS):
        raise SystemExit(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    report = Report()
    for name in only or PARTS:
        PARTS[name](report)
    report.summary()


def upload(report: Report) -> None:
    """2 GiB in 16 files to a server that throws bodies away."""
    with files(FILES, SIZE // FILES) as folder, sink() as server:
        costs = _uploads(report, server, folder)
    peer, ours = costs["s5cmd"], costs["ours"]
    report.at_least("upload, TLS sink: speed over s5cmd's", peer.wall_s / ours.wall_s, 1.5, "x")
    report.at_most("upload, TLS sink: client CPU over s5cmd's", ours.cpu_s / peer.cpu_s, 0.5, "x")
    report.at_most("upload, TLS sink: memory of the process that moves bytes", ours.others_mib, 50, " MiB")
    report.at_most("upload, TLS sink: memory of it and the agent together", ours.mib, 100, " MiB")


def gateway(report: Report) -> None:
    """The same to a real server, whose own CPU hides much of the clients'; without TLS all of them sign every byte."""
    with files(FILES, SIZE // FILES) as folder, versitygw() as server:
        _uploads(report, server, folder)


def small(report: Report) -> None:
    """20,000 files of 16 KiB: s5cmd sends them one by one, ours in packs."""
    with files(SMALL_FILES, SMALL_SIZE) as folder:
        for kind in (sink, versitygw):
            with kind() as server:
                costs = race(
                    report,
                    f"upload of {SMALL_FILES} files of {SMALL_SIZE >> 10} KiB, {server.name}",
                    {
                        "s5cmd": lambda n: s5cmd(server, "cp", f"{folder}/*", f"s3://{BUCKET}/s5cmd-{n}/"),
                        "ours, packed": lambda n: client(server, "ours-upload", f"s3://{BUCKET}/ours-{n}", folder),
                    },
                    after=lambda: empty(server.folder),
                )
            faster = costs["s5cmd"].wall_s / costs["ours, packed"].wall_s
            report.at_least(f"{SMALL_FILES} small files, {server.name}: speed over s5cmd's", faster, 5, "x")


def download(report: Report) -> None:
    """2 GiB in 16 files back, from both servers. Nobody waits for the disk, one line of ours aside."""
    for kind in (sink, versitygw):
        with files(FILES, SIZE // FILES) as folder, kind() as server:
            s5cmd(server, "cp", f"{folder}/*", f"s3://{BUCKET}/plain/")
            client(server, "ours-upload", f"s3://{BUCKET}/ours", folder)
            empty(folder)
            costs = _downloads(report, server)
        peer, ours = costs["s5cmd"], costs["ours"]
        report.at_least(f"download, {server.name}: speed over s5cmd's, verified", peer.wall_s / ours.wall_s, 1, "x")
        cost = 100 * _checksum_s() / ours.cpu_s
        report.at_most(f"download, {server.name}: what verification takes of the CPU", cost, 5, " %")


def memory(report: Report) -> None:
    """Uploads of 0.5, 2 and 8 GiB, of files that are holes: what the memory of each process comes to."""
    peaks = {}
    with sink() as server:
        for gib in MEMORY_GIB:
            with files(FILES, int(gib * 2**30) // FILES, sparse=True) as folder:
                cost = client(server, "ours-upload", f"s3://{BUCKET}/ours-{gib}", folder)
            peaks[f"ours, {gib:g} GiB"] = cost
    report.table("memory of an upload, TLS sink, once each", peaks)
    report.at_most(
        "memory of the process that moves bytes, any size", max(c.others_mib for c in peaks.values()), 100, " MiB"
    )
    grown = list(peaks.values())
    report.at_most("growth of all processes together, 0.5 to 8 GiB", grown[-1].mib - grown[0].mib, 10, " MiB")


def stall(report: Report) -> None:
    """How long training stands still for a save."""
    from bench import checkpoint_stall

    of_blocking, of_dcp = checkpoint_stall.main()
    report.at_most("stall of a save, of a blocking torch.save's", 100 * of_blocking, 5, " %")
    report.at_most("stall of a save over DCP's async_save, its best", of_dcp, 1, "x")


PARTS = {
    "upload": upload,
    "gateway": gateway,
    "small": small,
    "download": download,
    "memory": memory,
    "listing": checkpoint_log.listing,
    "flip": checkpoint_faults.flip,
    "faults": checkpoint_faults.faults,
    "deadlines": checkpoint_faults.deadlines,
    "stall": stall,
}


def _uploads(report: Report, server: Server, folder: Path) -> dict[str, Cost]:
    return race(
        report,
        f"upload of {SIZE >> 20} MiB in {FILES} files, {server.name}",
        {
            "s5cmd": lambda n: s5cmd(server, "cp", f"{folder}/*", f"s3://{BUCKET}/s5cmd-{n}/"),
            "boto3": lambda n: client(server, "boto3-upload", f"s3://{BUCKET}/boto3-{n}", folder),
            "ours": lambda n: client(server, "ours-upload", f"s3://{BUCKET}/ours-{n}", folder),
        },
        after=lambda: empty(server.folder),
    )


def _checksum_s() -> float:
    """CPU seconds that the checksum of SIZE bytes takes in a transfer's pieces. By itself: a download with it and one
    without differ by less than two downloads with it do."""
    piece, took = os.urandom(256 << 10), []
    for _ in range(5):
        begin = time.process_time()
        for _ in range(SIZE // len(piece)):
            crc.more(piece)
        took.append(time.process_time() - begin)
    return min(took)


def _downloads(report: Report, server: Server) -> dict[str, Cost]:
    with scratch() as to:

        def ours(*settings: str) -> Cost:
            switched_on = ((name, "1") for name in settings)
            return client(server, "ours-download", f"s3://{BUCKET}/ours", to / "checkpoint", *switched_on)

        return race(
            report,
            f"download of {SIZE >> 20} MiB in {FILES} files, {server.name}",
            {
                "s5cmd": lambda _: s5cmd(server, "cp", f"s3://{BUCKET}/plain/*", f"{to}/"),
                "boto3": lambda _: client(server, "boto3-download", f"s3://{BUCKET}/plain", to),
                "ours": lambda _: ours(),
                "ours, flushed to disk": lambda _: ours(DURABLE),
            },
            rounds=DOWNLOADS,
            before=lambda: touch(2 * SIZE),
            after=lambda: empty(to),
        )
