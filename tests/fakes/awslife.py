"""The whole life of an operator at AWS, step by step: base, offers, a fleet, its repair, its end."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.checkpoint.log.manifest import checkpoint_id
from mgpu_train.checkpoint.retention import plan_prune, prune
from mgpu_train.checkpoint.transfer.upload import commit_when_complete, upload_part
from mgpu_train.config import Retention
from mgpu_train.store import open_store

from fakes.aws import PROGRAMS, FakeAws
from fakes.aws.fake import Called
from mgpu.backend import location
from mgpu.errors import AmbiguousCreate, CleanupFailed, RateLimited, Transient
from mgpu.iac.aws import bootstrap as run_base
from mgpu.plan.model import Offer, Requirements
from mgpu.providers.aws import names, session_proxy
from mgpu.providers.aws.bootstrap import resource
from mgpu.providers.aws.bootstrap.bucket import Bucket, BucketManager
from mgpu.providers.aws.bootstrap.repository import Repository, RepositoryManager
from mgpu.providers.aws.bootstrap.resource import Site
from mgpu.providers.aws.bootstrap.roles import NodeRole, NodeRoleManager, ReaperRole, ReaperRoleManager
from mgpu.providers.aws.bootstrap.security_group import SecurityGroup, SecurityGroupManager
from mgpu.providers.aws.catalog.refresh import refresh
from mgpu.providers.aws.iam import policies
from mgpu.providers.aws.instances import disk_key, machines, network, reaper
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.passes.manager import PassesManager
from mgpu.providers.aws.passes.resource import Passes
from mgpu.providers.aws.provider import AwsProvider
from mgpu.providers.aws.session import Account
from mgpu.providers.base import FleetRequest, Handle, Intent, ReservationRequest
from mgpu.schedule import callers, fargate

HERE, ACCOUNT = "us-east-1", "123456789012"
BUCKET = names.bucket(ACCOUNT, HERE)
SSH = "203.0.113.7/32"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0000000000000000000000000000000000000000"
TAGS = ("CostCenter=4711",)
TOKENS = ("a" * 40, "b" * 40)
OFFER = Offer(
    provider="aws", instance_type="p4d.24xlarge", market="on-demand", price_usd_per_hour=1, region=HERE,
    zone="us-east-1a", fetched_at=1,
)  # fmt: skip
ON_SALE = ReservationRequest(nodes=2, hours=24, regions=(HERE,))
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_PATIENCE_S = 20.0


class Here(Account):
    """An account of one region: the fake needs half a second for each, and has China's, where its users are unknown."""

    def regions(self) -> tuple[str, ...]:
        return tuple(region for region in super().regions() if region == HERE)


@dataclass
class Life:
    """Its steps, in order, by the credentials in the environment; what a step leaves, the next needs."""

    aws: FakeAws
    handle: Handle | None = None
    provider: AwsProvider = field(default_factory=AwsProvider)
    token: str = TOKENS[0]
    asides: list[range] = field(default_factory=list)
    passes: Passes | None = None

    def __post_init__(self) -> None:
        self.account = self.provider._account = Here(Options.of({}), attempts=1)
        self.site = Site(self.account, HERE, 0, time.monotonic, lambda _: None)
        asked = (
            (BucketManager, Bucket(keep=False, tags=TAGS)),
            (RepositoryManager, Repository(tags=TAGS)),
            (NodeRoleManager, NodeRole(bucket=BUCKET, repository=names.REPOSITORY, ssm=True, tags=TAGS)),
            (ReaperRoleManager, ReaperRole(tags=TAGS)),
            (SecurityGroupManager, SecurityGroup(ssh=(SSH,), tags=TAGS)),
        )
        self.resources: list[tuple[Any, Any]] = [
            (manager, manager.complete(wanted)) for manager, wanted in ((make(self.site), each) for make, each in asked)
        ]

    def steps(self) -> dict[str, Callable[[], object]]:
        """By name. Those of the base begin with `base`, those of `mgpu schedule install --aws` with `passes`."""
        return {
            "base made": self.base_made,
            "base mended": self.base_mended,
            "checked": lambda: self.provider.check(),
            "findings": self.looked_at,
            "refreshed": lambda: refresh(self.account),
            "created": self.created,
            "reserved": self.reserved,
            "bought": self.bought,
            "described": self.described,
            "reached": self.reached,
            "capped again": self.capped_again,
            "repaired": self.repaired,
            "listed": lambda: self.provider.list_owned("me"),
            "granted": self.granted,
            "shared": self.shared,
            "passes made": self.passes_made,
            "passes mended": self.passes_mended,
            "passes deleted": lambda: resource.remove(PassesManager(self.site), self.passes),
            "stored": self.stored,
            "revoked": lambda: self.provider.revoke_store("demo-1"),
            "logged in": lambda: self.provider.registry_login(f"{'0' * 12}.dkr.ecr.{HERE}.amazonaws.com"),
            "destroyed": self.destroyed,
            "base deleted": self.base_deleted,
        }

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is called inside is not the operator's."""
        first = len(self.aws.calls())
        yield
        self.asides.append(range(first, len(self.aws.calls())))

    def calls(self) -> list[Called]:
        """What the operator has called, oldest first."""
        strange = {number for some in self.asides for number in some}
        return [call for number, call in enumerate(self.aws.calls()) if number not in strange]

    # --- base

    def base_made(self) -> None:
        run_base.require_regions(self.account, (HERE,))
        for manager, wanted in self.resources:
            resource.ensure(manager, wanted)

    def base_mended(self) -> None:
        """Somebody has opened the group, closed its way out, and given a role more than it had."""
        with self.aside():
            self._drift()
        for manager, wanted in self.resources:
            resource.ensure(manager, wanted)

    def looked_at(self) -> None:
        """Of an account whose disks have a key of its own."""
        with self.aside():
            policy = json.dumps({"Version": "2012-10-17", "Statement": [disk_key.statement(self.account.id(), HERE)]})
            key = self.aws.client("kms").create_key(Policy=policy)["KeyMetadata"]["Arn"]
            self.aws.client("ec2").modify_ebs_default_kms_key_id(KmsKeyId=key)
        self.provider.findings(None, lambda: SSH)

    def _drift(self) -> None:
        ec2, iam = self.aws.client("ec2"), self.aws.client("iam")
        group = ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": [names.SECURITY_GROUP]}])
        found = group["SecurityGroups"][0]
        world = {"IpProtocol": "tcp", "FromPort": 80, "ToPort": 80, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
        ec2.authorize_security_group_ingress(GroupId=found["GroupId"], IpPermissions=[world])
        ec2.revoke_security_group_egress(GroupId=found["GroupId"], IpPermissions=found["IpPermissionsEgress"])
        document, arn = self._more()
        iam.attach_role_policy(RoleName=names.NODE_ROLE, PolicyArn=arn)
        bound = f"arn:aws:iam::{ACCOUNT}:policy/{names.RUN_BOUNDARY}"
        for _ in range(4):  # IAM keeps five
            iam.create_policy_version(PolicyArn=bound, PolicyDocument=document, SetAsDefault=True)
        iam.put_role_policy(RoleName=names.REAPER_ROLE, PolicyName="more", PolicyDocument=document)

    def _more(self) -> tuple[str, str]:
        """A policy that no role of mgpu's should have: its document, and the ARN of one that can be attached."""
        may = {"Effect": "Allow", "Action": "s3:ListAllMyBuckets", "Resource": "*"}
        document, name = json.dumps({"Version": "2012-10-17", "Statement": [may]}), f"more-{len(self.asides)}"
        return document, self.aws.client("iam").create_policy(PolicyName=name, PolicyDocument=document)["Policy"]["Arn"]

    def base_deleted(self) -> None:
        """Something depends on the group at first."""
        self.aws.errors("DeleteSecurityGroup", "DependencyViolation", 1)
        with suppress(CleanupFailed):
            resource.remove(*self.resources[-1])
        for manager, wanted in reversed(self.resources):
            resource.remove(manager, wanted)

    # --- a fleet

    def request(self, generation: int = 1) -> FleetRequest:
        needed = Requirements(provider="aws", nodes=2, max_price_usd_per_hour=99, max_hours=1, provider_options={})
        return FleetRequest(
            fleet="demo", generation=generation, owner="me", requirements=needed, ssh_public_key=KEY, lease_s=300,
            hard_cap_s=3600,
        )  # fmt: skip

    def created(self) -> None:
        self.aws.quick()
        self.handle = insist(lambda: self.provider.create(self.request(), OFFER, self.token))

    def reserved(self) -> None:
        """What is on sale, what there is, and a plan in it."""
        with self.aside():
            self.aws.sell(OFFER.instance_type, 2, "us-east-1a", usd=1920)
            held = self.aws.reserve(OFFER.instance_type, 2, "us-east-1a", block=True, hours=24)
        assert self.provider.find_reservations(ON_SALE).offers
        assert self.provider.list_reservations((HERE,)).reservations
        wanted = self.request().requirements.model_copy(update={"provider_options": {"reservation": held}})
        assert self.provider.offers(wanted).offers[0].obstacle is None

    def bought(self) -> None:
        """The answer is lost, and what was bought is found by its tags."""
        with self.aside():
            offer = self.provider.find_reservations(ON_SALE).offers[0]
            self.aws.lose_answers("PurchaseCapacityBlock")
        with suppress(AmbiguousCreate):
            self.provider.buy_reservation(offer, "me", TOKENS[0])
        assert self.provider.bought_reservation(offer, TOKENS[0], time.time())

    def described(self) -> None:
        assert self.handle
        intent = Intent(fleet="demo", generation=1, owner="me", token=self.token, offer=OFFER)
        assert self.provider.find(intent)
        insist(lambda: self.provider.describe(self.handle))  # type: ignore[arg-type]
        for used in (False, True):
            self.provider.rekeyed(self.handle, self.handle.ids[0], KEY, used=used)

    def reached(self) -> None:
        """Through Session Manager, as a fleet of `address: ssm` is."""
        assert self.handle
        with self.aside():
            self.aws.endpoints()
            self.aws.pace(agent_s=0, agent_flaps_s=0)
        options = Options.of({"address": "ssm"})
        with mock.patch.dict(os.environ, {"PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"}):
            network.find(self.account, options, OFFER, 2)
            assert insist(lambda: machines.describe(self.account, options, self.handle)).ready  # type: ignore[arg-type]
            session_proxy.begin(self.account, HERE, self.handle.ids[0])

    def capped_again(self) -> None:
        """As a second try by the same token does."""
        assert self.handle
        reaper.arm(self.account, Options.of({}), HERE, self.handle.ids, time.time() + 3600)

    def repaired(self) -> None:
        assert self.handle
        self.aws.kill(self.handle.ids[1])
        self.handle = insist(
            lambda: self.provider.repair(self.handle, (1,), self.request(2), OFFER, TOKENS[1])  # type: ignore[arg-type]
        )

    def granted(self) -> None:
        """Twice, as for a later attempt."""
        url = f"s3://{BUCKET}/{policies.RUNS}/demo-1"
        self.provider.require_store([url])
        assert self.provider.grant_store("demo-1", (), (url,)) == self.provider.grant_store("demo-1", (), (url,))

    def shared(self) -> None:
        """Records and the state of stacks in the bucket of base, as every machine of a team has them."""
        with location.using(f"s3://{BUCKET}/{policies.BACKEND}") as here:
            assert here.shared is not None
            assert here.shared.put_if_absent("a", b"1")
            assert here.shared.replace("a", b"2", here.shared.read("a", 9).version)
            assert [found.key for found in here.state.list("")] == ["mgpu/a"]
            here.shared.delete("a")

    def passes_made(self) -> None:
        """As the command does, but for the engine."""
        with self.aside():
            manifest = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "layers": []})
            ecr = self.aws.client("ecr")
            ecr.put_image(repositoryName=names.REPOSITORY, imageManifest=manifest, imageTag="operator")
            (found,) = ecr.list_images(repositoryName=names.REPOSITORY)["imageIds"]
        image = f"{ACCOUNT}.dkr.ecr.{HERE}.amazonaws.com/{names.REPOSITORY}@{found['imageDigest']}"
        manager = PassesManager(self.site)
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.dict(os.environ, {"XDG_CONFIG_HOME": folder}),
            location.using(f"s3://{BUCKET}/{policies.BACKEND}"),
        ):
            plan = fargate.plan(600, image, "")
            self.passes = Passes.model_validate({"name": callers.caller_name(), **plan.asked})
        for name, value in plan.secrets.items():
            manager.keep_secret(self.passes.name, name, value)
        resource.ensure(manager, self.passes)

    def passes_mended(self) -> None:
        """Another period, and another task; somebody has given a role more than it had."""
        assert self.passes
        with self.aside():
            iam, role = self.aws.client("iam"), f"{self.passes.name}-task"
            document, arn = self._more()
            iam.attach_role_policy(RoleName=role, PolicyArn=arn)
            iam.put_role_policy(RoleName=role, PolicyName="more", PolicyDocument=document)
        self.passes = self.passes.model_copy(update={"every_minutes": 5, "command": "true"})
        resource.ensure(PassesManager(self.site), self.passes)

    def stored(self) -> None:
        """What the operator itself does in the store: its entries of the commit log, and what it prunes."""
        store = open_store(f"s3://{BUCKET}/{policies.RUNS}")
        log = CommitLog(store, "demo-1")
        log.take_over("writer", host="here", pid=1)
        log.begin_attempt(1, "writer")
        assert CommitLog(store, "demo-1").newest_attempt() == 1
        with self.aside(), tempfile.TemporaryDirectory() as folder:  # nodes do that
            (Path(folder) / "0.distcp").write_bytes(b"1")
            for step in (1, 2):
                saved = {"folder": Path(folder), "attempt": 1, "node": 0, "step": step, "world_size": 1, "meta": {}}
                upload_part(store, "demo-1", checkpoint_id(1, step), **saved)
                commit_when_complete(store, "demo-1", checkpoint_id(1, step), writers=(0,), nodes=1, writer="writer")
            key = f"{policies.RUNS}/demo-1/checkpoints/{checkpoint_id(1, 1)}/node-0/half"
            self.aws.client("s3").create_multipart_upload(Bucket=BUCKET, Key=key)
        gone = prune(store, "demo-1", plan_prune(store, "demo-1", Retention(keep_last=1)))
        assert gone == [checkpoint_id(1, 1)]
        with self.aside():  # base deletes no bucket that holds anything
            s3 = self.aws.client("s3")
            left = s3.list_object_versions(Bucket=BUCKET)
            for each in (*left.get("Versions", ()), *left.get("DeleteMarkers", ())):
                s3.delete_object(Bucket=BUCKET, Key=each["Key"], VersionId=each["VersionId"])

    def destroyed(self) -> None:
        """A disk and an address have outlived their machines."""
        assert self.handle
        with self.aside():
            self._leave()
        handles = [self.handle, self.handle.model_copy(update={"token": self.token})]
        end = time.monotonic() + _PATIENCE_S
        while handles:
            handles = [handle for handle in handles if not insist(lambda handle=handle: self.provider.destroy(handle))]
            assert time.monotonic() < end

    def _leave(self) -> None:
        marks = {names.OWNER: "me", names.FLEET: "demo", names.TOKEN: self.token}
        ec2, tags = self.aws.client("ec2"), [{"Key": key, "Value": value} for key, value in marks.items()]
        tagged = lambda kind: [{"ResourceType": kind, "Tags": tags}]  # noqa: E731
        ec2.create_volume(AvailabilityZone="us-east-1a", Size=1, TagSpecifications=tagged("volume"))
        card = ec2.create_network_interface(SubnetId=ec2.describe_subnets()["Subnets"][0]["SubnetId"])
        address = ec2.allocate_address(Domain="vpc", TagSpecifications=tagged("elastic-ip"))["AllocationId"]
        of_card = card["NetworkInterface"]["NetworkInterfaceId"]
        ec2.associate_address(AllocationId=address, NetworkInterfaceId=of_card)


def insist(call: Callable[[], Any]) -> Any:
    """As acquire does: the same call again while the provider asks for it."""
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return call()
        except (Transient, RateLimited):
            assert time.monotonic() < end
            time.sleep(0.05)
