"""What calls `mgpu reconcile`, as AWS is asked for it: whatever breaks off is made whole, or taken back as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from fakes.aws import FakeAws

from mgpu.errors import CleanupFailed, InputError, PermissionDenied, ProviderError
from mgpu.providers.aws.bootstrap import resource
from mgpu.providers.aws.bootstrap.resource import Site
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.passes.manager import PassesManager
from mgpu.providers.aws.passes.resource import Passes
from mgpu.providers.aws.session import Account

HERE, ACCOUNT, NAME = "us-east-1", "123456789012", "mgpu-reconcile-00000000"
WANTED = Passes(
    name=NAME,
    image=f"{ACCOUNT}.dkr.ecr.{HERE}.amazonaws.com/mgpu/trainer@sha256:{'0' * 64}",
    command="mgpu reconcile",
    environment=("PULUMI_BACKEND_URL=s3://b/p?region=us-east-1", "AWS_REGION=us-east-1"),
    secrets=("MGPU_PASSPHRASE",),
    backend="s3://b/p",
    subnets=("subnet-1", "subnet-2"),
    security_group="sg-1",
)
ROLE = f"{NAME}-task"


@pytest.fixture
def manager(aws: FakeAws) -> PassesManager:
    site = Site(Account(Options.of({}), attempts=1), HERE, 0, time.monotonic, lambda _: None)
    found = PassesManager(site)
    found.keep_secret(NAME, "MGPU_PASSPHRASE", "open sesame")
    return found


def state(manager: PassesManager, wanted: Passes = WANTED) -> Passes | None:
    found = resource.look(manager, wanted)
    return found.state if found else None


MAKING = (
    *("CreateRole", "PutRolePolicy", "CreateCluster", "CreateLogGroup", "PutRetentionPolicy"),
    *("RegisterTaskDefinition", "CreateSchedule"),
)


@pytest.mark.parametrize("action", MAKING)
def test_what_was_cut_off_is_made_whole_by_the_next_and_taken_back_by_its_name(aws, manager, action: str):
    """Refused once; then the answer is lost."""
    aws.errors(action, "InternalError", 1)
    aws.lose_answers(action, skip=1)
    for _ in range(2):
        with pytest.raises(ProviderError):
            resource.ensure(manager, WANTED)
    resource.ensure(manager, WANTED)
    assert state(manager) == WANTED
    assert len(aws.client("ecs").list_task_definitions()["taskDefinitionArns"]) == 1
    resource.remove(manager, WANTED)
    assert state(manager) is None
    assert manager.secrets(NAME) == frozenset()


def test_services_that_do_not_know_a_new_role_yet_are_waited_for(aws, manager):
    aws.errors("RegisterTaskDefinition", "ClientException", 1)
    aws.errors("CreateSchedule", "ValidationException", 1)
    resource.ensure(manager, WANTED)
    assert state(manager) == WANTED


def _disabled(aws: FakeAws) -> None:
    found = aws.client("scheduler").get_schedule(Name=NAME)
    keys = ("Name", "ScheduleExpression", "FlexibleTimeWindow", "Target")
    aws.client("scheduler").update_schedule(**{key: found[key] for key in keys}, State="DISABLED")


DRIFT: dict[str, tuple[Callable[[FakeAws], object], str]] = {
    "a schedule that somebody has switched off": (_disabled, "scheduled"),
    "no schedule": (lambda aws: aws.client("scheduler").delete_schedule(Name=NAME), "scheduled"),
    "no cluster": (lambda aws: aws.client("ecs").delete_cluster(cluster=NAME), "cluster_there"),
    "no log": (lambda aws: aws.client("logs").delete_log_group(logGroupName=NAME), "log_days"),
    "no task": (lambda aws: aws.client("ecs").deregister_task_definition(taskDefinition=f"{NAME}:1"), "task"),
    "a role without its policy": (
        lambda aws: aws.client("iam").delete_role_policy(RoleName=ROLE, PolicyName=f"mgpu-base-{HERE}"),
        "roles",
    ),
}


@pytest.mark.parametrize(("change", "shows"), DRIFT.values(), ids=DRIFT)
def test_what_others_have_changed_shows_and_is_put_back(aws, manager, change: Callable[[FakeAws], object], shows: str):
    resource.ensure(manager, WANTED)
    change(aws)
    found = state(manager)
    assert found is not None
    assert [name for name, value in found if value != getattr(WANTED, name)] == [shows]
    resource.ensure(manager, WANTED)
    assert state(manager) == WANTED


def test_a_pass_at_work_keeps_all_that_it_needs_until_it_ends(aws, manager):
    resource.ensure(manager, WANTED)
    ecs, there = aws.client("ecs"), aws.client("ec2").describe_subnets()["Subnets"][0]["SubnetId"]
    where = {"subnets": [there], "securityGroups": [aws.base()["security_group_id"]]}
    (task,) = ecs.run_task(
        cluster=NAME, taskDefinition=NAME, launchType="FARGATE", networkConfiguration={"awsvpcConfiguration": where}
    )["tasks"]
    with pytest.raises(CleanupFailed, match="a pass at work"):
        resource.remove(manager, WANTED)
    assert aws.client("scheduler").list_schedules()["Schedules"] == []
    found = state(manager)
    assert found is not None
    assert (found.cluster_there, found.task, found.secrets, found.roles) == (True, True, WANTED.secrets, WANTED.roles)
    ecs.stop_task(cluster=NAME, task=task["taskArn"])
    resource.remove(manager, WANTED)
    assert state(manager) is None


def test_a_task_definition_that_stays_is_told_and_nothing_is_called_gone(aws, manager, monkeypatch):
    resource.ensure(manager, WANTED)
    stays = aws.client("ecs").list_task_definitions()["taskDefinitionArns"]
    monkeypatch.setattr(manager, "_revisions", lambda _, status: stays if status == "INACTIVE" else [])
    with pytest.raises(CleanupFailed, match=stays[0]):
        resource.remove(manager, WANTED)
    assert state(manager, WANTED)


def test_a_secret_that_is_gone_shows_and_is_asked_for(aws, manager):
    resource.ensure(manager, WANTED)
    manager.forget_secrets(NAME, frozenset({"MGPU_PASSPHRASE"}))
    assert state(manager) == WANTED.model_copy(update={"secrets": ()})
    with pytest.raises(InputError, match=f"no parameter /{NAME}/MGPU_PASSPHRASE"):
        resource.ensure(manager, WANTED)


def test_a_role_of_somebody_elses_is_not_taken(aws, manager):
    aws.client("iam").create_role(RoleName=ROLE, AssumeRolePolicyDocument='{"Version": "2012-10-17", "Statement": []}')
    with pytest.raises(InputError, match="mgpu did not make it"):
        resource.ensure(manager, WANTED)


def test_roles_are_bounded_where_that_is_asked_for(aws, manager):
    bound = f"arn:aws:iam::{ACCOUNT}:policy/theirs"
    may = '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}'
    aws.client("iam").create_policy(PolicyName="theirs", PolicyDocument=may)
    wanted = WANTED.model_copy(update={"boundary": bound})
    resource.ensure(manager, WANTED)
    resource.ensure(manager, wanted)
    role = aws.client("iam").get_role(RoleName=ROLE)["Role"]
    assert role["PermissionsBoundary"]["PermissionsBoundaryArn"] == bound
    assert state(manager, wanted) == wanted


def test_who_may_not_is_told_which_policy_prints_it(aws, manager):
    aws.deny("CreateCluster")
    with pytest.raises(PermissionDenied) as caught:
        resource.ensure(manager, WANTED)
    assert "Allow ecs:CreateCluster " in caught.value.next_step
    assert "`mgpu policy aws --passes`" in caught.value.next_step
