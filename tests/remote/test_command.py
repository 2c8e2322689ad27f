"""Commands: arguments arrive exactly, three streams move at once, memory and time are bounded."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from waiting import until

from mgpu.errors import CommandFailed, ConnectionFailed, InputError
from mgpu.remote.command import Tail, deadline

ECHO = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["plain", "two words", ""],
        ["$(id)", "`id`", "$HOME", "${PATH}", "!!", "~", "*", "a;b", "a|b", "a&b", ">x", "#"],
        ["'", '"', "'\"'", "\\", "\\n"],
        ["line\nbreak", "tab\there", "\r\n", "-rf", "--"],
        ["grüße", "数据", "🦀", "\x1b[31m"],
    ],
)
def test_arguments_arrive_exactly(node, arguments):
    assert json.loads(node.run([*ECHO, *arguments], timeout=20).stdout) == arguments


def test_stdin_and_both_outputs_are_binary_exact(node):
    data = bytes(range(256)) * 4097
    program = "import sys; d = sys.stdin.buffer.read(); sys.stdout.buffer.write(d); sys.stderr.buffer.write(d[::-1])"
    result = node.run([sys.executable, "-c", program], stdin=data, timeout=30)
    assert result.stdout == data
    assert result.stderr == data[::-1]
    assert result.dropped == 0


def test_large_streams_at_once_do_not_deadlock(node):
    """More than any buffer on the way, in all three directions, with a program that reads late."""
    program = (
        "import sys; out, err, n = sys.stdout.buffer, sys.stderr.buffer, 0\n"
        "for _ in range(64): out.write(b'o' * 131072); err.write(b'e' * 131072)\n"
        "while True:\n"
        "    d = sys.stdin.buffer.read(65536)\n"
        "    if not d: break\n"
        "    n += len(d)\n"
        "out.write(b'%d' % n)"
    )
    result = node.run([sys.executable, "-c", program], stdin=b"i" * (8 << 20), timeout=60, max_output=16 << 20)
    assert result.stdout == b"o" * (8 << 20) + b"%d" % (8 << 20)
    assert result.stderr == b"e" * (8 << 20)


def test_input_may_be_made_on_the_way(node):
    blocks = (bytes([n]) * 100_000 for n in range(50))
    expected = hashlib.sha256(b"".join(bytes([n]) * 100_000 for n in range(50))).hexdigest()
    assert node.run(["sha256sum"], stdin=blocks, timeout=30).stdout.decode().split()[0] == expected


def test_a_command_that_leaves_its_input_unread_still_ends(node):
    assert node.run(["true"], stdin=b"x" * (4 << 20), timeout=30).status == 0


def test_a_command_that_closes_its_output_early_still_gets_its_input(node, server):
    node.run(["exec", "sh", "-c", "exec >out 2>&-; sleep 0.3; exec cat"], stdin=b"y" * (5 << 20), timeout=30)
    assert (server.home / "out").read_bytes() == b"y" * (5 << 20)


def test_status_and_last_words_of_a_failure(node):
    with pytest.raises(CommandFailed) as failed:
        node.run(["sh", "-c", "echo some; echo why >&2; exit 3"], timeout=20)
    assert failed.value.status == 3
    assert failed.value.stderr == "why"
    assert "node 0" in failed.value.what
    result = node.run(["sh", "-c", "echo some; exit 3"], timeout=20, check=False)
    assert (result.status, result.stdout) == (3, b"some\n")


def test_a_missing_program_is_status_127(node):
    assert node.run(["/no/such/program"], timeout=20, check=False).status == 127


def test_the_end_by_a_signal_is_not_a_lost_connection(node):
    result = node.run(["exec", "sh", "-c", "echo before; kill -9 $$"], timeout=20, check=False)
    assert (result.status, result.stdout) == (-1, b"before\n")
    assert not node.closed


def test_of_endless_output_the_end_is_kept_in_bounded_memory(node):
    program = "head -c 50000000 /dev/zero; echo; echo the end"
    result = node.run(["sh", "-c", program], timeout=60, max_output=1000)
    assert result.stdout.endswith(b"\nthe end\n")
    assert len(result.stdout) == 1000
    assert result.dropped == 50_000_000 + len("\nthe end\n") - 1000


def test_tail_holds_its_limit_whatever_the_pieces():
    tail, everything = Tail(10), b""
    for size in (3, 30, 0, 1, 9, 10, 4):
        piece = bytes(range(len(everything), len(everything) + size))
        tail.add(piece)
        everything += piece
        assert tail.value() == everything[-10:]
        assert tail.dropped == max(0, len(everything) - 10)


def test_a_hanging_command_ends_at_its_deadline_and_the_connection_lives_on(node):
    with pytest.raises(ConnectionFailed, match="sleep 600") as failed:
        node.run(["sleep", "600"], timeout=0.5)
    assert "0.5 s" in failed.value.why
    assert node.run(["echo", "on"], timeout=20).stdout == b"on\n"


def test_without_a_thread_for_its_deadline_nothing_is_waited_for(node, monkeypatch):
    """As without a file for a connection: a node that cannot be asked now, and may be later."""

    def full(_timer):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as short:
        short.setattr(threading.Timer, "start", full)
        with pytest.raises(ConnectionFailed, match="true") as failed:
            node.run(["true"], timeout=20)
    assert "can't start new thread" in failed.value.why
    assert node.run(["true"], timeout=20).status == 0


def test_a_deadline_on_a_connection_that_is_dead_says_nothing_of_its_own(node, monkeypatch):
    """What is sent to close a channel may fail as all else does."""
    said, waits = list[object](), threading.Event()
    monkeypatch.setattr(threading, "excepthook", said.append)
    channel = node._connection.open_session(20)
    close = channel.close

    def dead() -> None:
        close()
        waits.set()
        raise EOFError

    monkeypatch.setattr(channel, "close", dead)
    with pytest.raises(ConnectionFailed, match="x"), deadline(node._connection, channel, 0.01, "x"):
        assert waits.wait(20)
    until(lambda: not any(isinstance(each, threading.Timer) for each in threading.enumerate()), 20)
    assert said == []


def test_a_command_holds_no_descriptor_of_its_own(node):
    """A deadline's thread would close it under whom it wakes, who would then wait for whatever has the number next."""
    ours, meanwhile = Path("/dev/fd"), list[int]()
    before = len([*ours.iterdir()])

    def look():
        meanwhile.append(len([*ours.iterdir()]))
        yield b"x"

    assert node.run(["cat"], stdin=look(), timeout=20).stdout == b"x"
    assert meanwhile == [before]


def test_commands_of_several_threads_at_once(node):
    def ask(number: int) -> bytes:
        return node.run(["sh", "-c", f"sleep 0.1; echo {number}"], timeout=30).stdout

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [b"%d\n" % number for number in range(8)]


@pytest.mark.parametrize("argv", [[], [""], "id", ["a", "b\0c"], ["\udcff"]])
def test_what_no_shell_can_pass_on_is_refused(node, server, argv):
    with pytest.raises(InputError):
        node.run(argv, timeout=20)
    assert "command" not in server.seen
