"""What calls `mgpu reconcile` every few minutes: a schedule of EventBridge's that starts a task of Fargate's."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from mgpu.providers.aws.bootstrap.resource import Resource, fixed

TASKS, SCHEDULER = "ecs-tasks.amazonaws.com", "scheduler.amazonaws.com"
ROLES = {"task": TASKS, "execution": TASKS, "scheduler": SCHEDULER}
"""The three roles, and which service takes each on."""
LOG_DAYS = 30


class Passes(Resource):
    """What calls `mgpu reconcile` every few minutes."""

    facts: ClassVar[dict[str, str]] = {"schedule": "ARN of the schedule", "cluster": "ARN of the cluster"}
    identity: ClassVar[tuple[str, ...]] = ("name",)

    existing: str | None = fixed(None, "none of yours")
    tags: tuple[str, ...] = fixed((), "none of yours: AWS takes none for a schedule")
    name: str = Field(description="name of all of it", pattern=r"^[a-z0-9-]{1,40}$")
    image: str = Field(description="image of the task in ECR, by digest")
    every_minutes: int = Field(default=10, ge=1, description="minutes between the beginnings of two passes")
    command: str = Field(description="what a shell runs in the task: one pass")
    environment: tuple[str, ...] = Field(default=(), description="of the task, NAME=value")
    secrets: tuple[str, ...] = Field(default=(), description="further variables, from Parameter Store: /NAME/VARIABLE")
    backend: str = Field(description="where runs are remembered, s3://bucket/prefix")
    buckets: tuple[str, ...] = Field(default=(), description="of the user's that runs keep checkpoints in")
    key: str = Field(default="", description="key of KMS that encrypts the secrets of stacks, awskms://...")
    subnets: tuple[str, ...] = Field(description="where tasks are; they have public addresses")
    security_group: str = Field(description="of the tasks: the one of the nodes, whose members reach each other")
    boundary: str = Field(
        default="", description="ARN of a policy of yours that bounds the roles, whatever they may do"
    )
    cluster_there: bool = fixed(True, "the cluster is there")
    log_days: int = fixed(LOG_DAYS, "days that what passes said is kept")
    roles: tuple[str, ...] = fixed(tuple(sorted(ROLES)), "those that are there, and may do what they should")
    task: bool = fixed(True, "the task is as it should be, and its older revisions are gone")
    scheduled: bool = fixed(True, "the schedule is as it should be")
