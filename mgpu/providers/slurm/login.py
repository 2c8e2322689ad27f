"""Slurm's commands, here or on the login node: a script for `sh`, and what it says. Foreign errors are translated here.

All of a call is one script, so that it costs one connection. Its words are arguments of `sh`, never part of its text.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from importlib import resources

from mgpu.errors import (
    AmbiguousCreate,
    AuthError,
    InvalidRequest,
    NoOffer,
    PermissionDenied,
    ProviderError,
    QuotaExceeded,
    Transient,
)
from mgpu.paths import expanded
from mgpu.providers import slurm
from mgpu.providers.slurm.options import SlurmOptions

_CALL_S = 120.0  # Slurm's own commands give up earlier
_MARK = "@mgpu "  # before what a script says: what a user's start-up files print is passed over
_BEGINS = (
    f"{_MARK}begins\n"  # on stderr: Slurm's words stand behind it, and before it what ssh and start-up files print
)
_QUIET = tuple(f"-o{each}" for each in ("BatchMode=yes", "ConnectTimeout=15", "LogLevel=ERROR"))  # no banners
_OPERATORS = ("HOME", "PATH", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "LD_LIBRARY_PATH", "SLURM_CONF", "SLURM_JWT")
_PREFIXES = ("MODULE", "LMOD", "BASH_FUNC_", "http_proxy", "https_proxy", "no_proxy", "HTTP", "NO_PROXY", "SSL_CERT")

# what Slurm and ssh print -> what it means; the first that is found counts
_SILENT = (
    r"[Uu]nable to contact|[Tt]imed out|Connection (refused|closed|reset)|Zero Bytes|temporarily|Communication|"
    r"[Ll]ost connection|Could not resolve|No route"
)
_ON_LOGIN = "Slurm's commands, bash, flock and python3 have to be on the PATH of the login node: `mgpu check slurm`."
_ASKS_NOTHING = "`ssh {login}` has to work without a question: keys, an agent, or a connection that is kept open."
_OF_YOURS = "Take a partition, account or QOS of yours."
_SAID: tuple[tuple[str, type[ProviderError], str], ...] = (
    (r"Permission denied \(|Host key verification failed|Too many authentication", AuthError, _ASKS_NOTHING),
    (r"mgpu: no locks", InvalidRequest, "Name a `slurm.work_folder` on a file system that has locks (flock)."),
    (r"mgpu: cannot write", InvalidRequest, "Free space, or quota, in `slurm.work_folder`."),
    (r"another work folder", InvalidRequest, "Name that `slurm.work_folder` again, or end the job with scancel."),
    (_SILENT, Transient, "Ask again later; `mgpu check slurm` says more."),
    (r"command not found|: not found|No such file or directory", InvalidRequest, _ON_LOGIN),
    (r"accounting/QOS policy", QuotaExceeded, "Ask for less, or have the limit of your account or QOS raised."),
    (r"[Tt]ime limit", NoOffer, "Lower `max_hours`, or take a partition or QOS that allows as much."),
    (r"configuration is not available|More processors requested|[Nn]ode count", NoOffer, "Ask for less a node."),
    (r"limit|Limit|policy", QuotaExceeded, "Ask for less, or have the limit of your account or QOS raised."),
    (r"not permitted|[Aa]ccess.*denied|not authorized", PermissionDenied, _OF_YOURS),
    (r"", InvalidRequest, "`mgpu check slurm` tries the request without making it."),
)
# of a submission: this partition is not for this user, or not now; another one may be
_CLOSED = (
    r"not permitted|[Aa]ccess.*denied|account/partition combination|[Ii]nvalid qos|"
    r"partition not available|partition configuration not available|[Ii]nvalid partition"
)

ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
)
"""The states of a job that runs nowhere any more; whatever else there is, or will be, is no end."""


class Login:
    """Where Slurm's commands run."""

    def __init__(self, options: SlurmOptions) -> None:
        self.options = options

    @property
    def name(self) -> str:
        """How messages and offers name it."""
        return self.options.login.rpartition("@")[2] if self.options.login else "here"

    def ssh(self, *arguments: str) -> tuple[str, ...]:
        """The user's own ssh, which asks nothing, to the login node."""
        config = ("-F", str(expanded(self.options.ssh_config))) if self.options.ssh_config else ()
        return ("ssh", *config, *_QUIET, *arguments)

    def said(self, script: str, *words: str, files: str = "", doing: str = "ask Slurm") -> list[str]:
        """What a part of login.sh says, line by line. `files`: what it reads, a script of its own.

        Raises:
            AmbiguousCreate: the answer to a submission was lost.
            ProviderError: Slurm refused, or does not answer; or ssh did not get there.
        """
        text = resources.files(slurm).joinpath("login.sh").read_text(encoding="utf-8")
        given = " ".join(map(shlex.quote, (self.options.work_folder, *words)))
        program = f"set -- {given}\n{text}\n{script}\nexit\n"
        argv = [*self.ssh(), self.options.login, "exec sh -s"] if self.options.login else ["sh", "-s"]
        lost: type[ProviderError] = AmbiguousCreate if script.startswith("submit") else Transient
        what = f"slurm at {self.name}: could not {doing}"
        try:
            # to a file: a connection that ssh keeps open (ControlPersist) may hold stderr, and a pipe would not end
            with tempfile.TemporaryFile() as errors:
                done = subprocess.run(
                    argv,
                    input=program.replace("@FILES@", files).replace("@ENDED@", "|".join(ENDED)).encode(),
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    timeout=_CALL_S,
                    check=False,
                    env=passed_on(os.environ) if not self.options.login else None,
                )
                errors.seek(0)
                complaint = errors.read().decode(errors="replace")
        except subprocess.TimeoutExpired as error:
            raise lost(what, f"no answer within {_CALL_S:.0f} s") from error
        except OSError as error:
            raise InvalidRequest(what, str(error), "Install an OpenSSH client.") from error
        answers = [
            line.removeprefix(_MARK)
            for line in done.stdout.decode(errors="replace").splitlines()
            if line.startswith(_MARK)
        ]
        if done.returncode == 0:
            return answers
        if done.returncode != 255:  # 255 is ssh's own
            complaint = complaint.rpartition(_BEGINS)[2]
        why = complaint.replace(_BEGINS, "").strip()[-1000:] or f"it ended with status {done.returncode}"
        kind, cure = next((kind, cure) for pattern, kind, cure in _SAID if re.search(pattern, why))
        if lost is AmbiguousCreate and kind in (PermissionDenied, InvalidRequest) and re.search(_CLOSED, why):
            kind, cure = NoOffer, _OF_YOURS
        gone = done.returncode in (-9, -15, 255) and kind is not AuthError
        if gone or kind is Transient:
            raise lost(what, why, cure if kind is Transient else "")
        raise kind(what, why, cure.format(login=self.options.login), scope="offer" if kind is NoOffer else "provider")


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """What Slurm's commands, and with them the nodes, get of this process's environment: none of its secrets but the
    token that logs in to Slurm, which the job forgets before anything of it begins (batch.sh)."""
    return {name: value for name, value in environ.items() if name in _OPERATORS or name.startswith(_PREFIXES)}
