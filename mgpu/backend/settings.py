"""What all who share a backend have in common: who encrypts the secrets of its stacks."""

from __future__ import annotations

import json

from mgpu.backend import location
from mgpu.errors import InputError

_KEY = "settings.json"
_LARGEST = 64 << 10  # bytes
PASSPHRASE = "passphrase"  # noqa: S105  what Pulumi calls the provider


def secrets_provider() -> str:
    """As `pulumi stack init --secrets-provider` takes it; where nothing was said, a passphrase. Raises StackError."""
    from mgpu_train.store import NotFound

    here = location.current()
    if here.shared is None:
        return PASSPHRASE
    with here.asking("read"):
        try:
            return str(json.loads(here.shared.get(_KEY, _LARGEST))["secrets_provider"])
        except NotFound:
            return PASSPHRASE


def choose_secrets_provider(wanted: str) -> None:
    """Says once who encrypts the secrets of all stacks to come.

    Raises:
        InputError: the backend has another one, or is a folder of this machine's.
        StackError: the backend does not answer.
    """
    here = location.current()
    if here.shared is None:
        raise InputError(
            f"--secrets-provider {wanted}: the backend is a folder of this machine",
            "Secrets of its stacks are encrypted with this machine's passphrase.",
            "Name a bucket, too: `--backend s3://bucket/prefix`.",
        )
    with here.asking("written"):
        here.shared.put_if_absent(_KEY, json.dumps({"version": 1, "secrets_provider": wanted}).encode())
    known = secrets_provider()
    if known != wanted:
        raise InputError(
            f"--secrets-provider {wanted}: the backend {here.address} has {known}",
            "Everybody who shares it needs the same.",
            f"Leave the option out, or name {known}.",
        )
