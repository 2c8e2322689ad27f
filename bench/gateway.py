"""The servers that transfers are measured against, each a process of its own on loopback, ended with its block."""

from __future__ import annotations

import datetime
import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bench.tools import ROOT, store_tool

BUCKET = "bench"
START_S = 30.0
_KEYS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench-secret-key", "AWS_REGION": "us-east-1"}
# as S3 chooses it; OpenSSL's servers alone would take AES-256 with some clients, and not with others
_OPENSSL = """openssl_conf = init
[init]
ssl_conf = ssl
[ssl]
system_default = suites
[suites]
Ciphersuites = TLS_AES_128_GCM_SHA256
"""


@dataclass(frozen=True)
class Server:
    """An S3 server with an empty bucket named BUCKET. `folder` holds its objects, as files."""

    name: str
    endpoint: str
    env: Mapping[str, str]  # what every client needs to reach it, and to trust it
    folder: Path
    pid: int


@contextmanager
def sink(*, faults: str = "") -> Iterator[Server]:
    """Throws bodies away over TLS; `faults` as bench/sink.py takes them."""
    with tempfile.TemporaryDirectory(prefix="mgpu-bench-") as name:
        folder = Path(name)
        authority, certificate = _certificates(folder)
        (folder / "openssl.cnf").write_text(_OPENSSL)
        (folder / "objects").mkdir()
        argv = [sys.executable, "-m", "bench.sink", str(folder / "objects")]
        argv += [f"--certificate={certificate}", f"--faults={faults}"]
        env = os.environ | {"OPENSSL_CONF": str(folder / "openssl.cnf"), "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            told, told_to = _pipes(process)
            endpoint = f"https://127.0.0.1:{int(told.readline())}"
            trust = {"AWS_CA_BUNDLE": str(authority), "SSL_CERT_FILE": str(authority)}
            try:
                env = _KEYS | trust | {"AWS_ENDPOINT_URL": endpoint}
                yield Server("TLS sink", endpoint, env, folder / "objects", process.pid)
            finally:
                told_to.close()  # ends it and its connections
                process.wait()


@contextmanager
def versitygw() -> Iterator[Server]:
    """A real S3 server that keeps its objects as files, over plain HTTP."""
    program = store_tool("versitygw")
    with tempfile.TemporaryDirectory(prefix="mgpu-bench-") as name:
        folder = Path(name, "objects")
        (folder / BUCKET).mkdir(parents=True)
        port = _free_port()
        env = {"PATH": os.environ["PATH"], "ROOT_ACCESS_KEY": "bench", "ROOT_SECRET_KEY": "bench-secret-key"}
        process = subprocess.Popen(
            [str(program), "--port", f"127.0.0.1:{port}", "posix", str(folder)],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_for(port, process)
            endpoint = f"http://127.0.0.1:{port}"
            env = _KEYS | {"AWS_ENDPOINT_URL": endpoint}
            yield Server("versitygw", endpoint, env, folder / BUCKET, process.pid)
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)  # its attributes do not hinder


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    if process.stdout is None or process.stdin is None:
        raise TypeError("it was started without pipes")
    return process.stdout, process.stdin


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"versitygw did not answer within {START_S:.0f} s")


def _certificates(folder: Path) -> tuple[Path, Path]:
    """An authority of our own, and the key and certificate for 127.0.0.1 that it issued, as two PEM files."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def certificate(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named("mgpu bench"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    ours, theirs = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    above = certificate("mgpu bench", ours).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    below = certificate("127.0.0.1", theirs).add_extension(
        x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
    )
    pem = serialization.Encoding.PEM
    key = theirs.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    authority, server = folder / "authority.pem", folder / "server.pem"
    authority.write_bytes(above.sign(ours, hashes.SHA256()).public_bytes(pem))
    server.write_bytes(key + below.sign(ours, hashes.SHA256()).public_bytes(pem))
    return authority, server
