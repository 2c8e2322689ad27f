"""Every path of one run's record on this machine: `mgpu.run.record.record` says what is where."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mgpu.backend import location


def runs() -> Path:
    """The folder of all runs' records."""
    return location.current().root / "runs"


class Folder:
    """Every path of one run's record."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.root = runs() / run_id
        self.record = self.root / "record.json"
        self.run_file = self.root / "mgpu.yaml"
        self.journal = self.root / "journal"
        self.pulumi = self.root / "pulumi"
        self.lock = self.root / "lock"
        self.stop = self.root / "stop"
        self.work = self.root / "work"
        self.program = self.root / "program"

    def logs(self, node_rank: int) -> list[Path]:
        """The logs of one node_rank, oldest first: one for each instance that has had it."""
        return sorted((self.root / "logs").glob(f"node-{node_rank}.*.log"))

    def log(self, node_rank: int, instance: str) -> Path:
        """The log of one instance; the file's size says how much of the node's log is here."""
        return of_instance(self.root / "logs", f"node-{node_rank}", ".log", instance)

    def make(self) -> None:
        """Makes the folders, for this user alone."""
        self.root.mkdir(parents=True, mode=0o700, exist_ok=True)
        (self.root / "logs").mkdir(exist_ok=True, mode=0o700)


def of_instance(folder: Path, stem: str, suffix: str, instance: str) -> Path:
    """`<stem>.<n>.<mark of the instance><suffix>` in `folder`: the instances that had a rank, numbered as they came."""
    known = sorted(folder.glob(f"{stem}.*{suffix}"))
    mark = hashlib.sha256(instance.encode()).hexdigest()[:12]
    same = [path for path in known if path.name.endswith(f".{mark}{suffix}")]
    return same[0] if same else folder / f"{stem}.{len(known):04d}.{mark}{suffix}"


def newest_part(path: Path) -> Path:
    """Of the copies of one file of an instance: the one that grows. Each time that the file is emptied on its node
    there is another one, with a number of its own."""
    stem, _, rest = path.name.split(".", 2)
    return max(path.parent.glob(f"{stem}.*.{rest}"), default=path)


def next_part(path: Path) -> Path:
    """Where the copy goes on of a file that was emptied on its node since `path` was written."""
    stem, _, rest = path.name.split(".", 2)
    newest = newest_part(path)  # another supervisor may have begun it
    known = len(list(path.parent.glob(f"{stem}.*{path.suffix}")))
    return newest if newest != path else path.with_name(f"{stem}.{known:04d}.{rest}")
