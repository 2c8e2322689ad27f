"""The kinds of stack `base`, by the token of their resource."""

from __future__ import annotations

from typing import Any

from mgpu.iac.tokens import BUCKET, NODE_ROLE, REAPER_ROLE, REPOSITORY, SECURITY_GROUP
from mgpu.providers.aws.base.bucket import BucketKeeper
from mgpu.providers.aws.base.group import GroupKeeper
from mgpu.providers.aws.base.repository import RepositoryKeeper
from mgpu.providers.aws.base.roles import NodeKeeper, ReaperKeeper
from mgpu.providers.aws.base.thing import Keeper

KEEPERS: dict[str, type[Keeper[Any]]] = {
    BUCKET: BucketKeeper,
    REPOSITORY: RepositoryKeeper,
    NODE_ROLE: NodeKeeper,
    REAPER_ROLE: ReaperKeeper,
    SECURITY_GROUP: GroupKeeper,
}
