"""The stack output `mgpu`, version 1: the whole contract between a Pulumi program and a run.

Any program that exports it, ours or a user's, can be trained on. The JSON schema stands in docs/formats.md.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mgpu.errors import StackError

VERSION = 1


class _Output(BaseModel):
    # a newer program may export more than this reader knows: unknown keys are ignored, on purpose
    model_config = ConfigDict(defer_build=True, frozen=True, extra="ignore", populate_by_name=True)


class Via(_Output):
    """A jump host, where SSH goes through one."""

    address: str
    port: int = Field(22, ge=1, le=65535)
    user: str
    host_key: str = Field(description="OpenSSH public key line, pinned")


class ProxyCommand(_Output):
    """Or the program that carries SSH: it is started here, and its standard input and output are the connection."""

    command: tuple[str, ...] = Field(
        min_length=1, description="argument list; an argument `{python}` stands for the interpreter that mgpu runs in"
    )
    in_process: bool = Field(
        False,
        description="it is `{python} -P -m MODULE ARGUMENT...`, and MODULE.connect(arguments, seconds) makes the same "
        "connection without a program",
    )


class NodeOutput(_Output):
    """One node, as the operator reaches it."""

    rank: int = Field(ge=0, description="node_rank")
    id: str = Field(description="the provider's id of the instance")
    address: str = Field(description="host name or IP address")
    port: int = Field(22, ge=1, le=65535)
    user: str
    host_key: str = Field(description="OpenSSH public key line, pinned: another key is refused")
    private_address: str = Field("", description="as the other nodes reach it; empty: same as address")
    via: Via | ProxyCommand | None = Field(
        None, description="how SSH gets there: through a jump host, or by a program, its `command` (default: by TCP)"
    )
    python: str = Field("python3", description="the interpreter on the node that runs programs; has torch")


class StackOutput(_Output):
    """The stack output `mgpu`."""

    version: Literal[1]
    fleet: str = Field(description="fleet id: stack, generation")
    generation: int = Field(1, ge=1)
    owner: str = Field("", description="owner tag of the machines; empty: not made by mgpu")
    token: str = Field("", description="the provider's handle on the newest create; empty: not made by mgpu")
    made_at: float = Field(0, description="UNIX seconds of the newest create; 0: not known")
    account: str = Field("", description="the provider's account that the machines are in; empty: not known")
    provider: str
    options: dict[str, str] = Field({}, description="settings of the provider; nothing secret")
    region: str = ""
    nodes: tuple[NodeOutput, ...] = Field(min_length=1)
    gpu: str | None = None
    gpus_per_node: int = 0
    processes_per_node: int = 1
    market: Literal["spot", "on-demand"] = "on-demand"
    price_usd_per_hour: float = Field(0, ge=0, description="of the whole fleet")
    other_usd_per_hour: float | None = Field(
        None, ge=0, description="of what it has beside its machines: disks, addresses; null: not known"
    )
    private_key_file: str = Field(description="0600 file with the OpenSSH private key that logs in")
    store: str | None = Field(None, description="default of checkpoint.to")
    image: str | None = Field(None, description="digest reference of the container image; none: native")
    lease_minutes: float = Field(60, description="minutes the fleet lives without a run")
    hard_cap_at: float = Field(0, description="UNIX seconds; no machine lives longer; 0: not known")

    @property
    def machines_usd_per_hour(self) -> float | None:
        """Its price; None: not known. Machines that mgpu has made cost nothing only where they were paid for before."""
        return self.price_usd_per_hour if self.price_usd_per_hour or self.owner else None


def validated(value: Any, stack: str) -> StackOutput:
    """The output as a stack exports it, checked.

    Raises:
        StackError: it is of another version, or not what docs/formats.md says.
    """
    what = f"stack {stack}: its output `mgpu` is not one that runs can use"
    version = value.get("version") if isinstance(value, dict) else None
    if version != VERSION:
        cure = "Bring mgpu and the program in infra/ to the same version."
        raise StackError(what, f"It says version {version!r}; this mgpu reads version {VERSION}.", cure)
    try:
        return StackOutput.model_validate(value)
    except ValidationError as error:
        problems = "\n".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise StackError(what, problems, "docs/formats.md describes every field.") from error
