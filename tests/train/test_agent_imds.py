"""F22: whatever EC2's metadata service does, whoever reads its notices never waits, and the poller lives on."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from mgpu_train.agent.machine import imds
from mgpu_train.agent.machine.imds import Imds
from mgpu_train.agent.machine.notices import Notices

ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
NOTICE = b'{"action": "terminate", "time": "2099-01-01T00:02:00Z"}'
HINT = b'{"noticeTime": "2026-01-01T00:00:00Z"}'


class Service:
    """A metadata service on loopback, which asks for a token as IMDSv2 does."""

    def __init__(self) -> None:
        self.said: dict[str, bytes] = {}  # path -> body; what is not here is 404
        self.statuses: dict[str, int] = {}  # path -> what it is answered with instead
        self.tokens = ["token-1"]  # the last one is the valid one
        self.asked: list[str] = []
        self.ttl: str | None = None
        self.drip_s = 0.0  # between two bytes of an answer
        self.hang = threading.Event()
        self.hangs = False
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                service.ttl = self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
                service.answer(self, service.tokens[-1].encode())

            def do_GET(self) -> None:
                if self.headers["X-aws-ec2-metadata-token"] != service.tokens[-1]:
                    service.answer(self, b"", 401)
                elif self.path in service.said:
                    service.answer(self, service.said[self.path])
                else:
                    service.answer(self, b"<html>not found</html>", 404)

            def log_message(self, *_said: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_request: Any) -> None:
                """Who asked has gone."""

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler, body: bytes, status: int = 200) -> None:
        self.asked.append(f"{handler.command} {handler.path}")
        if self.hangs:
            self.hang.wait(30)
        handler.send_response(self.statuses.get(handler.path, status))
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        for byte in body:
            handler.wfile.write(bytes([byte]))
            self.hang.wait(self.drip_s)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.hang.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


@pytest.fixture
def source(service: Service) -> Imds:
    return Imds(service.address, every_s=0.02, timeout_s=10)


@pytest.fixture
def hasty(service: Service) -> Imds:
    """For a service that does not answer in time."""
    return Imds(service.address, every_s=0.02, timeout_s=0.2)


def until(condition: Callable[[], Any], deadline_s: float = 10) -> Any:
    end = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
    return found


def trouble(source: Imds) -> str:
    try:
        source.read()
    except OSError as error:
        return str(error)
    return ""


def rounds(service: Service, count: int = 2) -> None:
    """Waits until so many more looks at the notice were made."""
    seen = service.asked.count(f"GET {ACTION}")
    until(lambda: service.asked.count(f"GET {ACTION}") >= seen + count)


def test_nothing_is_there_until_there_is(service, source):
    assert source.read() is None
    rounds(service)
    assert (source.read(), source.hint()) == (None, None)
    service.said[ACTION] = NOTICE
    assert until(source.read) == NOTICE
    service.said[REBALANCE] = HINT
    assert until(source.hint) == HINT
    assert service.ttl is not None
    assert 60 <= int(service.ttl) <= 21600
    assert service.asked.count("PUT /latest/api/token") == 1, "one token serves all questions"


def test_an_old_token_is_replaced(service, source):
    source.read()
    rounds(service)
    service.tokens.append("token-2")
    service.said[ACTION] = NOTICE
    assert until(source.read) == NOTICE
    assert service.asked.count("PUT /latest/api/token") == 2


@pytest.mark.parametrize(("path", "status"), [("/latest/api/token", 403), (ACTION, 401), (ACTION, 500)])
def test_a_refusal_is_told_and_asked_again(service, source, path, status):
    service.statuses[path] = status
    assert str(status) in until(lambda: trouble(source))
    service.said[ACTION] = NOTICE
    del service.statuses[path]
    assert until(lambda: not trouble(source) and source.read()) == NOTICE


def test_a_service_that_hangs_keeps_nobody_waiting(service, source, hasty):
    service.hangs = True
    began = time.monotonic()
    source.read()
    assert time.monotonic() - began < 5, "who waits for an answer waits for 10 s"
    assert until(lambda: trouble(hasty))
    service.hangs = False
    service.said[ACTION] = NOTICE
    assert until(lambda: not trouble(hasty) and hasty.read()) == NOTICE


def test_a_service_that_drips_is_cut_off(service, hasty):
    service.said[ACTION] = b" " * 200 + NOTICE
    service.drip_s = 0.05  # no read times out, and all of them would take 12 s
    assert until(lambda: trouble(hasty), 3)
    service.drip_s = 0.0
    assert until(lambda: not trouble(hasty) and hasty.read()) == b" " * 200 + NOTICE


def test_no_service_at_all_is_told_once_and_training_does_not_hear_of_it():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        source = Imds(f"127.0.0.1:{unused.getsockname()[1]}", every_s=0.01, timeout_s=0.2)
        said: list[str] = []
        notices = Notices(source, said.append)
        until(lambda: trouble(source))
        assert [notices.poll() for _ in range(20)] == [None] * 20
        assert len(said) == 1
        assert "the metadata service" in said[0]


def test_a_notice_that_stands_is_not_hidden_by_later_trouble(service, source):
    service.said[ACTION] = NOTICE
    until(source.read)
    service.statuses[REBALANCE] = 500
    rounds(service)
    assert source.read() == NOTICE


def test_an_answer_is_read_as_far_as_a_notice_goes(service, source):
    service.said[ACTION] = b"x" * 100_000
    assert len(until(source.read)) <= 4096


def test_no_proxy_is_asked(service, source, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    service.said[ACTION] = NOTICE
    assert until(source.read) == NOTICE


def test_without_a_thread_it_is_an_error_like_others(service, source, monkeypatch):
    def none(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(imds.threading.Thread, "start", none)
        assert "thread" in trouble(source)
    service.said[ACTION] = NOTICE
    assert until(source.read) == NOTICE
