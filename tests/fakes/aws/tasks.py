"""ECS where moto is kinder than AWS: a cluster whose tasks are at work stays, and Fargate has its sizes."""

from __future__ import annotations

from typing import Any

from moto.ecs.exceptions import EcsClientException, ECSException
from moto.ecs.models import EC2ContainerServiceBackend

from fakes.aws.patching import existing, replace

# https://docs.aws.amazon.com/AmazonECS/latest/developerguide/task-cpu-memory-error.html; CPU units: MiB
SIZES = {"256": (512, 1024, 2048), "512": (1024, 2048, 3072, 4096)}


def install() -> None:
    """From now on."""
    delete = existing(EC2ContainerServiceBackend, "delete_cluster")
    register = existing(EC2ContainerServiceBackend, "register_task_definition")

    def deleted(self: Any, cluster_str: str) -> Any:
        tasks = self.tasks.get(cluster_str.rpartition("/")[2], {})
        if any(task.desired_status != "STOPPED" for task in tasks.values()):
            raise ECSException("ClusterContainsTasksException", "The Cluster cannot be deleted while Tasks are active.")
        return delete(self, cluster_str)

    def registered(self: Any, family: str, *rest: Any, **asked: Any) -> Any:
        if int(asked["memory"]) not in SIZES.get(asked["cpu"], ()):
            raise EcsClientException("No Fargate configuration exists for given values.")
        return register(self, family, *rest, **asked)

    # of machines that Fargate has not: moto adds up what containers need, and fails where a task alone says it
    replace(EC2ContainerServiceBackend, "_calculate_task_resource_requirements", lambda *_: {})
    replace(EC2ContainerServiceBackend, "delete_cluster", deleted)
    replace(EC2ContainerServiceBackend, "register_task_definition", registered)
