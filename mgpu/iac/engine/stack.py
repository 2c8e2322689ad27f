"""Drives the Pulumi CLI: one `Stack`, brought up, looked at, destroyed.

The CLI as a plain subprocess, not through Pulumi's Automation API: that costs 0.2 to 1.1 s more a call, and takes the
CLI with it when its driver is interrupted, before the state is saved.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import yaml
from mgpu_train.agent.machine.procs import Process
from mgpu_train.timeouts import Timeouts

from mgpu import acquire
from mgpu.backend import location, settings
from mgpu.errors import Interrupted, MgpuError, StackError, TeardownIncomplete
from mgpu.events import Emit, Event, Note
from mgpu.iac import environment, failures, tokens
from mgpu.iac.engine import install, locks, operations, state_file
from mgpu.iac.engine.event_log import Change, EngineLog
from mgpu.iac.engine.process import CliProcess
from mgpu.iac.engine.project import project_files as project_files
from mgpu.iac.engine.project import project_name
from mgpu.iac.environment import HARD_CAP, IMAGE, MAX_USD, RANKED_UP_TO, SEARCHES
from mgpu.iac.naming import fleet_name, unmarked
from mgpu.iac.outputs import StackOutput, validated

_OUTPUT = "mgpu"
_PLAIN = ("--non-interactive", "--color", "never")
_ASK_S = 30.0
_NOTHING: Mapping[str, str] = {}


class Stack:
    """One stack of the Pulumi program in the folder `project`.

    With `own_config` the stack's configuration lies in `log_dir` and names `run_file` and the `folder` that its paths
    are relative to (None: its own), and nothing is written into the user's folder; `config` is all of it where the
    program reads no run file. Without `own_config` it is a stack of the user's, with the `Pulumi.<stack>.yaml` beside
    their program. What the CLI prints goes to `log_dir/pulumi.log`. Every call has a deadline made of `timeouts`, and
    raises StackError, the ProviderError that the plugin reported, or Interrupted.
    """

    def __init__(
        self,
        project: Path,
        name: str,
        run_file: Path,
        *,
        log_dir: Path,
        emit: Emit,
        timeouts: Timeouts,
        folder: Path | None = None,
        own_config: bool = True,
        config: Mapping[str, object] | None = None,
    ) -> None:
        self.project = project.resolve()
        self.name = name
        self._run_file = run_file.resolve()
        self._folder = folder or self._run_file.parent
        self._log_dir = log_dir.resolve()
        self._emit = emit
        self._timeouts = timeouts
        self._own_config = own_config
        self._values = config
        self._cli = CliProcess(grace_s=timeouts.destroy_s)
        self._provider = ""
        self._ousted: Process | None = None
        self._lost_hosts = frozenset[str]()
        self._exported: dict[str, Any] | None = None  # by the last `up`, until something else works on the stack

    @property
    def fleet(self) -> str:
        """The name under which a provider lists the stack's machines. Raises StackError."""
        project = project_name(self.project)
        now, before = fleet_name(project, self.name), unmarked(project, self.name)
        return before if before != now and before in state_file.fleets(project, self.name) else now

    # ---- the life of a stack

    def exists(self) -> bool:
        """Whether the backend knows the stack."""
        return state_file.state_key(project_name(self.project), self.name) is not None

    def init(self) -> None:
        """Makes the stack, if it is not there."""
        environment.make_backend_dir()
        if self._own_config:
            self._write_config()
        if not self.exists():
            self._make_way()
            whose = settings.secrets_provider()
            self._run("stack", "init", self.name, "--no-select", f"--secrets-provider={whose}")

    @contextmanager
    def telling(self, hear: Emit) -> Iterator[None]:
        """While the block runs, `hear` gets all events, too."""
        tell = self._emit

        def both(event: Event) -> None:
            tell(event)
            hear(event)

        self._emit = both
        try:
            yield
        finally:
            self._emit = tell

    def choose(self, provider: str) -> None:
        """Of several providers that the run file names, from here on the one whose machines the stack has."""
        self._provider = provider

    def up(
        self,
        hard_cap_at: float = 0.0,
        image: str = "",
        max_usd: float = 0.0,
        ranked_up_to: Sequence[float] = (),
        searches: int = 0,
    ) -> None:
        """Makes the machines be what the run file asks for. Those that a create which was cut off has made are
        adopted; what is left of its processes is ended first. `hard_cap_at`: UNIX seconds; a fleet that has to be made
        anew ends by then, too, and before it costs more than `max_usd` (0: no limit). `image`: what the run has settled
        on, repository@sha256:...; it is built or found no more, whatever the run file's `image:` says meanwhile.
        `ranked_up_to`: a `mgpu.plan.rank.Rank`; a fleet that is made is of an offer up to it. `searches`: how many for
        these machines have come to their end before; of a stack of the user's the plugin knows that.

        Raises:
            StackError: another operator is at work on the stack.
        """
        self._make_way()
        self._clear()
        limit_s = acquire.operation_s(self._timeouts)
        known = {
            HARD_CAP: repr(hard_cap_at) if hard_cap_at else "",
            IMAGE: image,
            MAX_USD: repr(max_usd) if max_usd else "",
            RANKED_UP_TO: json.dumps(ranked_up_to) if ranked_up_to else "",
            SEARCHES: str(searches) if searches and self._own_config else "",
        }
        more = {name: value for name, value in known.items() if value}
        self._exported = self._operate("up", "--yes", "--skip-preview", limit_s=limit_s, more=more).outputs

    def preview(self) -> tuple[Change, ...]:
        """What `up` would change, and which inputs are the cause; nothing is changed."""
        return tuple(self._operate("preview", limit_s=0).changes)

    def refresh(self) -> None:
        """Brings state in line with what the provider says. Entries of creates that were cut off are dropped: the next
        `up` adopts the machines that they may have made, and `destroy` sweeps them."""
        self._make_way()
        flags = ("--yes", "--skip-preview", "--clear-pending-creates")
        self._operate("refresh", *flags, limit_s=self._timeouts.destroy_s)

    def destroy(self) -> None:
        """Ends everything that the stack made; absent is success. Not stopped by an earlier `interrupt`."""
        self._cli.interrupted = False
        if not self.exists():
            return
        self._make_way()
        self._clear()
        self._operate("destroy", "--yes", "--skip-preview", limit_s=self._timeouts.destroy_s)

    def remove(self) -> None:
        """Forgets the empty stack, with its history, backups and own configuration; absent is success."""
        if self.exists():
            self._make_way()
            self._run("stack", "rm", self.name, "--yes", "--remove-backups", "--preserve-config")
        if self._own_config:
            for path in (self._config, self._log_dir / "Pulumi.yaml"):
                path.unlink(missing_ok=True)

    def outputs(self) -> StackOutput | None:
        """The stack output `mgpu`; None when the stack or the output is not there.

        Raises:
            StackError: it is not what docs/formats.md says.
        """
        values = self.values() if self._exported is None else self._exported
        return validated(values[_OUTPUT], self.name) if _OUTPUT in values else None

    def values(self) -> dict[str, Any]:
        """All outputs of the stack; none when it is not there."""
        return json.loads(self._run("stack", "output", "--json", "--stack", self.name)) if self.exists() else {}

    def private_key(self) -> str | None:
        """The private key that its state has, in OpenSSH's format; None: there is none."""
        if not self.exists():
            return None
        exported = json.loads(self._run("stack", "export", "--show-secrets", "--stack", self.name))
        for resource in (exported.get("deployment") or {}).get("resources") or ():
            if resource["type"] == tokens.SSH_KEY:
                return json.loads(resource["outputs"]["privateKey"]["plaintext"])
        return None

    def unprotect(self) -> None:
        """Takes the protection off all its resources, so that `destroy` may end them; the next `up` puts it back."""
        self._make_way()
        self._run("state", "unprotect", "--all", "--yes", "--stack", self.name)

    def interrupt(self) -> None:
        """Asks the CLI to cancel: what is under way is undone and saved. Later operations but `destroy` are refused."""
        self._cli.interrupt()

    def abandon(self) -> None:
        """Ends what is under way at once, for the stack may be another operator's by now: what it has made is found by
        whoever goes on, or ends by itself. Later operations but `destroy` are refused."""
        self._cli.interrupted = True
        operations.abandon(self._place)

    def oust(self, driver: Process, host: str, others: Collection[str] = ()) -> None:
        """From here on, what this driver has at work on the stack is ended as if it had died: it has lost the stack. On
        another host it cannot be seen from here; its locks count no more, nor do those of `others`, hosts that had lost
        the stack before. One of them may have this machine's name."""
        lives = host == os.uname().nodename and driver.alive
        self._ousted = driver if lives else None
        self._lost_hosts = frozenset({*others} if lives else {host, *others})

    # ---- configuration

    @property
    def _config(self) -> Path:
        return self._log_dir / f"Pulumi.{self.name}.yaml"

    def _write_config(self) -> None:
        # `stack init` knows no --config-file: it saves the encryption salt beside the Pulumi.yaml where it is called
        self._log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        stub = {"name": project_name(self.project), "runtime": "python"}
        environment.replace(self._log_dir / "Pulumi.yaml", yaml.safe_dump(stub))
        # as it is wanted now, and where this machine has it; the salt of the stack's secrets stays
        known = (yaml.safe_load(self._config.read_text(encoding="utf-8")) if self._config.exists() else None) or {}
        ours = {"mgpu:runFile": str(self._run_file), "mgpu:folder": str(self._folder)}
        ours |= {"mgpu:provider": self._provider} if self._provider else {}
        wanted = ours if self._values is None else dict(self._values)
        if known.get("config") != wanted:
            environment.replace(self._config, yaml.safe_dump({**known, "config": wanted}))

    @cached_property
    def _engine(self) -> install.PulumiEngine:
        return install.install_engine(lambda line: self._emit(Note(line)))

    def _environment(self) -> Mapping[str, str]:
        environment.make_passphrase()  # refuses an empty one
        # the event stream is an option of the CLI's debug commands
        ours = {"PULUMI_STACK": self.name, "PULUMI_DEBUG_COMMANDS": "1"} | operations.mark(self._place)
        ours |= {SEARCHES: "0"} if self._own_config else {}  # its run counts them
        return environment.process_env(environment.engine_env(self._engine.path) | ours)

    # ---- what an earlier operation left

    @property
    def _place(self) -> str:
        """By which the processes at work on this stack are known, whatever folder they were started in."""
        return f"{location.current().address}:{project_name(self.project)}/{self.name}"

    def _make_way(self) -> None:
        """Ends what dead operators left at work on the stack, and releases the locks of dead processes."""
        given_up = lambda: self._cli.interrupted  # noqa: E731
        save_s, ousted = self._timeouts.destroy_s, self._ousted
        operations.end_orphans(self._place, emit=self._emit, save_s=save_s, ousted=ousted, given_up=given_up)
        if not given_up():
            prefix = state_file.lock_prefix(project_name(self.project), self.name)
            locks.release_dead(prefix, self._place, self.name, self._emit, self._lost_hosts)
            state_file.drop_torn_attributes(project_name(self.project), self.name)

    def _clear(self) -> None:
        """Drops the entries of creates that were cut off, if there are any: `up` and `destroy` would keep them."""
        if state_file.pending_creates(project_name(self.project), self.name) and not self._cli.interrupted:
            self._emit(Note(f"stack {self.name}: an earlier create was cut off; looking at what it made"))
            self.refresh()

    # ---- calls of the CLI

    def _operate(self, verb: str, *flags: str, limit_s: float, more: Mapping[str, str] = _NOTHING) -> EngineLog:
        """An operation that starts the program or the plugin, with its events followed; `more` is for the plugin."""
        self._exported = None
        if self._cli.interrupted:
            raise Interrupted(f"stack {self.name}: interrupted before `pulumi {verb}`")
        # without a name: the raw stream carries secrets, and no crash may leave it behind
        with tempfile.TemporaryFile() as events, self._transcript(verb) as transcript:
            log = EngineLog(events.fileno(), self._emit, planned=verb == "preview")
            status = self._cli.run(
                [
                    *(str(self._engine.pulumi), verb, "--stack", self.name, *_PLAIN, *flags, *self._config_flags()),
                    *("--event-log", f"/dev/fd/{events.fileno()}"),
                ],
                cwd=self.project,
                env={**self._environment(), **more},
                out=transcript,
                err=transcript,
                limit_s=limit_s + self._timeouts.engine_s,
                pass_fd=events.fileno(),
                undone=True,
                look=log.follow,
            )
            log.follow()
        if status != 0:
            raise self._failure(verb, log.errors, status)
        return log

    def _run(self, *argv: str) -> str:
        """A short command's standard output."""
        own = self._own_config and self._config.exists()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            status = self._cli.run(
                [str(self._engine.pulumi), *argv, *_PLAIN],
                cwd=self._log_dir if own else self.project,
                env=self._environment(),
                out=out,
                err=err,
                limit_s=self._timeouts.engine_s,
            )
            if status != 0:
                raise self._failure(" ".join(argv[:2]), [_text(err)], status)
            return _text(out)

    def _config_flags(self) -> tuple[str, ...]:
        return ("--config-file", str(self._config)) if self._own_config and self._config.exists() else ()

    @contextmanager
    def _transcript(self, verb: str) -> Iterator[IO[bytes]]:
        """`pulumi.log`, opened for what the CLI prints, which holds no secrets."""
        self._log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self._log_dir / "pulumi.log").open("ab", buffering=0) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(f"== pulumi {verb} --stack {self.name}\n".encode())
            yield file

    def _failure(self, verb: str, messages: list[str], status: int) -> MgpuError:
        """What the plugin reported, where it did; else what the engine said."""
        if status < 0:
            why = f"Signal {-status} ended it, and its state was not saved. What it has made is not lost from sight."
            return StackError(f"stack {self.name}: `pulumi {verb}` was killed", why, "Run the same command again.")
        what = f"stack {self.name}: `pulumi {verb}` failed"
        log = self._log_dir / "pulumi.log"
        reported = next((found for text in messages if (found := failures.parse(text))), None)
        if self._cli.interrupted and not isinstance(reported, TeardownIncomplete):
            saved = "What it had under way was undone, and the state was saved."
            return Interrupted(f"stack {self.name}: `pulumi {verb}` was interrupted", saved)
        last = "\n".join(line for text in messages for line in text.splitlines()[-8:] if line.strip())
        cure = f"The whole output is in {log}." if log.exists() else ""
        if "failed to load checkpoint" in last:
            cure = f"Its state is damaged; a copy may be beside it: {self.name}.json.bak. `mgpu gc` finds the machines."
        return reported or StackError(what, last, cure)


def current_stack(project: Path) -> str | None:
    """PULUMI_STACK, else the stack that is selected in this folder (`pulumi stack select`), else None."""
    named = os.environ.get("PULUMI_STACK")
    engine = install.find_engine() if not named else None
    if engine is None:
        return named
    env = environment.process_env(environment.engine_env(engine.path))
    del env["PULUMI_STACK"]
    argv = [str(engine.pulumi), "stack", "--show-name", *_PLAIN]
    try:
        done = subprocess.run(
            argv,
            cwd=project,
            env=env,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StackError("Pulumi did not name the selected stack.", str(error), "Give `--stack NAME`.") from error
    return done.stdout.strip() or None if done.returncode == 0 else None


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
