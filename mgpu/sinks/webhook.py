"""Sink `webhook`: each message as JSON to an address, signed.

X-Mgpu-Id          the message's id: one that comes twice has the same
X-Mgpu-Signature   sha256=<HMAC-SHA256 of the body with the secret, hexadecimal>, where there is a secret
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from urllib.parse import urlsplit

from mgpu_train.config import EnvName, Text
from pydantic import Field

from mgpu.sinks import telling
from mgpu.sinks.base import Heard
from mgpu.sinks.telling import ANSWER_S, Message, Telling
from mgpu.spec.sink import SinkEntry

VERSION = 1


_ADDRESS_OR_NAME = re.compile(r"(?i:https?)://[^\s/]\S*|[A-Za-z_]\w*", re.ASCII)


class WebhookOptions(telling.Options):
    """`sinks.webhook:` each message as JSON to an address."""

    url: EnvName | Text = Field(description="http(s)://..., or the name of the environment variable that holds it")
    secret: EnvName | None = Field(
        None, description="name of the environment variable whose value signs each request (default: not signed)"
    )


class WebhookSink(Telling):
    """POSTs each message; any answer of 200 to 299 is a delivery."""

    name = "webhook"

    def __init__(self, options: WebhookOptions, heard: Heard) -> None:
        super().__init__(options, heard)
        self._options, self._url = options, ""
        self._secret: bytes | None = None

    def prepare(self) -> None:
        """Raises ValueError: a variable is not set here, or holds no address."""
        given = self._options
        self._url = given.url if "://" in given.url else value_of(given.url)
        self._secret = value_of(given.secret).encode() if given.secret else None
        if urlsplit(self._url).scheme not in ("http", "https"):
            raise ValueError("`url` is no address that begins with https:// or http://")

    def tell(self, message: Message) -> None:
        """Raises OSError: no answer, or another one."""
        body = json.dumps({"version": VERSION, **asdict(message)}).encode()
        headers = {"Content-Type": "application/json", "X-Mgpu-Id": message.id}
        if self._secret is not None:
            headers["X-Mgpu-Signature"] = f"sha256={hmac.new(self._secret, body, hashlib.sha256).hexdigest()}"
        status, _ = post(self._url, body, headers)
        if not 200 <= status < 300:
            raise OSError(f"it answers {status}")


def post(url: str, body: bytes, headers: dict[str, str]) -> tuple[int, str]:
    """POSTs it, and goes nowhere else; the answer's status and text. Raises OSError: there is none."""
    import urllib3

    try:
        answer = urllib3.request(
            "POST", url, body=body, headers=headers, timeout=ANSWER_S, retries=False, redirect=False
        )
    except urllib3.exceptions.HTTPError as error:  # the address may hold a secret
        raise OSError(f"no answer: {type(error).__name__}") from None
    return answer.status, answer.data.decode(errors="replace")


def value_of(variable: str) -> str:
    """The value of an environment variable. Raises ValueError: it is not set."""
    if not (value := os.environ.get(variable)):
        raise ValueError(f"{variable} is not set here")
    return value


def _mistakes(block: WebhookOptions) -> Iterator[tuple[str, str]]:
    if not _ADDRESS_OR_NAME.fullmatch(block.url):
        yield "url", "must be http(s)://..., or the name of the environment variable that holds it"


ENTRY = SinkEntry("mgpu.sinks.webhook:WebhookSink", WebhookOptions, mistakes=_mistakes)
