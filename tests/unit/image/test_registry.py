"""What a registry is asked and how its answers are read; real registries, and some that say what a test wants."""

from __future__ import annotations

import hashlib
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from fakes.clock import Clock
from fakes.engine import Engine, Registry, free_port
from fakes.registries import Asked, Said, certificate, scripted

from mgpu.errors import ImageError, InputError
from mgpu.image.registry import registry as registries
from mgpu.image.registry.auth import Login, nobody, password
from mgpu.image.registry.http import RetryPolicy
from mgpu.image.registry.reference import Reference

DIGEST = "sha256:" + "a" * 64
FOUND = Said(200, {"Docker-Content-Digest": DIGEST})
NOT_ITS = "which its manifest has not"
OCI = "application/vnd.oci.image.manifest.v1+json"


def patient(clock: Clock, total_s: float = 30.0) -> RetryPolicy:
    return RetryPolicy(total_s=total_s, sleep=clock.sleep, now=clock)


@pytest.mark.parametrize(
    ("text", "registry", "name", "tag", "digest"),
    [
        ("ubuntu", "docker.io", "library/ubuntu", "latest", ""),
        ("ubuntu:22.04", "docker.io", "library/ubuntu", "22.04", ""),
        ("nvidia/cuda:13", "docker.io", "nvidia/cuda", "13", ""),
        ("index.docker.io/nvidia/cuda:13", "docker.io", "nvidia/cuda", "13", ""),
        ("localhost/x", "localhost", "x", "latest", ""),
        ("127.0.0.1:5000/a/b", "127.0.0.1:5000", "a/b", "latest", ""),
        ("127.0.0.1:5000/a/b:c", "127.0.0.1:5000", "a/b", "c", ""),
        (f"ghcr.io/a/b@{DIGEST}", "ghcr.io", "a/b", "", DIGEST),
        (f"ghcr.io/a/b:c@{DIGEST}", "ghcr.io", "a/b", "c", DIGEST),
    ],
)
def test_references_mean_what_docker_means(text, registry, name, tag, digest):
    found = Reference.parse(text)
    assert (found.registry, found.name, found.tag, found.digest) == (registry, name, tag, digest)
    assert Reference.parse(str(found)).wanted == (digest or tag)


@pytest.mark.parametrize("registry", ["127.0.0.1:5000", "localhost", "[::1]:5000", "localhost:1"])
def test_plain_http_is_for_this_machine(registry):
    assert Reference.parse(f"{registry}/x").local


@pytest.mark.parametrize("registry", ["127.0.0.1.example.com", "localhost.example.com", "10.0.0.1:5000", "example.com"])
def test_every_other_registry_is_spoken_to_with_tls(registry):
    assert not Reference.parse(f"{registry}/x").local


def test_a_real_registry_is_asked_by_tag_and_by_digest(engine: Engine, registry: Registry):
    name = f"{registry.address}/asked"
    assert registries.find(f"{name}:1") is None
    engine.docker("tag", "base:1", f"{name}:1")
    said = engine.docker("push", f"{name}:1").stdout
    digest = registries.find(f"{name}:1")
    assert digest is not None
    assert digest in said
    assert registries.find(f"{name}@{digest}") == digest
    assert registries.find(f"{name}@{DIGEST}") is None
    image = registries.manifest(f"{name}:1")
    assert image is not None
    assert image.digest == digest
    stored = registry.folder / "data/docker/registry/v2/blobs/sha256"
    assert {size for _, size in image.layers} == {
        (stored / layer[7:9] / layer[7:] / "data").stat().st_size for layer, _ in image.layers
    }


def test_a_locked_registry_is_told_who_we_are_when_it_asks(locked_registry: Registry):
    name = f"{locked_registry.address}/secret:1"
    assert registries.find(name, password(locked_registry.user, locked_registry.password)) is None
    with pytest.raises(ImageError, match="wants a login for secret") as caught:
        registries.find(name)
    assert "docker login" in caught.value.next_step
    with pytest.raises(ImageError, match="does not accept the login") as caught:
        registries.find(name, password("tester", "canary-wrong"))
    assert "canary" not in str(caught.value)


def test_a_token_is_fetched_where_the_registry_says_and_used_there():
    def script(asked: Asked) -> Said:
        if asked.path.startswith("/token"):
            return Said(200, body=b'{"token": "tok"}')
        if asked.authorization == "Bearer tok":
            return FOUND
        challenge = f'Bearer realm="http://{server.address}/token?x=1",service="reg",scope="repository:a/b:pull"'
        return Said(401, {"WWW-Authenticate": challenge})

    with scripted(script) as server:
        assert registries.find(f"{server.address}/a/b:1", password("me", "pass")) == DIGEST
        first, token, second = server.asked
    assert (first.method, first.authorization) == ("HEAD", "")
    assert token.path == "/token?x=1&scope=repository%3Aa%2Fb%3Apull&service=reg"
    assert token.authorization == Login("me", "pass").basic()
    assert second.authorization == "Bearer tok"
    assert "vnd.oci.image.index" in second.headers["accept"]
    assert "manifest.v2" in second.headers["accept"]


def test_a_registry_that_knows_nobody_is_not_said_to_refuse_a_login():
    def script(asked: Asked) -> Said:
        if asked.path.startswith("/token"):
            return Said(200, body=b'{"token": "anonymous"}')
        return Said(401, {"WWW-Authenticate": f'Bearer realm="http://{server.address}/token"'})

    with scripted(script) as server:
        name = f"{server.address}/library/pyton:3.12"
        with pytest.raises(ImageError, match="wants a login for library/pyton") as caught:
            registries.find(name)
    assert caught.value.next_step.startswith("Check the name")
    assert "docker login" in caught.value.next_step


@contextmanager
def hub() -> Iterator[str]:
    """The address of a registry like Docker Hub: every good login gets a token, and 401 for what it may not see."""

    def script(asked: Asked) -> Said:
        if asked.path.startswith("/token"):
            good = asked.authorization == Login("me", "pass").basic()
            return Said(200, body=b'{"token": "tok"}') if good else Said(401)
        if asked.authorization and asked.path.startswith("/v2/me/there/"):
            return FOUND if asked.path.endswith("/1") else Said(404)
        error = ',error="insufficient_scope"' if asked.authorization else ""
        return Said(401, {"WWW-Authenticate": f'Bearer realm="http://{server.address}/token"{error}'})

    with scripted(script) as server:
        yield server.address


def test_a_repository_that_the_first_push_makes_is_not_there_yet():
    me, wrong = password("me", "pass"), password("me", "old")
    with hub() as address:
        assert registries.find(f"{address}/me/there:1", me, made_by_push=True) == DIGEST
        assert registries.find(f"{address}/me/there:2", me, made_by_push=True) is None
        assert registries.find(f"{address}/me/new:1", me, made_by_push=True) is None
        for login, words in ((wrong, "does not accept the login"), (nobody, "wants a login for me/new")):
            with pytest.raises(ImageError, match=words):
                registries.find(f"{address}/me/new:1", login, made_by_push=True)


def test_a_repository_that_is_not_shown_is_not_said_to_refuse_a_login():
    with hub() as address, pytest.raises(ImageError, match="shows this login no me/new") as caught:
        registries.find(f"{address}/me/new:1", password("me", "pass"))
    assert caught.value.next_step.startswith("Check the name")
    assert "docker login" in caught.value.next_step


def test_an_identity_token_is_exchanged():
    def script(asked: Asked) -> Said:
        if asked.path == "/oauth":
            return Said(200, body=b'{"access_token": "tok"}')
        known = asked.authorization == "Bearer tok"
        return FOUND if known else Said(401, {"WWW-Authenticate": f'Bearer realm="http://{server.address}/oauth"'})

    with scripted(script) as server:
        login = Login("", "", identity_token="it's")
        assert registries.find(f"{server.address}/a:1", lambda: login) == DIGEST
    assert server.asked[1].method == "POST"
    assert b"grant_type=refresh_token" in server.asked[1].body
    assert b"refresh_token=it%27s" in server.asked[1].body


@pytest.mark.parametrize("registry", ["registry.example", "127.0.0.1:5000"])
@pytest.mark.parametrize(
    "realm",
    ["http://198.51.100.1/token", "http://127.0.0.1@198.51.100.1/", "ftp://127.0.0.1/x", "file:///etc/passwd", ""],
)
def test_a_password_goes_nowhere_without_tls(realm, registry):
    with scripted(lambda _: Said(401, {"WWW-Authenticate": f'Bearer realm="{realm}"'})) as server:
        # as a registry elsewhere, whose certificate is not what is tested
        api = registries.Api(Reference.parse(f"{registry}/a:1"), password("me", "canary"))
        api._base = f"http://{server.address}/v2/a/"
        with pytest.raises(ImageError, match="without TLS"):
            api.ask("HEAD", "manifests/1")
    assert len(server.asked) == 1


def test_a_redirect_is_told_no_secret():
    with scripted(lambda _: FOUND) as elsewhere:

        def script(asked: Asked) -> Said:
            if not asked.authorization:
                return Said(401, {"WWW-Authenticate": 'Basic realm="x"'})
            return Said(307, {"Location": f"http://{elsewhere.address}/blob"})

        with scripted(script) as server:
            assert registries.find(f"{server.address}/a:1", password("me", "canary")) == DIGEST
        assert [each.authorization for each in elsewhere.asked] == [""]


@pytest.mark.parametrize(
    ("status", "what", "cure"),
    [
        (403, "refuses access to a/b", "pull and push"),
        (429, "too many requests", "Wait"),
        (500, "is not well", "later"),
        (503, "is not well", "later"),
        (418, "is not well", "later"),
    ],
)
def test_a_refusal_has_a_name_and_a_cure(status, what, cure):
    body = b'{"errors": [{"code": "DENIED", "message": "because"}]}'
    with scripted(lambda _: Said(status, body=body)) as server, pytest.raises(ImageError, match=what) as caught:
        registries.manifest(f"{server.address}/a/b:1", retry=patient(Clock()))
    assert "DENIED because" in caught.value.why
    assert cure in caught.value.next_step


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_what_passes_is_asked_again(status):
    with scripted(lambda _: Said(status) if len(server.asked) < 5 else FOUND) as server:
        clock = Clock()
        assert registries.find(f"{server.address}/a:1", retry=patient(clock)) == DIGEST
    assert len(clock.sleeps) == 4
    assert clock.sleeps[3] > 2 * RetryPolicy().pause_s, "each pause is about twice the one before"


def test_a_refusal_that_stays_is_not_asked_again():
    with scripted(lambda _: Said(403)) as server, pytest.raises(ImageError):
        registries.find(f"{server.address}/a:1", retry=patient(Clock()))
    assert len(server.asked) == 1


def test_the_registry_says_when_to_come_back():
    with scripted(lambda _: FOUND if clock.sleeps else Said(429, {"Retry-After": "7"})) as server:
        clock = Clock()
        assert registries.find(f"{server.address}/a:1", retry=patient(clock)) == DIGEST
    assert clock.sleeps == [7.0]


def test_nobody_waits_beyond_the_deadline():
    clock = Clock()
    with scripted(lambda _: Said(429, {"Retry-After": "31"})) as server, pytest.raises(ImageError, match="too many"):
        registries.find(f"{server.address}/a:1", retry=patient(clock, 30.0))
    assert clock.sleeps == []


def test_a_registry_that_refuses_connections_is_waited_for_some_seconds():
    clock = Clock()
    with pytest.raises(ImageError, match="cannot be reached") as caught:
        registries.find(f"127.0.0.1:{free_port()}/a:1", retry=patient(clock, 30.0))
    assert "refused" in caught.value.why
    assert caught.value.next_step == "Is the registry running there?"
    assert len(clock.sleeps) >= 2
    assert sum(clock.sleeps) < 4


def test_a_registry_that_was_refusing_while_it_started_is_found():
    clock, port = Clock(), free_port()
    with ExitStack() as stack:

        def starts(seconds: float) -> None:
            clock.sleep(seconds)
            stack.enter_context(scripted(lambda _: FOUND, port=port))

        retry = replace(patient(clock), sleep=starts)
        assert registries.find(f"127.0.0.1:{port}/a:1", retry=retry) == DIGEST
    assert len(clock.sleeps) == 1


def test_a_proxy_that_refuses_is_thought_of(monkeypatch):
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ImageError, match=r"registry\.example cannot be reached") as caught:
        registries.find("registry.example/a:1", retry=patient(Clock()))
    assert "HTTPS_PROXY" in caught.value.next_step


def test_this_machines_registry_is_asked_through_no_proxy(monkeypatch):
    monkeypatch.delenv("no_proxy", raising=False)
    with scripted(lambda _: FOUND) as elsewhere, scripted(lambda _: FOUND) as proxy:
        monkeypatch.setenv("http_proxy", f"http://{proxy.address}")
        with scripted(lambda _: Said(307, {"Location": f"http://{elsewhere.address}/blob"})) as server:
            assert registries.find(f"{server.address}/a:1", retry=patient(Clock())) == DIGEST
        assert (len(server.asked), len(elsewhere.asked), proxy.asked) == (1, 1, [])
        with scripted(lambda _: Said(307, {"Location": "http://storage.example/blob"})) as server:
            assert registries.find(f"{server.address}/a:1", retry=patient(Clock())) == DIGEST
        assert [asked.path for asked in proxy.asked] == ["http://storage.example/blob"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Bad Name",
        "a@b",
        "a/B:1",
        "a:b:c",
        "https://a/b",
        "a//b",
        "a:-x",
        f"a@{DIGEST}0",
        "a@sha256:12",
        "a\n",
        "$A",
    ],
)
def test_what_is_no_name_of_an_image_goes_nowhere(text):
    with pytest.raises(InputError, match="is not the name of an image") as caught:
        registries.find(text)
    assert caught.value.exit_code == 2


def test_a_name_that_nobody_has_is_not_waited_for(monkeypatch):
    def unknown(*_: object, **__: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)  # without a network, it would be "try again"
    clock = Clock()
    with pytest.raises(ImageError, match="cannot be reached"):
        registries.find("registry.invalid/a:1", retry=patient(clock))
    assert not clock.sleeps


def test_a_silent_registry_costs_a_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ImageError, match="cannot be reached"):
        registries.find(
            f"127.0.0.1:{silent.getsockname()[1]}/a:1", retry=RetryPolicy(total_s=0.3, request_s=0.2, pause_s=1.0)
        )


@pytest.mark.parametrize("said", ["sha256:short", "md5:" + "a" * 32, "../../x"])
def test_what_is_no_digest_is_refused(said):
    with (
        scripted(lambda _: Said(200, {"Docker-Content-Digest": said})) as server,
        pytest.raises(ImageError, match=NOT_ITS),
    ):
        registries.find(f"{server.address}/a:1")


def test_a_digest_that_heads_do_not_say_is_counted():
    body = b'{"layers": []}'
    with scripted(lambda _: Said(200, body=body)) as server:
        assert registries.find(f"{server.address}/a:1") == f"sha256:{hashlib.sha256(body).hexdigest()}"


def test_a_manifest_that_is_not_its_digests_is_refused():
    with (
        scripted(lambda _: Said(200, {"Docker-Content-Digest": DIGEST}, b"{}")) as server,
        pytest.raises(ImageError, match=NOT_ITS),
    ):
        registries.manifest(f"{server.address}/a@{DIGEST}")
    with scripted(lambda _: Said(200, {}, b"{}")) as server, pytest.raises(ImageError, match="another manifest"):
        registries.manifest(f"{server.address}/a@{DIGEST}")


def test_another_digest_for_the_one_that_was_asked_is_refused():
    with scripted(lambda _: FOUND) as server, pytest.raises(ImageError, match="the digest"):
        registries.find(f"{server.address}/a@sha256:{'b' * 64}")


def test_of_an_index_the_platforms_own_image_is_taken():
    configs = {name: json.dumps({"os": "linux", "architecture": name}).encode() for name in ("arm64", "amd64")}
    inner = {name: _manifest(len(name) * index, config) for index, (name, config) in enumerate(configs.items(), 1)}
    entries = [
        {"digest": _digest(body), "platform": {"os": "linux", "architecture": name}} for name, body in inner.items()
    ]
    index = json.dumps({"manifests": entries}).encode()
    by_path = {f"/v2/a/manifests/{_digest(body)}": body for body in inner.values()} | {"/v2/a/manifests/1": index}
    by_path |= {f"/v2/a/blobs/{_digest(body)}": body for body in configs.values()}
    with scripted(lambda asked: Said(200, body=by_path[asked.path])) as server:
        name = f"{server.address}/a:1"
        assert registries.find(name) == _digest(index)
        found = {
            platform: registries.manifest(name, nobody, platform)
            for platform in ("linux/amd64", "linux/arm64", "linux/s390x")
        }
        one = f"{server.address}/a@{_digest(inner['arm64'])}"
        assert registries.manifest(one, nobody, "linux/amd64") is None
        assert registries.manifest(one, nobody, "linux/arm64") is not None
    assert {platform: image and image.bytes for platform, image in found.items()} == {
        "linux/amd64": 110,
        "linux/arm64": 105,
        "linux/s390x": None,
    }


@pytest.mark.parametrize("body", [b"[]", b'{"layers": 1}', b'{"layers": []}', b"\xff", b'{"manifests": [1]}'])
def test_a_manifest_that_is_no_images_is_refused(body):
    with scripted(lambda _: Said(200, body=body)) as server, pytest.raises(ImageError, match=" gave "):
        registries.manifest(f"{server.address}/a:1")


def test_a_configuration_that_is_not_its_digests_is_refused():
    body = _manifest(3, b"{}")
    answer = lambda asked: Said(200, body=b"{} " if "blobs" in asked.path else body)  # noqa: E731
    with scripted(answer) as server, pytest.raises(ImageError) as caught:
        registries.manifest(f"{server.address}/a:1")
    assert "a configuration that is not its digest's" in caught.value.what


def test_certificates_of_ones_own_are_trusted_besides(tmp_path: Path):
    with _tls(tmp_path) as (server, ca_file):
        name, clock = Reference("registry.example", "a", "1"), Clock()
        strange = registries.Api(name, nobody, patient(clock))
        trusted = registries.Api(name, nobody, ca_file=ca_file)
        strange._base = trusted._base = f"https://{server.address}/v2/a/"  # loopback would be spoken to without TLS
        with pytest.raises(ImageError, match="cannot be reached") as caught:
            strange.ask("HEAD", "manifests/1")
        assert "ca_file" in caught.value.next_step
        assert not clock.sleeps
        assert trusted.ask("HEAD", "manifests/1").status == 200


def test_a_file_without_certificates_is_named(tmp_path: Path):
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(ImageError, match="holds no certificates"):
        registries.find("registry.example/a:1", ca_file=tmp_path / "ca.pem")


def _manifest(layer_bytes: int, config: bytes) -> bytes:
    layers = [{"digest": DIGEST, "size": layer_bytes}]
    described = {"digest": _digest(config), "size": 100}
    return json.dumps({"mediaType": OCI, "config": described, "layers": layers}).encode()


def _digest(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


@contextmanager
def _tls(folder: Path):
    own, private = certificate()
    (folder / "ca.pem").write_bytes(own)
    (folder / "both.pem").write_bytes(own + private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "both.pem")
    with scripted(lambda _: FOUND, context) as server:
        yield server, folder / "ca.pem"
