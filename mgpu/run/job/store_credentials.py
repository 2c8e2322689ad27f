"""What opens the object store on the nodes: nothing of ours where their own role opens it, else the operator's keys.

Keys that live for hours (a role, SSO) are renewed by botocore a quarter of an hour before their end: who asks again
then gets new ones, and sends them on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mgpu.errors import InputError

# where the store is; nothing secret
_PLACE = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
# what the node's store client may need of the operator's environment; nothing else of it travels
STORE_VARIABLES = (*_KEYS, *_PLACE)


def _never(_url: str) -> bool:
    return False


class StoreKeys:
    """The environment of the nodes' store client, as of now. One for each use: it keeps the session that renews."""

    def __init__(
        self, urls: Iterable[str], environ: Mapping[str, str], opened_by_role: Callable[[str], bool] = _never
    ) -> None:
        """`urls` are all places that a run reads and writes; `opened_by_role` says of one whether the machines' own
        role opens it. Nothing is asked for yet."""
        self._urls = [url for url in urls if url.startswith("s3://")]
        self._environ, self._opened_by_role = environ, opened_by_role
        self._session: Any = None
        self._credentials: Any = None
        self._by_role: bool | None = None

    def now(self) -> dict[str, str]:
        """AWS_* variables; none where no run file's address is in an object store.

        Raises:
            InputError: there are no credentials, or they cannot be renewed.
            ProviderError: the provider cannot say what its machines' role opens.
        """
        if not self._urls:
            return {}
        place = {name: self._environ[name] for name in _PLACE if self._environ.get(name)}
        if self._by_role is None:
            self._by_role = all(self._opened_by_role(url) for url in self._urls)
        return place if self._by_role else place | self._keys(place)

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
