"""The whole exception tree of the operator.

    MgpuError                       1   a bug, unless a subclass says otherwise
    ├── InputError                  2   the user's request cannot be carried out as written
    │   ├── SpecError               2   the run file has mistakes (all of them at once)
    │   └── OverLimit               2   a limit of `mgpu limits` leaves no room for it now
    ├── ProviderError               3   the provider refused or did not answer
    │   ├── AuthError                   credentials are missing, wrong or expired
    │   ├── PermissionDenied            credentials are good, the action is not allowed
    │   ├── QuotaExceeded               an account limit; named, with how to raise it
    │   ├── NoCapacity                  the provider has none of it right now
    │   ├── NoOffer                     nothing on sale meets the requirements
    │   ├── BidTooLow                   the spot price is above what was bid
    │   ├── BillingError                balance, card or account state
    │   ├── InvalidRequest              the provider does not accept the request as such
    │   ├── Conflict                    the same token was used with other parameters
    │   ├── RateLimited                 too many calls; retry_after says when
    │   ├── Transient                   a retry may help
    │   ├── AmbiguousCreate             the answer was lost: find before retrying
    │   └── CleanupFailed               something was made and could not be ended; stays findable
    ├── StackError                  4   the Pulumi engine or the stack
    ├── ImageError                  4   a container image that cannot be built, pushed or found
    ├── RemoteError                 5   SSH to a node
    │   ├── HostKeyMismatch             the node shows another key than the pinned one
    │   ├── ConnectionFailed            no connection, or it was lost, within the deadline
    │   └── CommandFailed               a command on the node ended with a status that is not 0
    ├── TrainingFailed              6   the launcher ended without what was promised
    ├── NotAsExpected               6   the run succeeded, and a metric is not what its run file expects
    ├── TeardownIncomplete          7   something may still be billed; beats every other code
    ├── Stopped                     8   by budget, hard cap or deadline
    ├── Interrupted               130   by the user or a signal
    └── TakenOver                 130   another process supervises the run now

An error is three lines for the user: what is wrong and where, why, and what to do next.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import ClassVar, Literal

Scope = Literal["offer", "zone", "region", "provider", "account"]


class MgpuError(Exception):
    """The base of every error that mgpu raises on purpose.

    `what` says what is wrong and where, `why` the cause as far as it is known, `next_step` what to do. `queued`: runs
    of the same command that are queued all the same.
    """

    exit_code: ClassVar[int] = 1
    queued: tuple[str, ...] = ()

    def __init__(self, what: str, why: str = "", next_step: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.next_step = next_step

    def __str__(self) -> str:
        return "\n".join(line for line in (self.what, self.why, self.next_step) if line)

    def to_json(self) -> dict[str, object]:
        """The error as `--json` prints it, under `error`."""
        words = {"what": self.what, "why": self.why, "next_step": self.next_step}
        more = {"queued": list(self.queued)} if self.queued else {}
        return {"type": type(self).__name__, "exit_code": self.exit_code, **words, **more}


class InputError(MgpuError):
    """The request cannot be carried out as written."""

    exit_code = 2


class SpecError(InputError):
    """The run file has mistakes; `problems` holds all of them."""

    def __init__(self, path: str, problems: tuple[Problem, ...]) -> None:
        count = f"{len(problems)} problem" + ("s" if len(problems) != 1 else "")
        super().__init__(
            f"{path}: {count} in the run file",
            "\n".join(str(problem) for problem in problems),
            "Mend the lines named above; `mgpu spec` prints every key with its unit and default.",
        )
        self.path = path
        self.problems = problems

    def to_json(self) -> dict[str, object]:
        """Beside the words: each problem with its line and field."""
        return {**super().to_json(), "problems": [vars(problem) for problem in self.problems]}


class OverLimit(InputError):
    """A limit that was set for all runs leaves no room for one more now; `over` says of each limit by how much."""

    def __init__(self, what: str, why: str = "", next_step: str = "", *, over: Sequence[str] = ()) -> None:
        super().__init__(what, why, next_step)
        self.over = tuple(over)


class Problem:
    """One mistake in a run file: where (`line` counts from 1, 0 = unknown), which field, what, and a near name."""

    def __init__(self, path: str, line: int, field: str, message: str, nearest: str | None = None) -> None:
        self.path = path
        self.line = line
        self.field = field
        self.message = message
        self.nearest = nearest

    def __str__(self) -> str:
        hint = f" (did you mean `{self.nearest}`?)" if self.nearest else ""
        where = f"{self.path}:{self.line}" if self.line else self.path
        return f"{where}: {self.field}: {self.message}{hint}"


class ProviderError(MgpuError):
    """A provider refused or did not answer. `scope` is what the refusal blocks; `retry_after` is seconds, or None."""

    exit_code = 3

    def __init__(
        self,
        what: str,
        why: str = "",
        next_step: str = "",
        *,
        scope: Scope = "provider",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(what, why, next_step)
        self.scope: Scope = scope
        self.retry_after = retry_after


class AuthError(ProviderError):
    """Credentials are missing, wrong or expired."""


class PermissionDenied(ProviderError):
    """The credentials are good, the action is not allowed."""


class QuotaExceeded(ProviderError):
    """An account limit; the message names it and says how to raise it."""


class NoCapacity(ProviderError):
    """The provider has none of it right now."""


class NoOffer(ProviderError):
    """Nothing on sale meets the requirements."""


class BidTooLow(ProviderError):
    """The spot price is above what was bid."""


class BillingError(ProviderError):
    """Balance, card or account state."""


class InvalidRequest(ProviderError):
    """The provider does not accept the request as such; trying again will not help."""


class Conflict(ProviderError):
    """The same token was used before with other parameters."""


class RateLimited(ProviderError):
    """Too many calls; `retry_after` says when to come back."""


class Transient(ProviderError):
    """A retry may help."""


class AmbiguousCreate(ProviderError):
    """The answer to a create was lost: the gang may exist. Find before retrying."""


class CleanupFailed(ProviderError):
    """Something was made and could not be ended: it stays findable, and failover stops until it is gone."""


class StackError(MgpuError):
    """The Pulumi engine or the stack."""

    exit_code = 4


class ImageError(MgpuError):
    """A container image that cannot be built, pushed or found: the engine, the build or the registry says why."""

    exit_code = 4


class RemoteError(MgpuError):
    """SSH to a node."""

    exit_code = 5


class HostKeyMismatch(RemoteError):
    """The node shows another host key than the pinned one; nothing was sent to it."""


class ConnectionFailed(RemoteError):
    """No connection, or it was lost, within the deadline; `ranks` are the nodes, where several were called at once."""

    ranks: tuple[int, ...] = ()


class CommandFailed(RemoteError):
    """A command on a node ended with `status`, which is not 0; `stderr` holds its last lines."""

    def __init__(self, what: str, why: str = "", next_step: str = "", *, status: int, stderr: str = "") -> None:
        super().__init__(what, why, next_step)
        self.status = status
        self.stderr = stderr


class TrainingFailed(MgpuError):
    """The launcher ended without what was promised."""

    exit_code = 6


class NotAsExpected(MgpuError):
    """The run succeeded, and a metric is not what its run file expects."""

    exit_code = 6


class TeardownIncomplete(MgpuError):
    """Something may still be billed."""

    exit_code = 7


class Stopped(MgpuError):
    """Stopped by budget, hard cap or deadline."""

    exit_code = 8


class Interrupted(MgpuError):
    """Stopped by the user or a signal."""

    exit_code = 130


class TakenOver(MgpuError):
    """Another process supervises the run now: its record, its stack and its machines are not this one's any more."""

    exit_code = 130


_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_SHORT = {errno.EMFILE: "open files", errno.ENFILE: "open files", errno.ENOMEM: "memory", errno.EAGAIN: "processes"}


def of_this_machine(error: BaseException) -> InputError | None:
    """What a foreign error means that is no bug: a disk that is full, or that this user may not write to; too little
    memory, or too few files, processes or threads. None: it is something else."""
    if isinstance(error, OSError) and error.errno in _REFUSED:
        cure = "Make room, or give this user the right to it; XDG_STATE_HOME and XDG_DATA_HOME name other folders."
        return InputError(f"{error.filename or 'a file'}: {error.strerror}", "This machine refused it to mgpu.", cure)
    if not (short := _short_of(error)):
        return None
    cure = "End what else runs here, or raise the limit: `ulimit -a` shows them; a container has limits of its own."
    return InputError(f"this machine has not enough {short} for mgpu", f"{str(error) or type(error).__name__}.", cure)


def _short_of(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        # EAGAIN in other words is of a file that does not wait
        return _SHORT.get(error.errno, "") if error.strerror == os.strerror(error.errno) else ""
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "threads"
    return "memory" if isinstance(error, MemoryError) else ""
