"""What calls `mgpu reconcile` in an account: made, changed and taken back by the command that users type and the real
engine, its state in a bucket of the account; and the task, run as ECS would."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fakes.aws import FakeAws
from fakes.command import needs_secret

from mgpu.backend import location, settings
from mgpu.cli import main
from mgpu.errors import InputError
from mgpu.iac.engine import install
from mgpu.providers.aws.iam import policies
from mgpu.providers.aws.passes import documents
from mgpu.providers.aws.passes.resource import ROLES, Passes
from mgpu.schedule import fargate

ACCOUNT, HERE = "123456789012", "us-east-1"
BUCKET = f"mgpu-{ACCOUNT}-{HERE}"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
NOTHING = {"clusters": [], "tasks": [], "logs": [], "schedules": [], "roles": [], "parameters": [], "stacks": []}


class Laptop:
    """A machine of a user's, whose backend is in base's bucket."""

    def __init__(self, aws: FakeAws, folder: Path, prefix: str = "backend") -> None:
        self.folder, self._aws = folder / "project", aws
        self.folder.mkdir(parents=True)
        self.url = f"s3://{BUCKET}/{prefix}?region={HERE}&endpoint={aws.endpoint}&s3ForcePathStyle=true"
        own = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("STATE", "CONFIG", "DATA")}
        self.env = {**os.environ, **own, "PULUMI_BACKEND_URL": self.url}
        self.env |= {"TOKEN": "t0k", "HOOK_URL": "http://127.0.0.1:9/h00k"}

    def mgpu(self, *words: str, code: int = 0, env: Mapping[str, str] | None = None) -> Any:
        """What it prints with --json; what it says where that is an error."""
        command = [sys.executable, "-m", "mgpu", *words, "--json"]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=self.folder, env=env or self.env, stdin=subprocess.DEVNULL,
            timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout) if code == 0 else done.stderr

    @property
    def passphrase(self) -> Path:
        return Path(self.env["XDG_CONFIG_HOME"]) / "mgpu" / "passphrase"


@pytest.fixture
def image(aws: FakeAws) -> str:
    """One in the account's ECR, whose bytes nobody needs."""
    ecr = aws.client("ecr")
    ecr.create_repository(repositoryName="mgpu/trainer")
    manifest = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "layers": []})
    ecr.put_image(repositoryName="mgpu/trainer", imageManifest=manifest, imageTag="operator")
    (found,) = ecr.list_images(repositoryName="mgpu/trainer")["imageIds"]
    return f"{ACCOUNT}.dkr.ecr.{HERE}.amazonaws.com/mgpu/trainer@{found['imageDigest']}"


@pytest.fixture
def laptop(require: Callable[[str, bool, str], None], aws: FakeAws, tmp_path: Path) -> Laptop:
    require("engine", install.find_engine() is not None, "no Pulumi engine; `make setup` installs one")
    aws.base()
    aws.client("s3").create_bucket(Bucket=BUCKET)
    return Laptop(aws, tmp_path)


def stands(aws: FakeAws) -> dict[str, list[Any]]:
    """All that is there of any caller, by kind."""
    ecs, iam, s3 = aws.client("ecs"), aws.client("iam"), aws.client("s3")
    clusters = ecs.describe_clusters(clusters=ecs.list_clusters()["clusterArns"] or ["none"])["clusters"]
    tasks = [arn for s in ("ACTIVE", "INACTIVE") for arn in ecs.list_task_definitions(status=s)["taskDefinitionArns"]]
    roles = [each["RoleName"] for each in iam.list_roles()["Roles"]]
    keys = [each["Key"] for each in s3.list_objects_v2(Bucket=BUCKET).get("Contents", ())]
    return {
        "clusters": [each["clusterName"] for each in clusters if each["status"] == "ACTIVE"],
        "tasks": tasks,
        "logs": [each["logGroupName"] for each in aws.client("logs").describe_log_groups()["logGroups"]],
        "schedules": [each["Name"] for each in aws.client("scheduler").list_schedules()["Schedules"]],
        "roles": [each for each in roles if each.startswith("mgpu-reconcile")],
        "parameters": [each["Name"] for each in aws.client("ssm").describe_parameters()["Parameters"]],
        "stacks": [each for each in keys if ".pulumi/stacks/mgpu-passes" in each],
    }


def task_of(aws: FakeAws) -> dict[str, Any]:
    """The one task definition that there is."""
    (arn,) = stands(aws)["tasks"]
    return aws.client("ecs").describe_task_definition(taskDefinition=arn)["taskDefinition"]


def may(aws: FakeAws, role: str, action: str, resource: str, **facts: str) -> bool:
    """Whether the role's policies allow it, where these conditions of the request hold."""
    entries = [
        {"ContextKeyName": key.replace("__", ":"), "ContextKeyValues": [value], "ContextKeyType": "string"}
        for key, value in facts.items()
    ]
    arn = policies.role_arn(HERE, ACCOUNT, role)
    asked = {"ActionNames": [action], "ResourceArns": [resource], "ContextEntries": entries}
    (said,) = aws.client("iam").simulate_principal_policy(PolicySourceArn=arn, **asked)["EvaluationResults"]
    return said["EvalDecision"] == "allowed"


def scheduled(laptop: Laptop) -> None:
    """A schedule whose runs need a secret."""
    needs_secret(laptop.folder, "sinks: {webhook: {url: HOOK_URL, events: [missed]}}\n")
    laptop.mgpu("schedule", "add", "mgpu.yaml", "--cron", "0 2 29 2 *", "--yes")


def test_it_is_made_changed_in_place_from_any_machine_and_taken_back(aws, laptop, image, tmp_path):
    words = ("schedule", "install", "--aws", "--image", image)
    name = f"mgpu-reconcile-{hashlib.sha256(f's3://{BUCKET}/backend'.encode()).hexdigest()[:8]}"
    before = stands(aws)
    said = laptop.mgpu(*words, code=2)  # nobody agreed
    assert "$2.82 a month" in said
    assert "MGPU_PASSPHRASE" in said
    assert laptop.mgpu(*words, "--dry-run")["changes"]
    assert stands(aws) == before == before | NOTHING

    assert laptop.mgpu(*words, "--yes")["by_hand"][0].startswith(f"aws logs tail {name} --follow")
    found = stands(aws)
    assert {kind: found[kind] for kind in ("clusters", "logs", "schedules", "parameters")} == {
        "clusters": [name],
        "logs": [name],
        "schedules": [name],
        "parameters": [f"/{name}/MGPU_PASSPHRASE"],
    }
    assert sorted(found["roles"]) == sorted(f"{name}-{which}" for which in ROLES)
    assert aws.client("logs").describe_log_groups()["logGroups"][0]["retentionInDays"] == 30
    kept = aws.client("ssm").get_parameter(Name=f"/{name}/MGPU_PASSPHRASE", WithDecryption=True)["Parameter"]
    assert (kept["Type"], kept["Value"]) == ("SecureString", laptop.passphrase.read_text().strip())
    assert kept["Value"] not in str(task_of(aws))

    schedule = aws.client("scheduler").get_schedule(Name=name)
    target = schedule["Target"]
    assert (schedule["ScheduleExpression"], schedule["FlexibleTimeWindow"]) == ("rate(10 minutes)", {"Mode": "OFF"})
    assert target["RetryPolicy"]["MaximumRetryAttempts"] == 0
    where = target["EcsParameters"]["NetworkConfiguration"]["awsvpcConfiguration"]
    groups = aws.client("ec2").describe_security_groups(GroupIds=where["SecurityGroups"])["SecurityGroups"]
    assert ([each["GroupName"] for each in groups], where["AssignPublicIp"]) == (["mgpu-nodes"], "ENABLED")
    family, task = target["EcsParameters"]["TaskDefinitionArn"], task_of(aws)
    assert task["taskDefinitionArn"] == f"{family}:1"
    start = {"ecs__cluster": target["Arn"]}
    assert may(aws, f"{name}-scheduler", "ecs:RunTask", f"{family}:1", **start)
    assert not may(aws, f"{name}-scheduler", "ecs:RunTask", f"{family}x:1", **start)
    assert not may(aws, f"{name}-scheduler", "ecs:RunTask", f"{family}:1", ecs__cluster=f"{target['Arn']}x")
    for role in (task["taskRoleArn"], task["executionRoleArn"]):
        assert may(aws, f"{name}-scheduler", "iam:PassRole", role, iam__PassedToService="ecs-tasks.amazonaws.com")
    (container,) = task["containerDefinitions"]
    (secret,) = container["secrets"]
    assert may(aws, f"{name}-execution", "ssm:GetParameters", secret["valueFrom"])
    assert not may(aws, f"{name}-execution", "ssm:GetParameters", secret["valueFrom"].replace(name, "others"))

    assert laptop.mgpu(*words, "--yes")["changes"] == []
    aws.client("logs").put_retention_policy(logGroupName=name, retentionInDays=1)
    other = Laptop(aws, tmp_path / "other")
    other.passphrase.parent.mkdir(parents=True)
    other.passphrase.write_text(laptop.passphrase.read_text())
    (change,) = other.mgpu(*words, "--every", "5m", "--yes")["changes"]
    assert change.startswith(f"update {name} ")
    assert "everyMinutes: 10 => 5" in change
    assert "logDays: 1 => 30" in change
    assert aws.client("scheduler").get_schedule(Name=name)["ScheduleExpression"] == "rate(5 minutes)"
    assert stands(aws) == found | {"tasks": found["tasks"]}

    third = Laptop(aws, tmp_path / "third", "another")  # of another backend in the same account
    third.mgpu(*words, "--yes")
    assert len(stands(aws)["clusters"]) == 2
    third.mgpu("schedule", "uninstall", "--aws")
    assert stands(aws) == found

    laptop.mgpu("schedule", "uninstall", "--aws")
    assert stands(aws) == before
    laptop.mgpu("schedule", "uninstall", "--aws")  # as often as one likes


@contextmanager
def credentials(aws: FakeAws, role: str) -> Iterator[str]:
    """Where a container finds keys of this role while it runs, as ECS has it."""
    session = aws.client("sts").assume_role(RoleArn=role, RoleSessionName="task")["Credentials"]
    keys = {"RoleArn": role, "AccessKeyId": session["AccessKeyId"], "SecretAccessKey": session["SecretAccessKey"]}
    body = json.dumps({**keys, "Token": session["SessionToken"], "Expiration": f"{session['Expiration']:%FT%TZ}"})

    class Keys(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Keys) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/keys"
        server.shutdown()


def container_of(aws: FakeAws, home: Path) -> tuple[list[str], dict[str, str]]:
    """The task's command, and the environment that ECS would give it: with the secrets' values, and nothing of this
    machine's but its programs."""
    (container,) = task_of(aws)["containerDefinitions"]
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # the image has the engine
    environ = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(home), "XDG_CACHE_HOME": cache}
    environ |= {key: value for key, value in aws.env.items() if key == "AWS_ENDPOINT_URL"}
    environ |= {each["name"]: each["value"] for each in container["environment"]}
    for each in container["secrets"]:
        name = each["valueFrom"].partition(":parameter")[2]
        found = aws.client("ssm").get_parameter(Name=name, WithDecryption=True)
        environ[each["name"]] = found["Parameter"]["Value"]
    return [*container["entryPoint"], *container["command"]], environ


def test_a_pass_of_the_task_begins_with_what_is_due_and_has_no_more_than_its_role(aws, laptop, image, tmp_path):
    scheduled(laptop)
    (due,) = laptop.mgpu("schedule", "run-now", "it")["history"]
    bare = {name: value for name, value in laptop.env.items() if name != "TOKEN"}
    words = ("schedule", "install", "--aws", "--image", image, "--yes")
    assert "export TOKEN=..." in laptop.mgpu(*words, env=bare)["by_hand"][1]
    laptop.mgpu(*words)
    assert len(laptop.mgpu(*words, env=bare)["by_hand"]) == 1  # it is there
    (home := tmp_path / "home").mkdir()
    command, environ = container_of(aws, home)
    how = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "timeout": 200, "check": False}
    with credentials(aws, task_of(aws)["taskRoleArn"]) as url:
        aws.enforce()
        done = subprocess.run(command, env={**environ, "AWS_CONTAINER_CREDENTIALS_FULL_URI": url}, cwd=home, **how)
        aws.enforce(False)
    try:
        assert done.returncode == 0, done.stderr
        assert laptop.mgpu("status", due["run_id"])["state"] == "running", done.stderr
        assert "t0k" not in done.stdout + done.stderr
        assert environ["HOOK_URL"] == laptop.env["HOOK_URL"], "what a sink names is there, too"
    finally:
        laptop.mgpu("down", due["run_id"], env=environ | aws.env)  # its nodes are processes here
    laptop.mgpu("schedule", "uninstall", "--aws")
    assert not any(stands(aws).values())


ECR = f"{ACCOUNT}.dkr.ecr.{HERE}.amazonaws.com"
SOME = "@sha256:" + "1" * 64
BAD = {
    "too often": (["--every", "30s"], "whole minutes"),
    "no whole minutes": (["--every", "90s"], "whole minutes"),
    "no image": ([], f"mgpu image operator {ECR}/mgpu/trainer"),
    "an image of another registry": (["--image", f"hub.example/mgpu{SOME}"], "has to be in ECR"),
    "an image by its tag": (["--image", f"{ECR}/mgpu/trainer:operator"], "by its digest"),
    "an image of another region": (["--image", f"{ECR.replace(HERE, 'us-west-2')}/mgpu{SOME}"], "is in us-west-2"),
    "an image of another account": (["--image", f"{ECR.replace(ACCOUNT, '9' * 12)}/mgpu{SOME}"], "of account 9999"),
    "an image that is not there": (["--image", f"{ECR}/mgpu/trainer{SOME}"], "no image of that digest"),
    "a repository that is not there": (["--image", f"{ECR}/mgpu/none{SOME}"], "is not there"),
}


@pytest.fixture
def told(aws: FakeAws, xdg: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The command in this very process: its exit code, what it says, and what it has changed in the account."""
    aws.client("s3").create_bucket(Bucket=BUCKET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(location.VARIABLE, f"s3://{BUCKET}/backend?region={HERE}")

    def call(*words: str) -> tuple[int, str, list[str]]:
        before = len(aws.calls())
        with pytest.raises(SystemExit) as ended:
            main(["schedule", "install", "--aws", "--yes", *words])
        called = [call.action for call in aws.calls()[before:]]
        reads = ("Describe", "Get", "List", "Head", "Batch")
        return int(ended.value.code or 0), capsys.readouterr().err, [a for a in called if not a.startswith(reads)]

    return call


@pytest.mark.parametrize(("words", "says"), BAD.values(), ids=BAD)
def test_what_cannot_work_is_told_before_anything_is_made(told, image, words, says):
    code, said, changed = told(*words)
    assert (code, changed) == (2, [])
    assert says in said


@pytest.mark.parametrize(
    ("url", "code", "says"),
    [
        (f"s3://{BUCKET}/backend?region={HERE}", 3, "Run `mgpu bootstrap aws --region us-east-1` once"),
        (f"s3://{BUCKET}/backend?region=us-est-1", 2, "Did you mean us-east-1?"),
        ("s3://b/x?endpoint=http://127.0.0.1:9&region=us-east-1", 2, "the backend is not at AWS"),
        ("file:///tmp/nowhere", 2, "is a folder of this machine"),
    ],
)
def test_where_no_task_could_be_is_told_too(told, image, monkeypatch, url, code, says):
    monkeypatch.setenv(location.VARIABLE, url)
    found, said, changed = told("--image", image)
    assert (found, changed) == (code, [])
    assert says in said


def test_a_machine_without_the_teams_passphrase_writes_none_of_its_own(told, aws, image, xdg):
    aws.base()
    aws.client("s3").put_object(Bucket=BUCKET, Key="backend/.pulumi/stacks/mgpu-runs/it.json", Body=b"{}")
    code, said, changed = told("--image", image)
    assert (code, changed, (xdg / "config" / "mgpu" / "passphrase").exists()) == (2, [], False)
    assert "passphrase is not on this machine" in said


@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        ("awskms://1234-ab?region=us-east-1", f"arn:aws:kms:*:{ACCOUNT}:key/1234-ab"),
        ("awskms://alias/mine?region=us-east-1", "kms:ResourceAliases"),
        (f"awskms:///arn:aws:kms:{HERE}:{ACCOUNT}:key/1234-ab", f"arn:aws:kms:{HERE}:{ACCOUNT}:key/1234-ab"),
        (f"awskms:///arn:aws:kms:{HERE}:{ACCOUNT}:alias/mine", "kms:ResourceAliases"),
    ],
)
def test_with_a_key_of_kms_a_pass_needs_no_passphrase(aws, image, told, monkeypatch, key, allowed):
    aws.base()
    monkeypatch.setattr(settings, "secrets_provider", lambda: key)
    plan = fargate.plan(600, image, "")
    assert (plan.asked["secrets"], plan.secrets) == ([], {})
    passes = Passes.model_validate({"name": "mgpu-reconcile-1", **plan.asked})
    document = documents.policy(documents.Place(ACCOUNT, HERE), passes, "task")
    (statement,) = [each for each in document["Statement"] if each["Sid"] == "Key"]
    assert allowed in json.dumps(statement)
    assert len(json.dumps(document, separators=(",", ":"))) < 10240  # characters of all that is in one role
    monkeypatch.setattr(settings, "secrets_provider", lambda: "gcpkms://x")
    with pytest.raises(InputError, match="a role of AWS's alone"):
        fargate.plan(600, image, "")
