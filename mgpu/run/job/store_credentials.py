"""What opens the object store on the nodes: rights of their own where the provider gives them, else keys made for that.

The operator's own keys open the store on machines of this machine alone (provider `local`): they go nowhere. Keys that
live for hours (a role, SSO) are renewed by botocore a quarter of an hour before their end: who asks again then gets new
ones, and sends them on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mgpu.errors import InputError
from mgpu.providers.base import Provider, StoreRole

# where the store is; nothing secret
_PLACE = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL_STS")
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_FOR_NODES = {f"MGPU_STORE_{name.removeprefix('AWS_')}": name for name in _KEYS}


class StoreKeys:
    """The environment of the nodes' store client, as of now. One for each use: it keeps the session that renews."""

    def __init__(
        self,
        run_id: str,
        environ: Mapping[str, str],
        provider: Provider | None,
        *,
        reads: Sequence[str] = (),
        writes: Sequence[str] = (),
    ) -> None:
        """`reads` and `writes` are all addresses below which the run's nodes do that; `provider` is that of its
        machines, None for machines that are not mgpu's. Nothing is asked for yet."""
        self._run_id, self._environ, self._provider = run_id, environ, provider
        self._reads = [url for url in reads if url.startswith("s3://")]
        self._writes = [url for url in writes if url.startswith("s3://")]
        self._granted: Mapping[str, str] | None = None
        self._session: Any = None
        self._credentials: Any = None

    @property
    def grants(self) -> bool:
        """Whether `now` gives the run's machines rights, which somebody has to take away again."""
        return (
            isinstance(self._provider, StoreRole) and bool(self._reads or self._writes) and not self._made_for_nodes()
        )

    def require(self) -> None:
        """Looks whether `now` could answer; gives no rights yet. Raises what `now` raises."""
        if self.grants and isinstance(self._provider, StoreRole):
            self._provider.require_store([*self._reads, *self._writes])
        else:
            self.now()

    def now(self) -> dict[str, str]:
        """Variables of AWS's SDKs, and of a role that the nodes take on; none where no address is in an object store.

        Raises:
            InputError: there are no credentials for nodes, or they cannot be renewed.
            ProviderError: the provider cannot give the machines their rights.
        """
        if not (self._reads or self._writes):
            return {}
        place = {name: self._environ[name] for name in _PLACE if self._environ.get(name)}
        if made := self._made_for_nodes():
            return place | made
        if isinstance(self._provider, StoreRole):
            if self._granted is None:
                self._granted = self._provider.grant_store(self._run_id, self._reads, self._writes)
            return {**self._granted, **place}
        if self._provider is None or not self._provider.capabilities.this_machine:
            raise InputError(
                "no credentials of the object store for the nodes",
                "The operator's own go to no other machine, and this provider gives machines none.",
                "Make keys that open this run's place alone, and set MGPU_STORE_ACCESS_KEY_ID and "
                "MGPU_STORE_SECRET_ACCESS_KEY.",
            )
        return place | self._keys(place)

    def _made_for_nodes(self) -> dict[str, str]:
        given = {name: self._environ[each] for each, name in _FOR_NODES.items() if self._environ.get(each)}
        if given and not {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= given.keys():
            raise InputError(
                "MGPU_STORE_ACCESS_KEY_ID and MGPU_STORE_SECRET_ACCESS_KEY belong together", "", "Set both."
            )
        return given

    def _keys(self, place: Mapping[str, str]) -> dict[str, str]:
        given = {name: self._environ[name] for name in _KEYS if self._environ.get(name)}
        if "AWS_ACCESS_KEY_ID" in given:
            return given
        # a profile, SSO or a role: boto3 knows how to ask; only the short-lived result travels
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            frozen = self._found().get_frozen_credentials()
        except (BotoCoreError, ClientError) as error:
            raise InputError(
                "the credentials for the object store cannot be used",
                str(error),
                "Renew them, for instance with `aws sso login`.",
            ) from error
        keys = {"AWS_ACCESS_KEY_ID": frozen.access_key, "AWS_SECRET_ACCESS_KEY": frozen.secret_key}
        if frozen.token:
            keys["AWS_SESSION_TOKEN"] = frozen.token
        if self._session.region_name and "AWS_REGION" not in place:
            keys["AWS_REGION"] = self._session.region_name
        return keys

    def _found(self) -> Any:
        import boto3

        self._session = self._session or boto3.Session()
        # None is not kept: a login meanwhile is seen
        self._credentials = self._credentials or self._session.get_credentials()
        if self._credentials is None:
            raise InputError(
                "no credentials for the object store",
                "The run uses an s3:// address, and neither AWS_ACCESS_KEY_ID nor a profile gives credentials.",
                "Set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a file:// address.",
            )
        return self._credentials
