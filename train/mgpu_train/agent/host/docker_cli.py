"""The Docker engine of a machine, by its `docker` program: is it there, has it room, and an image by its digest.

Standard library only, Python 3.8 or newer: `container.py` stands on it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, NamedTuple  # noqa: UP035 - for the Python 3.8 of older images

from mgpu_train.agent.host.python_env import Problem, ProblemKind

ASK_S = 30.0  # for an answer that needs no work
BY_DIGEST = re.compile(r"[A-Za-z0-9][^@\s]*@sha256:[0-9a-f]{64}")
# Bytes on disk for each byte of an image's compressed layers: these stay until the last is unpacked (1), beside what
# they unpack to (2.5: gzip makes 1 byte of 2.1 of PyTorch's packages for CUDA, measured on 2.15; of a base 1 of more).
ROOM = 3.5
_SPARE = 1 << 30  # bytes: the container's own layer and its logs
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # after the first pull that failed, doubled after each
_LAST_LINES = 6
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_CONTAINERD = "/var/lib/containerd"  # where an engine that leaves its images to containerd has them

# What no other try mends, the first that fits; anything else about a pull may pass. The words are those of moby
# (distribution/{errors,pull_v2}.go, layer/; with containerd's store daemon/containerd/image_pull.go), of containerd
# (client/pull.go, core/remotes/docker/, core/content/, core/diff/apply/, core/images/image.go), and of registries (the
# codes of OCI's distribution-spec; Docker Hub's and ECR's own texts).
_FINAL = {
    ProblemKind.DISK: re.compile(r"no space left on device"),
    ProblemKind.DIGEST: re.compile(r"(manifest|layer) verification failed|unexpected commit digest"),
    ProblemKind.UNPACK: re.compile(
        r"failed to (register|extract) layer.*(permission denied|not permitted|read-only file system)"
    ),
    ProblemKind.PLATFORM: re.compile(r"no matching manifest|no match for platform|not provide the specified platform"),
    ProblemKind.LIMIT: re.compile(r"pull rate limit|Data limit exceeded"),  # of hours; others (ECR's) are of seconds
    ProblemKind.ABSENT: re.compile(
        r"(manifest|name) unknown|(manifest for|repository) .* not found|failed to resolve reference .*: not found"
    ),
    # "permission denied" is a file's
    ProblemKind.DENIED: re.compile(
        r"(?i)unauthorized|forbidden|(?<!permission )denied|authentication required|authorization failed|no basic auth"
        r"|token has expired"
    ),
}
_LIMITED = re.compile(r"(?i)toomanyrequests|too many requests")
_HUB, _HUB_KEY = "docker.io", "https://index.docker.io/v1/"  # how Docker's own configuration names its own registry


class Done(NamedTuple):
    """A call's end; `error` has its last lines alone."""

    status: int
    out: str
    error: str


class Login(NamedTuple):
    """Who pulls."""

    registry: str
    username: str
    password: str


class DockerCli:
    """The machine's engine, until a moment of the monotonic clock: no call lasts longer."""

    def __init__(self, until: float) -> None:
        program = shutil.which("docker")
        if program is None:
            raise Problem(ProblemKind.DOCKER, f"There is no program `docker` on PATH ({os.environ.get('PATH', '')}).")
        self.program = program
        self.until = until

    def call(
        self, *arguments: str, seconds: float = ASK_S, folder: str | None = None, late: ProblemKind = ProblemKind.DOCKER
    ) -> Done:
        """`docker arguments`, at most so many seconds; `folder`: in the place of the user's ~/.docker.

        Raises:
            Problem: `late`, when it does not end in time.
        """
        seconds = max(1.0, min(seconds, self.until - time.monotonic()))
        try:
            done = subprocess.run(
                [self.program, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env={**os.environ, **({"DOCKER_CONFIG": folder} if folder else {})},
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Problem(late, f"`docker {arguments[0]}` did not end within {seconds:.0f} s.") from None
        error = done.stderr.decode(errors="replace").strip().splitlines()
        return Done(done.returncode, done.stdout.decode(errors="replace"), "\n".join(error[-_LAST_LINES:]))

    def info(self) -> dict[str, Any]:
        """What the engine says of itself.

        Raises:
            Problem: docker, or permission: the user may not speak to it.
        """
        done = self.call("info", "--format", "{{json .}}")
        try:
            info = json.loads(done.out)
        except ValueError:
            info = {}
        said = "\n".join([*(info.get("ServerErrors") or []), done.error])
        if done.status == 0 and info.get("DockerRootDir") and not info.get("ServerErrors"):
            return info
        refused = re.search(r"permission denied while trying|connect: permission denied", said)
        raise Problem(
            ProblemKind.PERMISSION if refused else ProblemKind.DOCKER,
            said or f"`docker info` ended with status {done.status}.",
        )

    def ready(self, boot_s: float) -> dict[str, Any]:
        """The same, of an engine that has so long to start; raises what `info` raises."""
        end = min(self.until, time.monotonic() + boot_s)
        while True:
            try:
                return self.info()
            except Problem as problem:
                if problem.kind is not ProblemKind.DOCKER or time.monotonic() + _PAUSE_S > end:
                    raise
            time.sleep(_PAUSE_S)

    def inspect(self, kind: str, name: str) -> dict[str, Any] | None:
        """What the engine knows of an image or container; None: there is none."""
        done = self.call(kind, "inspect", name)
        return json.loads(done.out)[0] if done.status == 0 else None


def image(engine: DockerCli, info: dict[str, Any], reference: str, size: int | None, login: Login | None) -> Any:
    """The id of the image that has this digest, and whether it was pulled just now; `size`: its compressed bytes.

    Raises:
        Problem: reference, disk, absent, denied, limit, pull, unpack, platform, digest.
    """
    if not BY_DIGEST.fullmatch(reference):
        raise Problem(ProblemKind.REFERENCE, f"{reference!r} is not `repository@sha256:...`.")
    found = engine.inspect("image", reference)
    pulled = found is None
    if found is None:
        _require_room(info, size)
        _pull(engine, reference, login)
        found = engine.inspect("image", reference)
    found = _same(found, reference)
    machine = _MACHINES.get(info.get("Architecture", ""), info.get("Architecture"))
    if found["Architecture"] != machine:
        raise Problem(
            ProblemKind.PLATFORM, f"The image is for {found['Os']}/{found['Architecture']}, the machine is {machine}."
        )
    return found["Id"], pulled


def _same(found: dict[str, Any] | None, reference: str) -> dict[str, Any]:
    """What runs is what was named, whatever registry and engine made of the name."""
    digest, known = reference.partition("@")[2], (found or {}).get("RepoDigests") or []
    if found is None or all(name.partition("@")[2] != digest for name in known):
        raise Problem(ProblemKind.DIGEST, f"The engine was asked for {digest}, and has {', '.join(known) or 'none'}.")
    return found


def _require_room(info: dict[str, Any], size: int | None) -> None:
    if size is None:
        return
    elsewhere = "io.containerd.snapshotter" in json.dumps(info.get("DriverStatus") or ())
    roots = [info["DockerRootDir"], *([_CONTAINERD] if elsewhere else [])]
    needed = int(size * ROOM) + _SPARE
    for root in roots:
        free = _free(Path(root))
        if free < needed:
            why = f"{root} has {free / 2**30:.1f} GiB free; {size / 2**30:.1f} GiB of layers"
            raise Problem(ProblemKind.DISK, f"{why} need {needed / 2**30:.1f} GiB while they are unpacked.")


def _free(folder: Path) -> int:
    """Bytes that are free where the folder is, or would be: to the user it may be hidden."""
    while True:
        try:
            return shutil.disk_usage(folder).free
        except (FileNotFoundError, PermissionError):
            if folder == folder.parent:
                raise
            folder = folder.parent


def _pull(engine: DockerCli, reference: str, login: Login | None) -> None:
    """Pulls, again and again until the engine's deadline: a registry that is away now may be back then."""
    pause = _PAUSE_S
    with _private_folder() as folder:
        while True:
            done = _try(engine, reference, login, folder)
            if done.status == 0:
                return
            for kind, words in _FINAL.items():
                if words.search(done.error):
                    raise Problem(kind, done.error)
            if time.monotonic() + pause > engine.until:
                kind = ProblemKind.LIMIT if _LIMITED.search(done.error) else ProblemKind.PULL
                raise Problem(kind, done.error or f"`docker pull` ended with status {done.status}.")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def _try(engine: DockerCli, reference: str, login: Login | None, folder: str) -> Done:
    left = engine.until - time.monotonic()
    if login is None:  # what the machine has of its own: a helper of its image, say
        return engine.call("pull", "--quiet", reference, seconds=left, late=ProblemKind.PULL)
    _write_login(login, Path(folder, "config.json"))
    done = engine.call("pull", "--quiet", reference, folder=folder, seconds=left, late=ProblemKind.PULL)
    # whatever a registry echoes
    return done._replace(error=done.error.replace(login.password, "***"))


def _write_login(login: Login, path: Path) -> None:
    """As `docker login` does without a credential store; with one that it finds on PATH, it would put it there."""
    auth = base64.b64encode(f"{login.username}:{login.password}".encode()).decode()
    key = _HUB_KEY if login.registry == _HUB else login.registry
    path.touch(0o600)
    path.write_text(json.dumps({"auths": {key: {"auth": auth}}}), encoding="utf-8")


@contextmanager
def _private_folder() -> Iterator[str]:
    """A folder for the login, which Docker's program reads from a file: in memory where there is such a place; gone
    afterwards."""
    mine = f"mgpu-pull-{os.getuid()}-{hashlib.sha256(str(Path(__file__)).encode()).hexdigest()[:8]}-"
    places = [os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm", tempfile.gettempdir()]  # noqa: S108 - 0700
    place = next(place for place in places if place and os.access(place, os.W_OK | os.X_OK))
    for left in Path(place).glob(mine + "*"):  # by one that was killed: one at a time is here
        shutil.rmtree(left, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=mine, dir=place)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
