"""What has `mgpu reconcile` called again and again: the files that it takes, and the commands that put them to work.

systemd and cron call one script of this user's, which has the environment that a pass needs: theirs is nearly empty.
Secrets are in none of these files, but in one beside the script that the user fills, or in the CI's own store.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import yaml

from mgpu import __version__, paths
from mgpu.backend import location, settings
from mgpu.errors import InputError, StackError
from mgpu.run.record import files
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import unsettled
from mgpu.schedule import kept
from mgpu.spec import environment
from mgpu.spec.load import accepted
from mgpu.words import duration

_COMMAND_S = 30.0  # systemctl, crontab
_KEPT = ("PATH", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")
_KEPT_TOO = (
    *("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy", "http_proxy", "no_proxy", "AWS_CA_BUNDLE"),
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "MGPU_TIMEOUTS"),
    *("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "DOCKER_HOST", "SSL_CERT_FILE"),
)


@dataclass(frozen=True)
class Command:
    """A program that is run once, with what it reads."""

    argv: tuple[str, ...]
    stdin: str | None = None

    def run(self) -> str:
        """What it says. Raises StackError."""
        words = " ".join(self.argv)
        try:
            done = subprocess.run(
                [*self.argv],
                input=os.fsencode(self.stdin) if self.stdin is not None else None,
                capture_output=True,
                timeout=_COMMAND_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise StackError(f"`{words}` could not be run", str(error), "Take another way: see --help.") from error
        if done.returncode:
            why = os.fsdecode(done.stderr).strip() or f"It ended with exit code {done.returncode}."
            raise StackError(f"`{words}` failed", why, "Take another way: see --help.")
        return os.fsdecode(done.stdout)  # each byte of a crontab of the user's own comes back as it is


@dataclass(frozen=True)
class Caller:
    """One way. `files`: by path, what is in them; `own`: those that are the user's once they are there; `begin` and
    `end`: what puts it to work, and ends it; `by_hand`, `by_hand_after`: what is left to the user; `require`: that what
    `begin` goes by is so still, raises StackError."""

    files: Mapping[Path, str]
    own: Mapping[Path, str] = field(default_factory=dict)
    begin: tuple[Command, ...] = ()
    end: tuple[Command, ...] = ()
    by_hand: tuple[str, ...] = ()
    by_hand_after: tuple[str, ...] = ()
    require: Callable[[], None] = lambda: None

    def install(self) -> None:
        """Writes the files, for this user alone, and puts it to work. Raises OSError, StackError."""
        self.require()
        for path, text in self.files.items():
            _write(path, text)
        for path, text in self.own.items():
            if not path.exists():
                _write(path, text)
        for command in self.begin:
            command.run()

    def remove(self) -> None:
        """Ends it, and removes the files but the user's own. Raises OSError, StackError."""
        for command in self.end:
            command.run()
        for path in self.files:
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Needs:
    """What passes need, by what the backend has. By default nothing, for what is only taken back: the backend may be
    gone by then."""

    variables: tuple[str, ...] = ()
    passphrase: bool = False  # encrypts the secrets of stacks
    git: bool = False  # fetches code

    @classmethod
    def asked(cls) -> Needs:
        """Raises StackError, SpecError."""
        passphrase = settings.secrets_provider() == settings.PASSPHRASE
        fetches = any(schedule.code_from for schedule in kept.every().schedules.values())
        return cls(tuple(variable_names()), passphrase, fetches)


def systemd(every_s: float, needs: Needs) -> Caller:
    """A timer of this user's. The next pass begins so long after the one before it has ended."""
    script, name = _script(needs), caller_name()
    units = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"
    service = f"""\
# Written by `mgpu schedule install --systemd`.
[Unit]
Description=mgpu: one pass over {location.current().address}

[Service]
Type=oneshot
ExecStart=/bin/sh {_systemd_quoted(script.path)}
# a pass lasts as long as a machine takes to come; what it leaves behind, nodes of provider local, outlives it
TimeoutStartSec=infinity
KillMode=process
"""
    timer = f"""\
# Written by `mgpu schedule install --systemd`.
[Unit]
Description=mgpu: a pass every {duration(every_s)}

[Timer]
OnBootSec=60
OnActiveSec=1
OnUnitInactiveSec={every_s:.0f}
AccuracySec=10

[Install]
WantedBy=timers.target
"""
    call = ("systemctl", "--user")
    return Caller(
        files={script.path: script.text, units / f"{name}.service": service, units / f"{name}.timer": timer},
        own={script.secrets: script.empty},
        begin=(Command((*call, "daemon-reload")), Command((*call, "enable", "--now", f"{name}.timer"))),
        end=(Command((*call, "disable", "--now", f"{name}.timer")),),
        by_hand=(
            *script.by_hand,
            f"journalctl --user -u {name}    what the passes said",
            "loginctl enable-linger    once: it goes on while you are logged out",
        ),
    )


def cron(every_s: float, needs: Needs) -> Caller:
    """A line of this user's crontab."""
    script, mark = _script(needs), f"# {caller_name()}"
    log = paths.state_dir() / f"{caller_name()}.log"
    line = f"{fields(every_s)} /bin/sh {shlex.quote(str(script.path))} >> {shlex.quote(str(log))} 2>&1 {mark}"
    before = _crontab()
    others = [each for each in before if not each.endswith(mark)]

    def require() -> None:
        if _crontab() != before:
            what, why = "the crontab has changed since it was read", "What was written would take that back."
            raise StackError(what, why, "Nothing was written; install again.")

    return Caller(
        files={script.path: script.text},
        own={script.secrets: script.empty},
        begin=(Command(("crontab", "-"), _lines([*others, line.replace("%", "\\%")])),),
        end=(Command(("crontab", "-"), _lines(others)),),
        by_hand=(*script.by_hand, f"tail -f {shlex.quote(str(log))}    what the passes said"),
        require=require,
    )


def github(every_s: float, needs: Needs) -> Caller:
    """A workflow of the repository in the present folder."""
    names = [*dict.fromkeys((*(() if at_aws() else AWS_KEYS[:2]), *needs.variables))]
    refused = [name for name in names if name.startswith("GITHUB_") and name != _THE_WORKFLOWS]
    theirs = [name for name in names if name not in (*refused, _THE_WORKFLOWS)]
    steps: list[Mapping[str, object]] = [{"uses": "actions/setup-python@v6", "with": {"python-version": "3.12"}}]
    if at_aws():
        role = {"role-to-assume": "${{ vars.MGPU_AWS_ROLE }}", "aws-region": region()}
        steps.append({"uses": "aws-actions/configure-aws-credentials@v5", "with": role})
    secret = {_THE_PASSPHRASE: {"env": {PASSPHRASE: f"${{{{ secrets.{PASSPHRASE} }}}}"}}}
    steps += [{"name": name, "run": run, **secret.get(name, {})} for name, run in _set_up(needs).items()]
    given = {name: f"${{{{ secrets.{name} }}}}" for name in names if name not in refused}
    steps.append({"name": "One pass", "run": "mgpu reconcile", "env": given})
    may = {"statuses": "write"} if _THE_WORKFLOWS in names else {}
    workflow = {
        "name": "mgpu",
        "on": {"schedule": [{"cron": fields(every_s)}], "workflow_dispatch": {}},
        "permissions": {"contents": "read", "id-token": "write", **may},
        "jobs": {
            "reconcile": {
                "runs-on": "ubuntu-latest",
                "timeout-minutes": 60,
                "env": {location.VARIABLE: url_elsewhere()},
                "steps": steps,
            }
        },
    }
    aws = ("MGPU_AWS_ROLE: a variable of the repository, the role that its workflows take by OpenID Connect",)
    return Caller(
        files={Path(".github/workflows/mgpu.yml"): as_yaml("--github", workflow)},
        by_hand=(
            "commit the file to the default branch, and push: GitHub calls it from then on",
            *(aws if at_aws() else ()),
            f"secrets of the repository: {', '.join([PASSPHRASE, *theirs])}",
            *(f"{name}: GitHub keeps no secret of such a name; name another one in the run file" for name in refused),
        ),
    )


def gitlab(every_s: float, needs: Needs) -> Caller:
    """A job of the repository in the present folder, for a pipeline schedule."""
    aws = at_aws()
    names = dict.fromkeys((PASSPHRASE, *(() if aws else AWS_KEYS[:2]), *needs.variables))
    job = {
        caller_name(): {
            "image": "python:3.12" if needs.git else "python:3.12-slim",  # the slim one has no git
            "rules": [{"if": '$CI_PIPELINE_SOURCE == "schedule"'}],
            "timeout": "1h",
            "variables": {location.VARIABLE: url_elsewhere()},
            "script": [*_set_up(needs).values(), "mgpu reconcile"],
        }
    }
    return Caller(
        files={Path(".gitlab/mgpu.yml"): as_yaml("--gitlab", job)},
        by_hand=(
            "in .gitlab-ci.yml: include: [{local: .gitlab/mgpu.yml}]",
            f"a pipeline schedule of the project: `{fields(every_s)}`",
            f"variables of the project, masked: {', '.join(names)}" + (", and credentials of AWS" if aws else ""),
        ),
    )


WAYS = {"systemd": systemd, "cron": cron, "github": github, "gitlab": gitlab}
OF_A_CI = ("github", "gitlab")  # they need a bucket

_THE_PASSPHRASE = "The passphrase of the backend"  # noqa: S105  the name of a step
PASSPHRASE = "MGPU_PASSPHRASE"  # noqa: S105  the name of a secret; empty where a key encrypts instead
AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_THE_WORKFLOWS = "GITHUB_TOKEN"  # GitHub itself makes one for each workflow's run
PUT_IN_PLACE = (
    "umask 077 && mkdir -p ~/.config/mgpu && "
    'if [ -n "$MGPU_PASSPHRASE" ]; then printf %s "$MGPU_PASSPHRASE" > ~/.config/mgpu/passphrase; fi'
)
"""A command of a shell that puts it where mgpu looks for it."""
_REQUIRED = f': "${{{PASSPHRASE}:?is not set here: nobody else could open the stacks that this job makes}}" && '
# steps of a CI's job, by what they do
_SET_UP = {
    "mgpu": f"pip install --quiet mgpu=={__version__}",
    "The Pulumi engine": "python -m mgpu.iac.engine.install",
    _THE_PASSPHRASE: PUT_IN_PLACE,
}


def _set_up(needs: Needs) -> dict[str, str]:
    """Those, for this backend: where a passphrase encrypts its stacks, no job goes on with one of its own."""
    required = _REQUIRED if needs.passphrase else ""
    return {**_SET_UP, _THE_PASSPHRASE: f"{required}{PUT_IN_PLACE}"}


@dataclass(frozen=True)
class _Script:
    path: Path
    text: str
    secrets: Path  # what the user fills
    empty: str  # what is in it before
    by_hand: tuple[str, ...]  # what is to be set in it, and is not


def _script(needs: Needs) -> _Script:
    """One pass, with the environment of this command."""
    path = paths.config_dir() / f"{caller_name()}.sh"
    secrets = path.with_suffix(".env")
    given = {name: os.environ[name] for name in (*_KEPT, *_KEPT_TOO) if os.environ.get(name)}
    given |= {"HOME": str(Path.home()), location.VARIABLE: location.current().url}
    text = [
        "#!/bin/sh",
        "# One pass of mgpu. Written by `mgpu schedule install`; secrets are in the file beside it.",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(given.items())),
        f"set -a; . {shlex.quote(str(secrets))}; set +a",
        f"exec {shlex.quote(sys.executable)} -m mgpu reconcile",
    ]
    # those that open AWS here, where no profile does
    names = dict.fromkeys((*needs.variables, *(key for key in AWS_KEYS if os.environ.get(key))))
    head = f"# {secrets.name}: what a pass has in its environment, NAME='value' a line. Nobody else can read it."
    there = os.fsdecode(secrets.read_bytes()) if secrets.exists() else ""
    unset = ", ".join(name for name in names if not re.search(rf"(?m)^\s*(export\s+)?{name}=(?!''|\"\"|\s|$)", there))
    by_hand = (f"{secrets}: set {unset} in it; without one runs and messages wait",) if unset else ()
    return _Script(path, _lines(text), secrets, _lines([head, *(f"#{name}=" for name in names)]), by_hand)


def caller_name() -> str:
    """Of what is installed for this backend; several backends do not meet."""
    here = location.current()
    if here.folder is not None and here.folder == paths.state_dir() / "pulumi":
        return "mgpu-reconcile"
    return f"mgpu-reconcile-{hashlib.sha256(here.address.encode()).hexdigest()[:8]}"


def variable_names() -> list[str]:
    """The variables that passes read for schedules, and for runs that are not over. Raises StackError, SpecError."""
    return sorted(
        {
            name
            for path in _run_files()
            for name in environment.named(accepted(path.read_text(encoding="utf-8"), str(path)))
        }
    )


def _run_files() -> Iterator[Path]:
    for schedule in kept.every().schedules.values():
        folder = kept.folder(schedule)
        if files.bring_folder(folder, f"{schedule.submission}/"):
            yield folder / files.RUN_FILE
    for record in unsettled():
        if not record.schedule:
            files.bring(record.run_id)
            yield from Folder(record.run_id).root.glob(files.RUN_FILE)


def fields(every_s: float) -> str:
    """A period as cron's five fields. Raises InputError: they cannot say it."""
    minutes = every_s / 60
    if minutes in (1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30):
        return "* * * * *" if minutes == 1 else f"*/{minutes:.0f} * * * *"
    if minutes / 60 in (1, 2, 3, 4, 6, 8, 12):
        return f"0 */{minutes / 60:.0f} * * *" if minutes > 60 else "0 * * * *"
    why = "Cron's fields say parts of an hour, or of a day."
    raise InputError(f"--every {duration(every_s)} is no period of cron", why, "Take 5m, 10m, 15m, 30m, 1h, 2h or 6h.")


def _crontab() -> list[str]:
    try:
        # cron's own lines: Python's end with a form feed, too, and with others that a comment may hold
        lines = Command(("crontab", "-l")).run().split("\n")
    except StackError as error:
        if "no crontab" in error.why.lower():  # nobody has made one yet
            return []
        raise
    return lines if lines[-1] else lines[:-1]


def require_bucket(option: str) -> None:
    """Raises InputError where nobody else can see the backend."""
    if location.current().folder is not None:
        raise InputError(
            f"{option}: the backend is a folder of this machine",
            "A CI job or a pod has another machine each time, and would find nothing.",
            "Move it to a bucket first: `mgpu backend move s3://bucket/prefix`.",
        )


def url_elsewhere() -> str:
    """The backend's address for a machine that has none of this one's AWS profiles."""
    return re.sub(r"(?<=[?&])profile=[^&]*&?", "", location.current().url).rstrip("?&")


def at_aws() -> bool:
    """Whether the backend is at AWS itself."""
    return "endpoint=" not in location.current().url


def region() -> str:
    """The backend's, at AWS: as its client takes it, from the address, the environment or the profile."""
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    given = dict(parse_qsl(urlsplit(location.current().url).query))
    known = given.get("region") or os.environ.get("AWS_REGION")
    with suppress(BotoCoreError):  # a profile that is gone keeps nobody from taking back what was installed
        known = known or Session(profile=given.get("profile")).get_config_variable("region")
    return known or "us-east-1"


def as_yaml(option: str, *documents: object) -> str:
    """What `install` with this option writes."""
    text = yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=1000)
    return f"# Written by `mgpu schedule install {option}`.\n{text}"


class _Plain(yaml.SafeDumper):
    """Writes what is there twice out twice."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _systemd_quoted(path: Path) -> str:
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$") + '"'


def _write(path: Path, text: str) -> None:
    ours = path.is_absolute()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700 if ours else 0o755)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    # a caller here reads paths and variables, as this machine writes them; other files are the repository's
    aside.write_bytes(os.fsencode(text) if ours else text.encode())
    aside.chmod(0o600 if ours else 0o644)
    aside.replace(path)
