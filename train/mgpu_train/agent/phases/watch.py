"""Watches a launcher from outside until it has ended: progress, stalls, requests to stop, a newer attempt."""

from __future__ import annotations

import json
import time
from pathlib import Path

from mgpu_train.agent.attempt.attempt import Attempt
from mgpu_train.agent.attempt.decide import DISK_FULL, Act, AttemptFailed, Cause, Ended, Watched, gone, look
from mgpu_train.agent.attempt.hang import Hang
from mgpu_train.agent.attempt.liveness import Liveness, Silence, Stage, deadline_s
from mgpu_train.agent.attempt.save_budget import NOTHING, Need, need
from mgpu_train.agent.machine import kernel_log, procs
from mgpu_train.agent.machine.procs import Process
from mgpu_train.agent.phases import evidence, folders
from mgpu_train.agent.phases.launcher_process import Launch, LauncherProcess
from mgpu_train.agent.phases.peers import Peers
from mgpu_train.agent.status.log import clean, last_words, tail
from mgpu_train.agent.status.status import Fault, Phase
from mgpu_train.agent.status.tail import MetricsTail, Progress
from mgpu_train.agent.uploads.saves import tidy
from mgpu_train.agent.uploads.uploads import Uploads
from mgpu_train.checkpoint.local import finished

_NAMED = 3  # processes that a line names
_FOREIGN = "runs as another user than the agent (sudo), and"
CLOCKS_S = 1.0  # the kernel's log has another clock than its uptime


class Watch:
    """One launcher under watch. Nothing is believed but what can be seen: metrics, checkpoints, and a user's log.

    The attempt is judged as a whole: see `liveness`.
    """

    def __init__(self, attempt: Attempt, uploads: Uploads | None, resumed_step: int = -1) -> None:
        """`uploads` looks at the checkpoint folder, where the node has a part in the checkpoints."""
        self._attempt, self._uploads, self._resumed = attempt, uploads, resumed_step
        self._tail = MetricsTail(Path(attempt.layout.metrics))
        self._metrics = Progress()
        self._saved = -1
        self._logged = self._log_size()
        self._durable = (-1, -1)  # steps uploaded and committed
        self._liveness = Liveness(attempt.job, time.monotonic())
        self._peers = Peers(attempt.job, attempt.say)
        self._overdue = False
        self._cause: Cause | None = None
        self._warned = False
        self._hang: Hang | None = None  # what the ranks have shown of it

    def _need(self) -> Need:
        """What a last save would take now. What another node uploads does not depend on this machine."""
        if self._attempt.job.checkpoint is None:
            return NOTHING
        upload_s = self._uploads.expect_s() if self._uploads else 0.0
        return need(self._metrics.saves.lasted, self._metrics.step_s, upload_s)

    def run(self, launch: Launch) -> Ended:
        """Starts the launcher and returns when it, and everything that it started, has ended.

        Raises:
            AttemptFailed: it could not be started; or it has to be ended, and is another user's.
        """
        begin, starved, up_s = self._attempt.log.size, procs.out_of_memory_kills(), procs.uptime_s()
        try:
            launcher = LauncherProcess(launch, self._attempt.log.fd)
        except OSError as error:
            raise AttemptFailed(Fault.USER, f"the launcher cannot be started: {error}") from error
        self._liveness.sign(time.monotonic(), Stage.FIRST_STEP)
        self._peers.start()
        if self._uploads is not None:
            self._uploads.start()
        self._attempt.need = self._need
        while (code := launcher.poll()) is None:
            # a torchrun whose ranks were stopped along with a peer's waits 5 minutes for the peer's, which may be gone;
            # one that ends by itself has until the next pass
            along = self._metrics.ended == "stopped"
            self._pass()
            self._act(launcher, along=along)
            time.sleep(self._attempt.times.poll_s)
        full = self._full
        if code == 0 and self._cause is None:
            self._tell_left(launcher.left)
        launcher.kill(self._attempt.times.kill_s)  # survivors: ranks whose launcher died before them
        self._pass()
        self._blame_notice()
        self._attempt.need = lambda: NOTHING  # what was saved is on disk
        rank, rank_code = _first_failure(Path(self._attempt.layout.failure(self._attempt.job.attempt)))
        lines, known = tail(self._attempt.log, begin), self._peers.known
        if code and self._cause is None:
            self._hang = evidence.read(self._attempt, {})  # what torch's flight recorder has left by itself
        return Ended(
            exit_code=code,
            last_words=last_words(lines),
            lines=lines,
            kernel=tuple(kernel_log.since(up_s - CLOCKS_S)) if code else (),
            rank=rank,
            rank_code=rank_code,
            full=full,
            starved=procs.out_of_memory_kills() - starved,
            peers_answer=known.heard and not known.silent,
            hang=self._hang.words if self._hang else "",
            cause=self._cause,
            said=self._metrics.ended,
            resumed_step=self._resumed,
            saved_step=self._saved,
        )

    def _tell_left(self, left: list[Process]) -> None:
        """A program that goes to the background, or starts a server, is to know what becomes of it."""
        if not left:
            return
        many = f"{len(left)} processes that the program left running were"
        one = "1 process that the program left running was"
        named = "; ".join(filter(None, (clean(procs.command_line(each.pid), 80) for each in left[:_NAMED])))
        self._attempt.say(f"{one if len(left) == 1 else many} ended with it: {named}")

    def _act(self, launcher: LauncherProcess, *, along: bool) -> None:
        stop, now = self._attempt.stop, time.monotonic()
        quiet = self._quiet(now)
        if quiet.hung and self._cause is None and stop.asked is None and self._attempt.going is None:
            self._ask_ranks()
            self._pass()  # one that came back to life meanwhile lives on
            now = time.monotonic()
            quiet = self._quiet(now)
        seen = Watched(
            now=now,
            hung=self._why_hung() if quiet.hung else None,
            silent=quiet.silent,
            asked=stop.asked,
            asked_now=stop.now,
            going=self._attempt.going,
            fenced=self._uploads.fenced if self._uploads else None,
            resumed_step=self._resumed,
            saved_step=self._saved,
            save_s=self._need().save_s,
            ending=self._cause,
        )
        act, cause = look(seen, self._attempt.times)
        if cause is not None and self._cause is None:
            self._attempt.say(f"ending the launcher: {cause.reason}")
        self._cause = cause
        if act is Act.KILL:
            if stop.now and self._hang is None and self._liveness.doubtful(now):  # for a peer's sake: it hung as well
                self._ask_ranks()
            if not launcher.kill(self._attempt.times.kill_s) and launcher.foreign and cause is not None:
                raise AttemptFailed(cause.fault, f"{cause.reason}; the launcher {_FOREIGN} cannot be ended")
        elif (act is Act.TERMINATE or along) and not self._warned:
            self._warned = True
            if launcher.foreign:
                self._attempt.say(f"the launcher {_FOREIGN} cannot be asked to save and exit: start it without sudo")
            launcher.terminate()

    def _blame_notice(self) -> None:
        """Some providers signal the program itself, which may end before the agent has heard of it: with exit code 0
        where it saved, with the signal's where it did not. Neither tells whether it had finished, unless it says so."""
        going, now = self._attempt.going, time.monotonic()
        if self._cause is None and going is not None and self._metrics.ended is None:
            self._cause = gone(going, now, self._attempt.times)

    def _ask_ranks(self) -> None:
        self._hang = evidence.collect(self._attempt, self._metrics.done)
        self._attempt.tick(alive=False, hang=self._attempt.public(self._hang.words), missing_rank=self._hang.missing)

    def _why_hung(self) -> str:
        told = self._liveness.reason, DISK_FULL if self._full else "", self._hang.words if self._hang else ""
        return "; ".join(filter(None, told))

    @property
    def _full(self) -> bool:
        """Whether there is no room for signs of progress, or last words."""
        return folders.full(Path(self._attempt.layout.root))

    def _pass(self) -> None:
        signs = self._metrics.signs
        progress = self._observe()
        changes = dict(self._metrics.fields)
        now = time.monotonic()
        if progress or self._metrics.signs > signs or self._durably():
            self._liveness.sign(now, self._metrics.stage, stepped=self._metrics.fields["step"] >= 0)
        if progress:
            changes["progress_at"] = time.time()
            if self._attempt.report.status.phase is Phase.LAUNCHING:
                self._attempt.enter(Phase.TRAINING)
        if self._uploads is not None:
            self._tell_saves(self._uploads)
            changes["checkpoint"] = self._uploads.status
            drain_s = self._uploads.drain_s()
            changes["drain_s"] = drain_s if drain_s > self._attempt.times.drain_s else None
        self._peers.vouch(self._liveness.until)
        quiet = self._quiet(now)
        changes |= {
            "quiet_s": deadline_s(self._liveness.stage, self._attempt.times),
            "quiet_until": time.time() + quiet.until - now,
            "overdue": quiet.overdue,
        }
        if quiet.overdue and not self._overdue:
            self._attempt.say(f"{self._liveness.reason}; but some nodes were never heard here, and may be at work")
        self._overdue = quiet.overdue
        self._attempt.tick(alive=progress or (self._cause is None and not quiet.hung), **changes)

    def _quiet(self, now: float) -> Silence:
        return self._liveness.judge(now, self._peers.known)

    def _durably(self) -> bool:
        """True where more of the checkpoints has become safe since the last look."""
        if self._uploads is None:
            return False
        status, before = self._uploads.status, self._durable
        self._durable = status.uploaded_step, status.committed_step
        return self._durable > before

    def _tell_saves(self, uploads: Uploads) -> None:
        """What the program says of its saves goes into the status, without secrets; a failed one into the log, too."""
        said = dict(self._metrics.saves.fields)
        if problem := said.get("save_problem"):
            said["save_problem"] = clean(self._attempt.public(problem), 300)
        if said.get("save_failed", 0) > uploads.status.save_failed:
            self._attempt.say(f"checkpoint: {said['save_problem']}")
        uploads.note(**said)

    def _observe(self) -> bool:
        """Looks at everything; True: there was progress since the last look."""
        steps = [self._metrics.take(record) for record in self._tail.poll()]
        saved = self._uploads.look() if self._uploads else self._tidy()
        logged = self._log_size()
        # the bundled trainer has metrics; of a program that is not ours the log is all there is
        spoke = self._attempt.job.command is not None and logged > self._logged
        progress = any(steps) or saved > self._saved or spoke
        self._saved, self._logged = max(saved, self._saved), logged
        return progress

    def _tidy(self) -> int:
        """The newest finished checkpoint of a node that uploads none; the node keeps no more than the newest two."""
        if self._attempt.job.checkpoint is None:
            return max((step for step, _ in finished(self._attempt.checkpoints)), default=-1)
        return max(tidy(self._attempt.checkpoints, None), default=-1)

    def _log_size(self) -> int:
        return self._attempt.log.size - self._attempt.log.own


def _first_failure(path: Path) -> tuple[int | None, int]:
    """The rank that failed first and its exit code, from what torchrun has left; None where it has left nothing."""
    try:
        said = json.loads(path.read_bytes())
        return int(said["rank"]), int(said["exit_code"])
    except (OSError, ValueError, TypeError, KeyError):
        return None, 0
