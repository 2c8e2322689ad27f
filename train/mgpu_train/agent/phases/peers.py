"""The agents of an attempt tell node 0's agent until when they vouch for it, and it answers for all of them.

They have to know this of each other because nodes train on when no operator watches. A word is one short TCP
connection, and goes where torchrun's own rendezvous goes. Each is sealed with the attempt's writer token and numbered:
nobody else on the network, and no old word, keeps an attempt alive.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any

from mgpu_train.agent.attempt import liveness
from mgpu_train.agent.attempt.liveness import Stage
from mgpu_train.config import Job

_MAX_BYTES = 4096
_WORD, _ANSWER = b"word", b"answer"  # an answer cannot be sent back as a word


class Peers:
    """This node's place among the agents. `start` begins; until then, and without a port, nobody is heard."""

    def __init__(self, job: Job, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._job, self._say, self._clock = job, say, clock
        self._key = hashlib.sha256(f"{job.run_id}/{job.attempt}/{job.writer}".encode()).digest()
        self._longest_s = max(liveness.deadline_s(stage, job.timeouts) for stage in Stage)
        self._lock = threading.Lock()
        self._mine = float("-inf")
        self._beat = 0
        self._others: dict[int, tuple[int, float]] = {}  # node 0: rank -> its newest word's number, and until when
        self._rest = float("-inf")  # the others: until when node 0 vouches for all
        self._heard: dict[int, float] = {}  # rank -> when it was heard last: node 0 of all, the others of node 0
        self._missed = False  # the others: node 0 misses one
        self._all_heard = job.nodes == 1

    @property
    def known(self) -> liveness.Known:
        """What the other nodes are known to vouch for. What was heard stands, also when they fall silent."""
        with self._lock:
            until = max((until for _, until in self._others.values()), default=self._rest)
            return liveness.Known(until, self._all_heard, self._silent())

    def _silent(self) -> bool:
        late = self._clock() - liveness.ROUNDS * self._job.timeouts.heartbeat_s
        return self._missed or any(at < late for at in self._heard.values())

    def vouch(self, until: float) -> None:
        """This node's own word from now on."""
        with self._lock:
            self._mine = until

    def start(self) -> None:
        """Begins to listen (node 0), or to tell node 0, in a thread that ends with the agent."""
        if self._job.nodes > 1 and self._job.peer_port is not None:
            work = self._listen if self._job.node_rank == 0 else self._tell
            threading.Thread(target=work, args=(self._job.master_addr, self._job.peer_port), daemon=True).start()

    # --- node 0 ---------------------------------------------------------------------------------------------------

    def _listen(self, address: str, port: int) -> None:
        told = False
        while True:
            try:
                server = self._server(address, port)
            except OSError as error:
                if not told:
                    self._say(f"the other nodes' agents cannot be heard on port {port}: {error}")
                told = True
                time.sleep(self._job.timeouts.heartbeat_s)
            else:
                server.serve_forever()

    def _server(self, address: str, port: int) -> socketserver.ThreadingTCPServer:
        """Raises OSError when the port is taken. An address that is not this machine's own is a translated one."""
        peers = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = peers._job.timeouts.heartbeat_s

            def handle(self) -> None:
                try:
                    self.wfile.write(peers.answer(self.rfile.readline(_MAX_BYTES)))
                except (OSError, ValueError):  # whoever says nonsense, or nothing, gets no answer
                    return

        class Server(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
            allow_reuse_address = daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                return

        try:
            return Server((address, port), Handler)
        except OSError:
            return Server(("", port), Handler)

    def answer(self, line: bytes) -> bytes:
        """Takes a node's word in, and says what all vouch for. Raises ValueError for what no agent of ours has said."""
        word = self._open(_WORD, line)
        rank, beat, left_s = word.get("rank"), word.get("beat"), word.get("left_s")
        if type(rank) is not int or type(beat) is not int or not 0 < rank < self._job.nodes:
            raise ValueError("no word of a node")
        with self._lock:
            if beat <= self._others.get(rank, (0, 0.0))[0]:
                raise ValueError("an old word")
            now = self._clock()
            self._others[rank] = beat, now + self._seconds(left_s)
            self._heard[rank] = now
            self._all_heard = len(self._others) == self._job.nodes - 1
            until = max(self._mine, *(until for _, until in self._others.values()))
            return self._seal(
                _ANSWER, {"beat": beat, "left_s": until - now, "all": self._all_heard, "silent": self._silent()}
            )

    # --- the other nodes ------------------------------------------------------------------------------------------

    def _tell(self, address: str, port: int) -> None:
        every_s = self._job.timeouts.heartbeat_s
        while True:
            try:
                with socket.create_connection((address, port), timeout=every_s) as connection:
                    connection.sendall(self.word())
                    with connection.makefile("rb") as file:
                        self.hear(file.readline(_MAX_BYTES))
            except (OSError, ValueError):  # it comes later, or it is gone: what it said stands
                pass
            time.sleep(every_s)

    def word(self) -> bytes:
        """This node's next word."""
        with self._lock:
            self._beat += 1
            left_s = max(self._mine - self._clock(), -self._longest_s)
            return self._seal(_WORD, {"rank": self._job.node_rank, "beat": self._beat, "left_s": left_s})

    def hear(self, line: bytes) -> None:
        """Takes node 0's answer to the newest word in. Raises ValueError for what it has not said."""
        answer = self._open(_ANSWER, line)
        with self._lock:
            if answer.get("beat") != self._beat:
                raise ValueError("an answer to another word")
            self._heard[0] = self._clock()
            self._missed = answer.get("silent") is True
            self._rest = self._heard[0] + self._seconds(answer.get("left_s"))
            self._all_heard = self._all_heard or answer.get("all") is True

    # --- both -----------------------------------------------------------------------------------------------------

    def _seconds(self, value: Any) -> float:
        """No node vouches for longer than the longest deadline."""
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError("no seconds")
        return min(float(value), self._longest_s)

    def _seal(self, kind: bytes, said: dict[str, Any]) -> bytes:
        body = json.dumps(said, allow_nan=False).encode()
        return self._mac(kind, body) + b" " + body + b"\n"

    def _open(self, kind: bytes, line: bytes) -> dict[str, Any]:
        seal, _, body = line.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(seal, self._mac(kind, body)):
            raise ValueError("not sealed by an agent of this attempt")
        said = json.loads(body)
        if not isinstance(said, dict):
            raise ValueError("no word")
        return said

    def _mac(self, kind: bytes, body: bytes) -> bytes:
        return hmac.new(self._key, kind + b"\0" + body, hashlib.sha256).hexdigest().encode()
