"""A way to a node that a test can spoil: a TCP proxy on loopback, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import asyncssh
import pytest

CHUNK = 1 << 16


class _Rude(asyncssh.SSHServer):
    """Lets everybody in, and hangs up at once."""

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._conn = conn

    def begin_auth(self, username: str) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        return True

    def auth_completed(self) -> None:
        self._conn.abort()


class Link:
    """Carries connections to `target`, a port of this machine, and does to them what it is told."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.seen = 0  # connections so far
        self.before_banner = 0  # so many of the next ones are dropped before a byte has passed
        self.after_login = 0  # ... right after they have logged in; `be_rude` comes first
        self.cut_after = 0  # bytes from the node after which a connection ends; 0: never
        self._rude_port = 0
        self._every_s = 0.0
        self._pumps: set[asyncio.Task[None]] = set()
        self._carried: set[asyncio.Task[None] | None] = set()
        self._loop = asyncio.new_event_loop()
        self._flows = asyncio.Event()
        self._flows.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._carry, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]

    # --- for the test

    def cut(self) -> None:
        """Ends the connections that stand."""
        self._loop.call_soon_threadsafe(self._cut)

    def cut_every(self, seconds: float) -> None:
        """Ends them again and again; 0: not any more."""
        self._every_s = seconds
        if seconds:
            self._loop.call_soon_threadsafe(self._again)

    def stall(self) -> None:
        """Carries nothing from here on, and says so to nobody: half-open."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def flow(self) -> None:
        """Carries on."""
        self._loop.call_soon_threadsafe(self._flows.set)

    def be_rude(self, host_key: Path) -> None:
        """What `after_login` needs: a server that has the node's own key, and hangs up on whoever has logged in."""
        made = asyncssh.listen("127.0.0.1", 0, server_factory=_Rude, server_host_keys=[str(host_key)])
        self._rude_port = self._call(made).get_port()

    def close(self) -> None:
        self._every_s = 0
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    # --- in the thread

    def _call(self, what):
        future: Future = asyncio.run_coroutine_threadsafe(_awaited(what), self._loop)
        return future.result(10)

    def _cut(self) -> None:
        for pump in self._pumps:
            pump.cancel()

    def _again(self) -> None:
        if self._every_s:
            self._cut()
            self._loop.call_later(self._every_s, self._again)

    def _upstream(self) -> int:
        """The port that the next connection goes to; 0: nowhere."""
        self.seen += 1
        if self.before_banner:
            self.before_banner -= 1
            return 0
        if self.after_login:
            self.after_login -= 1
            return self._rude_port
        return self.target

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._carried.add(task := asyncio.current_task())
        port, ends, pumps = self._upstream(), [writer], set[asyncio.Task[None]]()
        with suppress(OSError):  # nobody listens there any more
            if port:
                far, there = await asyncio.open_connection("127.0.0.1", port)
                ends.append(there)
                ways = (self._pump(reader, there, 0), self._pump(far, writer, self.cut_after))
                pumps = {self._loop.create_task(way) for way in ways}
                self._pumps |= pumps
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        cut = any(pump.cancelled() for pump in pumps)
        for pump in pumps:
            pump.cancel()
        for end in ends:
            end.transport.abort() if cut else end.close()
        self._pumps -= pumps
        self._carried.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int) -> None:
        carried = 0
        with suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
                carried += len(data)
                if 0 < most < carried:
                    raise asyncio.CancelledError

    async def _end(self) -> None:
        self._server.close()
        while self._carried:
            self._cut()
            await asyncio.sleep(0.01)


async def _awaited(what):
    return await what


@pytest.fixture
def new_link() -> Iterator[Callable[[int], Link]]:
    """Makes links."""
    made: list[Link] = []

    def link(target: int = 0) -> Link:
        made.append(Link(target))
        return made[-1]

    yield link
    for each in made:
        each.close()
