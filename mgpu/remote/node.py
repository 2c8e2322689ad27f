"""One node over SSH: run, read, write, follow, sync, fetch."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from mgpu_train.timeouts import Timeouts

from mgpu.errors import CommandFailed, RemoteError
from mgpu.remote import receiver
from mgpu.remote.command import checked, run_command
from mgpu.remote.connection import load_key, open_connection
from mgpu.remote.files import Files
from mgpu.remote.library import paramiko
from mgpu.remote.snapshot import Snapshot, scan
from mgpu.remote.targets import Result, SyncReport, Target, check_path

_RECEIVER = Path(receiver.__file__).read_text("utf-8")  # now: an upgrade of mgpu may put another one there
_MANIFEST_LIMIT = 256 << 20
_SPARE_S = 10.0  # for the node's answer to arrive, once it has given up by itself
_CURES = {
    receiver.REFUSED: "Mend that on the node (`mgpu ssh`), and run the command again.",
    receiver.BUSY: "Another `mgpu` sends to this folder: run the command again when it is done. If it is stuck, end "
    "that process on the node (`mgpu ssh`).",
    receiver.CHANGED: "Another `mgpu` sends other files to this folder: run the command again when it is done.",
}


class Node:
    """One open connection to a node. Paths are relative to the SSH user's home, or absolute.

    Any thread may call any method; SFTP calls wait for each other, commands do not. Every call has a deadline, and
    raises ConnectionFailed when the connection is lost, which a peer's silence shows after 4 x `keepalive_s`.
    """

    def __init__(self, target: Target, key: paramiko.PKey, timeouts: Timeouts, *, connect: bool = True) -> None:
        """Without `connect` it is closed until the first `reconnect`. Raises what that raises."""
        self.target = target
        self._key = key
        self._timeouts = timeouts
        if connect:
            self.reconnect()

    def reconnect(self) -> None:
        """Opens a new connection in the old one's place. Raises ConnectionFailed, HostKeyMismatch."""
        self.close()
        self._connection = open_connection(self.target, self._key, self._timeouts)
        self._files = Files(self._connection, self._timeouts)

    @property
    def closed(self) -> bool:
        """True once the connection is lost or closed; `reconnect` opens another."""
        return "_connection" not in self.__dict__ or self._connection.closed

    def greet(self) -> None:
        """Waits for an answer of the server: a login may stand, and be lost at once. Raises ConnectionFailed."""
        with self._connection.translated("was lost right after the login"):
            if not self._connection.answers():
                raise EOFError

    def close(self) -> None:
        """Ends the connection; calls that wait on it raise ConnectionFailed."""
        if "_connection" in self.__dict__:
            self._connection.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        timeout: float,
        check: bool = True,
        max_output: int = 8 << 20,
    ) -> Result:
        """Runs a command, its arguments exactly as given, and waits for its end, `timeout` seconds at most.

        Of each output the last `max_output` bytes are kept.

        Raises:
            CommandFailed: its status is not 0, and `check`.
            ConnectionFailed: the connection was lost, or the time was over; the command may still run.
            InputError: an argument that cannot be passed on.
        """
        result = run_command(self._connection, argv, stdin, timeout=timeout, max_output=max_output)
        return checked(self._connection, argv, result) if check else result

    def write(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """Writes a file aside and renames it over `path`. Missing folders are made (0700)."""
        self._files.write(path, data, mode)

    def read(self, path: str) -> bytes:
        """A whole file, 64 MiB at most. Raises FileNotFoundError."""
        return self._files.read(path)

    def read_from(self, path: str, offset: int, limit: int) -> bytes | None:
        """What a growing file has from `offset` on, `limit` bytes at most; none when nothing is new, or absent. None:
        it ends before that."""
        return self._files.read_from(path, offset, limit)

    def exists(self, path: str) -> bool:
        """True when there is a file or folder of this name."""
        return self._files.exists(path)

    def fetch(self, path: str, dest: Path, go_on: Callable[[], object] = lambda: None) -> None:
        """Copies a file of the node to `dest`, aside and renamed. `go_on` is called now and then, and may raise.

        Raises FileNotFoundError; OSError of this machine.
        """
        aside = dest.with_name(f".{dest.name[:50]}.{secrets.token_hex(4)}")  # the name may be as long as any can be
        try:
            with contextlib.closing(self._files.blocks(path)) as blocks, aside.open("xb") as out:
                for block in blocks:
                    go_on()
                    out.write(block)
            aside.replace(dest)
        finally:
            aside.unlink(missing_ok=True)

    def sync(
        self,
        folder: Path | Snapshot,
        dest: str,
        *,
        python: str | None = None,
        like: str = "",
        apart: bool = False,
        within_s: float | None = None,
    ) -> SyncReport:
        """Makes `dest` hold what `folder` holds: sends what differs, deletes what an earlier sync sent and is gone now.

        Files on the node that no sync sent stay; where `folder` is empty, those that were touched there do, too. A
        transfer that is cut changes nothing. Another one to `dest` that is under way is waited for; one of which the
        node hears nothing for `silence_s` is ended there. Links inside the folder stay links. What of a Path is left
        out: see `scan`. `python` is the node's (default: the target's).
        `like`: a pattern of folders below the home; a `dest` that is new begins with a copy of what is untouched in the
        one of them that was synced last. The two may share files on the disk, unless they are to be `apart`, because
        programs run in both at once.

        Raises:
            InputError: files that cannot be sent, links that leave the folder.
            CommandFailed, ConnectionFailed: as `run`; the whole is bounded by `within_s` (default: `sync_s`), the wait
                for others included.
        """
        snapshot = folder if isinstance(folder, Snapshot) else scan(folder)
        # names are the same bytes there as here, whatever the node's locale
        program = [python or self.target.python, "-I", "-X", "utf8", "-c", _RECEIVER]
        check_path(dest)
        until = time.monotonic() + (self._timeouts.sync_s if within_s is None else within_s)
        while True:
            try:
                return self._send(snapshot, program, dest, ("have-apart" if apart else "have", dest, like), until)
            except CommandFailed as error:
                # another transfer was done in between: what is there now is asked anew
                if error.status != receiver.CHANGED or time.monotonic() > until:
                    raise

    def _send(
        self, snapshot: Snapshot, program: list[str], dest: str, question: Sequence[str], until: float
    ) -> SyncReport:
        """Asks what is there and sends what differs, once."""
        found = self._found([*program, *question], dest, until)
        wanted = snapshot.entries
        changed = [path for path, entry in wanted.items() if found.get(path) != entry.identity]
        if not changed and found.keys() == wanted.keys():
            return SyncReport(len(wanted), 0, 0, 0)
        argv = [*program, "take", dest, f"{self._timeouts.silence_s:g}"]
        answer = self._receive(argv, dest, snapshot.stream(changed), until)
        sent = sum(wanted[path].size for path in changed)
        return SyncReport(len(wanted), len(changed), int(answer.stdout), sent)

    def _found(self, argv: list[str], dest: str, until: float) -> dict[str, str]:
        """What the node says of `dest`: identities by path. Only ever compared with our own paths."""
        answer = self._receive(argv, dest, (), until)
        try:
            found = json.loads(answer.stdout)
        except ValueError as error:
            raise RemoteError(f"{self.target.label}: its answer about {dest} cannot be read", str(error)) from error
        return found if isinstance(found, dict) else {}

    def _receive(self, argv: list[str], dest: str, stdin: Iterable[bytes], until: float) -> Result:
        """Runs the receiver; it waits for others until `until` at most (monotonic, seconds)."""
        left_s = max(0.0, until - time.monotonic())
        whole = [*argv, f"{left_s:.1f}"]
        result = self.run(whole, stdin=stdin, timeout=left_s + _SPARE_S, check=False, max_output=_MANIFEST_LIMIT)
        if result.status:
            why = result.stderr[-2000:].decode("utf-8", "replace").strip()
            what = f"{self.target.label}: the folder could not be synced to {dest}"
            cure = _CURES.get(result.status, f"The node needs {argv[0]} 3.8 or newer.")
            raise CommandFailed(what, why, cure, status=result.status, stderr=why)
        return result


def connect(target: Target, key_file: Path, timeouts: Timeouts) -> Node:
    """Connects once, within `ssh_banner_s` for each host on the way; `NodeSet.connect` is the one that tries again.

    Raises:
        InputError: the key cannot be used.
        HostKeyMismatch: another host key than the pinned one; nothing was sent.
        ConnectionFailed: anything else.
    """
    return Node(target, load_key(key_file), timeouts)
