"""What calls `mgpu reconcile` every few minutes in an AWS account, one stack for each backend. Yours to change.

`mgpu schedule install --aws` brings it up, and sets what is read here; `mgpu schedule uninstall --aws` takes it down.
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
passes = aws.Passes(
    "passes",
    name=config.require("name"),
    image=config.require("image"),
    every_minutes=config.get_int("everyMinutes"),
    command=config.require("command"),
    environment=config.get_object("environment"),
    secrets=config.get_object("secrets"),
    backend=config.require("backend"),
    buckets=config.get_object("buckets"),
    key=config.get("key"),
    subnets=config.require_object("subnets"),
    security_group=config.require("securityGroup"),
    boundary=config.get("permissionsBoundary"),
    opts=pulumi.ResourceOptions(provider=provider),
)

pulumi.export("schedule", passes.schedule)
pulumi.export("cluster", passes.cluster)
