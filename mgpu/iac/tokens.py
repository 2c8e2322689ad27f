"""The types of resource, as programs, state and the plug-in name them."""

from __future__ import annotations

SSH_KEY = "mgpu:index:SshKey"
IMAGE = "mgpu:index:Image"
FLEET = "mgpu:index:Fleet"
FLEET_GUARD = "mgpu:index:FleetGuard"

# of stack `base`
BUCKET = "mgpu:aws:Bucket"
REPOSITORY = "mgpu:aws:Repository"
NODE_ROLE = "mgpu:aws:NodeRole"
REAPER_ROLE = "mgpu:aws:ReaperRole"
SECURITY_GROUP = "mgpu:aws:SecurityGroup"
BASE = (BUCKET, REPOSITORY, NODE_ROLE, REAPER_ROLE, SECURITY_GROUP)

# of a stack of its own
PASSES = "mgpu:aws:Passes"
AWS = (*BASE, PASSES)
AWS_CONFIG = ("account", "region", "profile", "endpointUrl")  # of the provider, for these
