"""Who a registry is told that we are: a provider's tokens, docker's own configuration with its helpers, a password.

An `Auth` is asked each time that a login is needed, so that one which ends is renewed.
"""

from __future__ import annotations

import base64
import math
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, TypeVar

from mgpu.errors import ImageError, ProviderError
from mgpu.image.registry.reference import HUB
from mgpu.spec.provider import of_registry

HELPER_S = 60.0  # of a credential helper, which may ask its user
SPARE_S = 900.0  # a token that ends sooner is renewed: a push of many GiB is begun with it
_T = TypeVar("_T")


@dataclass(frozen=True)
class Login:
    """A name and a password, or the token that stands for both; `expires_at` in seconds of the clock time.time."""

    username: str
    password: str = field(repr=False)
    identity_token: str = field(default="", repr=False)
    expires_at: float = math.inf

    def for_engine(self) -> dict[str, str]:
        """As the engine's API takes it."""
        if self.identity_token:
            return {"identitytoken": self.identity_token}
        return {"username": self.username, "password": self.password}

    def basic(self) -> str:
        """The value of an Authorization header."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()


Auth = Callable[[], Login | None]


def nobody() -> Login | None:
    """An `Auth` for registries that ask nobody."""
    return None


def password(username: str, password: str) -> Auth:
    """An `Auth` of a name and a password."""
    login = Login(username, password)
    return lambda: login


def of(registry: str, provider: object = None) -> Auth:
    """Who this user is for a registry: the word of the provider whose it is, docker's configuration for all others.

    `provider`: is asked if it is that one; else one is, with what this environment says.
    """
    found = of_registry(registry)
    if found is None:
        return lambda: from_docker(registry)
    entry, has = found

    def ask() -> Login:
        whose = resolve_name(entry.provider)
        asked: Any = provider if isinstance(provider, whose) else whose(None)
        try:
            username, secret, ends = asked.registry_login(registry)
        except ProviderError as error:
            raise ImageError(f"no login for {registry}", f"{error.what}. {error.why}".strip(), has.renew) from error
        return Login(username, secret, expires_at=ends)

    return Renewed(ask)


def is_dockers(registry: str) -> bool:
    """Whether docker's own programs know who this user is for a registry: no provider has to be asked."""
    return of_registry(registry) is None


class Renewed:
    """A login that ends: it is kept until it is about to. Safe to use from any thread."""

    def __init__(self, ask: Callable[[], Login], now: Callable[[], float] = time.time) -> None:
        self._ask, self._now = ask, now
        self._lock = threading.Lock()
        self._login: Login | None = None

    def __call__(self) -> Login:
        """A login that lives for SPARE_S at least. Raises what `ask` does."""
        with self._lock:
            if self._login is None or self._login.expires_at - self._now() < SPARE_S:
                self._login = self._ask()
            return self._login


def from_docker(registry: str, within_s: float = HELPER_S) -> Login | None:
    """What `docker login` has left for a registry, in docker's configuration or in a credential helper.

    Raises:
        ImageError: the configuration cannot be read, or the helper fails or is silent for `within_s` seconds.
    """
    cure = f"Run `docker login {registry}` again, or mend ~/.docker/config.json."
    try:
        found = _within(within_s, lambda: _resolve(registry))
    except TimeoutError as error:
        why = f"A credential helper of docker's configuration was silent for {within_s:g} s."
        raise ImageError(f"no login for {registry}", why, cure) from error
    except Exception as error:
        raise ImageError(f"no login for {registry}", str(error), cure) from error
    known = {key.lower(): value for key, value in (found or {}).items() if value}
    if token := known.get("identitytoken"):
        return Login("", "", identity_token=token)
    return Login(known["username"], known["password"]) if "username" in known and "password" in known else None


def _resolve(registry: str) -> dict[str, Any] | None:
    from docker import auth

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a helper that is not there: the error that follows says it
        return auth.load_config().resolve_authconfig("" if registry == HUB else registry)


def _within(seconds: float, work: Callable[[], _T]) -> _T:
    """What `work` returns. Raises TimeoutError; the SDK's calls of helpers know no deadline."""
    outcome = list[tuple[bool, Any]]()

    def run() -> None:
        try:
            outcome.append((True, work()))
        except BaseException as error:  # noqa: BLE001  raised again by who waits
            outcome.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError
    good, result = outcome[0]
    if not good:
        raise result
    return result
