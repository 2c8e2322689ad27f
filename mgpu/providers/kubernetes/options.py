"""What is known of provider `kubernetes` before it is imported: its block of the run file, and what it can do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from mgpu_train.config import Text
from pydantic import Field, model_validator

from mgpu.paths import expanded
from mgpu.spec.block import Block, File, MachineKeys, Market, ProviderOptions
from mgpu.spec.provider import Capabilities, ProviderEntry
from mgpu.spec.values import form

_LABEL = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_KEY = rf"([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_LABEL}"

_Context = Annotated[Text, form(r"^[^-\s][^\s]*$", "a context's name, without spaces")]
_Name = Annotated[
    str,
    form(r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$", "a name of Kubernetes': lower-case letters, digits, `-` and `.`"),
]
_Key = Annotated[
    str, form(rf"^{_KEY}$", "a key of Kubernetes': letters, digits, `-`, `_`, `.`, and a domain before a `/`")
]
_Value = Annotated[str, form(rf"^({_LABEL})?$", "a label's value: letters, digits, `-`, `_` and `.`, at most 63")]
_Toleration = Annotated[
    str,
    form(
        rf"^({_KEY}(=({_LABEL})?)?(:(NoSchedule|NoExecute))?|\*)$",
        "key=value:Effect, key:Effect, key, or `*` for every taint; with Effect NoSchedule or NoExecute",
    ),
]
_Claim = Annotated[
    str, form(r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(:ro)?$", "a claim's name, or name:ro where it is only read")
]
_Path = Annotated[str, form(r"^/[A-Za-z0-9._/+@=-]+$", "an absolute path, of letters, digits and `._/+@=-`")]
_Quantity = Annotated[str, form(r"^[0-9]+$", "a whole number")]


class NodePool(Block):
    """`kubernetes.node_pool`: nodes of CoreWeave's for this run alone."""

    instance_type: Text = Field(description="instance type of CoreWeave's, gd-8xh100ib-i128")
    compute_class: Literal["default", "spot"] = Field("default", description="default (on demand, reserved) or spot")

    @property
    def market(self) -> Market:
        """How its nodes are bought, in mgpu's word."""
        return "spot" if self.compute_class == "spot" else "on-demand"


class KubernetesOptions(ProviderOptions):
    """`kubernetes:` settings of provider kubernetes."""

    block = "kubernetes"

    context: _Context | None = Field(None, description="context of your kubeconfig (default: its current one)")
    kubeconfig: File | None = Field(
        None, description="kubeconfig file, relative to the run file (default: as kubectl finds it)"
    )
    namespace: _Name | None = Field(None, description="namespace (default: the context's)")
    gpu_resource: _Key = Field("nvidia.com/gpu", description="resource that GPUs are asked for by; amd.com/gpu")
    resources: dict[_Key, _Quantity] = Field(
        {}, description="what else each pod gets of a node's resources, such as {rdma/ib: '1'} (default: nothing)"
    )
    cpus_per_node: int | None = Field(None, ge=1, description="CPUs that a pod asks for (default: the namespace's)")
    memory_gib: int | None = Field(None, ge=1, description="memory of a pod, GiB (default: the namespace's)")
    shm_gib: int | None = Field(
        None, ge=1, description="shared memory of a pod, GiB (default: half of the node's memory)"
    )
    node_selector: dict[_Key, _Value] = Field({}, description="labels that nodes have (default: any node)")
    node_pool: NodePool | None = Field(
        None,
        description="CoreWeave alone: nodes that are made for the run, and deleted after it (default: those there are)",
    )
    tolerations: tuple[_Toleration, ...] = Field(
        (), description="taints that pods stand, as kubectl writes them: key=value:NoSchedule (default: none)"
    )
    priority_class: _Name | None = Field(None, description="priority class (default: the cluster's)")
    service_account: _Name | None = Field(None, description="service account, whose token pods get (default: no token)")
    image_pull_secret: _Name | None = Field(
        None, description="secret of the namespace that pulls the image (default: none)"
    )
    run_as_user: int | None = Field(
        None, ge=1, description="user id that pods run as, without privileges (default: the image's user)"
    )
    fs_group: int | None = Field(
        None, ge=1, description="group id that volumes are given to, where their driver can (default: `run_as_user`)"
    )
    volumes: dict[_Path, _Claim] = Field(
        {}, description="persistent volume claims by the path where pods see them, /data: corpus:ro (default: none)"
    )
    same_paths: bool = Field(
        False, description="this machine sees the volumes too, at the same paths: `file://` is for what lies in them"
    )
    queue: _Name | None = Field(None, description="Kueue's local queue that admits the pods (default: none)")
    queue_hours: float = Field(
        1, gt=0, description="hours that pods may wait for the queue or for room; nothing is counted as cost meanwhile"
    )
    notice_s: int = Field(60, ge=1, le=3600, description="seconds between a pod's notice and its end (grace period)")
    price_usd_per_hour: float = Field(0, ge=0, description="what a pod's hour costs you")

    @model_validator(mode="after")
    def _one_wait(self) -> Self:
        if self.node_pool and self.queue:
            raise ValueError(
                "`node_pool` makes nodes at once, which cost money while `queue` holds the pods back: one of both"
            )
        return self

    def contradicts(self, machines: MachineKeys) -> Iterator[tuple[str, str]]:
        """A cluster is in no region, GPUs are counted by `gpus_per_node` alone, and a node pool is of one market."""
        if machines.regions:
            yield "regions", "a cluster is in none: leave it out (`kubernetes.node_selector` says which nodes)"
        if self.gpu_resource in self.resources:
            yield "gpus_per_node", f"says how many of {self.gpu_resource} there are, not `kubernetes.resources`"
        if self.node_pool and machines.market not in (self.node_pool.market, "spot-then-on-demand"):
            yield "market", f"is {self.node_pool.market} with `kubernetes.node_pool` of this `compute_class`"

    def in_folder(self, folder: Path) -> Self:
        """With the kubeconfig where it is, for processes that run elsewhere."""
        if not self.kubeconfig:
            return self
        found = (folder / expanded(self.kubeconfig)).absolute()
        return self.model_copy(update={"kubeconfig": str(found)})

    def shares_files(self) -> bool:
        """As `same_paths` says of volumes."""
        return self.same_paths and bool(self.volumes)

    def queue_s(self) -> float:
        """As `queue_hours` says."""
        return self.queue_hours * 3600


ENTRY = ProviderEntry(
    provider="mgpu.providers.kubernetes.provider:KubernetesProvider",
    options=KubernetesOptions,
    capabilities=Capabilities(
        multi_node=True,
        starts_from_image=True,
        idempotent_create=True,
        repairs_single_nodes=False,
        boot_s=900,  # an image of 10 GB is pulled
        end_s=900,  # of nodes that were made for the pods, which end in a minute: `provider` knows
        notices="file",
        account_options=frozenset({"context", "kubeconfig", "namespace"}),
    ),
)
