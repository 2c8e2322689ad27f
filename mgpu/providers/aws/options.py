"""The run file's `aws:` block as the provider gets it: flattened to strings, lists joined by commas."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from mgpu.errors import InputError
from mgpu.providers.base import JumpHost

_KEY = r"(ssh-ed25519|ecdsa-sha2-nistp(256|384|521)|ssh-rsa) [A-Za-z0-9+/]+={0,2}( .*)?"
_JUMP = r"(?P<user>[a-z_][a-z0-9_.-]*)@(?P<address>\[[0-9a-f:]+\]|[A-Za-z0-9][A-Za-z0-9.-]*)(:(?P<port>[0-9]{1,5}))?"
# what a value has to look like in full, and in words; a value is shown in errors, because none of these is a secret
_FORMS = {
    "account": (r"[0-9]{12}", "12 digits"),
    "endpoint_url": (r"https?://[^\s/@]+(/\S*)?", "http://... or https://..., without a user"),
    "subnet_ids": (r"subnet-[0-9a-z]+(,subnet-[0-9a-z]+)*", "subnet-..."),
    "security_group_id": (r"sg-[0-9a-z]+", "sg-..."),
    "reaper_role": (r"arn:aws[a-z-]*:iam::[0-9]{12}:role/\S+", "arn:aws:iam::ACCOUNT:role/NAME"),
    "machine_image": (r"ami-[0-9a-z]+", "ami-..."),
    "python": (r"/[^\x00-\x20]+", "an absolute path on the node"),
    "address": (r"public|private", "public or private"),
    "jump_host": (_JUMP, "user@address or user@address:port"),
    "jump_host_key": (_KEY, "an OpenSSH public key line, as `ssh-keyscan` prints it after the host's name"),
    "network": (r"auto|plain", "auto or plain"),
}


@dataclass(frozen=True)
class Options:
    """Settings of provider aws; an empty value means that nothing was set."""

    account: str = ""
    profile: str = ""
    endpoint_url: str = ""
    subnet_ids: tuple[str, ...] = ()
    security_group_id: str = ""
    instance_profile: str = ""
    reaper_role: str = ""  # an ARN
    machine_image: str = ""
    python: str = ""
    address: str = "public"
    jump_host: str = ""
    jump_host_key: str = ""
    network: str = "auto"

    @classmethod
    def of(cls, mapping: Mapping[str, str]) -> Options:
        """The options of a flattened `aws:` block; an empty string counts as absent.

        Raises:
            InputError: a key or a value that means nothing here.
        """
        given = {key: value for key, value in mapping.items() if value}
        for key, value in given.items():
            _require_form(key, value)
        if bool(given.get("jump_host")) != bool(given.get("jump_host_key")):
            raise InputError(
                "aws: `jump_host` and `jump_host_key` belong together",
                "a jump host whose key is not known beforehand could be anybody",
                "Set both; `ssh-keyscan ADDRESS` prints the key of a host in a network that you trust.",
            )
        subnets = tuple(filter(None, given.pop("subnet_ids", "").split(",")))
        return cls(**given, subnet_ids=subnets)

    @property
    def via(self) -> JumpHost | None:
        """The host that SSH goes through, where one is set."""
        found = re.fullmatch(_JUMP, self.jump_host)
        if found is None:
            return None
        return JumpHost(
            address=found["address"].strip("[]"),
            port=int(found["port"] or 22),
            user=found["user"],
            host_key=self.jump_host_key,
        )


def _require_form(key: str, value: str) -> None:
    known = [field.name for field in fields(Options)]
    if key not in known:
        raise InputError(f"aws: there is no setting {key!r}", "", f"Known settings: {', '.join(known)}.")
    form, words = _FORMS.get(key, (r"[A-Za-z0-9][A-Za-z0-9._-]*", "a name: letters, digits, `.`, `_`, `-`"))
    if not re.fullmatch(form, value):
        raise InputError(f"aws.{key}: {value!r} is not of the right form", f"expected: {words}", "Mend the run file.")
