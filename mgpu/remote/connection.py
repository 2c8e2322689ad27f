"""One SSH connection: dial, compare the host key, authenticate. Where foreign errors of connections are translated.

Nothing of the user's own SSH set-up is looked at: no agent, no keys or configuration under ~/.ssh, no known_hosts.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mgpu_train.timeouts import Timeouts

from mgpu.errors import ConnectionFailed, HostKeyMismatch, InputError, RemoteError
from mgpu.remote.library import IncompatiblePeer, UnknownKeyType, paramiko
from mgpu.remote.proxy import ProxyStream
from mgpu.remote.targets import ALGORITHMS, HostKey, Jump, ProxyCommand, Target
from mgpu.remote.wire import Stream, Wire

FOREIGN = (paramiko.SSHException, paramiko.SFTPError, EOFError, OSError)
# GCM first: one pass in C a packet, where paramiko's default (CTR with a MAC) takes three
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
_GLOBAL_REQUEST = b"\x50"
_DISCONNECT, _BY_APPLICATION = b"\x01", 11
# All nodes may be behind one jump host, and sshd drops who comes while ten others log in (its MaxStartups)
_jumping = threading.BoundedSemaphore(8)

# paramiko logs every lost connection as an error; without a handler Python would print that on stderr
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class Connection:
    """An authenticated transport to `target`, and the one to its jump host under it. Made by `open_connection`."""

    def __init__(self, target: Target, transport: paramiko.Transport, wire: Wire, outer: Connection | None) -> None:
        self.target = target
        self.transport = transport
        self._wire = wire
        self._outer = outer

    @property
    def closed(self) -> bool:
        """True once it is lost or closed."""
        return not self.transport.is_active()

    def answers(self) -> bool:
        """Asks the server for an answer and waits for it, or for the connection's end."""
        self.transport.global_request("keepalive@openssh.com", wait=True)
        return self.transport.is_active()

    def open_session(self, timeout: float) -> paramiko.Channel:
        """A new channel, within `timeout` seconds. Raises what paramiko raises."""
        return self.transport.open_session(timeout=timeout)

    def failure(self, doing: str, cause: str = "The connection was lost.") -> ConnectionFailed:
        """What is raised when `doing` something on this connection failed."""
        return _failed(self.target, doing, self._wire.fault or cause)

    @contextmanager
    def translated(self, doing: str) -> Iterator[None]:
        """Turns paramiko's and sockets' errors into ConnectionFailed."""
        try:
            yield
        except FOREIGN as error:
            raise self.failure(doing, _cause(error)) from error

    def close(self) -> None:
        """Ends it; what waits on it raises ConnectionFailed."""
        self._wire.leave()
        with contextlib.suppress(*FOREIGN):
            _say_goodbye(self.transport)
        self._wire.close()
        self.transport.close()
        if self._outer:
            self._outer.close()


def load_key(path: Path) -> paramiko.PKey:
    """The private key that logs in. Raises InputError: absent, not a key, or behind a passphrase."""
    try:
        return paramiko.PKey.from_path(path)
    except FileNotFoundError as error:
        raise InputError(
            f"no private key at {path}",
            "The stack output `mgpu` names it as private_key_file, and it is not on this machine.",
            "Run this where the stack was made, or copy the key from there (mode 0600).",
        ) from error
    except (paramiko.SSHException, UnknownKeyType, OSError, ValueError, TypeError) as error:
        raise InputError(
            f"the private key at {path} cannot be read",
            str(error),
            "It has to be an OpenSSH or PEM key without a passphrase.",
        ) from error


def open_connection(target: Target, key: paramiko.PKey, timeouts: Timeouts) -> Connection:
    """Dials and logs in once, within `ssh_banner_s` for each host on the way, and as long for its turn at a jump host.

    Raises:
        HostKeyMismatch: another key than the pinned one; no byte of authentication was sent.
        ConnectionFailed: anything else.
    """
    if not isinstance(target.via, Jump):
        return _open(target, target, key, timeouts, None)
    if not _jumping.acquire(timeout=timeouts.ssh_banner_s):
        raise _failed(target.via, "could not be connected to", "Too many other connections are being made.")
    try:
        outer = _open(target, target.via, key, timeouts, None)
    finally:
        _jumping.release()
    try:
        return _open(target, target, key, timeouts, outer)
    except BaseException:
        outer.close()
        raise


def _open(
    target: Target, end: Target | Jump, key: paramiko.PKey, timeouts: Timeouts, outer: Connection | None
) -> Connection:
    wire: Wire | None = None
    try:
        wire = _dial(end, outer, timeouts.ssh_banner_s)
        transport = _log_in(wire, end, key, timeouts)
    except RemoteError:
        raise
    except (*FOREIGN, RuntimeError) as error:  # there may be no thread left for it
        cause = (wire.fault if wire else "") or _cause(error)
        raise _failed(end, "could not be connected to", cause) from error
    return Connection(target, transport, wire, outer)


def _dial(end: Target | Jump, outer: Connection | None, seconds: float) -> Wire:
    deadline = time.monotonic() + seconds
    if outer is not None:
        there = (end.address, end.port)
        try:
            tunnel = outer.transport.open_channel("direct-tcpip", there, ("127.0.0.1", 0), timeout=seconds)
        except paramiko.ChannelException as error:
            raise ConnectionError(f"Its jump host opened no connection to it: {error.text}.") from error
        return Wire(tunnel, deadline)
    if isinstance(end, Target) and isinstance(end.via, ProxyCommand):
        return Wire(_proxied(end.via, seconds), time.monotonic() + seconds)
    plain = socket.create_connection((end.address, end.port), timeout=seconds)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small requests must not wait for acknowledgements
    return Wire(plain, deadline)


def _proxied(via: ProxyCommand, seconds: float) -> Stream:
    """Raises OSError: no connection; with what is known of the reason."""
    if not via.in_process:
        return ProxyStream(via.argv, seconds)
    module, arguments = via.module
    try:
        connect = importlib.import_module(module).connect
    except (ImportError, AttributeError) as error:
        raise ConnectionError(f"{module} makes no connections here: {error}") from error
    return connect(arguments, seconds)


def _log_in(wire: Wire, end: Target | Jump, key: paramiko.PKey, timeouts: Timeouts) -> paramiko.Transport:
    transport = paramiko.Transport(wire)  # type: ignore[arg-type]  # a Wire has what paramiko asks of a socket
    try:
        _prepare(transport, end, timeouts)
        transport.start_client(timeout=timeouts.ssh_banner_s)
        _compare_host_key(transport, end)
        if transport.auth_publickey(end.user, key):
            raise paramiko.AuthenticationException("the server wants more than a key")
    except BaseException as error:
        wire.close()
        transport.close()
        if isinstance(error, IncompatiblePeer) and "host key" in str(error):
            raise _mismatch(end, "none of the pinned key's type") from error
        raise
    wire.watch(timeouts.keepalive_s, lambda: _probe(transport))
    return transport


def _prepare(transport: paramiko.Transport, end: Target | Jump, timeouts: Timeouts) -> None:
    transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = timeouts.ssh_banner_s
    transport.clear_to_send_timeout = timeouts.command_s
    # paramiko begins a key exchange after 512 MiB, waits for itself where the server closes a channel meanwhile, and
    # loses the connection (its issue 822). A server begins one when it has to, OpenSSH's after 64 GiB: before us
    transport.packetizer.REKEY_BYTES = 1 << 37
    options = transport.get_security_options()
    # a server with several host keys has to prove the one that is pinned
    options.key_types = ALGORITHMS[HostKey.parse(end.host_key).kind]
    options.ciphers = _CIPHERS


def _compare_host_key(transport: paramiko.Transport, end: Target | Jump) -> None:
    shown = transport.get_remote_server_key()
    found = HostKey(shown.get_name(), shown.asbytes())
    if found != HostKey.parse(end.host_key):
        raise _mismatch(end, found.fingerprint)


def _probe(transport: paramiko.Transport) -> None:
    # runs in the transport's own thread, which does the key exchanges: one that is under way cannot begin in between
    if not transport.clear_to_send.is_set():
        return
    request = paramiko.Message()
    request.add_byte(_GLOBAL_REQUEST)
    request.add_string("keepalive@openssh.com")
    request.add_boolean(True)  # an answer is wanted: every server sends one, if only to say that it does not know this
    transport.packetizer.send_message(request)


def _say_goodbye(transport: paramiko.Transport) -> None:
    # what carries the connection may outlive it, and then only the server can end that, when it is told
    if not transport.is_active() or not transport.clear_to_send.is_set():
        return
    farewell = paramiko.Message()
    farewell.add_byte(_DISCONNECT)
    farewell.add_int(_BY_APPLICATION)
    farewell.add_string("")
    farewell.add_string("")
    transport.packetizer.send_message(farewell)


def _mismatch(end: Target | Jump, shown: str) -> HostKeyMismatch:
    return HostKeyMismatch(
        f"{end.label} shows another host key than the pinned one",
        f"Pinned: {HostKey.parse(end.host_key).fingerprint}. Shown: {shown}. Nothing was sent to it.",
        "Another machine may have this address now: `mgpu status` says what the provider knows of it.",
    )


def _failed(end: Target | Jump, doing: str, cause: str) -> ConnectionFailed:
    return ConnectionFailed(
        f"{end.label}: {doing}",
        cause,
        "`mgpu status` says whether the machine still runs; its work goes on without us.",
    )


def _cause(error: BaseException) -> str:
    if isinstance(error, paramiko.AuthenticationException):
        return f"The login was refused: {error}"
    if isinstance(error, paramiko.ChannelException):
        return f"The SSH server opened no channel: {error.text}. Its sshd_config may limit them (MaxSessions)."
    if isinstance(error, TimeoutError):
        return "No answer in time."
    return str(error) or "The connection was lost."
