"""This machine's address, from who is asked for it: no other one is let in."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from mgpu.cli.common import own_address
from mgpu.errors import InputError


@pytest.fixture
def answering(monkeypatch):
    """`answering(text)`: what the service says that tells addresses."""
    servers = []

    def start(text: bytes):
        class Service(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Service)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(own_address, "WHO_AM_I", f"http://127.0.0.1:{server.server_port}")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("said", "network"), [(b"203.0.113.7\n", "203.0.113.7/32"), (b"2001:db8::1", "2001:db8::1/128")]
)
def test_the_address_of_this_machine_alone_is_let_in(answering, said, network):
    answering(said)
    assert own_address.own_address() == network


@pytest.mark.parametrize("said", [b"", b"<html>log in first</html>", b"0.0.0.0/0", b"203.0.113.7 evil", b"\xff\xfe"])
def test_what_is_no_address_is_not_let_in(answering, said):
    answering(said)
    with pytest.raises(InputError) as unknown:
        own_address.own_address()
    assert "--allow-ssh" in unknown.value.next_step


def test_without_an_answer_the_address_has_to_be_named(monkeypatch):
    monkeypatch.setattr(own_address, "WHO_AM_I", "http://127.0.0.1:1")
    with pytest.raises(InputError, match="cannot be found out"):
        own_address.own_address()
