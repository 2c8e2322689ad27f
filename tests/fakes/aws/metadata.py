"""The metadata service of the fake's machines, IMDSv2 alone: an instance is known by the address that asks.

As EC2's: a token for a PUT with its life time, 401 without a good one, 404 where nothing is, notices only once they
are given. The answer to the PUT lives for as many hops as the instance's options say.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fakes.aws.blueprint import Machine

NOTICES = ("spot/instance-action", "events/recommendations/rebalance")
FAULTS = ("hang", "500", "refused", "malformed")  # no answer; an error; no tokens; bodies that are no JSON
HANG_S = 60.0

_TTL = "X-aws-ec2-metadata-token-ttl-seconds"
_TOKEN = "X-aws-ec2-metadata-token"
_LONGEST_TTL_S = 21600
_CREDENTIALS = "meta-data/iam/security-credentials/"

Credentials = Callable[["Machine"], Mapping[str, str]]


def made_up(machine: Machine) -> Mapping[str, str]:
    """Credentials of a role as the service gives them, good for a moto that does not look at them."""
    fresh = {"AccessKeyId": f"ASIA{machine.id[-16:].upper():0>16}", "SecretAccessKey": "fake", "Token": machine.id}
    return {"Code": "Success", "Type": "AWS-HMAC", **fresh, **lasting(6 * 3600)}


def lasting(seconds: float) -> dict[str, str]:
    """When credentials were made and when they expire."""
    now = time.time()
    stamps = {"LastUpdated": now, "Expiration": now + seconds}
    return {name: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at)) for name, at in stamps.items()}


@dataclass
class Entry:
    """What the service knows of one instance."""

    machine: Machine
    public_address: str | None
    fault: str | None = None
    notices: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)  # token -> when it ends, monotonic
    gone: threading.Event = field(default_factory=threading.Event)


class Metadata:
    """The service; it listens from the moment that it is made, in the network of the thread that makes it."""

    def __init__(self, address: str, port: int = 80, credentials: Credentials = made_up) -> None:
        self._entries: dict[str, Entry] = {}  # by private address
        self._credentials = credentials
        service = self

        class Handler(_Handler):
            metadata = service

        self._server = ThreadingHTTPServer((address, port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="metadata", daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.server_address[1]

    def add(self, machine: Machine) -> Entry:
        """Knows an instance from now on. ValueError: its address is another's."""
        if machine.private_address in self._entries:
            raise ValueError(f"{machine.private_address} is the address of another machine that runs")
        entry = Entry(machine, machine.public_address)
        return self._entries.setdefault(machine.private_address, entry)

    def remove(self, machine: Machine) -> None:
        """Forgets an instance; what hangs for its sake is let go."""
        entry = self._entries.pop(machine.private_address, None)
        if entry:
            entry.gone.set()

    def entry(self, address: str) -> Entry | None:
        """The instance that has this private address."""
        return self._entries.get(address)

    def close(self) -> None:
        """Stops listening."""
        for entry in tuple(self._entries.values()):
            self.remove(entry.machine)
        self._server.shutdown()
        self._server.server_close()

    def answer(self, entry: Entry, path: str) -> str | bytes | None:
        """What lies at a path below /latest/; None where nothing is."""
        machine = entry.machine
        if path in (f"meta-data/{kind}" for kind in NOTICES):
            return entry.notices.get(path.removeprefix("meta-data/"))
        if path == "user-data":
            return machine.user_data or None
        if path == "dynamic/instance-identity/document":
            return json.dumps(identity(machine), indent=1)
        if path.startswith(_CREDENTIALS) and machine.role:
            rest = path.removeprefix(_CREDENTIALS)
            return {"": machine.role, machine.role: json.dumps(dict(self._credentials(machine)))}.get(rest)
        return facts(machine, entry.public_address).get(path.removeprefix("meta-data/"))


def identity(machine: Machine) -> dict[str, Any]:
    """The instance identity document."""
    return {
        "accountId": machine.account,
        "architecture": "x86_64",
        "availabilityZone": machine.zone,
        "instanceId": machine.id,
        "instanceType": machine.instance_type,
        "privateIp": machine.private_address,
        "region": machine.region,
        "version": "2017-09-30",
    }


def facts(machine: Machine, public_address: str | None) -> dict[str, str]:
    """The plain values, by their path below meta-data/."""
    host = hostname(machine.private_address)
    found = {
        "hostname": f"{host}.ec2.internal",
        "instance-id": machine.id,
        "instance-life-cycle": machine.market,
        "instance-type": machine.instance_type,
        "local-hostname": f"{host}.ec2.internal",
        "local-ipv4": machine.private_address,
        "placement/availability-zone": machine.zone,
        "placement/region": machine.region,
        "services/domain": "amazonaws.com",
    }
    return {**found, **({"public-ipv4": public_address} if public_address else {})}


def hostname(private_address: str) -> str:
    """As EC2 names a machine."""
    return "ip-" + private_address.replace(".", "-")


class _Handler(BaseHTTPRequestHandler):
    """One request of one instance."""

    metadata: Metadata
    timeout = 30  # seconds for a peer that says nothing

    def do_PUT(self) -> None:
        """Hands out a token."""
        if entry := self._entry():
            ttl = self.headers.get(_TTL, "")
            if entry.fault == "refused" or "X-Forwarded-For" in self.headers:
                self._say(403)
            elif self.path != "/latest/api/token" or not ttl.isdigit() or not 1 <= int(ttl) <= _LONGEST_TTL_S:
                self._say(400)
            else:
                self._hand_out(entry, ttl)

    def do_GET(self) -> None:
        """Answers a question."""
        if entry := self._entry():
            if entry.tokens.get(self.headers.get(_TOKEN, ""), 0.0) < time.monotonic() or entry.fault == "refused":
                self._say(401)
            elif (body := self.metadata.answer(entry, self.path.removeprefix("/latest/"))) is None:
                self._say(404)
            else:
                self._say(200, "{malformed" if entry.fault == "malformed" else body)

    def _hand_out(self, entry: Entry, ttl: str) -> None:
        token = secrets.token_urlsafe(30)
        entry.tokens[token] = time.monotonic() + int(ttl)
        self.connection.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, entry.machine.hop_limit)
        self._say(200, token, {_TTL: ttl})

    def _entry(self) -> Entry | None:
        """Who asks; None where the answer is given already, or never will be."""
        entry = self.metadata.entry(self.client_address[0])
        if entry is None:
            self._say(404)
        elif entry.fault == "hang":
            entry.gone.wait(HANG_S)
            self.close_connection = True
        elif entry.fault == "500":
            self._say(500)
        else:
            return entry
        return None

    def _say(self, status: int, body: str | bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        content = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        """Says nothing."""
