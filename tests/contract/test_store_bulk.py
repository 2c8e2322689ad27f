"""Large bodies on a bad network, to bad servers, by a process that dies: success, or an error that says what it was.

Deadlines are scaled, so that each ends within seconds; that it ends at all is what is tested.
"""

from __future__ import annotations

import datetime
import errno
import ipaddress
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fakes.clock import Clock
from mgpu_train.store import Damaged, Expired, StoreError, Unavailable, crc, disk, open_store
from mgpu_train.store.bulk.engine import Engine, Failed
from mgpu_train.store.bulk.line import Line
from mgpu_train.store.bulk.message import Keys, Route, Task
from mgpu_train.store.bulk.minimum_rate import LEAST, MinimumRate
from mgpu_train.store.bulk.sign import query_string, signed
from mgpu_train.store.pace import Pace
from mgpu_train.timeouts import Timeouts
from waiting import until

MIB = 1 << 20
SIZE = 25 * MIB + 7  # four parts up, three ranges or so down
ALWAYS_S = 60  # after which a test has hung
STALL_S = 15  # a task that nobody works on ends so much later, as one that is too slow


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(random.Random(1).randbytes(SIZE))
    return path


def there_and_back(store, source: Path) -> None:
    """Every byte goes up and comes down again, and every progress is told."""
    sent = store.put_file("f", source)
    assert (sent.size, sent.crc64nvme) == disk.checksum(source)
    told: list[int] = []
    target = source.with_name("target")
    store.get_file("f", target, size=sent.size, crc64nvme=sent.crc64nvme, progress=told.append)
    assert disk.checksum(target) == (sent.size, sent.crc64nvme)
    assert sum(told) == sent.size
    assert store.sweep("", lambda _key: True) == 0 or "lost answers leave uploads that were never heard of"


def dice(share: float, seed: int = 7):
    """True for a share of the calls, the same ones every time that they come in the same order."""
    rolls, lock = random.Random(seed), threading.Lock()

    def roll() -> bool:
        with lock:
            return rolls.random() < share

    return roll


def body(call) -> bool:
    """This is a large body on its way up or down."""
    return "PartNumber".lower() in call.path.lower() or "Range" in call.headers


def error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>told by a test</Message></Error>".encode()


def refuse(call, status: int, code: str) -> None:
    call.status, call.answer = status, error(code)


def once_each():
    """True for the first call of each path and range."""
    seen, lock = set(), threading.Lock()

    def first(call) -> bool:
        with lock:
            key = call.method, call.path, call.headers.get("Range")
            return key not in seen and not seen.add(key)

    return first


# --- what a network does ----------------------------------------------------------------------------------------------


@pytest.mark.drawn("faults on the way to a store", "train/mgpu_train/store")
@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (500, "InternalError"), (429, "TooManyRequests")])
def test_a_third_of_all_requests_is_refused(weather, source, status, code):
    """F27."""
    roll = dice(0.3)
    store, proxy = weather(lambda call: refuse(call, status, code) if roll() else None)
    there_and_back(store, source)
    assert len(proxy.calls) > 10


def test_a_third_of_all_answers_is_lost(weather, lost, source):
    roll = dice(0.3)

    def lose(call) -> None:
        if roll():
            raise lost

    store, _ = weather(after=lose)
    there_and_back(store, source)


def test_the_answer_to_the_last_call_of_an_upload_is_lost(weather, lost, source):
    """The upload is gone when it is asked for again, as S3 says after a while: the object tells that it was done."""
    done = []

    def ends(call) -> bool:
        return call.method == "POST" and "uploadId" in call.path

    def lose(call) -> None:
        if ends(call) and not done:
            assert call.status == 200
            done.append(call.path)
            raise lost

    store, _ = weather(lambda call: refuse(call, 404, "NoSuchUpload") if ends(call) and done else None, lose)
    there_and_back(store, source)
    assert done


def test_an_upload_that_somebody_ended_is_no_success(weather, source):
    def end(call) -> None:
        if call.method == "POST" and "uploadId" in call.path:
            refuse(call, 404, "NoSuchUpload")

    store, _ = weather(end)
    with pytest.raises(StoreError, match=r"somebody has ended this upload\. Write it again"):
        store.put_file("f", source)
    assert store.stat("f") is None


def test_every_body_is_reset_once(weather, source):
    first = once_each()

    def up(call) -> None:
        if call.method == "PUT" and body(call) and first(call):
            call.cut_at = MIB

    def down(call) -> None:
        if "Range" in call.headers and first(call):
            call.cut_at = MIB

    store, proxy = weather(begin=up, after=down)
    there_and_back(store, source)
    assert sum("partNumber" in call for call in proxy.calls) >= 8
    assert sum(call.startswith("GET") for call in proxy.calls) >= 6, "each of three ranges, and each again"


def test_a_body_that_is_cut_goes_on_where_it_was_cut(weather, source):
    """However often, and however short the time that failures are borne for: something came."""
    came = []

    def cut(call) -> None:
        if "Range" in call.headers:
            call.answer, call.hang_up = call.answer[: 2 * MIB], True  # the head still promises all
            came.append(len(call.answer))

    store, _ = weather(after=cut, store_retry_s=0.05)
    there_and_back(store, source)
    assert sum(came) == SIZE
    assert len(came) > SIZE // (2 * MIB)


@pytest.mark.drawn("faults on the way to a store", "train/mgpu_train/store")
@pytest.mark.parametrize("short", [1, 100])
def test_a_body_that_always_ends_too_early_is_damage(weather, source, short):
    def cut(call) -> None:
        if "Range" in call.headers:
            call.answer = call.answer[:-short]
            call.answer_headers = [("Content-Length", str(len(call.answer)))]

    store, _ = weather(after=cut)
    sent = store.put_file("f", source)
    with pytest.raises(Damaged, match=r"came where \d+ from \d+ on were asked for"):
        store.checksum("f", sent.size)


def test_a_connection_that_ends_one_byte_early_is_read_again(weather, source):
    first = once_each()

    def cut(call) -> None:
        if "Range" in call.headers and first(call):
            call.cut_at = len(call.answer) - 1

    store, _ = weather(after=cut)
    there_and_back(store, source)


def test_a_server_that_knows_no_ranges_is_not_believed(weather, source):
    def whole(call) -> None:
        if "Range" in call.headers:
            call.status, call.answer = 200, source.read_bytes()
            call.answer_headers = [("Content-Length", str(SIZE))]

    store, _ = weather(after=whole)
    sent = store.put_file("f", source)
    with pytest.raises(Damaged, match="were asked for"):
        store.checksum("f", sent.size)


@pytest.mark.usefixtures("versitygw")  # moto takes what it gets
def test_a_byte_that_flips_on_its_way_up_is_refused_and_sent_again(weather, source):
    first = once_each()

    def flip(call) -> None:
        if call.method == "PUT" and body(call) and first(call):
            call.body = bytes([call.body[0] ^ 1]) + call.body[1:]

    store, _ = weather(flip)
    there_and_back(store, source)


@pytest.mark.drawn("faults on the way to a store", "train/mgpu_train/store")
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_silent_server_is_given_up(weather, source, way):
    """It takes all that it gets and says nothing; the bytes in the buffers of the network are no progress."""
    quiet, over = threading.Event(), threading.Event()

    def silent(call) -> None:
        if quiet.is_set() and body(call):
            over.wait(ALWAYS_S)

    calm, _ = weather()
    sent = calm.put_file("f", source)
    store, _ = weather(silent, store_read_s=0.3, store_retry_s=30, store_stall_s=2)
    quiet.set()
    begin = time.monotonic()
    with pytest.raises(Unavailable, match=r"too slow: .* in 2 s"):
        store.put_file("g", source) if way == "up" else store.checksum("f", sent.size)
    assert time.monotonic() - begin < ALWAYS_S / 2
    over.set()
    assert calm.checksum("f", sent.size) == sent.crc64nvme  # and no harm is done


def test_a_server_that_fails_for_longer_than_is_borne(weather, source):
    store, _ = weather(lambda call: refuse(call, 503, "SlowDown") if body(call) else None, store_retry_s=0.5)
    with pytest.raises(Unavailable, match="too busy or broken"):
        store.put_file("f", source)
    assert store.stat("f") is None
    assert store.sweep("", lambda _key: True) == 0  # aborted


@pytest.mark.drawn("faults on the way to a store", "train/mgpu_train/store")
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_kilobyte_a_second_is_too_slow(weather, source, way):
    def slow_up(call) -> None:
        if body(call) and call.method == "PUT":
            call.bytes_per_s = 1000

    def slow_down(call) -> None:
        if "Range" in call.headers:
            call.bytes_per_s = 1000

    calm, _ = weather()
    calm.put_file("f", source)
    store, _ = weather(begin=slow_up, after=slow_down, store_stall_s=1.5)
    transfer = {"up": lambda: store.put_file("g", source), "down": lambda: store.checksum("f", SIZE)}[way]
    with pytest.raises(Unavailable, match=r"too slow: \d+ KiB in 2 s"):
        transfer()


def test_a_small_object_at_a_kilobyte_a_second_is_too_slow(weather):
    """No other process reads this one; botocore itself would read for minutes."""

    def slow(call) -> None:
        call.bytes_per_s = 60_000 if call.method == "GET" else None

    calm, _ = weather()
    calm.put("a", b"x" * 200_000)
    store, _ = weather(after=slow, store_stall_s=0.2, store_retry_s=0.1)
    with pytest.raises(Unavailable, match="too slow"):
        store.get("a", MIB)


# --- what happens to the file -----------------------------------------------------------------------------------------


@pytest.mark.drawn("faults on the way to a store", "train/mgpu_train/store")
@pytest.mark.parametrize("harm", ["cut", "written to", "replaced", "gone"])
def test_a_file_that_changes_while_it_is_sent(weather, source, harm):
    """The transfer fails, and nothing else: no part of it is an object, and the next one works."""
    begun = threading.Event()

    def change(call) -> None:
        if call.method == "PUT" and "partNumber=1&" in call.path and not begun.is_set():
            begun.set()
            if harm == "cut":
                os.truncate(source, 100)
            elif harm == "written to":
                with source.open("r+b") as file:
                    file.write(b"other")
            elif harm == "gone":
                source.unlink()
            else:
                source.with_name("new").write_bytes(bytes(SIZE))
                source.with_name("new").replace(source)
            refuse(call, 503, "SlowDown")  # and once more, please

    store, _ = weather(change)
    with pytest.raises(StoreError, match=r"cannot be sent|No such file"):
        store.put_file("f", source)
    assert store.stat("f") is None
    source.write_bytes(bytes(SIZE))
    there_and_back(store, source)


def test_a_file_that_is_cut_in_the_middle_of_a_part(tmp_path):
    """Between two pieces of one part, when its checksum is already in the header."""
    path = tmp_path / "f"
    path.write_bytes(bytes(8 * MIB))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def cut() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(65536)
                os.truncate(path, 300_000)
                while peer.recv(1 << 20):
                    pass

        threading.Thread(target=cut, daemon=True).start()
        found = path.stat()
        identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        route = Route(f"http://127.0.0.1:{server.getsockname()[1]}", "/b/", "us-east-1")
        with pytest.raises(Failed) as caught:
            engine(store_retry_s=1).run([Task(0, "PUT", route, "/b/f", 0, 8 * MIB, str(path), identity)])
    assert (caught.value.told["kind"], caught.value.told["text"]) == ("changed", "it became shorter while it was sent")


def test_a_full_disk_is_said(weather, source):
    store, _ = weather()
    sent = store.put_file("f", source)
    with pytest.raises(Unavailable, match=r"No space left.*Free some space"):
        store._bulk.receive("f", sent.size, Path("/dev/full"), None)
    assert store.checksum("f", sent.size) == sent.crc64nvme


# --- the process ------------------------------------------------------------------------------------------------------


@pytest.mark.drawn("faults on the way to a store", "train/mgpu_train/store")
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_process_that_is_killed_in_the_middle_is_begun_again(weather, source, way):
    killed = []

    def kill(call) -> None:
        if not killed and body(call) and (call.method == "GET") == (way == "down"):
            killed.append(store._bulk.engine.pid)
            os.kill(killed[0], signal.SIGKILL)

    store, _ = weather(kill)
    there_and_back(store, source)
    assert killed[0] != store._bulk.engine.pid


def test_a_process_that_always_dies_is_given_up(weather, source):
    def kill(call) -> None:
        if "partNumber=2&" in call.path:
            os.kill(store._bulk.engine.pid, signal.SIGKILL)

    store, _ = weather(kill)
    with pytest.raises(Unavailable, match=r"the process that moves the bytes failed: it ended 3 times.* -9"):
        store.put_file("f", source)
    assert store.stat("f") is None


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_connections_process_that_is_killed_is_begun_again_with_all_others(weather, source, way):
    killed = []

    def kill(call) -> None:
        if not killed and body(call) and (call.method == "GET") == (way == "down"):
            killed.append(store._bulk.engine.pid)
            os.kill(children(killed[0])[0], signal.SIGKILL)

    store, _ = weather(kill, store_stall_s=STALL_S)
    there_and_back(store, source)
    gone(killed[0])
    assert killed[0] != store._bulk.engine.pid


def test_a_connections_process_that_always_dies_is_given_up(weather, source):
    def kill(call) -> None:
        if "partNumber=2&" in call.path:
            for each in children(store._bulk.engine.pid):
                os.kill(each, signal.SIGKILL)

    store, _ = weather(kill, store_stall_s=STALL_S)
    with pytest.raises(Unavailable, match=r"the process that moves the bytes failed: it ended 3 times.* -9"):
        store.put_file("f", source)


def test_a_process_that_is_killed_leaves_no_connections(weather, source):
    """Not even one that waits for a silent server, and so does not look whether anybody needs it."""
    over, lock, left = threading.Event(), threading.Lock(), []

    def hold(call) -> None:
        if body(call) and lock.acquire(blocking=False):  # the first, once
            left.extend(children(store._bulk.engine.pid))
            os.kill(store._bulk.engine.pid, signal.SIGKILL)
        if left and not over.is_set() and body(call):
            over.wait(ALWAYS_S)

    store, _ = weather(hold)
    sending = threading.Thread(target=store.put_file, args=("f", source), daemon=True)
    sending.start()
    until(lambda: len(left) == store._bulk.engine.settings.connections)
    for each in left:
        gone(each, 10)  # not after `store_read_s`
    over.set()
    sending.join(ALWAYS_S)
    assert store.stat("f")


def test_a_process_that_stands_still_is_ended(weather, source):
    stopped = []

    def stop(call) -> None:
        if not stopped and body(call):
            stopped.append(store._bulk.engine.pid)
            os.kill(stopped[0], signal.SIGSTOP)

    store, _ = weather(stop, store_stall_s=5)  # time to begin on a busy machine
    with pytest.raises(Unavailable, match="too slow"):
        store.put_file("f", source)
    calm, _ = weather()
    there_and_back(calm, source)
    gone(stopped[0])


def test_a_process_that_cannot_begin_is_said(weather, source, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/does/not/exist")
    store, _ = weather()
    with pytest.raises(Unavailable, match="it cannot be started: No such file"):
        store.put_file("f", source)


def test_an_idle_process_ends_and_another_begins(weather, source):
    store, _ = weather()
    bulk = store._bulk
    bulk.engine = Engine(Timeouts(), Pace(None), store._keys, idle_s=0.1)
    sent = store.put_file("f", source)
    first = bulk.engine.pid
    gone(first)
    assert store.checksum("f", sent.size) == sent.crc64nvme
    assert bulk.engine.pid != first


UPLOADS = """
import sys
from pathlib import Path
from mgpu_train.store import open_store
store = open_store(sys.argv[1], {"AWS_ACCESS_KEY_ID": sys.argv[3], "AWS_SECRET_ACCESS_KEY": sys.argv[4],
                                 "AWS_ENDPOINT_URL": sys.argv[5], "AWS_REGION": "us-east-1"})
print(store.stat("nothing"), flush=True)
store.put_file("f", Path(sys.argv[2]))
"""


def test_without_its_parent_it_ends_and_what_it_began_is_swept(weather, source):
    """SIGKILL in the middle: no object, no process; an upload is left for whoever comes next."""
    begun, over = threading.Event(), threading.Event()

    def hold(call) -> None:
        if "partNumber" in call.path:
            begun.set()
            over.wait(ALWAYS_S)

    store, proxy = weather(hold)
    keys = store._keys(False)
    argv = [sys.executable, "-c", UPLOADS, store.url, str(source), keys.access, keys.secret, proxy.endpoint]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as parent:
        assert begun.wait(ALWAYS_S)
        (child,) = children(parent.pid)
        parent.kill()
    gone(child)
    over.set()
    assert store.stat("f") is None
    assert store.sweep("", lambda key: key == "f") == 1


def test_it_is_small(weather, source):
    """Whatever it moves: parts are never whole in memory."""
    store, _ = weather()
    there_and_back(store, source)
    pid = store._bulk.engine.pid
    status = Path(f"/proc/{pid}/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak
    own = [own_kib(each) for each in children(pid)]
    assert len(own) == store._bulk.engine.settings.connections
    assert int(peak[1]) + sum(own) < 50 * 1024


def test_what_it_imports_is_little():
    program = "import sys, mgpu_train.store.bulk.child; print({'boto3', 'botocore', 'pydantic'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "set()"


def test_many_files_at_once(weather, source):
    store, _ = weather()
    threads = [threading.Thread(target=store.put_file, args=(f"f/{n}", source)) for n in range(5)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert {store.checksum(stat.key, stat.size) for stat in store.list("f/")} == {disk.checksum(source)[1]}


@pytest.mark.drawn("faults on the way to a store", "train/mgpu_train/store")
@pytest.mark.parametrize("key", ["a b/c+d.bin", "ü/é&=%~(1)!*'.bin", "x@y:z,$;.bin"])
@pytest.mark.parametrize("size", [MIB, 9 * MIB])
def test_odd_keys(weather, source, key, size):
    store, _ = weather()
    os.truncate(source, size)
    sent = store.put_file(key, source)
    assert [(stat.key, stat.size) for stat in store.list("")] == [(key, size)]
    assert store.checksum(key, size) == sent.crc64nvme


# --- credentials, TLS, proxies ----------------------------------------------------------------------------------------


def test_credentials_that_expire_are_renewed_once(through, source, tmp_path, monkeypatch):
    """The profile has others by then: as after `aws sso login`, or when a role's have run out."""
    profile = tmp_path / "credentials"
    profile.write_text("[p]\naws_access_key_id = old\naws_secret_access_key = canary\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    refused = []

    def old_ones(call) -> None:
        if body(call) and "Credential=fresh" not in call.headers["Authorization"]:
            refused.append(call.path)
            other = profile.with_name(f"other-{len(refused)}-{call.path[-9:]}".replace("/", ""))
            other.write_text("[p]\naws_access_key_id = fresh\naws_secret_access_key = canary\n")
            other.replace(profile)
            refuse(call, 400, "ExpiredToken")
        elif "Credential=old" in call.headers["Authorization"] and "uploads" not in call.path:
            refuse(call, 400, "ExpiredToken")

    store, _ = through(old_ones, env={"AWS_PROFILE": "p", "AWS_REGION": "us-east-1"})
    store.put_file("f", source)
    assert 1 <= len(refused) <= 8
    assert store.stat("f").size == SIZE


def test_expired_credentials_without_others_are_said(weather, source):
    store, proxy = weather(lambda call: refuse(call, 400, "ExpiredToken") if body(call) else None)
    with pytest.raises(Expired, match="Renew them"):
        store.put_file("f", source)
    assert sum("partNumber" in call for call in proxy.calls) <= 8  # no second round


@pytest.fixture(scope="session")
def certificates(tmp_path_factory) -> list[tuple[Path, Path]]:
    """Two certificates of this machine, each its own authority, and their keys."""
    return [_certificate(tmp_path_factory.mktemp("tls")) for _ in range(2)]


def _certificate(folder: Path) -> tuple[Path, Path]:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test")])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    loopback = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed_one = made.add_extension(loopback, critical=False).sign(key, hashes.SHA256())
    (folder / "crt").write_bytes(signed_one.public_bytes(serialization.Encoding.PEM))
    kind, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key").write_bytes(key.private_bytes(serialization.Encoding.PEM, kind, plain))
    return folder / "crt", folder / "key"


def test_over_tls_the_body_is_not_hashed_for_the_signature(weather, source, certificates):
    payloads = set()

    def look(call) -> None:
        if body(call):
            payloads.add(call.headers["X-Amz-Content-Sha256"])

    store, _ = weather(look, tls=certificates[0])
    there_and_back(store, source)
    assert payloads == {"UNSIGNED-PAYLOAD"}


def test_an_authority_that_is_not_trusted(weather, source, certificates):
    store, proxy = weather(tls=certificates[0])
    store.put_file("f", source)
    store._bulk._ca = str(certificates[1][0])  # boto3 would have said so before
    with pytest.raises(Unavailable, match=r"is not trusted\. Set AWS_CA_BUNDLE"):
        store.checksum("f", SIZE)
    assert not any("Range" in call for call in proxy.calls)


class Relay:
    """An HTTP proxy: tunnels, or requests that name their server; `asked` are its request lines and credentials."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://user:p%40ss@127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            peer, _ = self._server.accept()
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += peer.recv(1)
        lines = head.decode().split("\r\n")
        login = next((line for line in lines if line.lower().startswith("proxy-authorization")), "")
        self.asked.append((lines[0], login.partition(": ")[2]))
        method, target, _ = lines[0].split(" ")
        host = target if method == "CONNECT" else target.split("/")[2]
        other = socket.create_connection((host.partition(":")[0], int(host.partition(":")[2])))
        if method == "CONNECT":
            peer.sendall(b"HTTP/1.1 200 yes\r\n\r\n")
        else:
            other.sendall(head.replace(f"http://{host}".encode(), b"", 1))
        threading.Thread(target=_pump, args=(other, peer), daemon=True).start()
        _pump(peer, other)


def _pump(one: socket.socket, other: socket.socket) -> None:
    try:
        while data := one.recv(1 << 16):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)
    except OSError:
        pass


@pytest.mark.drawn("faults on the way to a store", "train/mgpu_train/store")
@pytest.mark.parametrize("secure", [True, False], ids=["tunnel", "plain"])
def test_proxies_are_used(moto, weather, source, certificates, monkeypatch, secure):
    relay = Relay()
    store, _ = weather(tls=certificates[0] if secure else None)
    monkeypatch.setenv("HTTPS_PROXY" if secure else "HTTP_PROXY", relay.url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    route = seen_route(store)
    assert route.proxy == relay.url
    os.truncate(source, 2 * MIB)  # one request: this proxy reads no second one of a connection
    store.put_file("f", source)
    wanted = "CONNECT 127.0.0.1:" if secure else "PUT http://127.0.0.1:"
    assert [login for line, login in relay.asked if line.startswith(wanted)] == ["Basic dXNlcjpwQHNz"]


def seen_route(store) -> Route:
    store.stat("x")
    assert store._bulk.learn("x")
    return store._bulk._route


# --- the parts of it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "a/token+of=length"])
@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/bucket/key", ()),
        ("/bucket/a%20b/%C3%BC~x", (("uploadId", "a+b/c=d~e"), ("partNumber", "10"))),
    ],
)
def test_signatures_are_those_of_botocore(path, query, token, monkeypatch):
    headers = {"host": "example.com:9000", "content-length": "7", "range": "bytes=0-1"}
    keys = Keys("access", "secret/+", token)
    ours = signed("PUT", path, query_string(query), headers, payload="UNSIGNED-PAYLOAD", keys=keys, region="eu-west-1")
    url = f"https://example.com:9000{path}" + (f"?{query_string(query)}" if query else "")
    theirs = AWSRequest("PUT", url, headers={**headers, "X-Amz-Content-SHA256": "UNSIGNED-PAYLOAD"})
    theirs.context["timestamp"] = ours["x-amz-date"]
    if token:
        theirs.headers["X-Amz-Security-Token"] = token
    theirs.headers["X-Amz-Date"] = ours["x-amz-date"]
    auth = S3SigV4Auth(Credentials("access", "secret/+", token), "s3", "eu-west-1")
    canonical = auth.canonical_request(theirs)
    signature = auth.signature(auth.string_to_sign(theirs, canonical), theirs)
    assert ours["authorization"].endswith(f"Signature={signature}")


def asked(method: str, file: str | None, number: int) -> Task:
    return Task(number, method, Route("http://x", "/b/", "r"), "/b/k", 0, 1, file)


def test_many_files_are_written_to_at_a_time_and_each_by_few():
    line = Line()
    for number, file in enumerate("aaabbc"):
        line.put(asked("GET", file, number))
    taken = [line.get() for _ in range(4)]
    assert [task.id for task in taken] == [0, 3, 5, 1]
    line.done(taken[0])
    line.done(taken[3])
    assert [line.get().id for _ in range(2)] == [2, 4]


@pytest.mark.parametrize(("method", "file"), [("PUT", "f"), ("GET", None)], ids=["sent", "only-read"])
def test_what_writes_to_no_file_has_no_turns(method, file):
    line = Line()
    for number, each in enumerate([file, file, file and "other"]):
        line.put(asked(method, each, number))
    line.put(asked("GET", "written", 3))
    assert [line.get().id for _ in range(4)] == [0, 1, 2, 3]


BODY = random.Random(2).randbytes(300_001)


def chunked(data: bytes) -> bytes:
    parts = [data[at : at + 70_000] for at in range(0, len(data), 70_000)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "data", "connections"),
    [
        (b"Content-Length: 300001", BODY, 1),
        (b"Transfer-Encoding: chunked", chunked(BODY), 1),
        (b"Content-Length: 300001\r\nConnection: close", BODY, 3),
        (b"X-Length: unknown\r\nConnection: close", BODY, 3),
    ],
    ids=["length", "chunked", "closed", "unknown"],
)
def test_bodies_of_every_kind_are_read_whole(tmp_path, head, data, connections):
    """And a connection that can be used again is."""
    accepted = []

    def serve(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                peer, _ = server.accept()
                accepted.append(peer)
                with peer, peer.makefile("rb") as requests:
                    while any(line == b"\r\n" for line in requests):  # to the end of a head
                        range_ = b"Content-Range: bytes 0-300000/300001"
                        peer.sendall(b"HTTP/1.1 206 Partial\r\n%b\r\n%b\r\n\r\n%b" % (range_, head, data))
                        if b"close" in head:
                            break

    to = tmp_path / "f"
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        route = Route(f"http://127.0.0.1:{server.getsockname()[1]}", "/b/", "us-east-1")
        one = Engine(Timeouts(store_retry_s=1), Pace(None), lambda _expired: KEYS, connections=1)
        for _ in range(3):
            to.write_bytes(b"")
            (answer,) = one.run([Task(0, "GET", route, "/b/f", 0, len(BODY), str(to))])
            assert (to.read_bytes(), crc.to_hex(answer["crc"])) == (BODY, crc.of_bytes(BODY))
    assert len(accepted) == connections


def test_too_little_in_too_much_time_breaks_the_floor():
    clock = Clock(1000)
    minimum_rate = MinimumRate(60, None, clock=clock)
    minimum_rate.saw(LEAST)
    clock.now += 59
    assert minimum_rate.broken() is None
    minimum_rate.saw(2 * LEAST - 1)
    clock.now += 1
    assert minimum_rate.broken() == "4095 KiB in 60 s"
    minimum_rate.begin()
    assert minimum_rate.broken() is None


def test_bytes_that_have_to_go_again_are_no_progress():
    clock = Clock(1000)
    minimum_rate = MinimumRate(60, None, clock=clock)
    for _ in range(3):  # into the buffers of the network, given up, and again
        minimum_rate.saw(3 * LEAST)
        clock.now += 30
        minimum_rate.saw(0)
    assert minimum_rate.broken() == "0 KiB in 60 s"


def test_another_process_gets_no_other_time():
    clock = Clock(1000)
    minimum_rate = MinimumRate(60, None, clock=clock)
    minimum_rate.saw(10 * LEAST)
    clock.now += 30
    minimum_rate.restarted()
    minimum_rate.saw(LEAST - 1)
    clock.now += 30
    assert minimum_rate.broken()


def test_under_a_bound_less_has_to_move():
    assert MinimumRate(60, 1000).least == 30_000
    assert MinimumRate(60, 1 << 30).least == LEAST


def test_a_bound_holds_for_all_that_share_it():
    clock = Clock(1000)
    one = Pace(1000, clock=clock, sleep=clock.sleep)
    other = Pace(1000, shared=os.dup(one.shared), clock=clock, sleep=clock.sleep)
    begin = clock.now
    for _ in range(50):
        one.take(100)
        other.take(100)
    assert 9.5 <= clock.now - begin <= 10  # 10,000 bytes; a quarter of a second comes free
    clock.now += 100
    begin = clock.now
    one.take(250)
    assert clock.now == begin


def test_without_a_bound_nothing_waits():
    Pace(None, sleep=pytest.fail).take(1 << 40)


def test_a_transfer_under_a_bound_is_no_faster(weather, source):
    os.truncate(source, 3 * MIB)
    store, _ = weather(max_bytes_per_s=4 * MIB)
    begin = time.monotonic()
    store.put_file("f", source)
    assert time.monotonic() - begin > 0.4
    begin = time.monotonic()
    store.checksum("f", 3 * MIB)
    assert time.monotonic() - begin > 0.4


def test_a_folder_under_a_bound_is_no_faster(tmp_path, source):
    os.truncate(source, 3 * MIB)
    store = open_store(f"file://{tmp_path}/store", max_bytes_per_s=4 * MIB)
    begin = time.monotonic()
    store.put_file("f", source)  # nothing was sent before: the first piece is free
    store.checksum("f", 3 * MIB)
    assert time.monotonic() - begin > 0.4


def test_a_file_that_cannot_be_written_is_no_trouble_of_the_network(moto):
    bucket = moto.bucket()
    moto.client().put_object(Bucket=bucket, Key="f", Body=b"x" * 100)
    keys = Keys(moto.env["AWS_ACCESS_KEY_ID"], moto.env["AWS_SECRET_ACCESS_KEY"])
    with pytest.raises(Failed) as caught:
        engine(keys=keys).run(
            [Task(0, "GET", Route(moto.endpoint, "", "us-east-1"), f"/{bucket}/f", 0, 100, "/dev/full")]
        )
    assert (caught.value.told["kind"], caught.value.told["status"]) == ("file", errno.ENOSPC)


KEYS = Keys("a", "b")


def engine(keys: Keys = KEYS, **times: float) -> Engine:
    return Engine(Timeouts(**times), Pace(None), lambda _expired: keys)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] or [
        int(each) for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()
    ]


def own_kib(pid: int) -> int:
    """Memory that a process shares with no other."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(map(int, re.findall(r"Private_\w+:\s+(\d+) kB", rollup)))


def gone(pid: int, within_s: float = ALWAYS_S) -> None:
    """Waits until a process has ended."""
    there, stat = Path(f"/proc/{pid}"), Path(f"/proc/{pid}/stat")
    until(lambda: not there.exists() or "Z" in stat.read_text().rpartition(")")[2][:3], within_s, "it lives")
