"""`agent facts`: what this machine is made of, as far as an image or a program depends on it.

Every question has a deadline, and one that gets no answer says why: a machine without GPUs or without Docker is a
machine, too. Nothing is started and nothing is changed.
"""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from mgpu_train.agent.status.log import clean

# without its persistence daemon the driver wakes every GPU first: seconds each
SMI_S, DOCKER_S = 60.0, 20.0
_FIELDS = ("name", "driver_version", "memory.total", "mig.mode.current", "compute_cap")
_KNOWN_ALWAYS = 3  # drivers before 450 do not know the fourth, and those before 510 not the last
_UNKNOWN_FIELD = re.compile(r'Field "(?:mig\.mode\.current|compute_cap)" is not a valid field')
_CUDA = re.compile(r"^cuda\s*(?::[^=]*)?=\s*(?:'([\d.]+)'|None)", re.MULTILINE)


class Gpu(BaseModel):
    """One GPU. None: the driver does not tell."""

    model_config = ConfigDict(frozen=True)

    name: str
    memory_mib: int | None = None
    compute_capability: str | None = None
    mig: bool | None = None  # it is divided (Multi-Instance GPU): a program sees one part of it


class Facts(BaseModel):
    """What a machine is made of. Each `..._problem` says why something is not known, or not there."""

    model_config = ConfigDict(frozen=True)

    python: str
    machine: str  # x86_64, aarch64
    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_problem: str | None = None
    torch: str | None = None  # None: not installed
    cuda: str | None = None  # what torch was built with; None with a torch: built without
    docker: str | None = None
    docker_root: str | None = None
    docker_free_bytes: int | None = None
    docker_problem: str | None = None


class NoAnswer(Exception):
    """A program is not there, failed, or was too slow; one line."""


def facts() -> Facts:
    """All of them; within SMI_S + DOCKER_S."""
    own = {"python": platform.python_version(), "machine": platform.machine()}
    return Facts.model_validate(own | _gpus() | _torch() | _docker())


def parsed(text: str) -> tuple[str | None, tuple[Gpu, ...]]:
    """The driver and the GPUs in what nvidia-smi printed (CSV, no header, no units).

    Raises:
        ValueError: it is not that.
    """
    rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if row]
    if any(not _KNOWN_ALWAYS <= len(row) <= len(_FIELDS) for row in rows):
        raise ValueError(f"nvidia-smi printed {text.strip()!r}")
    gpus = tuple(_gpu(*row) for row in rows)
    return (_told(rows[0][1]) if rows else None), gpus


def _gpu(name: str, _driver: str, memory: str, mig: str = "[N/A]", capability: str = "[N/A]") -> Gpu:
    divided = {"Enabled": True, "Disabled": False}.get(mig)
    return Gpu(name=name, memory_mib=_number(memory), compute_capability=_told(capability), mig=divided)


def _gpus() -> dict[str, object]:
    try:
        driver, gpus = parsed(_smi())
    except (NoAnswer, ValueError) as error:
        return {"gpu_problem": clean(str(error))}
    return {"driver": driver, "gpus": gpus, "gpu_problem": None if gpus else "nvidia-smi lists no GPU"}


def _smi() -> str:
    for count in range(len(_FIELDS), _KNOWN_ALWAYS, -1):
        try:
            return output(_query(_FIELDS[:count]), SMI_S)
        except NoAnswer as error:
            if not _UNKNOWN_FIELD.search(str(error)):
                raise
    return output(_query(_FIELDS[:_KNOWN_ALWAYS]), SMI_S)


def _query(fields: tuple[str, ...]) -> list[str]:
    return ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def _told(value: str) -> str | None:
    return None if value.startswith("[") else value  # [N/A], [Not Supported], [Unknown Error]


def _number(value: str) -> int | None:
    return int(value) if value.isdecimal() else None


def _torch() -> dict[str, object]:
    """Read, not imported: that takes seconds, and on a machine with a broken driver it may not end well."""
    try:
        torch = importlib.metadata.version("torch")
        found = importlib.util.find_spec("torch")
        built = (
            _CUDA.search(Path(found.origin).with_name("version.py").read_text(encoding="utf-8"))
            if found and found.origin
            else None
        )
    except (importlib.metadata.PackageNotFoundError, OSError):
        return {}
    return {"torch": torch, "cuda": built[1] if built else None}


def _docker() -> dict[str, object]:
    try:
        text = output(["docker", "info", "--format", "[{{json .ServerVersion}},{{json .DockerRootDir}}]"], DOCKER_S)
        version, root = json.loads(text)
        if not version:  # older clients answer without their daemon
            raise NoAnswer("docker has no daemon that answers")
    except (NoAnswer, ValueError) as error:
        return {"docker_problem": clean(str(error))}
    return {"docker": version, "docker_root": root, "docker_free_bytes": _free(root)}


def _free(root: str) -> int | None:
    try:
        disk = os.statvfs(root)
    except OSError:  # another machine's, or in a namespace of the daemon's own
        return None
    return disk.f_bavail * disk.f_frsize


def output(command: list[str], seconds: float) -> str:
    """What a program prints. Raises NoAnswer: it is not there, failed, or was too slow."""
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, encoding="utf-8", errors="replace"
        )
    except FileNotFoundError:
        raise NoAnswer(f"there is no program {command[0]}") from None
    except OSError as error:
        raise NoAnswer(f"{command[0]}: {error}") from error
    try:
        out, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        process.kill()  # and no wait for it, as subprocess.run would: what hangs in a driver does not die
        raise NoAnswer(f"{command[0]} did not answer within {seconds:g} s") from error
    if process.returncode:
        words = said.strip() or out.strip() or "no word"
        raise NoAnswer(f"{command[0]}: {words} (exit status {process.returncode})")
    return out.strip()
