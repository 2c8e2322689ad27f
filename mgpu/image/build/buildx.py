"""BuildKit, by docker's own buildx: the SDK does not speak to it."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from mgpu.errors import ImageError
from mgpu.events import Emit
from mgpu.image.build import cancel, progress
from mgpu.image.build.recipe import Limits, Recipe
from mgpu.image.registry import failures

_RAWJSON = (0, 13)  # the first that says what it does in JSON
_VERSION_S = 20.0
GRACE_S = 3.0  # between SIGTERM and SIGKILL for a build that is to end
_SECRET = "MGPU_BUILD_SECRET_"  # noqa: S105  a name: what docker's own program reads must not be hidden from it
CA_ID = "mgpu_ca"
# Of what --metadata-file says. Not --iidfile: it has the configuration's alone, before
# https://github.com/docker/buildx/pull/3952
_DIGESTS = ("containerimage.config.digest", "containerimage.digest")


def version(environ: Mapping[str, str]) -> str:
    """Of a buildx that is new enough; "" where there is none."""
    if not shutil.which("docker", path=environ.get("PATH")):
        return ""
    try:
        done = subprocess.run(
            ["docker", "buildx", "version"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_VERSION_S,
            env=dict(environ),
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"\bv?(\d+)\.(\d+)\.\S+", done.stdout)
    return match[0] if done.returncode == 0 and match and (int(match[1]), int(match[2])) >= _RAWJSON else ""


def build(
    recipe: Recipe,
    archive: IO[bytes],
    environ: Mapping[str, str],
    limits: Limits,
    emit: Emit,
    words: progress.Words,
    cancelled: threading.Event,
) -> tuple[str, ...]:
    """Builds from an archive of the context; the digests of the image's configuration and manifest. By one of them the
    engine knows it: by the second one where it leaves its images to containerd.

    Raises:
        ImageError: the failing step and its last lines, or the deadline.
        Interrupted: `cancelled` was set; the build and its folder are gone.
    """
    stream = progress.BuildKit(emit, words)
    with _folder() as folder:
        named = Path(folder) / "digests"
        process = subprocess.Popen(
            [*_command(recipe), f"--metadata-file={named}", "-"],
            stdin=archive,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env=_environment(recipe, environ),
            start_new_session=True,
        )
        late = threading.Event()
        timer = threading.Timer(limits.build_s, _end, (process, late.set))
        timer.start()
        try:
            with cancel.ending(cancelled, partial(_end, process)):
                for line in process.stderr or ():
                    stream.take(line)
                status = process.wait()
        finally:
            timer.cancel()
            _end(process)
        if cancelled.is_set():
            raise cancel.interrupted()
        if late.is_set():
            why = "It was ended at that deadline."
            raise ImageError(f"the image could not be built within {limits.build_s:g} s", why, "Try again.")
        if status:
            error = stream.failure(status)
            raise failures.in_dockerfile(error.why) or error
        said = json.loads(named.read_text(encoding="utf-8"))
        return tuple(said[name] for name in _DIGESTS if name in said)


def _folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="mgpu-build-")
    except OSError as error:
        raise failures.no_room(error) from error


def _command(recipe: Recipe) -> list[str]:
    options = [f"--platform={recipe.platform}", f"--file={recipe.context.dockerfile}"]
    options += [f"--target={recipe.target}"] if recipe.target else []
    options += [f"--network={recipe.network}"] if recipe.network else []
    options += [f"--build-arg={name}={value}" for name, value in recipe.args.items()]
    options += [f"--secret=id={name},env={_SECRET}{name}" for name in recipe.secrets]
    options += [f"--secret={_list(f'id={CA_ID}', f'src={recipe.ca_file}')}"] if recipe.ca_file else []
    # one manifest of one platform: what is pushed is what was built
    return ["docker", "buildx", "build", "--load", "--progress=rawjson", "--provenance=false", "--sbom=false", *options]


def _list(*fields: str) -> str:
    """CSV: a path may hold a comma."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


def _environment(recipe: Recipe, environ: Mapping[str, str]) -> dict[str, str]:
    return {**environ, **{f"{_SECRET}{name}": value for name, value in recipe.secrets.items()}}


def _end(process: subprocess.Popen[str], first: Callable[[], None] = lambda: None) -> None:
    """Ends it and all that it has started: on SIGTERM it takes the build back, which without it goes on a while."""
    first()
    if process.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
