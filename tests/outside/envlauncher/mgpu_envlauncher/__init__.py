"""A launcher that is not mgpu's: a value, and nothing that the nodes would need."""

from __future__ import annotations

from mgpu_train.launchers import Launcher

ENVRUN = Launcher(
    argv=("env", "STARTED_BY=envrun {attempt} of {run_id}", "{python}", "{program}"),
    environment={"PEERS": "{nodes} at {master_addr}", "RANK": "{node_rank}", "WORLD_SIZE": "{nodes}"},
    one_process=True,
)
