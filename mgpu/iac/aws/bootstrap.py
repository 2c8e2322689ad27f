"""What machines at AWS stand on: one region's stack `base`, planned, brought up, taken down."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mgpu import paths
from mgpu.context import Context
from mgpu.errors import InputError
from mgpu.iac.engine.event_log import Change
from mgpu.iac.engine.project import program_apart
from mgpu.iac.engine.stack import Stack
from mgpu.iac.naming import BASE_PROJECT
from mgpu.providers.aws.bootstrap import resource, role
from mgpu.providers.aws.bootstrap.bucket import Bucket, BucketManager
from mgpu.providers.aws.bootstrap.repository import Repository, RepositoryManager
from mgpu.providers.aws.bootstrap.resource import Manager, Site
from mgpu.providers.aws.bootstrap.roles import NodeRole, NodeRoleManager, ReaperRole, ReaperRoleManager
from mgpu.providers.aws.bootstrap.security_group import SecurityGroup, SecurityGroupManager, network
from mgpu.providers.aws.failures import calling
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.session import Account


@dataclass(frozen=True)
class Wanted:
    """What a base is asked to be. Where a name or an id is given, that one is used instead of one of mgpu's own."""

    ssh: tuple[str, ...] = ()
    allow_world: bool = False
    vpc: str = ""
    bucket: str = ""
    repository: str = ""
    instance_profile: str = ""
    reaper_role: str = ""
    security_group: str = ""
    data_buckets: tuple[str, ...] = ()
    permissions_boundary: str = ""
    tags: tuple[str, ...] = ()
    ssm: bool = False

    def config(self) -> dict[str, object]:
        """As `infra/base` reads it."""
        texts = {
            "vpc": self.vpc,
            "bucket": self.bucket,
            "repository": self.repository,
            "instanceProfile": self.instance_profile,
            "reaperRole": self.reaper_role,
            "securityGroup": self.security_group,
            "permissionsBoundary": self.permissions_boundary,
        }
        given = {key: value for key, value in texts.items() if value}
        more = {
            "ssh": list(self.ssh),
            "allowWorld": self.allow_world,
            "ssm": self.ssm,
            "dataBuckets": list(self.data_buckets),
            "tags": list(self.tags),
        }
        return {**given, **{key: value for key, value in more.items() if value}}


class Base:
    """The base of one region of the account behind the options; what it is to be, where it is to be brought up.

    Raises:
        InputError: an address that is none, or is the whole world; no default VPC.
    """

    def __init__(self, account: Account, region: str, context: Context, wanted: Wanted | None = None) -> None:
        self.site = Site(account, region, context.timeouts.destroy_s)
        self.region = region
        name = f"{account.id()}-{region}"
        log_dir = paths.state_dir() / "base" / name
        self.stack = Stack(
            program_apart("base", Path.cwd()),
            name,
            log_dir / "none",
            log_dir=log_dir,
            emit=context.emit,
            timeouts=context.timeouts,
            config=None if wanted is None else _config(self.site, _checked(self.site, wanted)),
        )

    def preview(self) -> tuple[Change, ...]:
        """What `up` would change."""
        self.stack.init()
        return self.stack.preview()

    def up(self) -> dict[str, Any]:
        """Makes it so, and says what is there."""
        self.stack.init()
        self.stack.up()
        return {"account": self.site.account.id(), "region": self.region, **self.stack.values()}

    def forget(self) -> None:
        """Drops the stack if it holds nothing: one that was looked at, and not wanted."""
        if not self.stack.values():
            self.stack.remove()

    def require_removable(self, *, and_bucket: bool) -> None:
        """Raises InputError where `down` would have to stop half-way, or has nothing to do."""
        if not self.stack.exists():
            why = "What another machine has made is taken over by `mgpu bootstrap aws`, and can be taken down then."
            raise InputError(f"this machine knows no base in {self.region}", why, "Run `mgpu bootstrap aws` first.")
        with calling("looking for machines that use the base", self.region):
            used_by = role.users(self.site)
        if used_by:
            why = f"Machines of mgpu's live there: {', '.join(used_by)}."
            raise InputError(f"the base in {self.region} is in use", why, "End them first: `mgpu ls`, `mgpu gc`.")
        if and_bucket:
            BucketManager(self.site).require_empty(self._bucket())

    def down(self, *, and_bucket: bool) -> None:
        """Takes it down, all but the bucket; with `and_bucket` that, too.

        Raises:
            CleanupFailed: something is still there.
        """
        ours = self._bucket() if and_bucket else None
        self.stack.unprotect()
        self.stack.destroy()
        if ours is not None:
            resource.remove(BucketManager(self.site), ours)
        self.stack.remove()

    def _bucket(self) -> Bucket:
        """The base's own: one of the user's is never deleted."""
        return BucketManager(self.site).complete(Bucket(keep=False))


def require_regions(account: Account, regions: tuple[str, ...]) -> None:
    """Raises InputError for a region that the account does not have, or has not enabled."""
    known = account.regions()
    for region in regions:
        if region not in known:
            near = difflib.get_close_matches(region, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Enabled: {', '.join(known)}."
            raise InputError(f"there is no region {region} in account {account.id()}, or it is not enabled", "", hint)


def _checked(site: Site, wanted: Wanted) -> Wanted:
    """With networks as AWS writes them, and the default VPC named; what is the user's is looked at."""
    _use(BucketManager(site), Bucket(existing=wanted.bucket or None))
    _use(RepositoryManager(site), Repository(existing=wanted.repository or None))
    _use(NodeRoleManager(site), NodeRole(existing=wanted.instance_profile or None))
    _use(ReaperRoleManager(site), ReaperRole(existing=wanted.reaper_role or None))
    group = SecurityGroup(
        existing=wanted.security_group or None, allow_world=wanted.allow_world, allow_nobody=wanted.ssm
    )
    _use(SecurityGroupManager(site), group)
    if wanted.security_group:
        return wanted
    ssh = SecurityGroupManager(site).complete(group.model_copy(update={"ssh": wanted.ssh})).ssh
    with calling("looking for the network", site.region):
        return replace(wanted, ssh=ssh, vpc=network(site, wanted.vpc))


def _use(manager: Manager[Any], asked: resource.Resource) -> None:
    if asked.existing:
        resource.examined(manager, manager.complete(asked))


def account_of(account: str, profile: str, endpoint_url: str) -> Account:
    """The account that is meant, looked up; empty: whatever the credentials say.

    Raises:
        AuthError, InputError: no good credentials; another account's.
    """
    found = Account(Options.of({"account": account, "profile": profile, "endpoint_url": endpoint_url}))
    found.id()
    return found


def _config(site: Site, wanted: Wanted) -> dict[str, object]:
    options = site.account.options
    where = {"profile": options.profile, "endpointUrl": options.endpoint_url}
    given = {key: value for key, value in where.items() if value}
    config = {"account": site.account.id(), "region": site.region, **given, **wanted.config()}
    return {f"{BASE_PROJECT}:{key}": value for key, value in config.items()}
