"""Code of a commit, by the user's own `git` and its credentials: `git+https://host/repository@branch`, as for pip.

Submodules and files of Git LFS are not fetched.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mgpu.errors import InputError

_URL = re.compile(
    r"git\+(?P<url>(?:https|ssh|file)://[\w/\[][^\s@#]*(?:@[^\s@#/]+/[^\s@#]*)?)"
    r"@(?P<ref>[A-Za-z0-9_][\w./+-]*)(?:#subdirectory=(?P<folder>[^\s#]+))?"
)
_SHA = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_ASK_S, _FETCH_S = 60.0, 600.0


@dataclass(frozen=True)
class GitCode:
    """Where code comes from: a repository, a branch, tag or commit of it, and the folder in it of the run file."""

    url: str
    ref: str
    folder: str = "."

    @classmethod
    def of(cls, text: str) -> GitCode:
        """`git+URL@REF[#subdirectory=FOLDER]`. Raises InputError."""
        found = _URL.fullmatch(text)
        folder = PurePosixPath(found["folder"] or ".") if found else None
        if found is None or folder is None or folder.is_absolute() or ".." in folder.parts:
            why = "It is git+https://, git+ssh:// or git+file://, @ and a branch, a tag or a commit."
            cure = (
                "For example git+https://github.com/you/llm@main, or git+ssh://git@host/you/llm@v2#subdirectory=train."
            )
            raise InputError(f"{text} names no code", why, cure)
        return cls(found["url"], found["ref"], str(folder))

    def __str__(self) -> str:
        part = "" if self.folder == "." else f"#subdirectory={self.folder}"
        return f"git+{self.url}@{self.ref}{part}"

    def commit(self) -> str:
        """The commit that the branch or tag names now, 40 or 64 hex digits. Raises InputError."""
        if _SHA.fullmatch(self.ref):
            return self.ref
        names = [f"refs/heads/{self.ref}", f"refs/tags/{self.ref}^{{}}", f"refs/tags/{self.ref}", self.ref]
        said = _git(["ls-remote", "--", self.url, *names], None, _ASK_S, f"{self} cannot be asked")
        lines = (line.split("\t", 1) for line in said.splitlines() if "\t" in line)
        there = {name: commit for commit, name in lines}
        for name in names:
            if name in there:
                return there[name]
        cure = "See `git ls-remote`; a commit is named by all its digits."
        raise InputError(f"{self.url} has no branch or tag `{self.ref}`", "", cure)

    @contextmanager
    def at(self, commit: str) -> Iterator[Path]:
        """The folder in it as that commit has it, while the block runs. Raises InputError."""
        with tempfile.TemporaryDirectory(prefix="mgpu-code-") as made:
            what = f"{self} could not be fetched at {commit[:12]}"
            _git(["init", "--quiet", "."], made, _ASK_S, what)
            try:  # most servers give one commit by its name
                _git(["fetch", "--quiet", "--depth", "1", "--", self.url, commit], made, _FETCH_S, what)
            except InputError:
                every = ["+refs/heads/*:refs/remotes/o/*", "+refs/tags/*:refs/tags/*"]
                _git(["fetch", "--quiet", "--", self.url, *every], made, _FETCH_S, what)
            _git(["-c", "advice.detachedHead=false", "checkout", "--quiet", "--detach", commit], made, _FETCH_S, what)
            folder = Path(made, self.folder)
            if not folder.is_dir() or not folder.resolve().is_relative_to(Path(made).resolve()):
                raise InputError(f"{self.url} has no folder {self.folder} at {commit[:12]}", "", "Name another one.")
            yield folder


def _git(words: list[str], folder: str | None, limit_s: float, what: str) -> str:
    """What git prints. Nobody is asked for a password. Raises InputError, `what`."""
    quiet = {"GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": "ssh -oBatchMode=yes"} | os.environ
    quiet = {name: value for name, value in quiet.items() if name not in _OF_A_HOOK}
    cure = "Try `git ls-remote` with its address on this machine: the same access is needed by whoever passes."
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=folder,
            env=quiet,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=limit_s,
        )
    except FileNotFoundError as error:
        raise InputError(what, "There is no `git` on this machine.", "Install it.") from error
    except subprocess.TimeoutExpired as error:
        raise InputError(what, f"git did not end within {limit_s:.0f} s.", cure) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise InputError(what, "\n".join(lines[:5]), cure)
    return done.stdout


# set while git runs a hook that runs this: they would lead to another repository
_OF_A_HOOK = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX"}
