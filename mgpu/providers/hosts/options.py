"""What is known of provider `hosts` before it is imported: its block of the run file, and the list of hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError

from mgpu.errors import InputError
from mgpu.paths import expanded
from mgpu.spec.block import Block, File, MachineKeys, Names, ProviderOptions
from mgpu.spec.provider import Capabilities, ProviderEntry
from mgpu.spec.values import form, refusal, shown

_ADDRESS = r"^(?:([A-Za-z0-9_][A-Za-z0-9._-]*)@)?(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9][A-Za-z0-9._-]*)(?::([0-9]{1,5}))?$"
_Address = Annotated[str, form(_ADDRESS, "an SSH address: host, user@host or user@host:port")]
_Path = Annotated[str, form(r"^(~|~/[^\x00-\x1f'\"]*|/[^\x00-\x1f'\"]*)$", "an absolute path on the host, or ~/...")]
_Python = Annotated[str, form(r"^(python3?[0-9.]*|/[^\x00-\x1f'\"]*)$", "an absolute path on the host, or python3")]


class Host(Block):
    """One host, as a line of the inventory says it: its address, then `key=value` for what is otherwise than in the
    block."""

    address: _Address
    folder: _Path = "~/.mgpu/hosts"
    python: _Python = "python3"
    price_usd_per_hour: float = Field(default=0.0, ge=0)
    private_address: str = ""

    @property
    def parts(self) -> tuple[str, str, str]:
        """User, name and port; empty where the address has none."""
        found = re.fullmatch(_ADDRESS, self.address)
        user, name, port = found.groups("") if found else ("", self.address, "")
        return user, name.strip("[]"), port


class HostsOptions(ProviderOptions):
    """`hosts:` settings of provider hosts: machines that are there already."""

    block = "hosts"

    addresses: Names = Field(
        (), description="SSH addresses in the order in which they are taken, [user@]host[:port] (default: none)"
    )
    inventory: File | None = Field(
        None, description="file with more of them, one a line, relative to the run file (default: none)"
    )
    folder: _Path = Field("~/.mgpu/hosts", description="folder on the hosts that a run's own folders are made in")
    python: _Python = Field("python3", description="interpreter on the hosts that runs programs; has torch")
    price_usd_per_hour: float = Field(0.0, ge=0, description="what an hour of one host counts as, in dollars")
    ssh_config: File | None = Field(None, description="configuration of ssh, relative to the run file (default: yours)")

    def contradicts(self, machines: MachineKeys) -> Iterator[tuple[str, str]]:
        """Regions, and a market that hosts are not on; addresses that are none."""
        if machines.regions:
            yield "regions", "hosts are in none: leave it out"
        if machines.market == "spot":
            yield "market", "hosts are on-demand: leave it out"
        if not self.addresses and not self.inventory:
            yield "hosts", "needs `addresses`, `inventory`, or both"
        for wrong in _wrong(self.addresses):
            yield "hosts", wrong

    def in_folder(self, folder: Path) -> Self:
        """With its files where they are, for processes that run elsewhere."""
        paths = {key: getattr(self, key) for key in ("inventory", "ssh_config")}
        found = {key: str((folder / expanded(path)).absolute()) for key, path in paths.items() if path}
        return self.model_copy(update=found)

    def hosts(self) -> tuple[Host, ...]:
        """All of them, in order.

        Raises:
            InputError: the inventory cannot be read, or has mistakes: all of them; an address stands there twice.
        """
        lines = [(f"hosts.addresses: {each}", each) for each in self.addresses]
        if self.inventory:
            try:
                text = expanded(self.inventory).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                cure = "Give `hosts.inventory` as a path from the folder of the run file."
                why = getattr(error, "strerror", None) or str(error)
                raise InputError(f"{self.inventory}: the inventory cannot be read", why, cure) from error
            numbered = ((number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1))
            lines += [(f"{self.inventory}:{number}", line) for number, line in numbered if line]
        found, wrong = dict[str, Host](), list[str]()
        for where, line in lines:
            try:
                host = self._host(line)
                if host.address in found:
                    wrong.append(f"{where}: {host.address} is given twice")
                found[host.address] = host
            except ValueError as error:
                wrong += [f"{where}: {each}" for each in _reasons(error)]
        cure = "Mend the list of hosts; docs/hosts.md describes it."
        if wrong:
            raise InputError("\n".join(wrong), "", cure)
        if not found:
            raise InputError(
                "hosts: there are none", "`hosts` of a run file names none by `addresses` or `inventory`.", cure
            )
        return tuple(found.values())

    def _host(self, line: str) -> Host:
        """Raises ValueError, pydantic's for one."""
        address, *words = line.split()
        odd = [word for word in words if "=" not in word]
        if odd:
            raise ValueError(f"`{odd[0]}` is not key=value")
        ours = {key: getattr(self, key) for key in ("folder", "python", "price_usd_per_hour")}
        return Host.model_validate({**ours, "address": address, **dict(word.split("=", 1) for word in words)})


def _wrong(addresses: tuple[str, ...]) -> Iterator[str]:
    for address in addresses:
        try:
            Host(address=address)
        except ValidationError as error:
            yield f"addresses: `{address}`: {_reasons(error)[0].partition(': ')[2]}"
    if len(set(addresses)) < len(addresses):
        yield "addresses: one is given twice"


def _reasons(error: ValueError) -> list[str]:
    if not isinstance(error, ValidationError):
        return [str(error)]
    unknown = f"there is no such key; there are {', '.join([*Host.model_fields][1:])}"
    found = ((each["loc"][0], each) for each in error.errors(include_url=False))
    return [
        f"{key}: {unknown if each['type'] == 'extra_forbidden' else refusal(each, shown(each['input']))}"
        for key, each in found
    ]


ENTRY = ProviderEntry(
    provider="mgpu.providers.hosts.provider:HostsProvider",
    options=HostsOptions,
    capabilities=Capabilities(
        multi_node=True,
        idempotent_create=True,
        end_s=60,
        look_every_s=15,
        account_options=frozenset(HostsOptions.model_fields),
    ),
)
