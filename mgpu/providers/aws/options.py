"""What is known of provider `aws` before it is imported: its block of the run file, and what it can do."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mgpu.providers.aws import names
from mgpu.spec.block import Block, MachineKeys, ProviderOptions, Word, as_list
from mgpu.spec.provider import Capabilities, ProviderEntry, Registries
from mgpu.spec.values import form

if TYPE_CHECKING:
    from mgpu.providers.base import JumpHost

_JUMP = r"^([a-z_][a-z0-9_.-]*)@(\[[0-9a-f:]+\]|[A-Za-z0-9][A-Za-z0-9.-]*)(?::([0-9]{1,5}))?$"
_KEY = r"^(ssh-ed25519|ecdsa-sha2-nistp(256|384|521)|ssh-rsa) [A-Za-z0-9+/]+={0,2}( .*)?$"

_Account = Annotated[str, form(r"^[0-9]{12}$", "12 digits, in quotes")]
_Endpoint = Annotated[str, form(r"^https?://[^\s/@]+(/\S*)?$", "http://... or https://..., without a user")]
_Subnet = Annotated[str, form(r"^subnet-[0-9a-z]+$", "subnet-...")]
_Subnets = Annotated[
    tuple[_Subnet, ...], BeforeValidator(as_list, json_schema_input_type=_Subnet | tuple[_Subnet, ...])
]
_Group = Annotated[str, form(r"^sg-[0-9a-z]+$", "sg-...")]
_Role = Annotated[str, form(r"^arn:aws[a-z-]*:iam::[0-9]{12}:role/\S+$", "arn:aws:iam::ACCOUNT:role/NAME")]
_Image = Annotated[str, form(r"^ami-[0-9a-z]+$", "ami-...")]
_Type = Annotated[str, form(r"^[a-z0-9-]+\.[a-z0-9-]+$", "a machine type of EC2's, such as p5.48xlarge")]
_Reservation = Annotated[str, form(r"^cr-[0-9a-z]+$", "cr-..., as `mgpu reservations ls` prints it")]
_Path = Annotated[str, form(r"^/[^\x00-\x20]+$", "an absolute path on the node")]
_JumpHost = Annotated[str, form(_JUMP, "user@address or user@address:port")]
_HostKey = Annotated[str, form(_KEY, "an OpenSSH public key line, as `ssh-keyscan` prints it after the host's name")]


def _users(key: str) -> str:
    """A tag that neither AWS nor mgpu sets itself."""
    if key.lower().startswith("aws:"):
        raise ValueError("keys that begin with `aws:` are AWS's own")
    if key.startswith(names.PREFIX) or key in names.ON_MACHINE:
        raise ValueError(f"mgpu sets `{key}` itself")
    return key


def _few(tags: dict[str, str]) -> dict[str, str]:
    ours = len(names.ON_MACHINE)
    if len(tags) + ours > names.MOST_TAGS:
        raise ValueError(f"{len(tags)} tags are too many: AWS takes {names.MOST_TAGS}, of which mgpu needs {ours}")
    return tags


# what every service of AWS takes: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/Using_Tags.html
_TagKey = Annotated[
    str,
    form(r"^[\w .:/=+@-]+$", "letters, digits, spaces and `_.:/=+-@`", max_length=128),
    AfterValidator(_users),
]
_TagValue = Annotated[str, form(r"^[\w .:/=+@-]*$", "letters, digits, spaces and `_.:/=+-@`", max_length=256)]
_Tags = Annotated[dict[_TagKey, _TagValue], AfterValidator(_few)]


_BASELINE_IOPS = 3000  # of gp3, in the price of the disk
_IOPS = {"gp3": (_BASELINE_IOPS, 80_000), "io2": (100, 256_000)}
_IOPS_A_GIB = {"gp3": 500, "io2": 1000}
_GIB = {"gp3": (1, 65_536), "io2": (4, 65_536)}
_IOPS_A_MIB_S = 4  # of gp3, at least


class Disk(Block):
    """`aws.disk:` the disk of a machine; its size is `disk_gib`. Bounds are EBS's:
    https://docs.aws.amazon.com/ebs/latest/userguide/ebs-volume-types.html
    """

    type: Literal["gp3", "io2"] = Field(default="gp3", description="kind of EBS volume")
    throughput_mib_s: int | None = Field(
        default=None,
        ge=125,
        le=2000,
        description="MiB per second, of gp3 alone (default: 125, which costs nothing more)",
    )
    iops: int | None = Field(
        default=None,
        ge=100,
        le=256_000,
        description="operations per second; io2 needs it (default: 3000, the least of gp3)",
    )
    initialization_mib_s: int | None = Field(
        default=None,
        ge=100,
        le=300,
        description="MiB per second at which the machine image is read in when a machine starts, billed by its GiB "
        "(default: as fast as EBS happens to, at no price)",
    )

    @model_validator(mode="after")
    def _within_bounds(self) -> Self:
        if self.type == "io2" and (self.iops is None or self.throughput_mib_s is not None):
            raise ValueError("io2 needs `iops`, and takes no `throughput_mib_s`: its throughput follows from them")
        least, most = _IOPS[self.type]
        iops = self.iops or _BASELINE_IOPS
        if not least <= iops <= most:
            raise ValueError(f"`iops` of {self.type} must be {least} to {most}, not {iops}")
        wanted = _IOPS_A_MIB_S * (self.throughput_mib_s or 0)
        if wanted > iops:
            raise ValueError(f"{self.throughput_mib_s} MiB/s need `iops: {wanted}` or more")
        return self

    def wrong_size(self, gib: int) -> str:
        """Why a disk of this size cannot be such a one; empty: it can."""
        least, most = _GIB[self.type]
        if not least <= gib <= most:
            return f"a {self.type} disk has {least} to {most} GiB, not {gib}"
        iops = 0 if self.iops in (None, _BASELINE_IOPS) else self.iops
        needed = math.ceil(iops / _IOPS_A_GIB[self.type])
        return f"{self.iops} IOPS of {self.type} need a disk of {needed} GiB or more, not {gib}" if gib < needed else ""


class Options(ProviderOptions):
    """`aws:` settings of provider aws."""

    block = "aws"

    account: _Account | None = Field(
        None, description="the account, 12 digits in quotes; credentials of another one are refused (default: any)"
    )
    profile: Word | None = Field(
        None, description="profile of ~/.aws, for S3 as well (default: what AWS's own tools would take)"
    )
    endpoint_url: _Endpoint | None = Field(
        None, description="address of all services, for a VPC endpoint or a fake (default: AWS's own)"
    )
    subnet_ids: _Subnets = Field((), description="subnets to use (default: those of the default VPC)")
    security_group_id: _Group | None = Field(
        None, description="security group of the nodes (default: the one of `base`)"
    )
    instance_profile: Word | None = Field(None, description="the nodes' role (default: the one of `base`)")
    reaper_role: _Role | None = Field(
        None, description="ARN of the role that ends machines at their hard cap (default: the one of `base`)"
    )
    instance_type: _Type | None = Field(
        None, description="the one machine type to rent, such as p5.48xlarge (default: any that meets the run file)"
    )
    reservation: _Reservation | None = Field(
        None,
        description="capacity reservation or Capacity Block, cr-..., to rent in and nowhere else: machine type and "
        "zone are its own (default: none)",
    )
    disk: Disk | None = Field(None, description="the machines' disks (default: gp3 as it is)")
    machine_image: _Image | None = Field(
        None, description="machine image, ami-... (default: the newest deep-learning image with PyTorch)"
    )
    python: _Path | None = Field(
        None, description="Python interpreter of the nodes; has torch (default: the machine image's)"
    )
    address: Literal["public", "private", "ssm"] = Field(
        "public",
        description="how the operator reaches nodes; private needs `jump_host`, or a network that leads there; ssm is "
        "Session Manager, with no public address and nobody let in",
    )
    jump_host: _JumpHost | None = Field(None, description="user@address[:port] to go through (default: none)")
    jump_host_key: _HostKey | None = Field(
        None, description="the jump host's OpenSSH public key line, pinned (default: none)"
    )
    network: Literal["auto", "plain"] = Field(
        "auto", description="auto: EFA and a placement group, where the type has EFA; plain: neither"
    )
    tags: _Tags = Field(
        {}, description="tags of everything that is made, beside mgpu's own: {key: value} (default: none)"
    )

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, data: Any) -> Any:
        """`python: ""`, as templates of run files leave it, is one that was not given."""
        return {key: value for key, value in data.items() if value != ""} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _pinned(self) -> Self:
        if self.address == "ssm" and (self.jump_host or self.jump_host_key):
            raise ValueError(
                "`address: ssm` and `jump_host` exclude each other: Session Manager leads to the machines itself "
                "(leave one of them out)"
            )
        if bool(self.jump_host) != bool(self.jump_host_key):
            raise ValueError(
                "`jump_host` and `jump_host_key` belong together: a jump host whose key is not known beforehand could "
                "be anybody (`ssh-keyscan ADDRESS` prints it, in a network that you trust)"
            )
        return self

    @model_validator(mode="after")
    def _one_type(self) -> Self:
        if self.reservation and self.instance_type:
            raise ValueError("`reservation` has a machine type of its own: leave `instance_type` out")
        return self

    def contradicts(self, machines: MachineKeys) -> Iterator[tuple[str, str]]:
        """A reservation is of on-demand machines."""
        if self.reservation and machines.market != "on-demand":
            yield "market", "`aws.reservation` is rented in alone, and has no spot machines: on-demand, or leave it out"

    @property
    def via(self) -> JumpHost | None:
        """The host that SSH goes through, where one is set."""
        from mgpu.providers.base import JumpHost

        if self.jump_host is None or self.jump_host_key is None:
            return None
        found: Any = re.match(_JUMP, self.jump_host)
        user, address, port = found.groups()
        return JumpHost(address=address.strip("[]"), port=int(port or 22), user=user, host_key=self.jump_host_key)


_ECR = r"\d{12}\.dkr\.ecr(?:-fips)?\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?"


def region_of(registry: str) -> str:
    """The region of an ECR registry; "" where it is none."""
    match = re.fullmatch(_ECR, registry)
    return match[1] if match else ""


ENTRY = ProviderEntry(
    provider="mgpu.providers.aws.provider:AwsProvider",
    options=Options,
    capabilities=Capabilities(
        spot=True,
        multi_node=True,
        image_repository=True,
        platform="linux/amd64",
        idempotent_create=True,
        listing_lag_s=names.LAG_S,
        boot_s=1500,  # metal; see `AwsProvider.boot_s`
        end_s=1800,  # machines with GPUs are `shutting-down` for 5 minutes and more
        notices="mgpu_train.agent.machine.imds:Imds",
        account_options=frozenset({"account", "profile", "endpoint_url"}),
    ),
    registries=Registries(
        host=_ECR,
        make="`mgpu bootstrap aws` makes base's.",
        renew="Renew your AWS credentials (`aws sso login`), and check that they are of the registry's account and "
        "allow ecr:GetAuthorizationToken.",
    ),
)
