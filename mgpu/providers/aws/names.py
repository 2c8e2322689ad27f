"""What everything of ours in an AWS account is called, and the tags by which it is found again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

_ROLE_CHARACTERS = 64

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
SUBNET = "mgpu:subnet"  # that was chosen: a second call by the token asks for the same
# on a run's role alone
RUN = "mgpu:run"
# on what `mgpu bootstrap aws` makes
BASE = "mgpu:base"

NAME = "Name"  # what AWS's console shows
PREFIX = "mgpu:"
ON_MACHINE = (NAME, OWNER, FLEET, GENERATION, TOKEN, RANK, RANKS, PRICE, HARD_CAP_AT, HOST_KEY, ONE_USE_KEY)
# seconds in which EC2's listings may not show what was made, or that it has ended: how long AWS would have one look
# again, https://docs.aws.amazon.com/ec2/latest/devguide/eventual-consistency.html
LAG_S = 300.0
MOST_TAGS = 50  # of one resource at AWS, those of AWS's own (`aws:`) not counted

OLD_PARTS_DAYS = 2  # that the bucket of base keeps parts of checkpoints which were deleted

CAPACITY_BLOCK = "capacity-block"  # EC2's word for the market, and for the type of a reservation

NODE_ROLE = "mgpu-node"  # also the name of its instance profile
RUN_ROLES = "/mgpu/run/"  # the path of the roles of runs
# what the operator calls for Session Manager alone (`aws: {address: ssm}`)
SESSION_LOOKS = ("ec2:DescribeRouteTables", "ec2:DescribeVpcEndpoints", "ssm:DescribeInstanceInformation")
START_SESSION = "ssm:StartSession"
RUN_BOUNDARY = "mgpu-run"  # the policy that bounds them
REAPER_ROLE = "mgpu-reaper"  # EventBridge Scheduler takes it on, to end machines at their hard cap
SECURITY_GROUP = "mgpu-nodes"
REPOSITORY = "mgpu/trainer"
CALLER = "mgpu-reconcile-"  # what the names of all begin with that calls `mgpu reconcile` (of a backend in a bucket)


def template(token: str) -> str:
    """The launch template of one create."""
    return f"mgpu-{token}"


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Tags as AWS takes them."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def run_role(run_id: str) -> str:
    """The role of one run, which its nodes take on; at most 64 characters."""
    name = f"mgpu-{run_id}"
    return name if len(name) <= _ROLE_CHARACTERS else f"{name[:55]}-{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"


def bucket(account: str, region: str) -> str:
    """The bucket of `base`."""
    return f"mgpu-{account}-{region}"
