"""What `mgpu schedule install` writes is what systemd, cron and a CI run, and what it does can be taken back."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import check_jsonschema
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from mgpu import paths
from mgpu.backend import location
from mgpu.cli import cli
from mgpu.console import Console
from mgpu.context import Context
from mgpu.errors import InputError, StackError
from mgpu.run.lifecycle.launch import kept_for_later
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import State
from mgpu.schedule import callers, kept, kubernetes
from mgpu.schedule.model import Schedule
from mgpu.schedule.reconcile import Reconciler
from mgpu.spec.load import load

BUCKET = "s3://team/runs?region=eu-west-1"
RUN_FILE = """
name: it
provider: local
max_hours: 1
max_price_usd_per_hour: 1
command: [train.py]
secrets: [WANDB_API_KEY]
sinks:
  webhook: {url: HOOK_URL, secret: HOOK_SECRET}
  apprise: {urls: [SLACK_URL]}
  command: {run: [x], secrets: [PIN]}
"""
NAMED = ["HOOK_SECRET", "HOOK_URL", "PIN", "SLACK_URL", "WANDB_API_KEY"]


def mgpu(*args: str) -> Any:
    return CliRunner().invoke(cli, args, standalone_mode=False)


@pytest.fixture
def user(world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with a schedule whose runs need a secret, and programs that write down what they were asked."""
    monkeypatch.chdir(world.folder)
    (world.folder / "train.py").write_text("pass\n")
    world.run_file.write_text(RUN_FILE)
    made = Schedule("nightly", "u1", "0 2 * * *", "UTC", {}, 1.0, "me@here", 4e9)
    spec, at = load(world.run_file), f"{made.submission}/"
    context = Context(world.events.append, world.timeouts)
    kept.add(replace(made, run=kept_for_later(world.run_file, spec, context, kept.folder(made), at)))
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "systemctl": f'echo "$@" >> {tmp_path}/asked',
        "crontab": f'if [ -e {tmp_path}/broken ]; then echo "no permission" >&2; exit 1; fi; '
        f'if [ "$1" = -l ] && [ ! -e {tmp_path}/tab ]; then echo "no crontab for you" >&2; exit 1; fi; '
        f'if [ "$1" = -l ]; then cat {tmp_path}/tab; else cat > {tmp_path}/tab; fi',
        "pip": f'echo "$@" >> {tmp_path}/asked',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return tmp_path


def bare(command: str, home: Path) -> str:
    """What a shell prints that has nothing of this environment, as cron's has not."""
    environ = {"HOME": str(home), "PATH": "/usr/bin:/bin", "SHELL": "/bin/sh"}
    done = subprocess.run(
        ["/bin/sh", "-c", command], env=environ, cwd=home, capture_output=True, text=True, timeout=600, check=True
    )
    return done.stdout + done.stderr


def test_a_timer_of_systemds(user: Path):
    dry = mgpu("schedule", "install", "--systemd", "--dry-run")
    units = user / "xdg" / "config" / "systemd" / "user"
    assert "OnUnitInactiveSec=300" in dry.stdout
    assert not units.exists(), "it was only shown"
    assert isinstance(mgpu("schedule", "install", "--systemd").exception, InputError), "nobody has agreed"
    assert mgpu("schedule", "install", "--systemd", "--every", "10m", "--yes").return_value == 0
    secrets = paths.config_dir() / "mgpu-reconcile.env"
    written = [units / "mgpu-reconcile.service", units / "mgpu-reconcile.timer", secrets]
    assert [stat.S_IMODE(path.stat().st_mode) for path in written] == [0o600] * 3
    assert secrets.read_text().splitlines()[1:] == [f"#{name}=" for name in NAMED]
    assert (user / "asked").read_text().splitlines() == [
        "--user daemon-reload",
        "--user enable --now mgpu-reconcile.timer",
    ]
    if shutil.which("systemd-analyze"):
        said = subprocess.run(
            ["systemd-analyze", "--user", "verify", *map(str, written[:2])], capture_output=True, text=True, check=False
        )
        assert "mgpu" not in said.stderr, said.stderr
    set_here = "MARK='a b'\nHOOK_URL=https://x\nexport HOOK_SECRET='s'\n  PIN=1\n"
    secrets.write_text(set_here + "#SLACK_URL=y\nWANDB_API_KEY=''\n")
    start = next(line for line in written[0].read_text().splitlines() if line.startswith("ExecStart="))
    assert "nothing to do" in bare(start.removeprefix("ExecStart="), user)
    again = mgpu("schedule", "install", "--systemd", "--yes")
    assert secrets.read_text().startswith("MARK='a b'\n"), "what the user has filled stays"
    assert f"{secrets}: set SLACK_URL, WANDB_API_KEY in it" in again.stderr
    assert mgpu("schedule", "uninstall", "--systemd").return_value == 0
    assert [path.exists() for path in written] == [False, False, True]
    assert (user / "asked").read_text().splitlines()[-1] == "--user disable --now mgpu-reconcile.timer"


def test_a_line_of_crontab(user: Path):
    (user / "tab").write_text("0 5 * * * /usr/bin/backup\n")
    for every in ("5m", "15m"):
        told = mgpu("schedule", "install", "--cron", "--every", every, "--yes")
        assert f"mgpu-reconcile.env: set {', '.join(NAMED)} in it" in told.stderr
    backup, line = (user / "tab").read_text().splitlines()
    assert backup == "0 5 * * * /usr/bin/backup"
    assert line.startswith("*/15 * * * * /bin/sh ")
    bare(line.split(" ", 5)[5], user)
    assert "nothing to do" in (paths.state_dir() / "mgpu-reconcile.log").read_text()
    assert mgpu("schedule", "uninstall", "--cron").return_value == 0
    assert (user / "tab").read_text() == "0 5 * * * /usr/bin/backup\n"


@pytest.mark.parametrize("line", [b"# f\xfcr alle", b"# a\x0cpage", "# a\u2028line".encode(), b"# of Windows\r", b""])
def test_a_crontab_keeps_each_byte_whatever_its_encoding(user: Path, line: bytes):
    before = line + b"\n0 5 * * * /usr/bin/backup\n" if line else line
    (user / "tab").write_bytes(before)
    assert mgpu("schedule", "install", "--cron", "--yes").return_value == 0
    assert (user / "tab").read_bytes().startswith(before + b"*/5 ")
    assert mgpu("schedule", "uninstall", "--cron").return_value == 0
    assert (user / "tab").read_bytes() == before


def test_the_command_that_shows_the_log_of_passes_can_be_pasted(user: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(user / "my state"))
    told = callers.cron(300, callers.Needs()).by_hand[-1]
    assert shlex.split(told)[2] == str(user / "my state" / "mgpu" / "mgpu-reconcile.log")


@pytest.mark.parametrize("way", ["cron", "systemd", "github", "gitlab"])
def test_what_calls_passes_can_be_taken_back_when_the_backend_is_gone(bucket: Path, monkeypatch, way: str):
    monkeypatch.setitem(callers._SET_UP, "The Pulumi engine", "true")
    assert mgpu("schedule", "install", f"--{way}", "--yes").return_value == 0

    def gone() -> Any:
        raise StackError("the backend could not be asked")

    for place, name in ((callers, "variable_names"), (callers.settings, "secrets_provider"), (kept, "every")):
        monkeypatch.setattr(place, name, gone)
    assert "could not be asked" in str(mgpu("schedule", "install", f"--{way}", "--yes").exception)
    assert mgpu("schedule", "uninstall", f"--{way}").return_value == 0


@pytest.mark.parametrize("way", ["cron", "systemd"])
def test_what_calls_passes_of_a_folder_that_was_moved_can_be_taken_back(user: Path, way: str):
    assert mgpu("schedule", "install", f"--{way}", "--yes").return_value == 0
    script = paths.config_dir() / "mgpu-reconcile.sh"
    assert script.exists()
    (location.current().root / location.MOVED).write_text(BUCKET)
    assert "was moved to" in str(mgpu("schedule", "install", f"--{way}", "--yes").exception)
    assert mgpu("schedule", "uninstall", f"--{way}").return_value == 0
    assert not script.exists()


@pytest.mark.parametrize(("way", "name"), [("github", ".github/workflows/mgpu.yml"), ("gitlab", ".gitlab/mgpu.yml")])
def test_a_ci_is_taken_back_when_the_backend_is_no_bucket_any_more(user: Path, way: str, name: str):
    Path(name).parent.mkdir(parents=True)
    Path(name).write_text("of when it was one\n")
    assert mgpu("schedule", "uninstall", f"--{way}").return_value == 0
    assert not Path(name).exists()


def test_a_crontab_that_cannot_be_read_is_not_written(user: Path):
    (user / "tab").write_text("0 5 * * * /usr/bin/backup\n")
    (user / "broken").touch()
    for args in (("install", "--cron", "--yes"), ("uninstall", "--cron")):
        assert "`crontab -l` failed" in str(mgpu("schedule", *args).exception)
    assert (user / "tab").read_text() == "0 5 * * * /usr/bin/backup\n"


def test_a_line_that_comes_while_the_user_is_asked_stays(user: Path, monkeypatch: pytest.MonkeyPatch):
    def agreed(*_: object) -> bool:
        (user / "tab").write_text("0 5 * * * /usr/bin/backup\n")
        return True

    monkeypatch.setattr(Console, "confirm", agreed)
    assert "has changed" in str(mgpu("schedule", "install", "--cron").exception)
    assert not (paths.config_dir() / "mgpu-reconcile.sh").exists()
    assert mgpu("schedule", "install", "--cron").return_value == 0
    assert (user / "tab").read_text().startswith("0 5 * * * /usr/bin/backup\n*/5 ")


def test_two_backends_do_not_meet(user: Path, monkeypatch: pytest.MonkeyPatch):
    mgpu("schedule", "install", "--cron", "--yes")
    monkeypatch.setenv(location.VARIABLE, f"file://{user}/shared")
    mgpu("schedule", "install", "--cron", "--yes")
    one, other = (user / "tab").read_text().splitlines()
    assert one != other
    mgpu("schedule", "uninstall", "--cron")
    assert (user / "tab").read_text() == f"{one}\n"


def test_a_program_that_is_not_there_or_fails_is_named(user: Path, monkeypatch: pytest.MonkeyPatch):
    (user / "bin" / "systemctl").write_text("#!/bin/sh\necho 'Failed to connect to bus' >&2; exit 1\n")
    failed = mgpu("schedule", "install", "--systemd", "--yes").exception
    assert isinstance(failed, StackError)
    assert (failed.what, failed.why) == ("`systemctl --user daemon-reload` failed", "Failed to connect to bus")
    monkeypatch.setenv("PATH", str(user / "nothing"))
    assert "`crontab -l` could not be run" in str(mgpu("schedule", "install", "--cron", "--yes").exception)


@pytest.mark.parametrize(
    ("every", "fields"),
    [("1m", "* * * * *"), ("5m", "*/5 * * * *"), ("1h", "0 * * * *"), ("6h", "0 */6 * * *"), ("7m", ""), ("5h", "")],
)
def test_periods_that_cron_can_say(every: str, fields: str, user: Path):
    said = mgpu("schedule", "install", "--cron", "--every", every, "--dry-run")
    if fields:
        assert f"\n    {fields} /bin/sh" in said.stdout
    else:
        assert "is no period of cron" in str(said.exception)


def test_no_time_between_two_passes_is_none(user: Path):
    said = mgpu("schedule", "install", "--systemd", "--every", "0", "--dry-run").exception
    assert "--every 0" in str(said), "and not as often as usual"


@pytest.mark.parametrize("way", [["--github"], ["--gitlab"], ["--kubernetes", "--image", "hub/mgpu:1"], ["--aws"]])
def test_other_machines_need_a_bucket(user: Path, way: list[str]):
    assert "is a folder of this machine" in str(mgpu("schedule", "install", *way, "--yes").exception)


@pytest.fixture
def bucket(user: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if the backend were a bucket: what is in it is the folder's."""
    known, named, found = replace(location.current(), url=BUCKET), callers.variable_names(), kept.every()
    monkeypatch.setattr(callers.location, "current", lambda: replace(known, folder=None))
    monkeypatch.setattr(callers, "variable_names", lambda: named)
    monkeypatch.setattr(kept, "every", lambda: found)
    monkeypatch.setattr(callers.settings, "secrets_provider", lambda: "passphrase")
    monkeypatch.setenv("MGPU_PASSPHRASE", "open sesame")
    (user / "bin" / "python").symlink_to(sys.executable)
    return user


def fits(schema: str, path: Path) -> str:
    """What is wrong with a file by the schema that its reader publishes; empty: nothing."""
    args = ["--no-cache", "--builtin-schema", f"vendor.{schema}", str(path)]
    done = CliRunner().invoke(check_jsonschema.main, args)
    assert done.exit_code in (0, 1), done.output
    return done.output if done.exit_code else ""


def test_what_a_ci_would_refuse_is_found(tmp_path: Path):
    (tmp_path / "mgpu.yml").write_text("jobs: {reconcile: {runs-on: ubuntu-latest, stepz: []}}\n")
    assert "stepz" in fits("github-workflows", tmp_path / "mgpu.yml")
    (tmp_path / "mgpu.yml").write_text("mgpu: {script: [x], timeout: 1h, imag: python}\nother: {rules: [{iff: x}]}\n")
    assert fits("gitlab-ci", tmp_path / "mgpu.yml")


def steps(found: Path, commands: list[str], user: Path) -> None:
    """Runs a CI's steps, but for the pass itself, in a home of their own."""
    home = user / "ci"
    home.mkdir()
    for command in commands:
        assert (
            subprocess.run(["/bin/sh", "-ec", command], env={**os.environ, "HOME": str(home)}, check=False).returncode
            == 0
        )
    assert (home / ".config" / "mgpu" / "passphrase").read_text() == "open sesame"
    assert "install --quiet mgpu==" in (user / "asked").read_text()


def test_a_workflow_of_githubs(bucket: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(callers._SET_UP, "The Pulumi engine", "true")  # 100 MB
    assert mgpu("schedule", "install", "--github", "--yes").return_value == 0
    path = Path(".github/workflows/mgpu.yml")
    assert fits("github-workflows", path) == ""
    found = yaml.safe_load(path.read_text())
    job = found["jobs"]["reconcile"]
    assert (found["on"]["schedule"], job["env"]) == ([{"cron": "*/30 * * * *"}], {location.VARIABLE: BUCKET})
    assert job["steps"][1]["with"] == {"role-to-assume": "${{ vars.MGPU_AWS_ROLE }}", "aws-region": "eu-west-1"}
    assert job["steps"][-1] == {
        "name": "One pass",
        "run": "mgpu reconcile",
        "env": {name: f"${{{{ secrets.{name} }}}}" for name in NAMED},
    }
    assert found["permissions"] == {"contents": "read", "id-token": "write"}
    assert [step["name"] for step in job["steps"] if "MGPU_PASSPHRASE" in step.get("env", {})] == [
        "The passphrase of the backend"
    ]
    steps(path, [step["run"] for step in job["steps"][2:-1]], bucket)
    assert mgpu("schedule", "uninstall", "--github").return_value == 0
    assert not path.exists()


def test_without_a_region_in_the_backends_address_it_is_that_of_its_client(bucket: Path, monkeypatch, tmp_path):
    known = location.current()

    def region(address: str) -> str:
        monkeypatch.setattr(callers.location, "current", lambda: replace(known, url=address))
        return callers.region()

    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert region("s3://team/runs") == "us-east-1"
    (tmp_path / "config").write_text("[default]\nregion = eu-west-2\n[profile work]\nregion = eu-west-3\n")
    assert region("s3://team/runs") == "eu-west-2"
    assert region("s3://team/runs?profile=work") == "eu-west-3"
    assert region("s3://team/runs?profile=gone") == "us-east-1", "what was installed can be taken back without it"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert region("s3://team/runs?profile=work") == "eu-west-1"
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    assert region("s3://team/runs") == "eu-north-1"
    assert region("s3://team/runs?region=eu-south-1") == "eu-south-1"


def test_a_job_of_gitlabs(bucket: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(callers._SET_UP, "The Pulumi engine", "true")
    told = mgpu("schedule", "install", "--gitlab", "--every", "1h", "--yes")
    assert "`0 * * * *`" in told.stderr
    assert f"{', '.join(['MGPU_PASSPHRASE', *NAMED])}, and credentials of AWS" in told.stderr
    assert fits("gitlab-ci", Path(".gitlab/mgpu.yml")) == ""
    (job,) = yaml.safe_load(Path(".gitlab/mgpu.yml").read_text()).values()
    assert (job["variables"], job["image"]) == ({location.VARIABLE: BUCKET}, "python:3.12-slim")
    assert job["script"][-1] == "mgpu reconcile"
    steps(Path(".gitlab/mgpu.yml"), job["script"][:-1], bucket)
    kept.every().schedules["nightly"].code_from = "git+https://host/you/llm@main"
    assert mgpu("schedule", "install", "--gitlab", "--yes").return_value == 0
    (job,) = yaml.safe_load(Path(".gitlab/mgpu.yml").read_text()).values()
    assert job["image"] == "python:3.12", "with git"
    assert fits("gitlab-ci", Path(".gitlab/mgpu.yml")) == ""


@pytest.mark.parametrize(("way", "file"), [("github", ".github/workflows/mgpu.yml"), ("gitlab", ".gitlab/mgpu.yml")])
@pytest.mark.parametrize("by", ["passphrase", "awskms://alias/mgpu?region=eu-west-1"])
def test_no_job_makes_a_passphrase_of_its_own(
    bucket: Path, monkeypatch: pytest.MonkeyPatch, way: str, file: str, by: str
):
    """Nobody else could open what it makes."""
    monkeypatch.setattr(callers.settings, "secrets_provider", lambda: by)
    assert mgpu("schedule", "install", f"--{way}", "--yes").return_value == 0
    found = yaml.safe_load(Path(file).read_text())
    (job,) = found.get("jobs", found).values()
    (step,) = (each for each in _commands(job) if "passphrase" in each)
    monkeypatch.delenv("MGPU_PASSPHRASE")
    monkeypatch.setenv("HOME", str(bucket))
    done = subprocess.run(["/bin/sh", "-ec", step], capture_output=True, text=True, check=False)
    if by == "passphrase":
        assert (done.returncode != 0, "MGPU_PASSPHRASE: is not set here" in done.stderr) == (True, True)
    else:
        assert (done.returncode, done.stderr) == (0, "")


def _commands(job: dict[str, Any]) -> list[str]:
    return job["script"] if "script" in job else [step["run"] for step in job["steps"] if "run" in step]


def test_github_has_its_own_token_and_the_keys_of_a_bucket_that_is_elsewhere(bucket: Path, monkeypatch):
    monkeypatch.setattr(callers, "variable_names", lambda: ["GITHUB_PAT", "GITHUB_TOKEN"])
    known = replace(location.current(), url=f"{BUCKET}&endpoint=https://minio.example")
    monkeypatch.setattr(callers.location, "current", lambda: known)
    told = mgpu("schedule", "install", "--github", "--yes").stderr
    assert fits("github-workflows", Path(".github/workflows/mgpu.yml")) == ""
    found = yaml.safe_load(Path(".github/workflows/mgpu.yml").read_text())
    assert [*found["jobs"]["reconcile"]["steps"][-1]["env"]] == [*callers.AWS_KEYS[:2], "GITHUB_TOKEN"]
    assert found["permissions"]["statuses"] == "write"
    assert "secrets of the repository: MGPU_PASSPHRASE, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY\n" in told
    assert "GITHUB_PAT: GitHub keeps no secret of such a name" in told
    keys = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, GITHUB_PAT"
    assert keys in mgpu("schedule", "install", "--gitlab", "--yes").stderr


def test_a_run_that_was_submitted_by_hand_names_variables_too(world):
    assert callers.variable_names() == []
    world.record("it-1125-abcde", state=State.QUEUED)
    Folder("it-1125-abcde").run_file.write_text(RUN_FILE)
    assert callers.variable_names() == NAMED


@pytest.fixture
def cluster(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl that writes down what it was asked, with a current context."""
    (bucket / "context").write_text("prod")
    kubectl = bucket / "bin" / "kubectl"
    kubectl.write_text(
        f'#!/bin/sh\nif [ "$1" = config ]; then cat {bucket}/context; else echo "$@" >> {bucket}/asked; fi\n'
    )
    kubectl.chmod(0o755)
    monkeypatch.setattr(kubernetes.settings, "secrets_provider", lambda: "passphrase")
    return bucket


IMAGE = "hub.example/mgpu@sha256:" + "0" * 64
IN_KUBERNETES = ("--kubernetes", "--namespace", "ml")
MANIFEST = Path("kubernetes/mgpu.yaml")


def installed(*more: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The account and the job of the manifest that was written."""
    assert mgpu("schedule", "install", *IN_KUBERNETES, "--image", IMAGE, "--yes", *more).return_value == 0
    account, job = yaml.safe_load_all(MANIFEST.read_text())
    for version in ("1.27", "1.37"):
        for each in (account, job):
            kubernetes_validate.validate(each, version, strict=True)
    return account, job


def test_a_cron_job_of_a_cluster(cluster: Path):
    shown = mgpu("schedule", "install", *IN_KUBERNETES, "--image", IMAGE, "--dry-run")
    assert "$ kubectl --context=prod --request-timeout=20s apply --filename=kubernetes/mgpu.yaml" in shown.stdout
    assert not MANIFEST.exists(), "it was only shown"
    account, job = installed("--every", "10m")
    name = callers.caller_name()
    assert {(each["metadata"]["name"], each["metadata"]["namespace"]) for each in (account, job)} == {(name, "ml")}
    spec, each = job["spec"], job["spec"]["jobTemplate"]["spec"]
    assert (spec["schedule"], spec["timeZone"], spec["concurrencyPolicy"]) == ("*/10 * * * *", "Etc/UTC", "Forbid")
    assert (spec["startingDeadlineSeconds"], each["activeDeadlineSeconds"], each["backoffLimit"]) == (600, 3600, 0)
    assert each["template"]["spec"]["containers"][0]["image"] == IMAGE
    assert (cluster / "asked").read_text().splitlines()[-1].endswith("apply --filename=kubernetes/mgpu.yaml")
    elsewhere = mgpu("schedule", "install", "--kubernetes", "--image", IMAGE, "--yes").exception
    assert f"cronjob/{name} in namespace ml, which would go on" in str(elsewhere)
    (cluster / "context").write_text("another")
    assert "is of another place" in str(mgpu("schedule", "install", *IN_KUBERNETES, "--image", IMAGE).exception)
    assert mgpu("schedule", "uninstall", "--kubernetes").return_value == 0
    assert (cluster / "asked").read_text().splitlines()[-1] == (
        "--context=prod --request-timeout=20s "
        f"delete cronjob/{name} serviceaccount/{name} --namespace=ml --ignore-not-found"
    )
    assert not MANIFEST.exists()
    assert mgpu("schedule", "uninstall", *IN_KUBERNETES).return_value == 0, "as often as one likes"
    assert (cluster / "asked").read_text().splitlines()[-1] == (
        f"--context=another --request-timeout=20s delete cronjob/{name} serviceaccount/{name} --namespace=ml "
        "--ignore-not-found"
    )


def test_a_pod_has_no_rights_and_no_value_of_a_secret(cluster: Path, monkeypatch: pytest.MonkeyPatch):
    account, job = installed()
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert [each["automountServiceAccountToken"] for each in (account, pod)] == [False, False]
    # https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted
    assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["seccompProfile"]["type"]) == (
        True,
        "RuntimeDefault",
    )
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & {*pod}
    assert all("emptyDir" in each for each in pod["volumes"])
    assert {each["mountPath"] for each in container["volumeMounts"]} == {"/home/mgpu", "/tmp"}
    plain = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    assert plain == {"HOME": "/home/mgpu", location.VARIABLE: BUCKET, "AWS_REGION": "eu-west-1"}
    keys = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in container["env"] if "valueFrom" in each}
    assert {name: key["optional"] for name, key in keys.items()} == {
        "MGPU_PASSPHRASE": False,
        **dict.fromkeys((*callers.AWS_KEYS, *NAMED), True),
    }
    assert {(key["name"], key["key"]) for key in keys.values()} == {(callers.caller_name(), name) for name in keys}
    assert "open sesame" not in MANIFEST.read_text()
    monkeypatch.setattr(kubernetes.settings, "secrets_provider", lambda: "awskms://alias/x")
    _, job = installed()
    assert "valueFrom" in str(job)
    assert "{'name': 'MGPU_PASSPHRASE'" not in str(job)


def test_without_kubectl_its_words_are_told(cluster: Path):
    (cluster / "context").write_text("")
    told = mgpu("schedule", "install", *IN_KUBERNETES, "--image", IMAGE, "--yes")
    assert "kubectl apply --filename=kubernetes/mgpu.yaml" in told.stderr
    assert f"kubectl create secret generic {callers.caller_name()} --namespace=ml --from-file=MGPU_PASSPHRASE=" in (
        told.stderr
    )
    assert all(f'--from-literal={name}="${name}"' in told.stderr for name in NAMED)
    ended = mgpu("schedule", "uninstall", *IN_KUBERNETES)
    assert f"kubectl delete cronjob/{callers.caller_name()}" in ended.stderr
    assert f"kubectl delete secret {callers.caller_name()}" in ended.stderr
    assert not MANIFEST.exists()
    assert not (cluster / "asked").exists()


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (("--kubernetes",), "`mgpu image operator registry/name`"),
        (("--kubernetes", "--image", "hub/mgpu"), "hub/mgpu:TAG"),
        (("--kubernetes", "--image", "Hub/Mgpu:1 2"), "must be repository:tag or repository@sha256"),
        (("--kubernetes", "--image", IMAGE, "--every", "7m"), "no period of cron"),
        (("--cron", "--image", IMAGE), "--image belongs to --kubernetes"),
        (("--cron", "--namespace", "ml"), "--namespace belongs to --kubernetes"),
        (("--cron", "--permissions-boundary", "arn:x"), "--permissions-boundary belongs to --aws"),
    ],
)
def test_what_no_cluster_can_take_is_refused(cluster: Path, args: tuple[str, ...], what: str):
    assert what in str(mgpu("schedule", "install", *args, "--yes").exception)
    assert not MANIFEST.exists()


def test_an_aws_profile_of_this_machine_goes_nowhere(cluster: Path, monkeypatch: pytest.MonkeyPatch):
    known = location.current()
    for given in (f"{BUCKET}&profile=me", BUCKET.replace("?", "?profile=me&")):
        monkeypatch.setattr(callers.location, "current", lambda given=given: replace(known, url=given))
        assert callers.url_elsewhere() == BUCKET


def test_by_what_it_is_to_be_called_has_to_be_said(user: Path):
    assert "One of --systemd, --cron, --github, --gitlab, --kubernetes" in str(mgpu("schedule", "install").exception)


def test_a_signal_ends_the_pass_and_says_so(user: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Reconciler, "work", lambda _: signal.raise_signal(signal.SIGTERM))
    told = mgpu("reconcile", "--watch")
    assert (told.return_value, "left: runs are as they are" in told.stderr) == (130, True)
