"""The role of a run, taken on by the machine's own role with the run's secret, and taken on anew before it expires."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import botocore.session
from botocore.credentials import CredentialProvider, DeferredRefreshableCredentials
from botocore.exceptions import ClientError

from mgpu_train.store.s3errors import NoMachineRole

_SESSION_S = 3600  # the longest that a role may have which another role takes on
_SETTLE_S = 60.0  # until AWS knows everywhere of a role that has just been made
_PAUSE_S = 2.0


class RunRole(CredentialProvider):
    """Credentials for botocore, which asks for them again when they are about to expire."""

    METHOD = CANONICAL_NAME = "run-role"

    def __init__(self, arn: str, external_id: str, endpoint: str | None, session: botocore.session.Session) -> None:
        """`endpoint`: of AWS's token service, None: AWS's own; `session` says the region, and reads models."""
        super().__init__(session)
        self._core = session
        self._role = {"RoleArn": arn, "ExternalId": external_id, "RoleSessionName": "mgpu"}
        self._endpoint = endpoint

    def load(self) -> Any:
        """Asks for nothing yet."""
        return DeferredRefreshableCredentials(refresh_using=self._take_on, method=self.METHOD)

    def _take_on(self) -> Mapping[str, Any]:
        """Raises NoMachineRole: this machine's own is not to be had now; ClientError: it may not take on this one."""
        until = time.monotonic() + _SETTLE_S
        sts = self._sts()
        while True:
            try:
                made = sts.assume_role(**self._role, DurationSeconds=_SESSION_S)["Credentials"]
            except ClientError as error:
                if error.response["Error"]["Code"] != "AccessDenied" or time.monotonic() > until:
                    raise
                time.sleep(_PAUSE_S)
                continue
            return {
                "access_key": made["AccessKeyId"],
                "secret_key": made["SecretAccessKey"],
                "token": made["SessionToken"],
                "expiry_time": made["Expiration"].isoformat(),
            }

    def _sts(self) -> Any:
        own = self._core.get_component("credential_provider").get_provider("iam-role").load()
        if own is None:
            raise NoMachineRole
        machine = botocore.session.Session()
        machine.register_component("data_loader", self._core.get_component("data_loader"))
        keys = own.get_frozen_credentials()
        region = self._core.get_config_variable("region")
        return machine.create_client(
            "sts",
            region_name=region,
            endpoint_url=self._endpoint,
            aws_access_key_id=keys.access_key,
            aws_secret_access_key=keys.secret_key,
            aws_session_token=keys.token,
        )
