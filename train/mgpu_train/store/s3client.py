"""A client of botocore's whose credentials, endpoint, deadlines, retries, checksums and signing are all explicit."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import botocore.loaders
import botocore.session
from botocore.config import Config
from botocore.exceptions import NoCredentialsError

from mgpu_train.store.base import NoStore
from mgpu_train.store.bulk.message import Keys
from mgpu_train.store.s3errors import S3Errors
from mgpu_train.timeouts import Timeouts

ROLE, EXTERNAL_ID = "MGPU_STORE_ROLE", "MGPU_STORE_EXTERNAL_ID"  # of `env`: a role that this machine's own takes on
_METADATA_ATTEMPTS = 3  # a second each; botocore asks once
_ATTEMPTS = 8  # of one request; S3 under load refuses several in a row


@dataclass(frozen=True)
class Connection:
    """A client, whoever has its credentials, the translator of its errors, and the authorities it trusts."""

    client: Any
    session: botocore.session.Session
    errors: S3Errors
    ca: str | None

    def keys(self) -> Keys:
        """The credentials, renewed by botocore where it can. Raises Denied when there are none."""
        with self.errors.translated("sign requests"):
            found = self.session.get_credentials()
            if found is None:
                raise NoCredentialsError
            now = found.get_frozen_credentials()
            return Keys(now.access_key or "", now.secret_key or "", now.token)


def connect(url: str, env: Mapping[str, str] | None, timeouts: Timeouts, *, threads: int) -> Connection:
    """The client of a store for so many threads, and what else knows of its settings. Makes no request.

    Raises NoStore for a malformed endpoint, and Denied when the profile that is asked for does not exist.
    """
    endpoint = _setting(env, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    errors = S3Errors(url, endpoint)
    with errors.translated("open it"):
        core = _session(env)
        ca = _setting(env, "AWS_CA_BUNDLE") or core.get_config_variable("ca_bundle")
        try:
            client = core.create_client(
                "s3",
                config=_config(endpoint, timeouts, threads),
                endpoint_url=endpoint,
                verify=ca,
            )
        except ValueError as error:
            raise NoStore(f"{url}: AWS_ENDPOINT_URL is no address. Use https://host:port.") from error
    return Connection(client, core, errors, ca)


def _session(env: Mapping[str, str] | None) -> botocore.session.Session:
    """Credentials and region: from the process, or from `env` and then what this machine has (a profile, a role)."""
    core = botocore.session.Session()
    core.register_component("data_loader", _models())
    if env is None:
        return core
    if profile := env.get("AWS_PROFILE"):
        core.set_config_variable("profile", profile)
    if region := env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION"):
        core.set_config_variable("region", region)
    core.set_config_variable("metadata_service_num_attempts", _METADATA_ATTEMPTS)
    chain = core.get_component("credential_provider")
    chain.remove("env")
    if role := env.get(ROLE):
        from mgpu_train.store.run_role import RunRole

        chain.providers.insert(0, RunRole(role, env.get(EXTERNAL_ID, ""), _sts(env), core))
    given = [env.get(f"AWS_{name}") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN")]
    if any(given):
        core.set_credentials(*given)
    return core


def _sts(env: Mapping[str, str]) -> str | None:
    return _setting(env, "AWS_ENDPOINT_URL_STS", "AWS_ENDPOINT_URL")


@functools.cache
def _models() -> Any:
    """The description of S3: 0.1 s to read, and the same for every store."""
    return botocore.loaders.create_loader()


def _config(endpoint: str | None, timeouts: Timeouts, threads: int) -> Config:
    return Config(
        connect_timeout=timeouts.store_connect_s,
        read_timeout=timeouts.store_read_s,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        max_pool_connections=2 * threads,
        # every put brings its own CRC64NVME; boto3's default would add a CRC32, and servers refuse the mix
        request_checksum_calculation="when_required",
        response_checksum_validation="when_supported",
        ignore_configured_endpoint_urls=True,  # asked for above, by the same names
        # TLS protects the body; without it the signature must
        s3={
            "payload_signing_enabled": bool(endpoint and endpoint.startswith("http:")),
            "addressing_style": "path" if endpoint else "auto",
        },
    )


def _setting(env: Mapping[str, str] | None, *names: str) -> str | None:
    given = os.environ if env is None else env
    return next((given[name] for name in names if given.get(name)), None)
