"""What AWS is told of the caller of `mgpu reconcile`: its task, its schedule, and who may do what. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mgpu.providers.aws.iam import operator_policies, policies
from mgpu.providers.aws.iam.policies import VERSION, Document
from mgpu.providers.aws.passes.resource import ROLES, TASKS, Passes

CPU_UNITS, MEMORY_MIB = 512, 3072  # half a vCPU; memory for a pass, and eight supervisors with an engine each
_STOP_S = 60  # supervisors take 20 s of it to save what they know
_MINUTE_S = 60  # the least age that Scheduler takes for a call which it could not make
_CONTAINER = "mgpu"


@dataclass(frozen=True)
class Place:
    """Where it is."""

    account: str
    region: str

    def arn(self, service: str, resource: str) -> str:
        """The ARN of something regional."""
        return f"arn:{policies.partition(self.region)}:{service}:{self.region}:{self.account}:{resource}"

    def role(self, name: str, which: str) -> str:
        """The ARN of one of the three roles."""
        return policies.role_arn(self.region, self.account, role_name(name, which))


def role_name(name: str, which: str) -> str:
    """Of one of the three roles."""
    return f"{name}-{which}"


def parameter(name: str, secret: str) -> str:
    """The name of the parameter that holds a secret."""
    return f"/{name}/{secret}"


def task_definition(place: Place, wanted: Passes) -> Document:
    """One pass, as ECS takes it. The root file system is the task's own, and goes with it."""
    logs = {"awslogs-group": wanted.name, "awslogs-region": place.region, "awslogs-stream-prefix": "pass"}
    container = {
        "name": _CONTAINER,
        "image": wanted.image,
        "essential": True,
        "entryPoint": ["/bin/sh"],
        "command": ["-ec", wanted.command],
        "environment": [dict(zip(("name", "value"), each.split("=", 1), strict=True)) for each in wanted.environment],
        "secrets": [
            {"name": each, "valueFrom": place.arn("ssm", f"parameter{parameter(wanted.name, each)}")}
            for each in wanted.secrets
        ],
        "stopTimeout": _STOP_S,
        # an init: somebody has to bury what an engine that is ended leaves behind
        "linuxParameters": {"initProcessEnabled": True, "capabilities": {"drop": ["ALL"]}},
        "logConfiguration": {"logDriver": "awslogs", "options": logs},
    }
    return {
        "family": wanted.name,
        "requiresCompatibilities": ["FARGATE"],
        "networkMode": "awsvpc",
        "cpu": str(CPU_UNITS),
        "memory": str(MEMORY_MIB),
        "runtimePlatform": {"cpuArchitecture": "X86_64", "operatingSystemFamily": "LINUX"},
        "taskRoleArn": place.role(wanted.name, "task"),
        "executionRoleArn": place.role(wanted.name, "execution"),
        "containerDefinitions": [container],
    }


def schedule(place: Place, wanted: Passes) -> Document:
    """When a pass is started, and where. The newest revision of the task is the only one that there is."""
    minutes = wanted.every_minutes
    network = {"Subnets": list(wanted.subnets), "SecurityGroups": [wanted.security_group], "AssignPublicIp": "ENABLED"}
    return {
        "Name": wanted.name,
        "Description": "mgpu: one pass of `mgpu reconcile`",
        "ScheduleExpression": f"rate({minutes} minute{'s' if minutes > 1 else ''})",
        "FlexibleTimeWindow": {"Mode": "OFF"},
        "State": "ENABLED",
        "Target": {
            "Arn": place.arn("ecs", f"cluster/{wanted.name}"),
            "RoleArn": place.role(wanted.name, "scheduler"),
            "EcsParameters": {
                "TaskDefinitionArn": place.arn("ecs", f"task-definition/{wanted.name}"),
                "TaskCount": 1,
                "LaunchType": "FARGATE",
                "NetworkConfiguration": {"awsvpcConfiguration": network},
            },
            # the next pass is the retry
            "RetryPolicy": {"MaximumRetryAttempts": 0, "MaximumEventAgeInSeconds": _MINUTE_S},
        },
    }


def policy(place: Place, wanted: Passes, which: str) -> Document:
    """What one of the three roles may do."""
    makers = {"task": _operator, "execution": _execution, "scheduler": _scheduler}
    return {"Version": VERSION, "Statement": list(makers[which](place, wanted))}


def _operator(place: Place, wanted: Passes) -> Iterator[Document]:
    """What whoever launches may do, through Session Manager, too; the backend, and the key of its secrets."""
    where = operator_policies.Where(place.account, home=place.region)
    yield from operator_policies.machines(where)
    yield from operator_policies.sessions(where)
    bucket, prefix = policies.place(wanted.backend)
    backend = policies.bucket_arn(place.region, bucket)
    objects = ["s3:DeleteObject", "s3:GetObject", "s3:PutObject"]
    yield _allow("Backend", objects, [f"{backend}/{prefix}/*" if prefix else f"{backend}/*"])
    others = [policies.bucket_arn(place.region, each) for each in wanted.buckets]
    yield _allow("Buckets", ["s3:ListBucket"], [backend, *others])
    if others:  # the operator's entries of commit logs
        yield _allow("Runs", ["s3:GetObject", "s3:PutObject"], [f"{each}/*" for each in others])
    if wanted.key:
        yield _key(place, wanted.key)


def _execution(place: Place, wanted: Passes) -> Iterator[Document]:
    """What ECS itself needs for a task: its image, its log, its secrets."""
    repository = wanted.image.partition("@")[0].partition("/")[2]
    pull = ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
    yield _allow("Pull", pull, [policies.repository_arn(place.region, place.account, repository)])
    yield _allow("PullToken", ["ecr:GetAuthorizationToken"], ["*"])  # AWS knows no narrower resource for it
    log = place.arn("logs", f"log-group:{wanted.name}:*")
    yield _allow("Log", ["logs:CreateLogStream", "logs:PutLogEvents"], [log])
    yield _allow("Secrets", ["ssm:GetParameters"], [place.arn("ssm", f"parameter{parameter(wanted.name, '*')}")])


def _scheduler(place: Place, wanted: Passes) -> Iterator[Document]:
    """Starting that task in that cluster, with those two roles."""
    family = place.arn("ecs", f"task-definition/{wanted.name}")
    there = {"ArnEquals": {"ecs:cluster": place.arn("ecs", f"cluster/{wanted.name}")}}
    yield _allow("Start", ["ecs:RunTask"], [family, f"{family}:*"], there)
    roles = [place.role(wanted.name, which) for which, service in ROLES.items() if service == TASKS]
    yield _allow("Pass", ["iam:PassRole"], roles, {"StringEquals": {"iam:PassedToService": TASKS}})


def _key(place: Place, url: str) -> Document:
    """Of an address of Pulumi's: awskms://ID, awskms://alias/NAME or awskms:///ARN, with settings behind a `?`."""
    name = url.removeprefix("awskms://").partition("?")[0].lstrip("/")
    alias = name if name.startswith("alias/") else name.rpartition(":")[2]
    actions = ["kms:Decrypt", "kms:Encrypt"]
    every = f"arn:{policies.partition(place.region)}:kms:*:{place.account}:key/"
    if alias.startswith("alias/"):  # of a call, IAM is told the key
        named = {"ForAnyValue:StringEquals": {"kms:ResourceAliases": alias}}
        return _allow("Key", actions, [f"{every}*"], named)
    return _allow("Key", actions, [name if name.startswith("arn:") else f"{every}{name}"])


def _allow(sid: str, actions: list[str], resources: list[str], condition: Document | None = None) -> Document:
    statement: dict[str, Any] = {"Sid": sid, "Effect": "Allow", "Action": actions, "Resource": resources}
    return {**statement, "Condition": condition} if condition else statement
