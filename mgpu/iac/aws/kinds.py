"""The kinds of what mgpu makes at AWS, by the token of their resource."""

from __future__ import annotations

from typing import Any

from mgpu.iac.tokens import BUCKET, NODE_ROLE, PASSES, REAPER_ROLE, REPOSITORY, SECURITY_GROUP
from mgpu.providers.aws.bootstrap.bucket import BucketManager
from mgpu.providers.aws.bootstrap.repository import RepositoryManager
from mgpu.providers.aws.bootstrap.resource import Manager
from mgpu.providers.aws.bootstrap.roles import NodeRoleManager, ReaperRoleManager
from mgpu.providers.aws.bootstrap.security_group import SecurityGroupManager
from mgpu.providers.aws.passes.manager import PassesManager

MANAGERS: dict[str, type[Manager[Any]]] = {
    BUCKET: BucketManager,
    REPOSITORY: RepositoryManager,
    NODE_ROLE: NodeRoleManager,
    REAPER_ROLE: ReaperRoleManager,
    SECURITY_GROUP: SecurityGroupManager,
    PASSES: PassesManager,
}
