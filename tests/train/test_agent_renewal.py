"""F16: fresh credentials of the store reach an agent that lives, are used at once, and stand on no disk."""

from __future__ import annotations

import os
import socket
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest
from mgpu_train.agent import renewal
from mgpu_train.agent.attempt.attempt import Attempt, StopRequests
from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.uploads import checkpoint_store
from mgpu_train.agent.uploads.checkpoint_store import AttemptStore
from mgpu_train.agent.uploads.uploads import Announced, CheckpointStoreError, Uploads
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.config import Job, Secrets
from mgpu_train.store import Denied, Expired, NoCredentials, Unavailable, open_store
from mgpu_train.timeouts import Timeouts

CANARY = "canary-91c4"


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    job = {
        "run_id": "r", "attempt": 1, "writer": "w", "node_rank": 0, "nodes": 1, "processes_per_node": 1,
        "master_addr": "127.0.0.1", "master_port": 1, "command": ["x.py"],
        "checkpoint": {"to": f"file://{tmp_path}/store", "writers": "all"},
    }  # fmt: skip
    layout = RunLayout("r", PurePosixPath(tmp_path))
    Path(layout.root).mkdir(parents=True)
    return Attempt(Job.model_validate(job), Secrets(store={"AWS_SESSION_TOKEN": "old-token"}), layout, StopRequests())


def test_the_next_use_of_the_store_has_them(attempt, tmp_path, monkeypatch):
    opened = []

    class Expired:
        def put(self, _key, _data):
            raise Denied("the credentials have expired (ExpiredToken)")

    def open_with(url, env, **_limits):
        opened.append(dict(env))
        return Expired() if env["AWS_SESSION_TOKEN"] == "old-token" else open_store(url)

    monkeypatch.setattr(checkpoint_store, "open_store", open_with)
    assert attempt.job.checkpoint is not None
    store = AttemptStore(attempt, attempt.job.checkpoint)
    with pytest.raises(CheckpointStoreError, match="have expired"):
        store.announce(Announced(1, False))
    attempt.renewed({"AWS_SESSION_TOKEN": "new-token"})
    for step in (2, 3):
        store.announce(Announced(step, False))
    assert store.announced() == Announced(3, False)
    assert [env["AWS_SESSION_TOKEN"] for env in opened] == ["old-token", "new-token"], "opened once for each"


@pytest.mark.parametrize("failure", [Expired, NoCredentials, Unavailable])
def test_the_last_checkpoint_waits_for_credentials_that_come_late(attempt, tmp_path, monkeypatch, failure):
    there, tries = open_store(f"file://{tmp_path}/store"), []
    CommitLog(there, "r").begin_attempt(1, "w")

    class Away:
        def __getattr__(self, _operation):
            def fail(*_given, **_named):
                tries.append(1)
                raise failure("not now")

            return fail

    monkeypatch.setattr(checkpoint_store, "open_store", lambda *_, **__: Away() if len(tries) < 5 else there)
    assert attempt.job.checkpoint is not None
    folder = tmp_path / "saves"
    (folder / "step-5").mkdir(parents=True)
    (folder / "step-5" / "weights").write_bytes(b"w")

    def pause(_seconds: float) -> None:
        if len(tries) == 5 and failure is not NoCredentials:  # those of a machine come without a word
            attempt.renewed({"AWS_SESSION_TOKEN": "new"})

    store = AttemptStore(attempt, attempt.job.checkpoint)
    uploads = Uploads(store, folder, leads=True, alone=True, times=Timeouts(), say=lambda _: None, pause=pause)
    uploads.drain(900)
    uploads.run()
    assert (uploads.status.committed_step, uploads.status.failed, len(tries)) == (5, 0, 5)


def test_old_ones_and_new_ones_are_hidden_in_what_is_said(attempt):
    attempt.renewed({"AWS_SESSION_TOKEN": "new-token"})
    assert attempt.public("old-token new-token") == attempt.public("old-token") + " " + attempt.public("new-token")
    assert "token" not in attempt.public("old-token new-token")


@pytest.fixture
def listening(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, taken = tmp_path / "agent.sock", []
    renewal.listen(path, taken.append)
    return path, taken


def test_only_the_stores_part_is_taken(listening):
    path, taken = listening
    assert renewal.hand_over(path, Secrets(env={"TOKEN": "of the run"}, store={"AWS_SESSION_TOKEN": "t"}))
    assert taken == [{"AWS_SESSION_TOKEN": "t"}]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("said", [b"", b"{", b"x" * 200_000, b'{"store": {"AWS_X": 1}}'])
def test_nonsense_is_not_taken_and_does_not_end_it(listening, said):
    path, taken = listening
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(os.path.relpath(path))
        try:
            peer.sendall(said)
            peer.shutdown(socket.SHUT_WR)
            assert peer.recv(1) == b""
        except OSError:  # it has hung up on so much
            pass
    assert renewal.hand_over(path, Secrets(store={"AWS_X": "1"}))
    assert taken == [{"AWS_X": "1"}]


def test_an_agent_that_is_out_of_files_for_a_moment_goes_on_listening(monkeypatch):
    agent, operator = socket.socketpair()
    turns, taken, slept = iter([OSError("too many open files"), (agent, None)]), [], []
    monkeypatch.setattr(renewal, "time", SimpleNamespace(sleep=slept.append))  # other tests' threads sleep on

    class Server:
        def accept(self):
            turn = next(turns)  # StopIteration: the end of this test
            if isinstance(turn, OSError):
                raise turn
            return turn

    operator.sendall(Secrets(store={"AWS_X": "1"}).model_dump_json().encode())
    operator.shutdown(socket.SHUT_WR)
    with operator, pytest.raises(StopIteration):
        renewal._serve(Server(), taken.append)
    assert (taken, len(slept)) == ([{"AWS_X": "1"}], 1)


def test_without_an_agent_nobody_takes_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not renewal.hand_over(tmp_path / "agent.sock", Secrets())
    (tmp_path / "agent.sock").touch()
    assert not renewal.hand_over(tmp_path / "agent.sock", Secrets())


def test_an_agent_in_a_deep_home_takes_them_and_no_file_has_them(node, tmp_path):
    node = type(node)(tmp_path / ("deep" * 25), node.store)  # longer than the address of a socket may be
    node.program("import time\nprint('running', flush=True)\ntime.sleep(60)\n")
    node.job(checkpoint=None)
    node.start()
    node.until(lambda: "running" in node.log)
    stdin = {"store": {"AWS_SESSION_TOKEN": CANARY, "AWS_REGION": "us-east-1"}}
    assert node.call("renew", "--run", "r", stdin=stdin) == {"renewed": True}
    assert "fresh credentials of the store have come" in node.log
    node.stop("--now")
    node.ended()
    found = [path for path in node.home.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]
    assert found == []
    assert "took the credentials" in node.call("renew", "--run", "r", stdin=stdin, code=1)["error"]
