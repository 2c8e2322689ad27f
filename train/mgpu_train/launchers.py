"""What starts a program on each node. A launcher is a value: the run file names it, the operator looks it up and sends
it with the job, and the agent fills it in; whoever brings one has nothing to install on the nodes.

    [project.entry-points."mgpu_train.launchers"]
    torchrun = "mgpu_train.launchers:TORCHRUN"
"""

from __future__ import annotations

import functools
import string
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from mgpu_train import entries
from mgpu_train.entries import Entries
from mgpu_train.names import FAILURE_FILE

GROUP = "mgpu_train.launchers"
OUR_TORCHRUN = "mgpu_train.agent.launchers.torchrun"
PROGRAM = "{program}"  # the word in whose place the program's own words come
WORDS = {
    "python": "the interpreter that has the program's requirements",
    "nodes": "how many there are",
    "node_rank": "of this one, from 0",
    "processes_per_node": "how many there are on each",
    "world_size": "processes of all nodes",
    "master_addr": "node 0, as the others reach it",
    "master_port": "free on node 0",
    "coordinator": "node 0, as address:port",
    "workers": "all nodes, as a JSON list of address:port; where nodes share an address, each has the next port",
    "world_info": "DeepSpeed's: the local ranks of each node, JSON in base64",
    "rendezvous_s": "whole seconds that the nodes may take to meet",
    "run_id": "the run",
    "attempt": "its number, from 1",
    "failure_file": "where the launcher may say which rank failed first, and how (mgpu_train.agent.launchers.torchrun)",
}


class Launcher(BaseModel):
    """How the processes of one node are started. Texts may hold the words of `WORDS` in braces, e.g. `{nodes}`."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    argv: tuple[str, ...] = Field(min_length=1, description="the command; `{program}` is a word of its own")
    environment: dict[str, str] = Field(default={}, description="what the command gets besides")
    one_process: bool = Field(default=False, description="starts one process a node, never more")
    one_node: bool = Field(default=False, description="starts the processes of one node, and finds no others")
    needs: tuple[Literal["torch"], ...] = Field(default=(), description="what the node's interpreter has to have")
    takes: Literal["python", "shell"] = Field(
        default="python",
        description="what a program is: a Python file, or `-m` and a module; or a script, or `-c` and a line, of a "
        "shell, whose PATH begins with the program's Python",
    )
    trainer: bool = Field(default=True, description="starts the bundled trainer, too: sets torchrun's variables")
    orphaned: Literal["SIGTERM", "SIGKILL"] = Field(
        default="SIGKILL",
        description="what it gets when its agent dies; SIGTERM: it ends processes that are in sessions of their own",
    )

    @model_validator(mode="after")
    def _words(self) -> Launcher:
        if PROGRAM not in self.argv:
            raise ValueError(f"argv has to hold {PROGRAM}, where the program's own words come")
        for text in self.argv:
            _require_words(text, {*WORDS, "program"} if text == PROGRAM else {*WORDS})
        for text in self.environment.values():
            _require_words(text, {*WORDS} - {"python"})  # which is made with this very environment
        return self

    def command(self, program: tuple[str, ...], values: Mapping[str, Any]) -> list[str]:
        """The command for one node; `values` has all of `WORDS`."""
        words = [program if word == PROGRAM else (word.format_map(values),) for word in self.argv]
        return [word for part in words for word in part]

    def variables(self, values: Mapping[str, Any]) -> dict[str, str]:
        """The variables for one node; `values` has all of `WORDS`."""
        return {name: text.format_map(values) for name, text in self.environment.items()}


def _require_words(text: str, words: set[str]) -> None:
    for _, word, _, _ in string.Formatter().parse(text):
        if word is not None and word not in words:
            raise ValueError(f"{text!r}: {{{word}}} means nothing here; there are {', '.join(sorted(words))}")


TORCHRUN = Launcher(
    argv=(
        *("{python}", "-m", OUR_TORCHRUN),
        *("--nnodes", "{nodes}", "--node-rank", "{node_rank}", "--nproc-per-node", "{processes_per_node}"),
        *("--master-addr", "{master_addr}", "--master-port", "{master_port}"),
        *("--rdzv-backend", "static", "--rdzv-id", "{run_id}-{attempt}"),
        *("--rdzv-conf", "timeout={rendezvous_s}"),  # peers may still fetch what this node has already
        *("--max-restarts", "0"),  # a restart is a new attempt, and the operator's decision
        PROGRAM,
    ),
    environment={FAILURE_FILE: "{failure_file}"},
    needs=("torch",),
    orphaned="SIGTERM",
)

PYTHON = Launcher(
    argv=("{python}", PROGRAM),
    environment={  # what torchrun would set, for the one process of this node
        "RANK": "{node_rank}",
        "WORLD_SIZE": "{nodes}",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "{node_rank}",
        "MASTER_ADDR": "{master_addr}",
        "MASTER_PORT": "{master_port}",
    },
    one_process=True,
)

ACCELERATE = Launcher(
    argv=(
        *("{python}", "-m", OUR_TORCHRUN, "accelerate"),
        *("--num_machines", "{nodes}", "--machine_rank", "{node_rank}", "--num_processes", "{world_size}"),
        *("--main_process_ip", "{master_addr}", "--main_process_port", "{master_port}", "--same_network"),
        *("--rdzv_backend", "static", "--rdzv_conf", "timeout={rendezvous_s}", "--max_restarts", "0"),
        *("--deepspeed_multinode_launcher", "standard"),  # others would dial the nodes themselves
        PROGRAM,
    ),
    environment={FAILURE_FILE: "{failure_file}"},
    needs=("torch",),
    trainer=False,
    orphaned="SIGTERM",
)

DEEPSPEED = Launcher(  # its part on one node: `deepspeed` itself would dial the others
    argv=(
        *("{python}", "-m", "deepspeed.launcher.launch", "--world_info", "{world_info}"),
        *("--node_rank", "{node_rank}", "--master_addr", "{master_addr}", "--master_port", "{master_port}"),
        PROGRAM,
    ),
    needs=("torch",),
    trainer=False,
    orphaned="SIGTERM",
)

JAX = Launcher(  # of these `jax.distributed.initialize` reads the first; the program hands it the others
    argv=("{python}", PROGRAM),
    environment={
        "JAX_COORDINATOR_ADDRESS": "{coordinator}",
        "JAX_NUM_PROCESSES": "{nodes}",
        "JAX_PROCESS_ID": "{node_rank}",
    },
    one_process=True,
    trainer=False,
)

TENSORFLOW = Launcher(
    argv=("{python}", PROGRAM),
    environment={
        "TF_CONFIG": '{{"cluster": {{"worker": {workers}}}, "task": {{"type": "worker", "index": {node_rank}}}}}',
    },
    one_process=True,
    trainer=False,
)

# On several nodes it would log in from one to the next, which nodes do not let each other do.
MPI = Launcher(
    argv=("{python}", "-m", "mgpu_train.agent.launchers.mpi", "-np", "{processes_per_node}", "{python}", PROGRAM),
    environment={  # Open MPI's, by either name: containers are root's
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    },
    one_node=True,
    trainer=False,
    orphaned="SIGTERM",
)

# A shell that is asked to end neither passes that on nor waits. This one does both: what it runs has time to save.
_RUN_AND_WAIT = """\
trap 'trap "" TERM; kill -TERM 0; wait $!; exit 143' TERM
(
    trap 'exit 143' TERM
    case $0 in
        -c) set -e; eval "$1" ;;
        /*) . "$0" "$@" ;;
        *) . "./$0" "$@" ;;
    esac
) & wait $!
"""

BASH = Launcher(
    argv=("bash", "-c", _RUN_AND_WAIT, PROGRAM),
    environment={
        "NODE_RANK": "{node_rank}",
        "NNODES": "{nodes}",
        "NPROC_PER_NODE": "{processes_per_node}",
        "MASTER_ADDR": "{master_addr}",
        "MASTER_PORT": "{master_port}",
        # torchrun's defaults (torch.distributed.argparse_util): a plain `torchrun train.py` has all nodes
        "PET_NODE_RANK": "{node_rank}",
        "PET_NNODES": "{nodes}",
        "PET_NPROC_PER_NODE": "{processes_per_node}",
        "PET_MASTER_ADDR": "{master_addr}",
        "PET_MASTER_PORT": "{master_port}",
        "PET_RDZV_CONF": "timeout={rendezvous_s}",
    },
    takes="shell",
    trainer=False,
    orphaned="SIGTERM",
)


_OURS = {
    "torchrun": TORCHRUN,
    "python": PYTHON,
    "bash": BASH,
    "accelerate": ACCELERATE,
    "deepspeed": DEEPSPEED,
    "jax": JAX,
    "mpi": MPI,
    "tensorflow": TENSORFLOW,
}


def _named(launcher: Any) -> Any:
    return _OURS.get(launcher, launcher) if isinstance(launcher, str) else launcher


def _name(launcher: Launcher) -> str | dict[str, Any]:
    return next((name for name, ours in _OURS.items() if ours == launcher), launcher.model_dump(mode="json"))


# in data one of ours is its name
LauncherOrName = Annotated[
    Launcher, BeforeValidator(_named, json_schema_input_type=str | Launcher), PlainSerializer(_name)
]


@functools.cache
def installed() -> Entries[Launcher]:
    """The launchers of this environment."""
    return entries.read(GROUP, Launcher)
