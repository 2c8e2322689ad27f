"""What is known of provider `slurm` before it is imported: its block of the run file, and what it can do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self

from mgpu_train.config import Text
from pydantic import AfterValidator, Field

from mgpu.spec.block import File, MachineKeys, ProviderOptions
from mgpu.spec.provider import Capabilities, ProviderEntry
from mgpu.spec.values import form

_LOGIN = r"^([A-Za-z_][A-Za-z0-9_.-]*@)?[A-Za-z0-9][A-Za-z0-9.-]*$"
_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.,@+-]*$"
_PATH = r"^~?/[A-Za-z0-9._/+@=-]+$"  # it stands in scripts and in sshd's configuration
_EXPRESSION = r"^[A-Za-z0-9_][A-Za-z0-9_.,:&|*()\[\]=+-]*$"

_Login = Annotated[str, form(_LOGIN, "host, user@host, or a name of your SSH configuration")]
_Name = Annotated[str, form(_NAME, "a name of Slurm's: letters, digits and `_.,@+-`")]
_Expression = Annotated[str, form(_EXPRESSION, "as sbatch takes it, without spaces")]


def _line(text: str) -> str:
    if "\n" in text:
        raise ValueError("is one line of a shell")
    return text


_Folder = Annotated[str, form(_PATH, "absolute or ~/..., of letters, digits and `._/+@=-`")]
_Line = Annotated[Text, AfterValidator(_line)]


class SlurmOptions(ProviderOptions):
    """`slurm:` settings of provider slurm."""

    block = "slurm"

    login: _Login | None = Field(
        None, description="login node, by your own ssh and its configuration (default: Slurm's commands run here)"
    )
    ssh_config: File | None = Field(
        None, description="file for `ssh -F`, relative to the run file (default: your own configuration)"
    )
    partition: _Name | None = Field(None, description="--partition (default: each that fits is an offer)")
    account: _Name | None = Field(None, description="--account (default: your default one)")
    qos: _Name | None = Field(None, description="--qos (default: the account's)")
    constraint: _Expression | None = Field(None, description="--constraint: features that nodes have (default: any)")
    reservation: _Name | None = Field(None, description="--reservation (default: none)")
    gres: _Expression | None = Field(None, description="--gres (default: gpu, of `gpu` and `gpus_per_node`)")
    cpus_per_node: int | None = Field(
        None, ge=1, description="--cpus-per-task; one task a node (default: the cluster's)"
    )
    memory_gib: int | None = Field(None, ge=1, description="--mem (default: the cluster's)")
    tmp_gib: int | None = Field(
        None, ge=1, description="--tmp: GiB of local disk that a node has, in place of `disk_gib` (default: any)"
    )
    exclusive: bool = Field(False, description="--exclusive: nobody else is on the nodes")
    prologue: tuple[_Line, ...] = Field(
        (), description="lines of bash that each node runs first, such as `module load cuda` (default: none)"
    )
    python: File = Field("python3", description="interpreter of the nodes that runs programs; has torch")
    work_folder: _Folder = Field(
        "~/.mgpu-slurm", description="folder that login node and nodes share, for what mgpu keeps of each gang"
    )
    node_folder: _Folder = Field("/tmp", description="disk of a node, where each gets a folder of its own")  # noqa: S108
    queue_hours: float = Field(
        1, gt=0, description="hours that a request may wait in the queue; nothing is counted as cost meanwhile"
    )
    notice_s: int = Field(
        120, ge=0, le=65535, description="seconds before the end of the time limit: a notice; 0: none"
    )
    price_usd_per_hour: float = Field(0, ge=0, description="what a node's hour costs you")

    def contradicts(self, machines: MachineKeys) -> Iterator[tuple[str, str]]:
        """A `gres` says how many GPUs there are, and so does `gpus_per_node`."""
        if self.gres and "gpu" in self.gres and not machines.gpus_per_node:
            yield "gpus_per_node", "is needed beside `slurm.gres` with GPUs: how many processes a node has"

    def in_folder(self, folder: Path) -> Self:
        """With the configuration of ssh where it is, for processes that run elsewhere. One below ~ stays as it is
        written, also for other machines: whoever goes on there asks by the same tokens for the same."""
        if not self.ssh_config or self.ssh_config.startswith("~"):
            return self
        return self.model_copy(update={"ssh_config": str((folder / self.ssh_config).absolute())})

    def shares_files(self) -> bool:
        """On a login node mgpu sees what the nodes see; from elsewhere it does not."""
        return self.login is None

    def queue_s(self) -> float:
        """As `queue_hours` says."""
        return self.queue_hours * 3600


ENTRY = ProviderEntry(
    provider="mgpu.providers.slurm.provider:SlurmProvider",
    options=SlurmOptions,
    capabilities=Capabilities(
        multi_node=True,
        idempotent_create=True,
        repairs_single_nodes=False,
        boot_s=900,  # nodes that Slurm starts in a cloud; a search waits twice as long
        end_s=180,
        look_every_s=30,  # a log-in, and two questions to a controller that all users share
        notices="file",
        account_options=frozenset({"login", "ssh_config", "work_folder"}),
    ),
)
