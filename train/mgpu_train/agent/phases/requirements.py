"""The user's requirements, in a virtual environment of the node's own, shared by all runs that ask for the same ones.

It also sees what the agent's interpreter sees, so that torch is not installed twice: a `.pth` file adds those folders
behind its own. (`--system-site-packages` of an environment that was made from another one shows only the base.)
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mgpu_train.agent.attempt.decide import AttemptFailed
from mgpu_train.agent.status.log import Log
from mgpu_train.agent.status.status import Fault

_DONE = "installed"  # a file in a finished environment
_LAST_LINES = 20
_LOCAL = re.compile(r"^(?:-[^-]|--(?:requirement|constraint|editable)|[./]|file:)|@\s*file:")
_NAME = re.compile(r"^([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)")
_NOT_THE_USERS = re.compile(
    r"Failed to establish a new connection|Name or service not known|Temporary failure in name resolution"
    r"|ConnectTimeoutError|Connection refused|No space left on device|Read-only file system"
)


def install(requirements: Path, environments: Path, *, scope: str, environment: Mapping[str, str], log: Log) -> Path:
    """Returns the interpreter of an environment that has `requirements`; makes it unless it stands already.

    `environments` is the node's folder of them; requirements that name local files are not shared beyond `scope`.

    Raises:
        AttemptFailed: they cannot be read or installed; the reason names the first line at fault.
    """
    try:
        text = requirements.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AttemptFailed(Fault.USER, f"{requirements.name} cannot be read: {error}") from error
    folder = environments / key(text, scope)
    with _locked(folder.with_suffix(".lock")):
        if (folder / _DONE).exists():
            log.say(f"{requirements.name}: already installed")
        else:
            log.say(f"{requirements.name}: installing")
            # not made aside and renamed: programs in an environment name it by its path
            shutil.rmtree(folder, ignore_errors=True)
            _make(folder)
            _pip(folder, requirements, text, environment, log)
            (folder / _DONE).touch()
    return _python(folder)


def key(text: str, scope: str) -> str:
    """Names an environment by all that decides what is in it."""
    parts = [text, sys.version, sys.prefix]
    if any(_LOCAL.search(line) for line in _lines(text)):
        parts.append(scope)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _lines(text: str) -> list[str]:
    """The requirements, without comments and hashes."""
    joined = re.sub(r"\\\n", " ", text)
    stripped = (re.sub(r"(?:^|\s)#.*", "", line).strip() for line in joined.splitlines())
    return [re.sub(r"\s+--hash=\S+", "", line) for line in stripped if line]


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _make(folder: Path) -> None:
    """An empty environment that sees the agent's packages behind its own."""
    try:
        # the agent's pip is seen through the .pth file; one of its own is needed only where the agent has none
        venv.EnvBuilder(symlinks=True, with_pip=importlib.util.find_spec("pip") is None).create(folder)
        for site in (folder / "lib").glob("python*/site-packages"):
            # addsitedir, and not the plain path: it also obeys the .pth files in there
            lines = (f"import site; site.addsitedir({path!r})\n" for path in _parent_sites())
            (site / "_agent_packages.pth").write_bytes(os.fsencode("".join(lines)))
    except (OSError, subprocess.SubprocessError) as error:
        raise AttemptFailed(Fault.INFRASTRUCTURE, f"no environment for the requirements: {error}") from error


def _parent_sites() -> list[str]:
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages") and Path(path).is_dir()]


def _pip(folder: Path, requirements: Path, text: str, environment: Mapping[str, str], log: Log) -> None:
    command = [
        *(str(_python(folder)), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-color"),
        *("--progress-bar", "off", "-r", requirements.name),
    ]
    clean = {name: value for name, value in environment.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    result = subprocess.run(
        command, cwd=requirements.parent, env=clean, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    output = (result.stdout + result.stderr).decode(errors="replace")
    if result.returncode == 0:
        return
    for line in output.splitlines()[-_LAST_LINES:]:
        log.say(f"pip: {line}")
    fault = Fault.INFRASTRUCTURE if _NOT_THE_USERS.search(output) else Fault.USER
    raise AttemptFailed(fault, blame(requirements.name, text, output))


def blame(name: str, text: str, output: str) -> str:
    """One line: the first requirement that pip's errors speak of, and the first of them that does."""
    errors = [line.removeprefix("ERROR:").strip() for line in output.splitlines() if line.startswith("ERROR:")]
    for line in _lines(text):
        match = _NAME.match(line)
        about = [error for error in errors if line in error or (match and _speaks_of(error, match[1]))]
        if about:
            return f"{name}: `{line}` cannot be installed: {about[0]}"
    return f"{name} cannot be installed: {errors[0] if errors else 'see the log'}"


def _speaks_of(error: str, package: str) -> bool:
    pattern = re.sub(r"[-_.]+", "[-_.]+", re.escape(package).replace("\\-", "-").replace("\\.", "."))
    return bool(re.search(rf"(?<![\w.-]){pattern}(?![\w-])", error, re.IGNORECASE))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
