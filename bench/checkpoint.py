"""Checkpoints on their way to S3 and back, beside s5cmd and boto3: the figures that `make bench-checkpoint` prints."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.gateway import BUCKET, Server, sink, versitygw
from bench.measure import Cost, median, run
from bench.report import Report
from bench.sink import pattern
from bench.tools import ROOT, store_tool

SIZE, FILES = 2 << 30, 16
ROUNDS = 3
REPORT = Report()


def main(only: Sequence[str] = ()) -> None:
    """Runs the named parts, or all of them."""
    if unknown := set(only) - set(PARTS):
        raise SystemExit(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    for name, part in PARTS.items():
        if not only or name in only:
            part()
    REPORT.summary()


def upload() -> None:
    """2 GiB in 16 files to a server that throws bodies away."""
    with _files(FILES, SIZE // FILES) as folder, sink() as server:
        costs = _uploads(server, folder)
    s5cmd, ours = costs["s5cmd"], costs["ours"]
    REPORT.at_least("upload to the TLS sink: speed over s5cmd's", s5cmd.wall_s / ours.wall_s, 1.5, "x")
    REPORT.at_most("upload to the TLS sink: client CPU over s5cmd's", ours.cpu_s / s5cmd.cpu_s, 0.5, "x")
    REPORT.at_most("upload to the TLS sink: memory of the transfer's own process", ours.others_mib, 50, " MiB")
    REPORT.at_most("upload to the TLS sink: memory, agent and transfer together", ours.mib, 100, " MiB")


def gateway() -> None:
    """The same to a real server, whose own CPU hides much of the clients'."""
    with _files(FILES, SIZE // FILES) as folder, versitygw() as server:
        _uploads(server, folder)


PARTS = {"upload": upload, "gateway": gateway}


def _uploads(server: Server, folder: Path) -> dict[str, Cost]:
    return _side_by_side(
        f"upload of {SIZE >> 20} MiB in {FILES} files to the {server.name}",
        {
            "s5cmd": lambda n: _s5cmd(server, "cp", f"{folder}/*", f"s3://{BUCKET}/s5cmd-{n}/"),
            "boto3": lambda n: _client(server, "boto3-upload", f"s3://{BUCKET}/boto3-{n}", folder),
            "ours": lambda n: _client(server, "ours-upload", f"s3://{BUCKET}/ours-{n}", folder),
        },
        server,
    )


def _side_by_side(what: str, clients: dict[str, Callable[[int], Cost]], server: Server) -> dict[str, Cost]:
    """The medians of some rounds, in each of which every client has its turn; printed with ratios to the first."""
    found: dict[str, list[Cost]] = {name: [] for name in clients}
    for number in range(ROUNDS):
        for name, client in clients.items():
            found[name].append(client(number))
            print(f"  {what}: {name} {found[name][-1].wall_s:.1f} s", file=sys.stderr)
            _empty(server.folder)
    costs = {name: median(each) for name, each in found.items()}
    REPORT.table(f"{what}, medians of {ROUNDS}", costs)
    return costs


def _s5cmd(server: Server, *args: str) -> Cost:
    argv = [str(store_tool("s5cmd")), "--endpoint-url", server.endpoint, "--log", "error", *args]
    return run(argv, _environment(server), server=server.pid)


def _client(server: Server, name: str, url: str, folder: Path) -> Cost:
    return run([sys.executable, "-m", "bench.clients", name, url, str(folder)], _environment(server), server=server.pid)


def _environment(server: Server) -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return mine | dict(server.env) | {"PYTHONPATH": str(ROOT), "AWS_EC2_METADATA_DISABLED": "true"}


@contextmanager
def _files(count: int, size: int) -> Iterator[Path]:
    """A folder with files of the sink's own content."""
    with tempfile.TemporaryDirectory(prefix="mgpu-bench-") as name:
        piece = pattern(min(size, 1 << 24))
        for number in range(count):
            with Path(name, f"file-{number:05d}").open("wb") as file:
                for _ in range(0, size, len(piece)):
                    file.write(piece)
        yield Path(name)


def _empty(folder: Path) -> None:
    """Removes what a client has left in a server's bucket, so that the disk does not fill."""
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each, ignore_errors=True)
        else:
            each.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])
