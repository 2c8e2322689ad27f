"""What the engine starts as `pulumi-resource-mgpu`: the plug-in, without Pulumi's SDK around its protocol.

The package `pulumi` imports all that a program needs: a third of what the start of the plug-in takes, and the engine
starts it for each operation. The plug-in needs the generated messages alone, which know only grpc, protobuf and each
other.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from mgpu_train.system import collector

_FOLDERS = ("pulumi", "pulumi.runtime", "pulumi.runtime.proto")


def without_sdk() -> None:
    """From here on these packages are mere folders of modules; only for a process that runs no Pulumi program."""
    spec = importlib.util.find_spec("pulumi")
    if spec is None or not spec.submodule_search_locations:
        return  # the import of the messages will say so
    above = Path(spec.submodule_search_locations[0]).parent
    for name in _FOLDERS:
        module = ModuleType(name, "A folder of modules: nothing was imported for it.")
        module.__path__ = [str(above.joinpath(*name.split(".")))]
        sys.modules[name] = module


def main() -> None:
    """Serves until the engine ends this process, or dies itself."""
    collector.seldom()
    without_sdk()
    from mgpu.iac.plugin import main as serve  # imports the messages

    serve()
