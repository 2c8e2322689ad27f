"""What engines and registries say when they cannot, in our words, each with a cure."""

from __future__ import annotations

import errno
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mgpu.errors import ImageError
from mgpu.image.registry.reference import Reference
from mgpu.spec.provider import of_registry

_STARTING = "Start Docker (`sudo systemctl start docker`, or Docker Desktop), or set DOCKER_HOST."
_CONNECTING = (errno.ENOENT, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)


def refused(reference: Reference, status: int, body: bytes = b"", *, known: bool = True) -> ImageError:
    """A registry's HTTP status. `known`: whether it was told who asks."""
    why = _answered(status, body)
    if status == 401 and not known:
        cure = f"Check the name: many registries say this of one that nobody has. If it is right: {_login(reference)}"
        return ImageError(f"{reference.registry} wants a login for {reference.name}", why, cure)
    if status == 401:
        return ImageError(f"{reference.registry} does not accept the login", why, _login(reference))
    if status == 403:
        cure = f"Ask for pull and push on {reference.repository}, or log in as somebody who has them."
        return ImageError(f"{reference.registry} refuses access to {reference.name}", why, cure)
    if status == 404:
        return unknown_repository(reference, why)
    if status == 429:
        cure = "Wait some minutes and try again; a login raises most registries' limits."
        return ImageError(f"{reference.registry} refuses: too many requests", why, cure)
    return ImageError(f"{reference.registry} is not well", why, "Try again later; see the registry's status page.")


def not_shown(reference: Reference, body: bytes) -> ImageError:
    """A repository that the registry shows no such login: nobody has it, or another one does."""
    what = f"{reference.registry} shows this login no {reference.name}"
    cure = f"Check the name. If it is right, ask its owner for access, or log in as another: {_login(reference)}"
    return ImageError(what, _answered(401, body), cure)


def unknown_repository(reference: Reference, why: str) -> ImageError:
    """A repository that has to be made before anything is pushed to it."""
    found = of_registry(reference.registry)
    made = found[1].make if found else "Ask the registry's owner."
    cure = f"Make the repository ({made}), or mend image.repository."
    return ImageError(f"{reference.registry} has no repository {reference.name}", why, cure)


def unreachable(reference: Reference, error: BaseException) -> ImageError:
    """No connection to a registry, or one that broke."""
    reason = getattr(error, "reason", "")
    why = str(reason or error)
    cure = "Check the name, the network and HTTPS_PROXY; certificates of your own go into image.ca_file."
    if isinstance(reason, ConnectionRefusedError):  # by a proxy, too; none is between us and this machine
        cure = "Is the registry running there?" + ("" if reference.local else " Check its port and HTTPS_PROXY, too.")
    return ImageError(f"{reference.registry} cannot be reached", why, cure)


def nonsense(reference: Reference, what: str) -> ImageError:
    """An answer that no registry gives."""
    cure = "Check that the name is a registry's and that no proxy answers in its place."
    return ImageError(f"{reference.registry} gave {what}", "That is no answer of a registry.", cure)


def no_room(error: OSError) -> ImageError:
    """The folder for temporary files takes nothing, or no more."""
    cure = (
        "Make room there, or set TMPDIR to a folder with room for the whole context (.dockerignore makes it smaller)."
    )
    return ImageError(f"no room in {tempfile.gettempdir()} for what the builder is sent", str(error), cure)


def no_context(error: OSError, cache: Path) -> ImageError:
    """What the trainer's image is built from cannot be put into the cache."""
    cure = f"Make room in {cache} and let this user write there, or set XDG_CACHE_HOME to another folder."
    return ImageError("what the trainer's image is built from cannot be put together", str(error), cure)


def no_engine(error: BaseException, host: str) -> ImageError:
    """No connection to the engine at `host`, or one that broke."""
    numbers = {getattr(each, "errno", None) for each in _chain(error)}
    if errno.EACCES in numbers or errno.EPERM in numbers:
        cure = "Add yourself to the group: `sudo usermod -aG docker $USER`, and log in again."
        return ImageError(f"you may not use the Docker engine at {host}", "Permission denied.", cure)
    if numbers & {*_CONNECTING}:
        return ImageError(f"no Docker engine at {host}", "Nothing answers there.", _STARTING)
    return ImageError(f"the Docker engine at {host} does not answer", _last(error), _STARTING)


def engine_said(what: str, said: str, reference: Reference | None = None) -> ImageError:
    """Words of an engine, about an image or a registry behind it."""
    small = said.lower()
    if (found := in_dockerfile(said)) is not None:
        return found
    if "no space left on device" in small:
        cure = "Free some: `docker system df`, `docker system prune`. Or move the engine's data-root."
        return ImageError(f"{what}: no space is left where the engine keeps its images", said, cure)
    status = _registry_status(small)
    if reference is not None and status:
        found = refused(reference, status)
        return ImageError(f"{what}: {found.what}", said, found.next_step)
    if reference is not None and any(word in small for word in ("dial tcp", "connection", "eof", "timeout", "tls")):
        return ImageError(f"{what}: {reference.registry} cannot be reached from the engine", said, _NETWORK)
    return ImageError(what, said, "The engine's own log says more (`journalctl -u docker`).")


def in_dockerfile(said: str) -> ImageError | None:
    """What a builder that cannot read a Dockerfile says of it; None: it says something else."""
    match = _UNREADABLE.search(said)
    return unreadable(int(match[1]), match[2].strip()) if match else None


def unreadable(line: int | None, why: str) -> ImageError:
    """A Dockerfile that builders do not take."""
    where = f"line {line}: " if line else ""
    return ImageError(f"the Dockerfile cannot be read: {where}{why}", "", "Mend that line.")


_UNREADABLE = re.compile(r"dockerfile parse error (?:on )?line (\d+): (.+)", re.IGNORECASE)
_NETWORK = "The engine has a network of its own: check its proxy, DNS and certificates (/etc/docker/certs.d)."
_WORDS = {
    401: ("unauthorized", "no basic auth", "authentication required", "status: 401", "no identity"),
    403: ("denied", "status: 403", "forbidden"),
    404: ("name unknown", "does not exist", "status: 404"),
    429: ("toomanyrequests", "too many requests", "status: 429"),
    503: ("internal server error", "bad gateway", "unavailable", "status: 50", "gateway time"),
}


def _registry_status(said: str) -> int:
    return next((status for status, words in _WORDS.items() if any(word in said for word in words)), 0)


def _login(reference: Reference) -> str:
    found = of_registry(reference.registry)
    return found[1].renew if found else f"Run `docker login {reference.registry}`."


def _answered(status: int, body: bytes) -> str:
    return f"It answered {status}: {_said(body)}" if _said(body) else f"It answered {status}."


def _said(body: bytes) -> str:
    """The messages of a registry's error, or the beginning of what else it is."""
    try:
        errors: Any = json.loads(body)["errors"]
        return "; ".join(f"{each.get('code', '')} {each.get('message', '')}".strip() for each in errors)[:500]
    except (ValueError, KeyError, TypeError, AttributeError):
        return body[:200].decode("utf-8", "replace").strip()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error with its causes, and those that libraries put into its arguments."""
    seen = list[BaseException]()
    todo = [error]
    while todo:
        each = todo.pop()
        if isinstance(each, BaseException) and each not in seen:
            seen.append(each)
            todo += [each.__cause__, each.__context__, *(arg for arg in each.args if isinstance(arg, BaseException))]
    yield from seen


def _last(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]
