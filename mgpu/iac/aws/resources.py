"""The SDK of what mgpu makes at AWS: what `infra/base` and `infra/passes` import.

Every property is documented in the plugin's schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pulumi
from pulumi import Input, Output, ResourceOptions
from pydantic.alias_generators import to_camel, to_snake

from mgpu.iac import tokens


class _AwsResource(pulumi.CustomResource):
    """Camel case on the wire; there is no map of a user's among our properties."""

    def __init__(self, token: str, resource_name: str, given: Mapping[str, Any], opts: ResourceOptions | None) -> None:
        super().__init__(token, resource_name, {**dict.fromkeys(type(self).__annotations__), **given}, opts)

    def translate_input_property(self, prop: str) -> str:
        """Python's name -> the wire's."""
        return to_camel(prop)

    def translate_output_property(self, prop: str) -> str:
        """The wire's name -> Python's."""
        return to_snake(prop)


class Bucket(_AwsResource):
    """A bucket for checkpoints: closed to the public, TLS only, versioned. With `keep` it outlives the stack."""

    existing: Output[str | None]
    lacks: Output[list[str]]
    tags: Output[list[str]]
    name: Output[str]
    keep: Output[bool]
    abort_uploads_days: Output[int]
    old_versions_days: Output[int]
    old_parts_days: Output[int]
    public_access_blocked: Output[bool]
    guarded: Output[bool]
    versioned: Output[bool]
    encryption: Output[str]
    arn: Output[str]
    url: Output[str]

    def __init__(
        self,
        resource_name: str,
        *,
        existing: Input[str] | None = None,
        name: Input[str] | None = None,
        keep: Input[bool] | None = None,
        abort_uploads_days: Input[int] | None = None,
        old_versions_days: Input[int] | None = None,
        old_parts_days: Input[int] | None = None,
        tags: Input[Sequence[str]] | None = None,
        opts: ResourceOptions | None = None,
    ) -> None:
        given = {
            "existing": existing,
            "name": name,
            "keep": keep,
            "abort_uploads_days": abort_uploads_days,
            "old_versions_days": old_versions_days,
            "old_parts_days": old_parts_days,
            "tags": tags,
        }
        super().__init__(tokens.BUCKET, resource_name, given, opts)


class Repository(_AwsResource):
    """An image repository: scanned on push, tags that never move, old images expire."""

    existing: Output[str | None]
    lacks: Output[list[str]]
    tags: Output[list[str]]
    name: Output[str]
    untagged_days: Output[int]
    keep_images: Output[int]
    scan_on_push: Output[bool]
    immutable_tags: Output[bool]
    lifecycle: Output[str]
    arn: Output[str]
    uri: Output[str]

    def __init__(
        self,
        resource_name: str,
        *,
        existing: Input[str] | None = None,
        name: Input[str] | None = None,
        untagged_days: Input[int] | None = None,
        keep_images: Input[int] | None = None,
        tags: Input[Sequence[str]] | None = None,
        opts: ResourceOptions | None = None,
    ) -> None:
        given = {
            "existing": existing,
            "name": name,
            "untagged_days": untagged_days,
            "keep_images": keep_images,
            "tags": tags,
        }
        super().__init__(tokens.REPOSITORY, resource_name, given, opts)


class NodeRole(_AwsResource):
    """What nodes may do by themselves, and what bounds the roles of runs. `existing`: an instance profile."""

    existing: Output[str | None]
    lacks: Output[list[str]]
    tags: Output[list[str]]
    bucket: Output[str]
    buckets: Output[list[str]]
    repository: Output[str]
    ssm: Output[bool]
    trust: Output[str]
    policy: Output[str]
    boundary: Output[str]
    other_policies: Output[list[str]]
    bounded: Output[bool]
    in_profile: Output[bool]
    arn: Output[str]
    profile: Output[str]
    profile_arn: Output[str]

    def __init__(
        self,
        resource_name: str,
        *,
        bucket: Input[str],
        repository: Input[str],
        buckets: Input[Sequence[Input[str]]] | None = None,
        ssm: Input[bool] | None = None,
        existing: Input[str] | None = None,
        boundary: Input[str] | None = None,
        tags: Input[Sequence[str]] | None = None,
        opts: ResourceOptions | None = None,
    ) -> None:
        given = {
            "existing": existing,
            "boundary": boundary,
            "bucket": bucket,
            "buckets": buckets,
            "repository": repository,
            "ssm": ssm,
            "tags": tags,
        }
        super().__init__(tokens.NODE_ROLE, resource_name, given, opts)


class ReaperRole(_AwsResource):
    """What EventBridge Scheduler takes on to end machines at their hard cap. `existing`: an ARN."""

    existing: Output[str | None]
    lacks: Output[list[str]]
    tags: Output[list[str]]
    trust: Output[str]
    policy: Output[str]
    boundary: Output[str]
    other_policies: Output[list[str]]
    arn: Output[str]

    def __init__(
        self,
        resource_name: str,
        *,
        existing: Input[str] | None = None,
        boundary: Input[str] | None = None,
        tags: Input[Sequence[str]] | None = None,
        opts: ResourceOptions | None = None,
    ) -> None:
        given = {"existing": existing, "boundary": boundary, "tags": tags}
        super().__init__(tokens.REAPER_ROLE, resource_name, given, opts)


class SecurityGroup(_AwsResource):
    """The nodes' security group: SSH from `ssh` alone, everything between its members, everything out."""

    existing: Output[str | None]
    lacks: Output[list[str]]
    tags: Output[list[str]]
    name: Output[str]
    vpc_id: Output[str]
    ssh: Output[list[str]]
    allow_world: Output[bool]
    allow_nobody: Output[bool]
    within: Output[bool]
    out: Output[bool]
    others: Output[list[str]]
    group_id: Output[str]
    vpc: Output[str]

    def __init__(
        self,
        resource_name: str,
        *,
        ssh: Input[Sequence[str]] | None = None,
        existing: Input[str] | None = None,
        name: Input[str] | None = None,
        vpc_id: Input[str] | None = None,
        allow_world: Input[bool] | None = None,
        allow_nobody: Input[bool] | None = None,
        tags: Input[Sequence[str]] | None = None,
        opts: ResourceOptions | None = None,
    ) -> None:
        given = {
            "existing": existing,
            "name": name,
            "vpc_id": vpc_id,
            "ssh": ssh,
            "allow_world": allow_world,
            "allow_nobody": allow_nobody,
            "tags": tags,
        }
        super().__init__(tokens.SECURITY_GROUP, resource_name, given, opts)


class Passes(_AwsResource):
    """What calls `mgpu reconcile` every few minutes: a schedule of EventBridge's that starts a task of Fargate's."""

    existing: Output[str | None]
    lacks: Output[list[str]]
    tags: Output[list[str]]
    name: Output[str]
    image: Output[str]
    every_minutes: Output[int]
    command: Output[str]
    environment: Output[list[str]]
    secrets: Output[list[str]]
    backend: Output[str]
    buckets: Output[list[str]]
    key: Output[str]
    subnets: Output[list[str]]
    security_group: Output[str]
    boundary: Output[str]
    cluster_there: Output[bool]
    log_days: Output[int]
    roles: Output[list[str]]
    task: Output[bool]
    scheduled: Output[bool]
    schedule: Output[str]
    cluster: Output[str]

    def __init__(
        self,
        resource_name: str,
        *,
        name: Input[str],
        image: Input[str],
        command: Input[str],
        backend: Input[str],
        subnets: Input[Sequence[Input[str]]],
        security_group: Input[str],
        every_minutes: Input[int] | None = None,
        environment: Input[Sequence[Input[str]]] | None = None,
        secrets: Input[Sequence[Input[str]]] | None = None,
        buckets: Input[Sequence[Input[str]]] | None = None,
        key: Input[str] | None = None,
        boundary: Input[str] | None = None,
        opts: ResourceOptions | None = None,
    ) -> None:
        given = {
            "name": name,
            "image": image,
            "every_minutes": every_minutes,
            "command": command,
            "environment": environment,
            "secrets": secrets,
            "backend": backend,
            "buckets": buckets,
            "key": key,
            "subnets": subnets,
            "security_group": security_group,
            "boundary": boundary,
        }
        super().__init__(tokens.PASSES, resource_name, given, opts)
