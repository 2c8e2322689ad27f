"""The locks on a stack: those of dead processes of this machine are broken, every other one is respected.

Pulumi writes a file `{pid, username, hostname, timestamp}` before it works on a stack, and deletes it after. One that
was killed leaves it, and Pulumi refuses to work on the stack from then on. `pulumi cancel` deletes every lock, also
that of a process which is at work; here it has to be shown that nobody is. A host name shows little: containers have
equal ones. In a folder it is believed, in a bucket only of a process that this machine is known to have had then.
"""

from __future__ import annotations

import json
import os
import pwd
import shlex
import socket
from collections.abc import Collection
from dataclasses import dataclass

from mgpu_train.agent.machine import procs
from mgpu_train.store import NotFound

from mgpu.backend import location
from mgpu.errors import StackError
from mgpu.events import Emit, Note
from mgpu.iac.engine import operations, process

_LARGEST = 1 << 20  # bytes of a lock


@dataclass(frozen=True)
class Lock:
    """One lock file: who says that it is at work, and since when, in the words of the file."""

    key: str
    pid: int
    username: str
    hostname: str
    timestamp: str


def release_dead(prefix: str, place: str, stack: str, emit: Emit, lost_hosts: Collection[str] = ()) -> None:
    """Deletes the locks below `prefix` of the backend whose holders are dead, or have lost the stack: those of
    `lost_hosts`. `place` is the mark of the stack's own operations.

    Raises:
        StackError: another process is at work on the stack, or it cannot be known whether one is.
    """
    backend = location.current()
    with backend.asking("asked for the locks of a stack"):
        keys = [found.key for found in backend.state.list(prefix) if found.key.endswith(".json")]
    for key in keys:
        lock = _read(backend, key, stack)
        if lock is None:
            continue
        same_name = lock.hostname == socket.gethostname()
        ours = same_name and lock.username == _me()
        if same_name and _held(lock, place):
            raise _busy(lock, stack)
        if ours and (backend.folder or process.was_here(lock.pid, lock.timestamp)):
            what = f"process {lock.pid}, which has ended"
        elif lock.hostname in lost_hosts:
            what = f"process {lock.pid} on {lock.hostname}, whose run was taken over"
        else:
            raise _not_ours(lock, stack, same_name=same_name)
        with backend.asking("written"):
            backend.state.delete(key)
        if ours:
            process.note(lock.pid).unlink(missing_ok=True)
        emit(Note(f"stack {stack}: released the lock of {what} ({lock.timestamp})"))


def _read(backend: location.Backend, key: str, stack: str) -> Lock | None:
    """None: its holder has deleted it since."""
    try:
        with backend.asking("asked for the locks of a stack"):
            content = json.loads(backend.state.get(key, _LARGEST))
        pid, names = content["pid"], [content[key] for key in ("username", "hostname", "timestamp")]
        if type(pid) is not int or pid < 1 or not all(isinstance(name, str) for name in names):
            raise ValueError("it names no process")
        return Lock(key, pid, *names)
    except NotFound:
        return None
    except (ValueError, TypeError, KeyError) as error:
        why = f"{backend.address}/{key} cannot be read: {error}"
        raise StackError(f"stack {stack} is locked, nobody knows by whom", why, _release(stack)) from error


def _not_ours(lock: Lock, stack: str, *, same_name: bool) -> StackError:
    """The error where this process cannot see whether the holder lives, or may not judge it."""
    why = "Whether that process still lives cannot be seen from here."
    if same_name:
        another = "It may be another machine's that has this one's name. " + why
        why = "It is another user's." if lock.username != _me() else another
    return StackError(f"stack {stack} is locked by {_who(lock)}", why, _release(stack))


def _me() -> str:
    """As Pulumi says it: a container's user may have no name but the environment's."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return os.environ.get("USER", "")


def _held(lock: Lock, place: str) -> bool:
    """Whether the process of that number is a Pulumi CLI, and none that is known to work on another stack.

    When it began is not asked: the lock's time is the wall clock's, which may have been set since. So the lock of a
    dead process whose number another CLI has now is respected for as long as that one lives.
    """
    holder = procs.of(lock.pid)
    if holder is None or not holder.alive or not operations.is_cli(lock.pid):
        return False
    elsewhere = [value for value, marked in procs.carriers(operations.MARK).items() if holder in marked]
    return all(operations.names(value, place) for value in elsewhere)


def _busy(lock: Lock, stack: str) -> StackError:
    return StackError(
        f"stack {stack} is locked by {_who(lock)}",
        "That process is at work on it: two at once would rent twice, or lose track of machines.",
        "Wait until it has ended, or end it (Ctrl-C where it runs), and run the same command again.",
    )


def _who(lock: Lock) -> str:
    return f"process {lock.pid} of {lock.username} on {lock.hostname}, since {lock.timestamp}"


def _release(stack: str) -> str:
    command = f"`. .mgpu/env && pulumi cancel --stack {shlex.quote(stack)}`"
    return f"Make sure that no `pulumi` is at work on this stack, on any machine; then {command} releases the lock."
