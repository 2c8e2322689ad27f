"""What Pulumi's engine starts of ours, forked: where a server that forks imports this module, an engine of a process
that it forks starts neither our plug-in nor the program in Python itself, each half a second of CPU. The engine sees a
process that stands for the forked one (stand_in.py), and is none the wiser.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import forks

from mgpu.iac import environment

for _name in (
    *("pulumi", "pulumi.runtime", "grpc._channel", "grpc._server", "argparse", "asyncio", "mgpu.iac.resources"),
    *("mgpu.iac.plugin", "mgpu.iac.types.fleet", "mgpu.iac.types.guard", "mgpu.iac.types.ssh_key"),
):
    importlib.import_module(_name)

SERVER = os.environ[forks.SERVER]
_FIRST = Path(__file__).parents[1] / "programs" / "engine"  # sitecustomize.py
_process_env = environment.process_env


def _with_programs(variables: dict[str, str]) -> dict[str, str]:
    env = _process_env(variables)
    path = os.pathsep.join([str(_FIRST), env.get("PYTHONPATH", "")])
    return env | {"PYTHONPATH": path, forks.SERVER: SERVER}


environment.process_env = _with_programs
