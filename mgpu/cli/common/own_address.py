"""From where this machine reaches the internet: machines that are rented let this address in, and no other."""

from __future__ import annotations

import ipaddress
import urllib.error
import urllib.request

from mgpu.errors import InputError

WHO_AM_I = "https://checkip.amazonaws.com"
_ANSWER_S = 5.0
_ADDRESS_BYTES = 64


def own_address() -> str:
    """The address from which this machine reaches the internet, as CIDR.

    Raises:
        InputError: it cannot be found out.
    """
    try:
        with urllib.request.urlopen(WHO_AM_I, timeout=_ANSWER_S) as answer:  # noqa: S310  a constant
            text = answer.read(_ADDRESS_BYTES).decode("ascii", "replace").strip()
        return str(ipaddress.ip_network(ipaddress.ip_address(text)))
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise InputError(
            "from which address this machine reaches the internet cannot be found out",
            f"{WHO_AM_I}: {error}",
            "Name it: `--allow-ssh 203.0.113.7/32`.",
        ) from error
