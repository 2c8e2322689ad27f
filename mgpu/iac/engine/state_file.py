"""What Pulumi's own backends, a folder or a bucket, hold of stacks, read without starting the CLI.

    .pulumi/stacks/<project>/<stack>.json[.gz]         the state
    .pulumi/locks/organization/<project>/<stack>/      a file for every process that says that it is at work

Both are whole whenever they are read. In a folder beside each file stands another, `.attrs`, with a checksum; that one
is written in place, and a CLI that is killed at the wrong moment leaves it cut off.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

from mgpu_train.store import NotFound

from mgpu.backend import location
from mgpu.iac import tokens

STACKS = ".pulumi/stacks"
_LARGEST = 1 << 30  # bytes of a state


def state_key(project: str, stack: str) -> str | None:
    """Where below the backend the stack's state is; None: the backend does not know the stack. Raises StackError."""
    here = location.current()
    keys = (f"{STACKS}/{project}/{stack}.json{packed}" for packed in ("", ".gz"))
    with here.asking("asked for a stack"):
        return next((key for key in keys if here.state.stat(key)), None)


def lock_prefix(project: str, stack: str) -> str:
    """Where below the backend the stack's locks are, of which there may be none."""
    return f".pulumi/locks/organization/{project}/{stack}/"


def stacks() -> Iterator[tuple[str, str, str]]:
    """Project and stack of all that the backend has a state of, or a backup, and its key. Raises StackError."""
    here = location.current()
    with here.asking("listed"):
        for found in here.state.list(f"{STACKS}/"):
            project, _, name = found.key.removeprefix(f"{STACKS}/").rpartition("/")
            if ".json" in name and not name.endswith(".attrs"):
                yield project, name.partition(".json")[0], found.key


def read(key: str) -> Any:
    """A state as it is now.

    Raises:
        NotFound: it has just gone.
        StackError: the backend does not answer.
        OSError, EOFError, ValueError: it is damaged.
    """
    here = location.current()
    with here.asking("read"):
        data = here.state.get(key, _LARGEST)
    try:
        return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except zlib.error as error:  # which is no OSError, as gzip's own are
        raise ValueError(str(error)) from error


def pending_creates(project: str, stack: str) -> tuple[str, ...]:
    """The URNs of resources whose create was cut off. `up` would keep these entries for ever, and `destroy` would
    report success over them. A state that cannot be read has none that could be told: the CLI says what is wrong."""
    key = state_key(project, stack)
    try:
        deployment: Any = read(key)["checkpoint"]["latest"] if key else None
        operations = (deployment or {}).get("pending_operations") or ()
        return tuple(entry["resource"]["urn"] for entry in operations if entry["type"] == "creating")
    except (NotFound, OSError, EOFError, ValueError, TypeError, KeyError):
        return ()


def fleets(project: str, stack: str) -> frozenset[str]:
    """The names of the stack's fleets, as their guards have them. A state that cannot be read has none."""
    key = state_key(project, stack)
    try:
        deployment: Any = read(key)["checkpoint"]["latest"] if key else None
        resources = (deployment or {}).get("resources") or ()
        return frozenset(each["inputs"]["fleet"] for each in resources if each["type"] == tokens.FLEET_GUARD)
    except (NotFound, OSError, EOFError, ValueError, TypeError, KeyError):
        return frozenset()


def drop_torn_attributes(project: str, stack: str) -> None:
    """Deletes attributes of the state that a killed CLI has cut off: Pulumi needs none, but refuses half of them.

    Only for a stack that no living process works on.
    """
    backend = location.current().folder
    for path in (backend / STACKS / project).glob(f"{stack}.json*.attrs") if backend else ():
        try:
            json.loads(path.read_bytes())
        except ValueError:
            path.unlink(missing_ok=True)
