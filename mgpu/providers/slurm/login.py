"""Slurm's commands, here or on the login node: a script for `sh`, and what it says. Foreign errors are translated here.

All of a call is one script, so that it costs one connection. Its words are arguments of `sh`, never part of its text.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
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
from mgpu.providers import slurm
from mgpu.providers.slurm.options import SlurmOptions

_CALL_S = 120.0  # Slurm's own commands give up earlier
_MARK = "@mgpu "  # before what a script says: what a user's start-up files print is passed over
_OPERATORS = ("HOME", "PATH", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "LD_LIBRARY_PATH", "SLURM_CONF")
_PREFIXES = ("MODULE", "LMOD", "BASH_FUNC_", "http_proxy", "https_proxy", "no_proxy", "HTTP", "NO_PROXY", "SSL_CERT")

# what Slurm and ssh print -> what it means; the first that is found counts
_SILENT = (
    r"[Uu]nable to contact|[Tt]imed out|Connection (refused|closed|reset)|Zero Bytes|temporarily|Communication|"
    r"[Ll]ost connection|Could not resolve|No route"
)
_ON_LOGIN = "Slurm's commands, bash, flock and python3 have to be on the PATH of the login node: `mgpu check slurm`."
_ASKS_NOTHING = "`ssh {login}` has to work without a question: keys, an agent, or a connection that is kept open."
_SAID: tuple[tuple[str, type[ProviderError], str], ...] = (
    (r"Permission denied \(|Host key verification failed|Too many authentication", AuthError, _ASKS_NOTHING),
    (r"mgpu: no locks", InvalidRequest, "Name a `slurm.work_folder` on a file system that has locks (flock)."),
    (_SILENT, Transient, "Ask again later; `mgpu check slurm` says more."),
    (r"not found|No such file or directory", InvalidRequest, _ON_LOGIN),
    (r"[Tt]ime limit", NoOffer, "Lower `max_hours`, or take a partition or QOS that allows as much."),
    (r"limit|Limit|policy", QuotaExceeded, "Ask for less, or have the limit of your account or QOS raised."),
    (r"not permitted|[Aa]ccess.*denied|not authorized", PermissionDenied, "Take a partition, account or QOS of yours."),
    (r"configuration is not available|More processors requested|node count", NoOffer, "Ask for less a node."),
    (r"", InvalidRequest, "`mgpu check slurm` tries the request without making it."),
)


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
        config = ("-F", os.path.expanduser(self.options.ssh_config)) if self.options.ssh_config else ()  # noqa: PTH111
        return ("ssh", *config, "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", *arguments)

    def said(self, script: str, *words: str, files: str = "", doing: str = "ask Slurm") -> list[str]:
        """What a part of login.sh says, line by line. `files`: what it reads, a script of its own.

        Raises:
            AmbiguousCreate: the answer to a submission was lost.
            ProviderError: Slurm refused, or does not answer; or ssh did not get there.
        """
        text = resources.files(slurm).joinpath("login.sh").read_text()
        given = " ".join(map(shlex.quote, (self.options.work_folder, *words)))
        program = f"set -- {given}\n{text}\n{script}\nexit\n"
        argv = [*self.ssh(), self.options.login, "exec sh -s"] if self.options.login else ["sh", "-s"]
        lost: type[ProviderError] = AmbiguousCreate if script.startswith("submit") else Transient
        what = f"slurm at {self.name}: could not {doing}"
        try:
            done = subprocess.run(
                argv,
                input=program.replace("@FILES@", files).encode(),
                capture_output=True,
                timeout=_CALL_S,
                check=False,
                env=passed_on(os.environ) if not self.options.login else None,
            )
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
        why = done.stderr.decode(errors="replace").strip()[-1000:] or f"it ended with status {done.returncode}"
        kind, cure = next((kind, cure) for pattern, kind, cure in _SAID if re.search(pattern, why))
        gone = done.returncode in (-9, -15, 255) and kind is not AuthError
        if gone or kind is Transient:
            raise lost(what, why, cure if kind is Transient else "")
        raise kind(what, why, cure.format(login=self.options.login), scope="offer" if kind is NoOffer else "provider")


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """What Slurm's commands, and with them the nodes, get of this process's environment: none of its secrets."""
    return {name: value for name, value in environ.items() if name in _OPERATORS or name.startswith(_PREFIXES)}
