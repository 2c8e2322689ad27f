"""One AWS account as this user reaches it: clients, regions, pages. Credentials are the user's own, as AWS's tools
find them; nothing here stores them."""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

from mgpu.errors import InputError
from mgpu.providers.aws.failures import EXPIRED, calling
from mgpu.providers.aws.options import Options

CONNECT_S = 5.0
READ_S = 40.0  # CreateFleet answers when all machines are placed
ATTEMPTS = 3  # of one call, the first one counted; who asks has a backoff of its own
_POOL = 32  # connections of one client: regions and nodes are asked in threads
_FALLBACK_REGION = "us-east-1"
_FRESH_S = 60.0  # for what `once` was told: a search asks for the same network at every offer
_T = TypeVar("_T")


class Account:
    """The account behind the options' profile. Safe to use from any thread; loads boto3 at the first call."""

    def __init__(
        self, options: Options, *, connect_s: float = CONNECT_S, read_s: float = READ_S, attempts: int = ATTEMPTS
    ) -> None:
        self.options = options
        self._limits = {"connect_timeout": connect_s, "read_timeout": read_s}
        self._attempts = attempts
        self._lock = threading.RLock()
        self._session: Any = None
        self._clients: dict[tuple[str, str], Any] = {}
        self._id = ""
        self._told: dict[Hashable, tuple[float, Any]] = {}

    @property
    def home_region(self) -> str:
        """Where what has no region is asked for: AWS_REGION, the profile's region, else us-east-1."""
        with self._lock:
            return self._home_region()

    def client(self, service: str, region: str) -> Any:
        """The botocore client of a service in a region; made once.

        Raises:
            AuthError: there are no credentials, or no such profile.
            InputError: the credentials are of another account than `aws.account`.
        """
        if service != "sts" and self.options.account:
            self.id()
        with self._lock:
            if (service, region) not in self._clients:
                self._clients[service, region] = self._make(service, region)
            return self._clients[service, region]

    def unsigned(self, service: str, limit_s: float) -> Any:
        """A client in the home region for one question that anybody may ask: it needs no credentials. Raises AuthError:
        there is no such profile."""
        from botocore import UNSIGNED
        from botocore.config import Config

        limits = {"connect_timeout": limit_s, "read_timeout": limit_s, "retries": {"total_max_attempts": 1}}
        with self._lock, calling(f"preparing calls to {service}", "", scope="provider"):
            return self._opened().create_client(
                service,
                region_name=self._home_region(),
                endpoint_url=self.options.endpoint_url or None,
                config=Config(signature_version=UNSIGNED, **limits),
            )

    def id(self) -> str:
        """The account's number; asked once.

        Raises:
            AuthError: the credentials are missing, wrong or expired.
            InputError: they are of another account than `aws.account`.
        """
        with self._lock:
            if not self._id:
                region = self._home_region()
                with calling("asking whose credentials these are", region, scope="provider"):
                    self._id = self.client("sts", region).get_caller_identity()["Account"]
        if self.options.account not in (None, self._id):
            raise InputError(
                f"aws.account: the credentials belong to account {self._id}, the run file says {self.options.account}",
                f"profile: {self.options.profile or os.environ.get('AWS_PROFILE') or 'default'}",
                "Set `aws: {profile: ...}` or AWS_PROFILE to a profile of that account, or mend `account`.",
            )
        return self._id

    def wants_code(self) -> bool:
        """Whether somebody has to type the code of an MFA device for these credentials. Raises AuthError: AWS's files
        cannot be read."""
        with self._lock, calling("reading the profile", "", scope="provider"):
            session = self._opened()
            profiles, name = session.full_config.get("profiles", {}), session.profile or "default"
        chain = list[str]()
        while name in profiles and name not in chain:
            chain.append(name)
            name = profiles[name].get("source_profile")
        return any("mfa_serial" in profiles[each] for each in chain)

    def regions(self) -> tuple[str, ...]:
        """All regions that are enabled for this account, in alphabetical order."""
        return tuple(sorted(self._enabled()))

    def opted_in(self) -> frozenset[str]:
        """Of these the ones that somebody has enabled: the others always were. As it was up to a minute ago."""
        found = self.once("opted in", self._enabled)
        return frozenset(region for region, status in found.items() if status == "opted-in")

    def _enabled(self) -> dict[str, str]:
        home = self.home_region
        with calling("listing the regions", home, scope="provider"):
            answer = self.client("ec2", home).describe_regions()
        return {region["RegionName"]: region.get("OptInStatus", "") for region in answer["Regions"]}

    def require_regions(self, asked: Sequence[str]) -> tuple[str, ...]:
        """These regions; none: all that are enabled. Raises InputError: one that there is not."""
        enabled = self.once("regions", self.regions)
        unknown = [region for region in asked if region not in enabled]
        if unknown:
            raise InputError(
                f"there is no region {', '.join(unknown)}, or it is not enabled for this account",
                "",
                f"Enable it in the AWS console, or name others: {', '.join(enabled)}.",
            )
        return tuple(asked) or enabled

    def once(self, question: Hashable, ask: Callable[[], _T]) -> _T:
        """The answer to a question about what hardly changes, as it was up to a minute ago; errors are not kept."""
        at, answer = self._told.get(question, (-math.inf, None))
        if time.monotonic() - at >= _FRESH_S:
            answer = ask()
            self._told[question] = (time.monotonic(), answer)
        return answer  # type: ignore[return-value]

    def pages(self, client: Any, operation: str, result_key: str, **arguments: Any) -> Iterator[Any]:
        """Every item of `result_key` in all pages of an operation's answer; errors are botocore's."""
        for page in client.get_paginator(operation).paginate(**arguments):
            yield from page.get(result_key, ())

    def _make(self, service: str, region: str) -> Any:
        from botocore.config import Config

        from mgpu import __version__

        config = Config(
            **self._limits,
            max_pool_connections=_POOL,
            retries={"mode": "standard", "total_max_attempts": self._attempts},
            user_agent_extra=f"mgpu/{__version__}",
        )
        with calling(f"preparing calls to {service}", region, scope="provider"):
            client = self._opened().create_client(
                service, region_name=region, endpoint_url=self.options.endpoint_url or None, config=config
            )
        client.meta.events.register("after-call", self._heed)
        return client

    def _heed(self, parsed: Any, **_: Any) -> None:
        """Credentials that have expired are read again by the next call: the user may have renewed them."""
        if isinstance(parsed, dict) and (parsed.get("Error") or {}).get("Code") in EXPIRED:
            with self._lock:
                self._session, self._clients, self._id = None, {}, ""

    def _home_region(self) -> str:
        with calling("reading the profile", "", scope="provider"):
            configured = self._opened().get_config_variable("region")
        return os.environ.get("AWS_REGION") or configured or _FALLBACK_REGION

    def _opened(self) -> Any:
        if self._session is None:
            from botocore.session import Session

            self._session = Session(profile=self.options.profile or None)
            self._session.register_component("data_loader", _models())
        return self._session


@functools.cache
def _models() -> Any:
    """The descriptions of AWS's services: 0.2 s to read for EC2, and the same for every account."""
    from botocore.loaders import create_loader

    return create_loader()
