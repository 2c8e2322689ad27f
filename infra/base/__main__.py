"""What machines at AWS stand on, one stack for each account and region. Yours to change.

`mgpu bootstrap aws` brings it up, and sets what is read here; `mgpu bootstrap aws --destroy` takes it down.
"""

from __future__ import annotations

import pulumi

from mgpu.iac import resources as mgpu
from mgpu.iac.aws import resources as aws

config = pulumi.Config()
provider = mgpu.Provider(
    "aws",
    account=config.require("account"),
    region=config.require("region"),
    profile=config.get("profile"),
    endpoint_url=config.get("endpointUrl"),
)
# Runs of many people may stand on these: `pulumi destroy` refuses until they are unprotected
opts = pulumi.ResourceOptions(provider=provider, protect=True)

tags = config.get_object("tags")  # of all of them, ["KEY=VALUE", ...]
ssm = config.get_bool("ssm")  # machines may be reached through Session Manager, and then SSH from nowhere
bounded = config.get("permissionsBoundary")  # the ARN of a policy that both roles have to stay within

bucket = aws.Bucket("bucket", existing=config.get("bucket"), tags=tags, opts=opts)
repository = aws.Repository("repository", existing=config.get("repository"), tags=tags, opts=opts)
nodes = aws.NodeRole(
    "nodes",
    existing=config.get("instanceProfile"),
    bucket=bucket.name,
    buckets=config.get_object("dataBuckets"),
    repository=repository.name,
    ssm=ssm,
    boundary=bounded,
    tags=tags,
    opts=opts,
)
reaper = aws.ReaperRole("reaper", existing=config.get("reaperRole"), boundary=bounded, tags=tags, opts=opts)
# What comes last goes first: as long as a machine is in the group, nothing goes
group = aws.SecurityGroup(
    "group",
    existing=config.get("securityGroup"),
    vpc_id=config.get("vpc"),
    ssh=config.get_object("ssh"),
    allow_world=config.get_bool("allowWorld"),
    allow_nobody=ssm,
    tags=tags,
    opts=pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(depends_on=[nodes, reaper])),
)

pulumi.export("bucket", bucket.name)
pulumi.export("checkpoints", bucket.url)
pulumi.export("repository", repository.uri)
pulumi.export("instance_profile", nodes.profile)
pulumi.export("reaper_role", reaper.arn)
pulumi.export("security_group", group.group_id)
pulumi.export("vpc", group.vpc)
pulumi.export("tags", group.tags)
pulumi.export("ssm", nodes.ssm)
