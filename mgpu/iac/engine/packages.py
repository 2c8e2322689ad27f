"""`python -m mgpu.iac.engine.packages`: what `pip list -v --format json` would say, as far as
Pulumi's language host reads it.

The host takes name, version and place of each package, to find those that belong to a Pulumi plug-in. All three stand
in the names of folders, so that no package has to be read. `python.sh` asks here in pip's place. Standard library only,
and no pathlib: its import takes longer than all that is done here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator

_SUFFIX = ".dist-info"


def installed(path: Iterable[str]) -> Iterator[dict[str, str]]:
    """The packages in the folders of a module search path; of two with one name the first counts, as for an import."""
    known = set[str]()
    for folder in path:
        for entry in _entries(folder):
            name, dash, version = entry.removesuffix(_SUFFIX).rpartition("-")
            # a folder's name has underscores where a package's has dashes, and the host looks for `pulumi-`
            name = name.replace("_", "-")
            if entry.endswith(_SUFFIX) and dash and name.lower() not in known:
                known.add(name.lower())
                yield {"name": name, "version": version, "location": os.path.abspath(folder)}  # noqa: PTH100


def _entries(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder or os.curdir))  # noqa: PTH208
    except OSError:
        return []  # a search path names archives, and folders that are not there


if __name__ == "__main__":
    sys.stdout.write(json.dumps(list(installed(sys.path))))
