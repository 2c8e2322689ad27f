"""First contact with machines whose host key came with user data, which others can read: each gets one of its own.

For one node, every step harmless when it was done already, so that any process can finish what another one began:

    connect, pinned to the key for one use      from here on nobody else can stand in between
    the node makes a key, and keeps it aside    -> `rekeyed(used=False)`: both keys may be met from now on
    the node shows it
    connect, pinned to the new key alone        -> `rekeyed(used=True)`: the old key is not pinned anywhere any more

Machines that boot refuse connections first, and may show a key that their image's own first boot has made: until the
time is over nothing is concluded from either, and nothing is sent to a machine that shows another key.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mgpu_train.timeouts import Timeouts

from mgpu.acquire import GANGS, Lost
from mgpu.errors import ConnectionFailed, HostKeyMismatch, RemoteError
from mgpu.events import Emit, Note, ignore
from mgpu.providers.base import FleetState, Handle, NodeState, ProxyCommand, Rekeys, dialled
from mgpu.remote import rekey
from mgpu.remote.connection import load_key
from mgpu.remote.node import Node
from mgpu.remote.targets import HostKey, Target, hop

_THREADS = 64
_PATIENCE = 1 / GANGS  # of `provision_s`: then the gang is given up, and another one has time to come

_Troubles = dict[str, RemoteError]  # by the machine's id


class Contact:
    """Meets the machines of one search; `meet` is what `mgpu.acquire.Terms` want. No connection is kept."""

    def __init__(
        self,
        provider: Rekeys,
        key_file: Path,
        timeouts: Timeouts,
        *,
        emit: Emit = ignore,
        cancelled: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises InputError: the key that logs in cannot be used."""
        self._provider = provider
        self._key = load_key(key_file)
        self._timeouts = timeouts
        self._emit = emit
        self._cancelled = cancelled or threading.Event()
        self._clock = clock
        self._since: dict[str, float] = {}  # by token: when its machines were all there
        self._keys: dict[str, str] = {}  # by id: the new key, once the provider was told of it
        self._met: set[str] = set()

    def meet(self, handle: Handle, state: FleetState) -> FleetState:
        """One pass over the machines that show a key for one use, all at once; those that were met have their new key.

        Raises:
            Lost: no answer for too long.
            HostKeyMismatch: a machine shows neither of its keys, for too long.
            ProviderError: a new key could not be written down.
        """
        if handle.token not in self._since:
            self._since[handle.token] = self._clock()
            self._emit(Note("all machines run; waiting for their SSH servers"))
        troubles: _Troubles = {}
        new = [node for node in state.nodes if node.one_use_key and node.id not in self._met]
        if new:
            with ThreadPoolExecutor(min(_THREADS, len(new))) as pool:
                for _ in pool.map(lambda node: self._try(handle, node, troubles), new):
                    pass  # raises what the provider has raised
        if troubles:
            self._judge(self._clock() - self._since[handle.token], new, troubles)
        return FleetState(nodes=tuple(self._seen(node, troubles) for node in state.nodes))

    def _try(self, handle: Handle, node: NodeState, troubles: _Troubles) -> None:
        if self._cancelled.is_set():
            return
        try:
            self._rekey(handle, node)
            self._met.add(node.id)
        except RemoteError as error:
            troubles[node.id] = error

    def _rekey(self, handle: Handle, node: NodeState) -> None:
        old, new = _line(node.one_use_key), self._keys.get(node.id) or _line(node.host_key)
        if new == old or not self._shows(node, new):
            new = self._replace(handle, node, old)
            if not self._shows(node, new):
                raise ConnectionFailed(f"node {node.rank} ({node.id}) shows its old host key for a moment longer")
        self._provider.rekeyed(handle, node.id, new, used=True)

    def _replace(self, handle: Handle, node: NodeState, old: str) -> str:
        with self._connected(node, old) as ssh:
            new = rekey.prepare(ssh, self._timeouts.command_s)
            self._provider.rekeyed(handle, node.id, new, used=False)
            self._keys[node.id] = new
            rekey.install(ssh, new, self._timeouts.command_s)
        return new

    def _shows(self, node: NodeState, key: str) -> bool:
        try:
            self._connected(node, key).close()
        except HostKeyMismatch:
            return False
        return True

    def _connected(self, node: NodeState, key: str) -> Node:
        via = hop(node.via.model_dump() if node.via else None)
        address = dialled(node.address, node.private_address, node.via)
        return Node(Target(node.rank, address, node.port, node.user, key, via), self._key, self._timeouts)

    def _judge(self, waited_s: float, new: Iterable[NodeState], troubles: _Troubles) -> None:
        """Raises what the troubles are worth, once the time is over."""
        if waited_s < self._timeouts.provision_s * _PATIENCE:
            return
        impostor = next((error for error in troubles.values() if isinstance(error, HostKeyMismatch)), None)
        if impostor is not None:
            raise impostor
        silent = [node for node in new if node.id in troubles]
        more = f", and {len(silent) - 1} more" if len(silent) > 1 else ""
        raise Lost(f"{_complaint(silent[0], troubles[silent[0].id])} for {waited_s:.0f} s{more}")

    def _seen(self, node: NodeState, troubles: _Troubles) -> NodeState:
        if node.id in self._met:
            return node.model_copy(update={"host_key": self._keys.get(node.id, node.host_key), "one_use_key": ""})
        if node.id in troubles:
            return node.model_copy(update={"reason": _complaint(node, troubles[node.id])})
        return node


def _complaint(node: NodeState, error: RemoteError) -> str:
    cause = (error.why or error.what).splitlines()[0].rstrip(".")
    by_tcp = isinstance(error, ConnectionFailed) and not isinstance(node.via, ProxyCommand)
    hint = f"; is port {node.port} open from here?" if by_tcp else ""
    address = dialled(node.address, node.private_address, node.via)
    return f"node {node.rank} ({node.id} at {address}): no first contact by SSH ({cause}{hint})"


def _line(key: str) -> str:
    return HostKey.parse(key).line
