"""What everything of ours in an AWS account is called, and the tags by which it is found again."""

from __future__ import annotations

# on everything that costs money
OWNER = "mgpu:owner"
FLEET = "mgpu:fleet"
GENERATION = "mgpu:generation"
TOKEN = "mgpu:token"  # noqa: S105  an idempotency token, no secret
# on machines alone
RANK = "mgpu:rank"
RANKS = "mgpu:ranks"  # of its whole create, from its template (machines.ranks_tag): who is who before RANK is there
PRICE = "mgpu:usd-per-hour"  # of one machine, from its template: EC2 does not say what a machine costs
HARD_CAP_AT = "mgpu:hard-cap-at"  # UNIX seconds
HOST_KEY = "mgpu:host-key"  # OpenSSH public key line: the one that is pinned
ONE_USE_KEY = "mgpu:one-use-host-key"  # the one that came with user data, as long as it may be met
# on a launch template alone
REQUEST = "mgpu:request"  # a digest of what was asked for: the same token for something else is a conflict
# on what `mgpu bootstrap aws` makes
BASE = "mgpu:base"

NAME = "Name"  # what AWS's console shows
PREFIX = "mgpu:"
ON_MACHINE = (NAME, OWNER, FLEET, GENERATION, TOKEN, RANK, RANKS, PRICE, HARD_CAP_AT, HOST_KEY, ONE_USE_KEY)
MOST_TAGS = 50  # of one resource at AWS, those of AWS's own (`aws:`) not counted

OLD_PARTS_DAYS = 2  # that the bucket of base keeps parts of checkpoints which were deleted

NODE_ROLE = "mgpu-node"  # also the name of its instance profile
REAPER_ROLE = "mgpu-reaper"  # EventBridge Scheduler takes it on, to end machines at their hard cap
SECURITY_GROUP = "mgpu-nodes"
REPOSITORY = "mgpu/trainer"


def template(token: str) -> str:
    """The launch template of one create."""
    return f"mgpu-{token}"


def bucket(account: str, region: str) -> str:
    """The bucket of `base`."""
    return f"mgpu-{account}-{region}"
