"""What Pulumi's file backend holds of one stack, read without starting the CLI.

    .pulumi/stacks/<project>/<stack>.json[.gz]         the state
    .pulumi/locks/organization/<project>/<stack>/      a file for every process that says that it is at work

Pulumi writes both aside and renames them: what is read here is whole. Beside each file stands another, `.attrs`, with a
checksum; that one is written in place, and a CLI that is killed at the wrong moment leaves it cut off.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from mgpu.iac import environment


def state_file(project: str, stack: str) -> Path | None:
    """Where the stack's state is; None: the backend does not know the stack."""
    folder = environment.backend_dir() / ".pulumi" / "stacks" / project
    return next((path for packed in ("", ".gz") if (path := folder / f"{stack}.json{packed}").exists()), None)


def lock_dir(project: str, stack: str) -> Path:
    """The folder of the stack's locks, which need not exist."""
    return environment.backend_dir() / ".pulumi" / "locks" / "organization" / project / stack


def pending_creates(project: str, stack: str) -> tuple[str, ...]:
    """The URNs of resources whose create was cut off. `up` would keep these entries for ever, and `destroy` would
    report success over them. A state that cannot be read has none that could be told: the CLI says what is wrong."""
    path = state_file(project, stack)
    try:
        deployment: Any = _load(path)["checkpoint"]["latest"] if path else None
        operations = (deployment or {}).get("pending_operations") or ()
        return tuple(entry["resource"]["urn"] for entry in operations if entry["type"] == "creating")
    except (OSError, EOFError, ValueError, TypeError, KeyError):
        return ()


def drop_torn_attributes(project: str, stack: str) -> None:
    """Deletes attributes of the state that a killed CLI has cut off: Pulumi needs none, but refuses half of them.

    Only for a stack that no living process works on.
    """
    folder = environment.backend_dir() / ".pulumi" / "stacks" / project
    for path in folder.glob(f"{stack}.json*.attrs"):
        try:
            json.loads(path.read_bytes())
        except ValueError:
            path.unlink(missing_ok=True)


def _load(path: Path) -> Any:
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
