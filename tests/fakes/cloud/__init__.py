"""Yard, a cloud that is not there: a REST API as small GPU clouds have it, one machine a request, on loopback.

    GET    /v1/types             what is on sale: type, region, market, price, how many are free
    POST   /v1/instances         one machine; with an Idempotency-Key the same one again
    GET    /v1/instances         `?label=value`, a page at a time; those that have ended are listed, too
    GET    /v1/instances/ID      one of them
    DELETE /v1/instances/ID      ends it

What becomes of answers and machines is in the hands of a test: the fields and calls of `Cloud`.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from fakes.cloud.machines import Machines

KEY = "yard-5ecret-key"
PAGE = 2  # instances of a listing's page
PRICES = {("north", "on-demand"): 0.07, ("north", "spot"): 0.02, ("south", "on-demand"): 0.09, ("south", "spot"): 0.03}
CREATES = {
    "": "is answered",
    "busy": "is refused with 429",
    "late": "arrives when another one has been done",
    "lost": "is done, and the connection is cut",
    "broken": "is done, and 500 is answered",
}
LATEST_S = 60.0
BUSY = (429, "too_many_requests", "slow down")
ASKED = {"type", "region", "market", "disk", "start_script", "labels", "hard_cap_s", "ends_by"}


class Refused(Exception):
    """An answer that is an error: status, code, what it says."""


@dataclass
class Cloud:
    """What the cloud has, and what a test does to it."""

    machines: Machines
    now: Callable[[], float] = time.time  # UNIX seconds
    latency_s: float = 0.0  # before each answer
    lag_s: float = 0.0  # so long listings do not show a new instance
    creates: list[str] = field(default_factory=list)  # what becomes of the next ones, one each: CREATES
    busy: int = 0  # so many requests are refused with 429
    per_s: float = math.inf  # requests that the account may make, evenly; the others are refused with 429
    retry_after_s: float = 7.0  # as those say
    quota: int = 64  # instances of the account
    locked: bool = False  # no instance can be deleted
    stuck: Collection[str] = ()  # ids that cannot
    keys: bool = True  # idempotency keys are honoured; many APIs know none
    capacity: dict[tuple[str, str], int] = field(default_factory=lambda: dict.fromkeys(PRICES, 16))
    instances: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)  # method and path
    done: int = 0  # creates that have come to an end, whoever still listens
    endpoint: str = ""
    refused: int = 0  # requests, with 429
    _asked_at: float = -math.inf
    _known: dict[str, tuple[str, str]] = field(default_factory=dict)  # key -> the body that it came with, and the id
    _lock: threading.Condition = field(default_factory=threading.Condition)

    @property
    def billed(self) -> list[str]:
        """Instances that cost money now: while they stop they do not."""
        return [name for name in list(self.instances) if self.show(name)["status"] in ("starting", "running")]

    def free(self, region: str, market: str) -> int:
        """Instances that can be had there."""
        there = [self.instances[name] for name in self.billed]
        taken = sum((each["region"], each["market"]) == (region, market) for each in there)
        return max(0, self.capacity[region, market] - taken)

    def show(self, name: str) -> dict[str, Any]:
        """An instance as the API tells of it."""
        return {**self.instances[name], **self.machines.look(name)}

    def answer(self, method: str, path: str, query: dict[str, str], body: bytes, key: str) -> tuple[int, Any]:
        """Status and body. Raises Refused."""
        match method, path.removeprefix("/v1/").split("/"):
            case "GET", ["types"]:
                sold = {"type": "barrow", "vcpus": 2, "memory_gib": 4.0}
                places = [{"region": region, "market": market} for region, market in PRICES]
                return 200, [{**sold, **p, "price": PRICES[(*p.values(),)], "free": self.free(**p)} for p in places]
            case "POST", ["instances"]:
                return self._make(body.decode(), key)
            case "GET", ["instances"]:
                return 200, self._page(int(query.pop("page", "1")), query)
            case (("GET" | "DELETE"), ["instances", name]) if name in self.instances:
                if method == "DELETE" and (self.locked or name in self.stuck):
                    raise Refused(403, "locked", f"{name} is protected from its end")
                if method == "DELETE":
                    self.machines.end(name)
                return 200, self.show(name)
        raise Refused(404, "not_found", f"there is no {path}")

    def _make(self, body: str, key: str) -> tuple[int, Any]:
        with self._lock:
            fault = self.creates.pop(0) if self.creates else ""
            if fault == "busy":
                raise Refused(*BUSY)
            if fault == "late":
                self._lock.wait_for(lambda: self.done, LATEST_S)
            status, made = self._create(body, key)
            self.done += 1
            self._lock.notify_all()
        if fault == "lost":
            raise ConnectionAbortedError
        return (500, {}) if fault == "broken" else (status, made)

    def _create(self, body: str, key: str) -> tuple[int, Any]:
        first, name = self._known.get(key, (body, ""))
        if first != body:
            raise Refused(409, "key_reused", "this Idempotency-Key came with another body")
        if name:
            return 200, self.show(name)
        asked = json.loads(body)
        place = (asked["region"], asked["market"])
        if asked.keys() != ASKED or place not in PRICES:
            raise Refused(422, "invalid", f"what is asked for has {', '.join(sorted(ASKED))}")
        if len(self.billed) >= self.quota:
            raise Refused(403, "quota_exceeded", f"your account may have {self.quota} instances (limit `instances`)")
        if not self.free(*place):
            raise Refused(409, "no_capacity", f"no barrow is free in {place[0]}")
        at, name = self.now(), self.machines.start(asked)
        ends_at = min(at + asked["hard_cap_s"], asked["ends_by"] or math.inf)
        told = {each: asked[each] for each in ("type", "region", "market", "labels")}
        self.instances[name] = {"id": name, "created_at": at, "ends_at": ends_at, "price": PRICES[place], **told}
        if key and self.keys:
            self._known[key] = (body, name)
        return 201, self.show(name)

    def _page(self, page: int, labels: dict[str, str]) -> dict[str, Any]:
        shown = [each for each in list(self.instances.values()) if each["created_at"] <= self.now() - self.lag_s]
        found = [each["id"] for each in shown if labels.items() <= each["labels"].items()]
        here = [self.show(name) for name in found[(page - 1) * PAGE : page * PAGE]]
        return {"instances": here, "next": page + 1 if len(found) > page * PAGE else None}

    def weather(self, authorization: str) -> None:
        """What stands between a request and its answer. Raises Refused."""
        time.sleep(self.latency_s)
        if authorization != f"Bearer {KEY}":
            raise Refused(401, "unauthorized", "the key is wrong")
        with self._lock:
            at = self.now()
            early = at - self._asked_at < 1 / self.per_s - 1e-6
            self._asked_at = self._asked_at if early else at
            refused = self.busy or early
            self.busy -= bool(self.busy)
            self.refused += bool(refused)
        if refused:
            raise Refused(*BUSY)


@contextmanager
def serving(machines: Machines) -> Iterator[Cloud]:
    """The cloud while it answers; afterwards nothing of it is left."""
    cloud = Cloud(machines)

    class Handler(BaseHTTPRequestHandler):
        def handle_one(self) -> None:
            url = urlsplit(self.path)
            cloud.requests.append((self.command, url.path))
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            try:
                cloud.weather(self.headers.get("Authorization", ""))
                key = self.headers.get("Idempotency-Key", "")
                status, said = cloud.answer(self.command, url.path, dict(parse_qsl(url.query)), body, key)
            except Refused as refused:
                status, code, message = refused.args
                said = {"code": code, "message": message}
            except ConnectionAbortedError:  # it was done, and nobody hears of it
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.send_response(status)
            if status == 429:
                self.send_header("Retry-After", f"{cloud.retry_after_s:g}")
            self.end_headers()
            with suppress(OSError):  # who asked may have given up
                self.wfile.write(json.dumps(said).encode())

        do_GET = do_POST = do_DELETE = handle_one  # noqa: N815 - http.server's names

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    cloud.endpoint = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield cloud
    finally:
        server.shutdown()
        server.server_close()
        machines.close()
